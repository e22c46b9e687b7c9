"""Calls that run out of memory half way through the model: they go on in smaller chunks, and the answer stays right."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer

from evenflow.compile import ChunkedPrefillOptimizer, ChunkedPrefillWrapper
from evenflow.compile.chunks.out_of_memory import is_out_of_memory
from tests.compile.architectures import HYBRID_CACHES, padding_mask, random_tokens, small_model

CHUNK, THRESHOLD = 64, 100


def allocate_too_much() -> None:
    torch.empty(1 << 60, dtype=torch.uint8)


def raise_as_cuda_does() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def raise_as_python_does() -> None:
    raise MemoryError


class Tight:
    """A model whose last layer runs out of memory if `does_not_fit(tokens of the call, tokens in the cache)`.

    By then the caches of the layers before it have grown.
    """

    def __init__(
        self, name: str, does_not_fit: Callable[[int, int], bool], run_out: Callable[[], None] = allocate_too_much
    ) -> None:
        self.plain = small_model(name)
        self.model = copy.deepcopy(self.plain)
        self.lengths: list[int] = []  # of calls that were answered
        self.num_failed = 0
        self._does_not_fit, self._run_out = does_not_fit, run_out
        self._num_cached = 0
        self.model.register_forward_pre_hook(self._before_call, with_kwargs=True)
        layers = self.model.transformer.h if name == "gpt2" else self.model.model.layers
        layers[-1].register_forward_pre_hook(self._before_layer)

    def _before_call(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        cache = kwargs.get("past_key_values")
        self._num_cached = 0 if cache is None else int(cache.get_seq_length())

    def _before_layer(self, _: Any, args: tuple[Any, ...]) -> None:
        length = args[0].shape[1]
        if self._does_not_fit(length, self._num_cached):
            self.num_failed += 1
            self._run_out()
        self.lengths.append(length)

    def wrapped(self, **settings: Any) -> ChunkedPrefillWrapper:
        given = {"chunk_size": CHUNK, "enable_threshold": THRESHOLD, "adaptive_chunking": False, **settings}
        return ChunkedPrefillWrapper(self.model, ChunkedPrefillOptimizer(**given), "tight")


def assert_close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=0)


def over_20(length: int, _: int) -> bool:
    return length > 20


@pytest.mark.parametrize("run_out", [allocate_too_much, raise_as_cuda_does, raise_as_python_does])
@torch.inference_mode()
def test_chunks_become_smaller(run_out: Callable[[], None], caplog: pytest.LogCaptureFixture) -> None:
    tight, tokens = Tight("llama", over_20, run_out), random_tokens(2, 150)
    wrapped = tight.wrapped()
    output = wrapped(tokens)
    assert_close(output.logits, tight.plain(tokens).logits)
    assert output.past_key_values.get_seq_length() == 150
    assert tight.lengths == [16] * 9 + [6]
    stats = wrapped.get_chunking_stats()
    assert (stats["chunked_calls"], stats["out_of_memory"], stats["optimizer_stats"]["chunks_processed"]) == (1, 2, 10)
    assert [record.getMessage().split(": ")[:2] for record in caplog.records] == [
        ["Memory pressure", "64 tokens at a time do not fit, chunks of 32 follow"],
        ["Memory pressure", "32 tokens at a time do not fit, chunks of 16 follow"],
    ]
    wrapped(tokens)  # starts with what fits
    assert tight.num_failed == 2


@torch.inference_mode()
def test_only_from_the_chunk_that_failed() -> None:
    """Memory of eager attention grows with the context: the first chunks fit."""
    tight = Tight("llama", lambda length, num_cached: length * (num_cached + length) > 64 * 128)
    tokens = random_tokens(1, 300)
    assert_close(tight.wrapped()(tokens).logits, tight.plain(tokens).logits)
    assert tight.lengths[:2] == [64, 64]
    assert tight.lengths[2:] == sorted(tight.lengths[2:], reverse=True)
    assert sum(tight.lengths) == 300
    assert tight.num_failed > 0


@pytest.mark.parametrize("name", ["llama", "gpt2", *HYBRID_CACHES])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@torch.inference_mode()
def test_a_cache_of_the_callers_holds_no_half_chunk(name: str, kind: str) -> None:
    """It holds 30 tokens before, which is more than the models' windows."""
    tight, tokens = Tight(name, over_20), random_tokens(2, 180)
    wanted = tight.plain(tokens).logits[:, 30:]
    if kind == "dynamic":
        cache: Any = DynamicCache(config=tight.plain.config)
    else:
        cache = StaticCache(config=tight.plain.config, max_cache_len=190)
    tight.plain(tokens[:, :30], past_key_values=cache)
    output = tight.wrapped()(tokens[:, 30:], past_key_values=cache)
    assert_close(output.logits, wanted)
    assert output.past_key_values is cache
    assert int(cache.get_seq_length()) == 180
    assert tight.num_failed == 2


@pytest.mark.parametrize("name", ["llama", *HYBRID_CACHES])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@torch.inference_mode()
def test_an_empty_cache_of_the_callers(name: str, kind: str) -> None:
    tight, tokens = Tight(name, over_20), random_tokens(2, 150)
    caches: list[Any] = [StaticCache(config=tight.plain.config, max_cache_len=160)]
    if kind == "dynamic":
        caches = [DynamicCache(config=tight.plain.config)]
        if name == "llama":
            caches.append(DynamicCache())  # gets its layers while it is filled
    for cache in caches:
        output = tight.wrapped()(tokens, past_key_values=cache)
        assert_close(output.logits, tight.plain(tokens).logits)
        assert int(cache.get_seq_length()) == 150


@torch.inference_mode()
def test_a_whole_call_goes_over_to_chunks() -> None:
    tight, tokens = Tight("llama", over_20), random_tokens(2, 60)
    wrapped = tight.wrapped()
    assert_close(wrapped(tokens).logits, tight.plain(tokens).logits)
    assert tight.lengths == [16, 16, 16, 12]
    assert wrapped.execution_stats == {"total_calls": 1, "chunked_calls": 1, "traditional_calls": 0}
    cache = DynamicCache(config=tight.plain.config)
    tight.plain(tokens[:, :20], past_key_values=cache)
    assert_close(wrapped(tokens[:, 20:], None, None, cache).logits, tight.plain(tokens).logits[:, 20:])
    assert int(cache.get_seq_length()) == 60
    wrapped(tokens[:, :8])
    assert wrapped.execution_stats["traditional_calls"] == 1


@torch.inference_mode()
def test_a_whole_call_with_a_cache_is_taken_back_at_its_first_failure() -> None:
    tight, tokens = Tight("gemma3", over_20), random_tokens(2, 90)
    cache = DynamicCache(config=tight.plain.config)
    tight.plain(tokens[:, :30], past_key_values=cache)
    assert_close(tight.wrapped()(tokens[:, 30:], past_key_values=cache).logits, tight.plain(tokens).logits[:, 30:])
    assert tight.num_failed == 2


@torch.inference_mode()
def test_tensors_of_a_failed_call_are_freed_before_the_next() -> None:
    """An error keeps the frames that it passed, and these their tensors, for as long as it is handled."""
    left: list[weakref.ref[torch.Tensor]] = []

    def run_out() -> None:
        activations = torch.zeros(1000)
        left.append(weakref.ref(activations))
        allocate_too_much()

    def does_not_fit(length: int, _: int) -> bool:
        assert not any(tensor() is not None for tensor in left)
        return length > 20

    for length in (60, 150):
        Tight("llama", does_not_fit, run_out).wrapped()(random_tokens(1, length))
    assert len(left) == 4


@torch.inference_mode()
def test_generation() -> None:
    tight = Tight("llama", over_20)
    mask = padding_mask([150, 90], "left")
    tokens = random_tokens(2, 150) * mask
    call = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    for settings in ({}, {"cache_implementation": "static"}):
        assert torch.equal(tight.wrapped().generate(tokens, **call, **settings), tight.plain.generate(tokens, **call))
    assert tight.num_failed == 4


@torch.inference_mode()
def test_where_even_the_smallest_chunk_does_not_fit() -> None:
    tight, tokens = Tight("llama", lambda length, _: length > 4), random_tokens(2, 150)
    cache = DynamicCache(config=tight.plain.config)
    with pytest.raises(RuntimeError, match="allocate") as caught:
        tight.wrapped()(tokens, past_key_values=cache)
    assert caught.value.__notes__ == ["No smaller chunks can follow: even 16 tokens at a time do not fit."]


def test_what_cannot_be_cut_fails_as_the_model_does() -> None:
    tight, tokens = Tight("llama", over_20), random_tokens(2, 60)
    with pytest.raises(RuntimeError, match="allocate") as caught:
        tight.wrapped()(tokens)
    assert "No smaller chunks can follow: gradients are recorded" in caught.value.__notes__[0]


@torch.inference_mode()
def test_other_errors_are_not_retried() -> None:
    def wrong() -> None:
        raise RuntimeError("shapes do not match")

    tight = Tight("llama", over_20, wrong)
    for length in (60, 150):
        with pytest.raises(RuntimeError, match="shapes"):
            tight.wrapped()(random_tokens(1, length))
    assert tight.num_failed == 2


@torch.inference_mode()
def test_a_cache_that_cannot_be_taken_back() -> None:
    class OtherLayer(DynamicLayer):  # type: ignore[misc]
        pass

    tight, tokens = Tight("llama", over_20), random_tokens(2, 150)
    cache = DynamicCache(config=tight.plain.config)
    cache.layers = [OtherLayer() for _ in cache.layers]
    with pytest.raises(RuntimeError, match="allocate") as caught:
        tight.wrapped()(tokens, past_key_values=cache)
    assert "what the call left in OtherLayer cannot be taken back" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (MemoryError(), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 byte"), True),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 196608000 bytes."), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
    ],
    ids=str,
)
def test_which_errors_are_about_memory(error: Exception, wanted: bool) -> None:
    assert is_out_of_memory(error) == wanted
