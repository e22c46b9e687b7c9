"""A wrapped model gives the plain model's results for every architecture, cache and length."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache, TextStreamer

from evenflow.compile import ChunkedPrefillOptimizer, ChunkedPrefillWrapper
from evenflow.errors import InvalidConfig
from tests.compile.architectures import ARCHITECTURES, HYBRID_CACHES, padding_mask, random_tokens, small_model

THRESHOLD = 32
CHUNK = 16
BOUNDARIES = (THRESHOLD - 1, THRESHOLD, THRESHOLD + 1, 47, 48, 49, 64, 79)
TOLERANCE = 1e-4
NAMES = tuple(ARCHITECTURES)


def wrap(model: Any, **changes: Any) -> ChunkedPrefillWrapper:
    settings = {"chunk_size": CHUNK, "enable_threshold": THRESHOLD, "adaptive_chunking": False, **changes}
    return ChunkedPrefillWrapper(model, ChunkedPrefillOptimizer(**settings), "small")


def assert_close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    assert got.shape == wanted.shape
    torch.testing.assert_close(got, wanted, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_logits_around_every_boundary(name: str) -> None:
    model = small_model(name)
    wrapped = wrap(model)
    for length in BOUNDARIES:
        tokens = random_tokens(1, length, seed=length)
        got, wanted = wrapped(tokens), model(tokens)
        assert type(got) is type(wanted)
        assert_close(got.logits, wanted.logits)
    assert wrapped.execution_stats == {"total_calls": 8, "chunked_calls": 6, "traditional_calls": 2}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("side", ["left", "right"])
@torch.inference_mode()
def test_a_padded_batch(name: str, side: str) -> None:
    model = small_model(name)
    mask = padding_mask([70, 33, 9], side)
    call = {"input_ids": random_tokens(3, 70) * mask, "attention_mask": mask}
    if side == "left" and name != "bloom":
        call["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    got, wanted = wrap(model)(**call), model(**call)
    assert_close(got.logits[mask.bool()], wanted.logits[mask.bool()])


@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_greedy_generation_of_a_padded_batch(name: str) -> None:
    model = small_model(name)
    mask = padding_mask([70, 40, 9], "left")
    call = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    tokens = random_tokens(3, 70) * mask
    wrapped = wrap(model)
    assert torch.equal(wrapped.generate(tokens, **call), model.generate(tokens, **call))
    assert wrapped.execution_stats["chunked_calls"] == 1
    assert wrapped.chunked_optimizer.stats["chunks_processed"] == 5


@pytest.mark.parametrize("name", ["llama", "gpt2", *HYBRID_CACHES])
@torch.inference_mode()
def test_generation_with_a_static_cache(name: str) -> None:
    model = small_model(name)
    mask = padding_mask([70, 40], "left")
    call = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    tokens = random_tokens(2, 70) * mask
    wrapped = wrap(model)
    got = wrapped.generate(tokens, cache_implementation="static", **call)
    assert torch.equal(got, model.generate(tokens, **call))
    assert wrapped.chunked_optimizer.stats["chunks_processed"] == 5


@pytest.mark.parametrize("name", ["llama", *HYBRID_CACHES])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@torch.inference_mode()
def test_a_cache_that_holds_tokens_already(name: str, attention: str) -> None:
    model = small_model(name, attention)
    tokens = random_tokens(1, 120)
    wanted = model(tokens).logits[:, 40:]
    for make_cache in (
        lambda: DynamicCache(config=model.config),
        lambda: StaticCache(config=model.config, max_cache_len=130),
    ):
        cache = make_cache()
        model(tokens[:, :40], past_key_values=cache)
        wrapped = wrap(model)
        output = wrapped(tokens[:, 40:], past_key_values=cache)
        assert output.past_key_values is cache
        assert int(cache.get_seq_length()) == 120
        assert wrapped.chunked_optimizer.stats["memory_saved_mb"] == pytest.approx((80 - CHUNK) * 120 * 4 / 1e6)
        assert_close(output.logits, wanted)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("use_cache", [True, False, None])
@torch.inference_mode()
def test_a_given_cache_comes_back_as_the_model_itself_gives_it(name: str, use_cache: bool | None) -> None:
    model = small_model(name)
    call = {} if use_cache is None else {"use_cache": use_cache}
    for length in (70, 20):
        caches = [DynamicCache(config=model.config) for _ in range(2)]
        got, wanted = (
            run(random_tokens(1, length), past_key_values=cache, **call)
            for run, cache in zip((wrap(model), model), caches, strict=True)
        )
        assert_close(got.logits, wanted.logits)
        assert (got.past_key_values is caches[0]) == (wanted.past_key_values is caches[1])
        assert got.keys() == wanted.keys()


@torch.inference_mode()
def test_beams_and_streams() -> None:
    model = small_model("llama")
    tokens = random_tokens(1, 70)
    beams = {"num_beams": 3, "max_new_tokens": 8, "do_sample": False}
    assert torch.equal(wrap(model).generate(tokens, **beams), model.generate(tokens, **beams))

    class Seen(TextStreamer):
        def __init__(self) -> None:
            self.tokens: list[int] = []

        def put(self, value: torch.Tensor) -> None:
            self.tokens += value.flatten().tolist()

        def end(self) -> None:
            pass

    streamer = Seen()
    output = wrap(model).generate(tokens, max_new_tokens=8, do_sample=False, streamer=streamer)
    assert streamer.tokens == output.flatten().tolist()


@pytest.mark.parametrize("keep", [0, 1, 5, 16, 17, 40, 70, 100, torch.tensor([69, 3, 20, -1, 3])], ids=str)
@torch.inference_mode()
def test_logits_to_keep(keep: Any) -> None:
    model = small_model("llama")
    tokens = random_tokens(2, 70)
    assert_close(wrap(model)(tokens, logits_to_keep=keep).logits, model(tokens, logits_to_keep=keep).logits)


@pytest.mark.parametrize("name", ["llama", "opt", "gemma3"])
@torch.inference_mode()
def test_other_ways_to_call(name: str) -> None:
    model, tokens = small_model(name), random_tokens(2, 70)
    wrapped = wrap(model)
    embeddings = model.get_input_embeddings()(tokens)
    assert_close(wrapped(inputs_embeds=embeddings).logits, model(inputs_embeds=embeddings).logits)

    without = wrapped(tokens, use_cache=False)
    assert without.past_key_values is None

    got, wanted = (run(tokens, torch.ones_like(tokens), output_hidden_states=True) for run in (wrapped, model))
    assert len(got.hidden_states) == len(wanted.hidden_states)
    for layer, wanted_layer in zip(got.hidden_states, wanted.hidden_states, strict=True):
        assert_close(layer, wanted_layer)

    logits, cache = wrapped(tokens, return_dict=False)
    assert_close(logits, wanted.logits)
    assert cache.get_seq_length() == 70
    assert wrapped.execution_stats["chunked_calls"] == 4


@torch.inference_mode()
def test_eager_attention_and_a_mask_without_positions() -> None:
    model = small_model("llama", "eager")
    mask = padding_mask([70, 50], "left")
    tokens = random_tokens(2, 70)
    got, wanted = wrap(model)(tokens, attention_mask=mask), model(tokens, attention_mask=mask)
    assert_close(got.logits[mask.bool()], wanted.logits[mask.bool()])


def reasons(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "evenflow"]


@pytest.mark.parametrize(
    ("call", "named"),
    [
        ({"labels": random_tokens(1, 70)}, "labels"),
        ({"output_attentions": True}, "output_attentions"),
        ({"attention_mask": torch.zeros(1, 1, 70, 70)}, "attention mask"),
        ({"position_ids": torch.arange(70).remainder(35)[None], "use_cache": False}, "packed"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@torch.inference_mode()
def test_what_chunks_cannot_honour_runs_whole(
    call: dict[str, Any], named: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, tokens = small_model("llama", "eager"), random_tokens(1, 70)
    wrapped = wrap(model)
    for _ in range(2):
        got, wanted = wrapped(tokens, **call), model(tokens, **call)
        assert torch.equal(got.logits, wanted.logits)
        assert got.keys() == wanted.keys()
    assert len(reasons(caplog)) == 1
    assert named in reasons(caplog)[0]
    assert wrapped.chunked_optimizer.stats["chunks_processed"] == 0


def test_training_and_gradients_pass_through(caplog: pytest.LogCaptureFixture) -> None:
    model, tokens = small_model("llama"), random_tokens(1, 70)
    wrapped = wrap(model)
    assert wrapped(tokens).logits.requires_grad
    assert "inference_mode" in reasons(caplog)[0]
    model.train()
    try:
        with torch.inference_mode():
            wrapped(tokens)
    finally:
        model.eval()
    assert "training" in reasons(caplog)[1]


@torch.inference_mode()
def test_positions_that_turn_by_length_are_not_cut(caplog: pytest.LogCaptureFixture) -> None:
    from transformers import Phi3Config, Phi3ForCausalLM

    rope = {"rope_type": "longrope", "long_factor": [2.0] * 8, "short_factor": [1.0] * 8, "rope_theta": 10000.0}
    sizes = {"vocab_size": 160, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    config = Phi3Config(
        **sizes,
        num_hidden_layers=2,
        pad_token_id=0,
        max_position_embeddings=256,
        original_max_position_embeddings=64,
        rope_parameters={**rope, "original_max_position_embeddings": 64},
    )
    torch.manual_seed(0)
    model = Phi3ForCausalLM(config).eval()
    wrapped = wrap(model)
    for length in (60, 70):
        tokens = random_tokens(1, length)
        assert_close(wrapped(tokens).logits, model(tokens).logits)
    assert wrapped.chunked_optimizer.stats["chunked_sequences"] == 1
    assert "longrope" in reasons(caplog)[0]


@torch.inference_mode()
def test_a_model_without_a_cache_runs_whole(caplog: pytest.LogCaptureFixture) -> None:
    class NoCache(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return input_ids * 2

    tokens = random_tokens(1, 70)
    assert torch.equal(wrap(NoCache())(tokens), tokens * 2)
    assert "past_key_values" in reasons(caplog)[0]


@torch.inference_mode()
def test_the_interface_is_the_models_own() -> None:
    model = small_model("llama")
    wrapped = wrap(model)
    assert wrapped.config is model.config
    assert wrapped.device == model.device
    assert not hasattr(wrapped, "no_such_attribute")
    wrapped.generate(random_tokens(1, 70), max_new_tokens=1)
    assert "forward" not in vars(model), "the model itself is not changed"


@torch.inference_mode()
def test_statistics() -> None:
    model = small_model("llama")
    wrapped = wrap(model)
    wrapped(random_tokens(3, 10))
    wrapped(random_tokens(2, 70))
    assert wrapped.get_chunking_stats() == {
        "total_calls": 2,
        "chunked_calls": 1,
        "traditional_calls": 1,
        "chunking_rate": 0.5,
        "whole_calls": {},
        "out_of_memory": 0,
        "optimizer_stats": {
            "total_sequences": 5,
            "chunked_sequences": 2,
            "chunks_processed": 5,
            "memory_saved_mb": pytest.approx(2 * (70 - 16) * 70 * 4 / 1e6),
        },
    }


@pytest.mark.parametrize(
    ("length", "wanted"), [(47, 512), (4095, 512), (4096, 1024), (16383, 1024), (16384, 2048), (30000, 2048)]
)
def test_adaptive_chunk_size(length: int, wanted: int) -> None:
    assert ChunkedPrefillOptimizer(chunk_size=100).get_optimal_chunk_size(length) == wanted
    assert ChunkedPrefillOptimizer(chunk_size=100, adaptive_chunking=False).get_optimal_chunk_size(length) == 100


def test_the_threshold_itself_is_not_over_it() -> None:
    optimizer = ChunkedPrefillOptimizer()
    assert not optimizer.should_chunk(2048)
    assert optimizer.should_chunk(2049)


@pytest.mark.parametrize("settings", [{"chunk_size": 0}, {"enable_threshold": -1}, {"target_seconds": 0.0}], ids=str)
def test_bad_settings(settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig, match=next(iter(settings))):
        ChunkedPrefillOptimizer(**settings)


@torch.inference_mode()
def test_little_free_memory_makes_chunks_small(monkeypatch: pytest.MonkeyPatch) -> None:
    from evenflow.compile.chunks import memory

    model, tokens = small_model("llama", "eager"), random_tokens(1, 300)
    wanted = model(tokens).logits
    needed = memory.bytes_per_token(model.config, 4, 300, 1)
    monkeypatch.setattr(memory, "available_memory", lambda: 2 * 50 * needed)
    wrapped = wrap(model, chunk_size=256)
    assert_close(wrapped(tokens).logits, wanted)
    assert wrapped.chunked_optimizer.stats["chunks_processed"] == 6


@torch.inference_mode()
def test_a_time_target_sizes_chunks_by_what_was_measured(caplog: pytest.LogCaptureFixture) -> None:
    """With made-up timings: a token takes a millisecond."""
    from evenflow.core.plan import ExecutorCaps

    optimizer = ChunkedPrefillOptimizer(chunk_size=2048, enable_threshold=0, target_seconds=0.1)
    for length in (16, 32, 64, 128, 256, 512) * 3:
        optimizer.sizes.step_times.observe(ExecutorCaps().prefill_shape(0, length), length * 1e-3)
    assert 60 < optimizer.sizes.within_target(0, 2048) <= 100
    with caplog.at_level(logging.WARNING):
        tokens = random_tokens(1, 200)
        model = small_model("llama")
        wrapped = ChunkedPrefillWrapper(model, optimizer, "small")
        assert_close(wrapped(tokens).logits, model(tokens).logits)
    assert optimizer.stats["chunks_processed"] >= 2
