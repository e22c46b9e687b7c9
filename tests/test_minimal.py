from __future__ import annotations

import importlib.util
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenflow import minimal
from evenflow.core import chunk_rules
from evenflow.errors import EngineFailed, InvalidConfig, InvalidRequest
from evenflow.minimal import (
    ChunkedPrefillMetrics,
    PriorityScheduler,
    Request,
    ToyModel,
    ToyTokenizer,
    batch_generate,
    chunked_attention_mask,
    run_steps,
)

TUTORIAL = Path(__file__).parent.parent / "examples" / "minimal_tutorial.py"


def load_tutorial() -> ModuleType:
    spec = importlib.util.spec_from_file_location("minimal_tutorial", TUTORIAL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


class CallLog:
    """A model that counts up from the last token it was given, and notes every call as (offset, length)."""

    def __init__(self, vocabulary_size: int = 50) -> None:
        self.calls: list[tuple[int, int]] = []
        self.vocabulary_size = vocabulary_size

    def __call__(self, token_ids: Sequence[int], offset: int, cache: object) -> tuple[list[float], int]:
        self.calls.append((offset, len(token_ids)))
        next_token = (token_ids[-1] + 1) % self.vocabulary_size
        return [float(token == next_token) for token in range(self.vocabulary_size)], offset + len(token_ids)


class NumberTokenizer:
    """Text is numbers with blanks between."""

    def __init__(self, eos_token_id: int | None = None) -> None:
        self.eos_token_id = eos_token_id

    def encode(self, text: str, /) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, token_ids: list[int], /) -> str:
        return " ".join(str(token) for token in token_ids)


# ---- The file itself


def test_it_stays_short_and_needs_no_tensors() -> None:
    assert len(Path(minimal.__file__).read_text().splitlines()) <= 350
    listing = "import sys, evenflow.minimal; print(*(name for name in ('torch', 'numpy') if name in sys.modules))"
    result = subprocess.run([sys.executable, "-c", listing], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == ""


def test_the_rules_of_chunk_size_are_those_of_the_engine() -> None:
    assert minimal.AdaptiveChunker is chunk_rules.AdaptiveChunker
    assert minimal.select_optimal_chunk_size is chunk_rules.select_optimal_chunk_size


# ---- Request


def test_prefill_runs_chunk_by_chunk_and_ends_with_the_first_token() -> None:
    model = CallLog()
    request = Request([5, 6, 7, 8, 9, 10, 11], 3, model=model, tokenizer=NumberTokenizer())
    seen = []
    while not request.is_prefill_done:
        assert request.next_token is None
        seen.append((request.try_prefill(), request.offset))
    assert seen == [(3, 3), (3, 6), (1, 7)]
    assert model.calls == [(0, 3), (3, 3), (6, 1)]
    assert request.prefill_tokens == [5, 6, 7, 8, 9, 10, 11]
    assert request.next_token == 12
    assert request.token_ids == [12]


def test_prefill_of_a_done_prompt_is_an_error() -> None:
    request = Request("Hello")
    assert request.try_prefill() == 5
    with pytest.raises(ValueError, match="All 5 tokens"):
        request.try_prefill()
    assert request.offset == 5


@pytest.mark.parametrize(
    ("length", "step", "chunks"),
    [
        (1, 1, [1]),
        (127, 128, [127]),
        (128, 128, [128]),
        (129, 128, [128, 1]),
        (300, 128, [128, 128, 44]),
        (3, 1, [1] * 3),
    ],
)
def test_chunks_cover_the_prompt_exactly(length: int, step: int, chunks: list[int]) -> None:
    request = Request([1] * length, step, model=CallLog())
    taken = []
    while not request.is_prefill_done:
        taken.append(request.try_prefill())
    assert taken == chunks


def test_a_chunk_takes_128_tokens_unless_told() -> None:
    assert Request([1] * 1000).try_prefill() == 128


def test_decode_feeds_the_last_token_at_its_position() -> None:
    model = CallLog()
    request = Request([5, 6], model=model, tokenizer=NumberTokenizer(), max_seq_len=5)
    request.try_prefill()
    request.decode()
    assert not request.is_finished
    request.decode()
    assert model.calls == [(0, 2), (2, 1), (3, 1)]
    assert request.token_ids == [7, 8, 9]
    assert request.is_finished
    assert request.cache is None  # memory goes back with the slot


def test_decode_needs_a_prefilled_and_unfinished_request() -> None:
    request = Request([5, 6], 1, max_seq_len=3)
    request.try_prefill()
    with pytest.raises(InvalidRequest, match="prefilled and not finished"):
        request.decode()
    request.try_prefill()
    with pytest.raises(InvalidRequest, match="prefilled and not finished"):
        request.decode()


@pytest.mark.parametrize("prompt", ["", [], ()])
def test_an_empty_prompt_is_refused(prompt: str | list[int]) -> None:
    with pytest.raises(InvalidRequest, match="at least one token"):
        Request(prompt)


def test_an_empty_prompt_is_refused_even_where_the_tokenizer_adds_a_start_token() -> None:
    class Starting(NumberTokenizer):
        def encode(self, text: str, /) -> list[int]:
            return [1, *super().encode(text)]

    with pytest.raises(InvalidRequest, match="at least one token"):
        Request("", tokenizer=Starting())


@pytest.mark.parametrize("step", [0, -1])
def test_a_chunk_of_nothing_is_refused(step: int) -> None:
    with pytest.raises(InvalidConfig, match=f"prefill_max_step={step}"):
        Request("Hello", step)


def test_of_equal_logits_the_lowest_token_is_taken() -> None:
    request = Request([1], model=lambda token_ids, offset, cache: ([0.0, 2.0, 2.0], None))
    request.try_prefill()
    assert request.next_token == 1


# ---- The mask


HIDDEN = -math.inf


def test_mask_as_drawn() -> None:
    assert chunked_attention_mask(2, 2) == [[0, 0, 0, HIDDEN], [0, 0, 0, 0]]
    assert chunked_attention_mask(0, 1) == [[0]]
    assert chunked_attention_mask(1, 1) == [[0, 0]]


def test_a_mask_is_as_wide_as_the_chunks_end_or_the_total_length() -> None:
    assert chunked_attention_mask(1, 1, 3) == [[0, 0, HIDDEN]]
    assert chunked_attention_mask(1, 2, 3) == chunked_attention_mask(1, 2)
    assert chunked_attention_mask(1, 2, 2) == chunked_attention_mask(1, 2)  # a total length never hides the chunk


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_masks_of_the_chunks_are_the_rows_of_the_whole_mask(sizes: list[int]) -> None:
    total = sum(sizes)
    rows = []
    for index, size in enumerate(sizes):
        rows += chunked_attention_mask(sum(sizes[:index]), size, total)
    assert rows == chunked_attention_mask(0, total)
    assert [row.count(0) for row in rows] == list(range(1, total + 1))


@pytest.mark.parametrize("arguments", [(-1, 2), (0, 0), (0, -1)])
def test_mask_of_positions_that_are_not_there_is_refused(arguments: tuple[int, int]) -> None:
    with pytest.raises(InvalidConfig, match=f"chunk_start={arguments[0]}, chunk_size={arguments[1]}"):
        chunked_attention_mask(*arguments)


# ---- The loop


def trace(
    requests: list[Request], waiting: PriorityScheduler, batch_size: int
) -> list[tuple[tuple[int, int, int] | None, list[int]]]:
    """Each step as ((request, start, size) of its chunk or None, requests that decoded)."""
    steps = []
    for step in run_steps(waiting, batch_size):
        chunk = None
        if step.prefilled is not None:
            chunk = (requests.index(step.prefilled), step.chunk_start, step.chunk_size)
        steps.append((chunk, [requests.index(request) for request in step.decoded]))
    return steps


def queued(*requests: Request) -> PriorityScheduler:
    waiting = PriorityScheduler()
    waiting.low_priority_queue.extend(requests)
    return waiting


def counting_request(length: int, num_output_tokens: int, step: int) -> Request:
    return Request(
        [1] * length, step, model=CallLog(), tokenizer=NumberTokenizer(), max_seq_len=length + num_output_tokens
    )


def test_decodes_run_between_the_chunks_of_a_long_prompt() -> None:
    requests = [counting_request(2, 4, 3), counting_request(7, 2, 3)]
    assert trace(requests, queued(*requests), 5) == [
        ((0, 0, 2), []),
        ((1, 0, 3), [0]),
        ((1, 3, 3), [0]),
        ((1, 6, 1), [0]),
        (None, [1]),
    ]


def test_a_prefill_starts_only_when_a_slot_is_free() -> None:
    requests = [counting_request(1, 3, 8), counting_request(1, 3, 8), counting_request(1, 2, 8)]
    assert trace(requests, queued(*requests), 2) == [
        ((0, 0, 1), []),
        ((1, 0, 1), [0]),
        (None, [0, 1]),
        ((2, 0, 1), [1]),
        (None, [2]),
    ]


def test_one_slot_serves_one_request_after_the_other() -> None:
    requests = [counting_request(3, 2, 2), counting_request(2, 2, 2)]
    assert trace(requests, queued(*requests), 1) == [
        ((0, 0, 2), []),
        ((0, 2, 1), []),
        (None, [0]),
        ((1, 0, 2), []),
        (None, [1]),
    ]


def test_a_request_whose_first_token_is_its_last_never_decodes() -> None:
    requests = [counting_request(2, 1, 2), counting_request(2, 1, 2)]
    assert trace(requests, queued(*requests), 2) == [((0, 0, 2), []), ((1, 0, 2), [])]


def test_requests_may_join_and_chunks_change_between_steps() -> None:
    first, late = counting_request(6, 1, 2), counting_request(1, 1, 2)
    waiting = queued(first)
    chunks = []
    for step in run_steps(waiting):
        assert step.prefilled is not None
        chunks.append((step.prefilled is late, step.chunk_start, step.chunk_size))
        if len(chunks) == 1:
            first.prefill_max_step = 3
            waiting.high_priority_queue.append(late)
    assert chunks == [(False, 0, 2), (False, 2, 3), (False, 5, 1), (True, 0, 1)]


def test_a_step_without_progress_is_an_error() -> None:
    class Stuck(Request):
        def try_prefill(self) -> int:
            return 0

    running = counting_request(1, 2, 8)
    steps = run_steps(queued(running, Stuck("Hello")))
    next(steps)
    next(steps)  # the running stream still advances
    assert running.is_finished
    with pytest.raises(EngineFailed, match="ran no token"):
        next(steps)


def test_steps_carry_the_time_of_each_phase() -> None:
    ticks = iter([0.0, 1.0, 1.5, 10.0, 10.0, 12.0])
    steps = list(run_steps(queued(counting_request(3, 2, 3)), clock=lambda: next(ticks)))
    assert [(step.prefill_seconds, step.decode_seconds) for step in steps] == [(1.0, 0.5), (0.0, 2.0)]


# ---- batch_generate


def test_batch_generate_answers_in_the_order_of_the_prompts() -> None:
    answers = batch_generate(CallLog(), NumberTokenizer(), ["1 2 3", [10], "20 21"], 2, 2, 6)
    assert [answer.token_ids for answer in answers] == [[4, 5, 6], [11, 12, 13, 14, 15], [22, 23, 24, 25]]
    assert [answer.text for answer in answers] == ["4 5 6", "11 12 13 14 15", "22 23 24 25"]


def test_the_end_token_ends_an_answer_and_is_no_text() -> None:
    (answer, ends_at_once) = batch_generate(CallLog(), NumberTokenizer(eos_token_id=9), [[5], [8]])
    assert answer.token_ids == [6, 7, 8, 9]
    assert answer.text == "6 7 8"
    assert ends_at_once.token_ids == [9]
    assert ends_at_once.text == ""


def test_without_an_end_token_only_the_length_ends() -> None:
    (answer,) = batch_generate(CallLog(), NumberTokenizer(), [[5]])
    assert len(answer.token_ids) == 511  # 512 with the prompt


def test_batch_generate_goes_by_its_long_name_too() -> None:
    assert minimal.batch_generate_with_chunked_prefill is batch_generate


def test_no_prompts_no_answers() -> None:
    assert batch_generate(CallLog(), NumberTokenizer(), []) == []


def test_a_prompt_must_leave_room_for_a_token() -> None:
    (answer,) = batch_generate(CallLog(), NumberTokenizer(), [[1, 2, 3]], max_seq_len=4)
    assert answer.token_ids == [4]
    model = CallLog()
    with pytest.raises(InvalidRequest, match="prompt of 4 tokens but expected fewer than max_seq_len=4"):
        batch_generate(model, NumberTokenizer(), [[1], [1, 2, 3, 4]], max_seq_len=4)
    assert model.calls == []  # refused before any work


def test_batch_generate_names_what_is_wrong() -> None:
    with pytest.raises(InvalidConfig, match="batch_size=0"):
        batch_generate(CallLog(), NumberTokenizer(), [[1]], batch_size=0)
    with pytest.raises(InvalidConfig, match="prefill_max_step=0"):
        batch_generate(CallLog(), NumberTokenizer(), [[1]], prefill_step=0)


def test_one_string_is_not_a_list_of_prompts() -> None:
    with pytest.raises(InvalidRequest, match="list of prompts"):
        batch_generate(CallLog(), NumberTokenizer(), "12")


# ---- Chunks change no answer


def alone_and_unchunked(prompt: list[int], max_seq_len: int) -> list[int]:
    """The toy run by hand: the whole sequence again for every token, with no cache, no chunk and no loop."""
    tokens = list(prompt)
    while len(tokens) < max_seq_len:
        logits, _ = ToyModel()(tokens, 0, None)
        tokens.append(logits.index(1.0))
        if tokens[-1] == ToyTokenizer.eos_token_id:
            break
    return tokens[len(prompt) :]


PROMPT_TOKENS = st.lists(st.integers(0, 255), min_size=1, max_size=40)


@settings(deadline=None, max_examples=50)
@given(st.lists(PROMPT_TOKENS, min_size=1, max_size=8), st.integers(1, 8), st.integers(1, 50))
def test_tokens_do_not_depend_on_chunks_or_batches(
    prompts: list[list[int]], batch_size: int, prefill_step: int
) -> None:
    answers = batch_generate(ToyModel(), ToyTokenizer(), prompts, batch_size, prefill_step, max_seq_len=48)
    assert [answer.token_ids for answer in answers] == [alone_and_unchunked(prompt, 48) for prompt in prompts]


def first_tokens(model: Any, prompt: list[int], chunk_size: int) -> list[int]:
    (answer,) = batch_generate(model, ToyTokenizer(), [prompt], prefill_step=chunk_size, max_seq_len=len(prompt) + 8)
    return answer.token_ids


PROMPT = [7 * place % 251 for place in range(20)]


@pytest.mark.parametrize("changed", range(len(PROMPT)))
def test_the_toy_depends_on_every_token(changed: int) -> None:
    other = [token + (place == changed) for place, token in enumerate(PROMPT)]
    assert first_tokens(ToyModel(), other, 6) != first_tokens(ToyModel(), PROMPT, 6)


def test_a_mask_that_hides_the_earlier_chunks_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = first_tokens(ToyModel(), PROMPT, 6)

    def own_chunk_only(start: int, size: int, total: int) -> list[list[float]]:
        return [[0 if start <= column <= start + row else HIDDEN for column in range(total)] for row in range(size)]

    monkeypatch.setattr(minimal, "chunked_attention_mask", own_chunk_only)
    assert first_tokens(ToyModel(), PROMPT, 6) != expected


def test_a_mask_that_shows_the_future_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = first_tokens(ToyModel(), PROMPT, 6)
    monkeypatch.setattr(minimal, "chunked_attention_mask", lambda start, size, total: [[0.0] * total] * size)
    assert first_tokens(ToyModel(), PROMPT, 6) != expected


def test_a_wrong_offset_is_found_out() -> None:
    toy = ToyModel()

    def one_behind(token_ids: Sequence[int], offset: int, cache: Any) -> tuple[list[float], Any]:
        return toy(token_ids, max(0, offset - 1), cache)

    assert first_tokens(one_behind, PROMPT, 6) != first_tokens(toy, PROMPT, 6)


# ---- On a real architecture


@pytest.fixture(scope="module")
def tiny_llama() -> Any:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,  # far from ties, and far from the same token for ever
        attn_implementation="eager",
    )
    return transformers.LlamaForCausalLM(config).to(torch.float64).eval().requires_grad_(False)


class MaskedLlama:
    """The same model, told by `chunked_attention_mask` who sees whom."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, token_ids: Sequence[int], offset: int, cache: Any) -> tuple[list[float], Any]:
        import torch
        from transformers import DynamicCache

        total = offset + len(token_ids)
        mask = torch.tensor(chunked_attention_mask(offset, len(token_ids), total), dtype=torch.float64)
        with torch.inference_mode():
            output = self._model(
                input_ids=torch.tensor([token_ids]),
                position_ids=torch.arange(offset, total).unsqueeze(0),
                attention_mask=mask[None, None],
                past_key_values=DynamicCache() if cache is None else cache,
                use_cache=True,
            )
        return output.logits[0, -1].tolist(), output.past_key_values


def reference_tokens(model: Any, prompt: list[int], max_seq_len: int) -> list[int]:
    """What transformers itself makes of the prompt, recomputed whole for every token."""
    import torch

    tokens = torch.tensor([prompt])
    with torch.inference_mode():
        while tokens.shape[1] < max_seq_len:
            best = model(input_ids=tokens, use_cache=False).logits[0, -1].argmax()
            tokens = torch.cat([tokens, best.reshape(1, 1)], dim=1)
    return tokens[0, len(prompt) :].tolist()


LLAMA_PROMPTS = [[(3 * place + 11 * length) % 97 for place in range(length)] for length in (1, 5, 16, 29)]


@pytest.fixture(scope="module")
def llama_reference(tiny_llama: Any) -> list[list[int]]:
    return [reference_tokens(tiny_llama, prompt, 36) for prompt in LLAMA_PROMPTS]


def test_the_llama_under_test_says_more_than_one_thing(llama_reference: list[list[int]]) -> None:
    assert all(len(set(tokens)) > 3 for tokens in llama_reference)
    assert len({tuple(tokens[:4]) for tokens in llama_reference}) == len(LLAMA_PROMPTS)


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("prefill_step", [1, 7, 16, 128])
def test_chunked_equals_unchunked_on_llama(
    tiny_llama: Any, llama_reference: list[list[int]], prefill_step: int, batch_size: int
) -> None:
    for model in (tiny_llama, MaskedLlama(tiny_llama)):
        answers = batch_generate(model, NumberTokenizer(), LLAMA_PROMPTS, batch_size, prefill_step, 36)
        assert [answer.token_ids for answer in answers] == llama_reference


# ---- Models of other forms


class SelfCaching:
    """The toy with its cache inside: called with the tokens and their offset, it returns logits of shape (1, V)."""

    def __init__(self) -> None:
        self._cache: Any = None
        self.calls: list[tuple[int, int]] = []

    def __call__(self, tokens: list[int], offset: int) -> list[list[float]]:
        self.calls.append((offset, len(tokens)))
        logits, self._cache = ToyModel()(tokens, offset, self._cache if offset else None)
        return [logits]


class IgnoresTheGivenCache(SelfCaching):
    """Takes a cache as well, and returns none."""

    def __call__(self, tokens: list[int], offset: int, cache: None = None) -> list[list[float]]:
        assert cache is None
        return super().__call__(tokens, offset)


def without_cache(tokens: list[int]) -> list[list[list[float]]]:
    """Logits of shape (1, n, V), of which only the last row means something."""
    logits, _ = ToyModel()(tokens, 0, None)
    return [[[0.0] * len(logits)] * (len(tokens) - 1) + [logits]]


def with_a_loss(tokens: list[int]) -> tuple[list[list[list[float]]], None]:
    return without_cache(tokens), None


def any_arguments(*arguments: Any) -> Any:
    return ToyModel()(*arguments)


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("prefill_step", [1, 6, 128])
@pytest.mark.parametrize("model", [SelfCaching(), IgnoresTheGivenCache(), without_cache, with_a_loss, any_arguments])
def test_models_of_other_forms_give_the_same_tokens(model: Any, prefill_step: int, batch_size: int) -> None:
    prompts = [PROMPT, PROMPT[3:8], PROMPT[::2]]
    answers = batch_generate(model, ToyTokenizer(), prompts, batch_size, prefill_step, 30)
    assert [answer.token_ids for answer in answers] == [alone_and_unchunked(prompt, 30) for prompt in prompts]


def test_a_model_with_one_cache_runs_one_request_at_a_time() -> None:
    model = SelfCaching()
    requests = [Request(prompt, 4, model=model, max_seq_len=8) for prompt in (PROMPT[:6], PROMPT[6:11])]
    assert [step for step, decoded in trace(requests, queued(*requests), 5) if step and decoded] == []
    assert model.calls == [(0, 4), (4, 2), (6, 1), (0, 4), (4, 1), (5, 1), (6, 1)]


class TensorModel:
    """Notes what it is given, and returns what a transformers tutorial would: `logits[:, -1, :]`."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def __call__(self, tokens: Any, offset: int, cache: Any) -> Any:
        import torch

        assert tokens.dtype == torch.int64
        self.shapes.append(tuple(tokens.shape))
        logits = torch.nn.functional.one_hot((tokens + 1) % 50, 50).to(torch.float16)
        return logits[:, -1, :], offset + tokens.shape[1]


@pytest.mark.parametrize("shape", [(7,), (1, 7)])
def test_a_prompt_in_a_tensor_reaches_the_model_in_tensors(shape: tuple[int, ...]) -> None:
    torch = pytest.importorskip("torch")
    model = TensorModel()
    request = Request(torch.arange(7).reshape(shape), 3, model=model, tokenizer=NumberTokenizer(), max_seq_len=9)
    assert [request.try_prefill() for _ in range(3)] == [3, 3, 1]
    request.decode()
    assert model.shapes == [(1, 3), (1, 3), (1, 1), (1, 1)]
    assert request.prefill_tokens == list(range(7))
    assert request.token_ids == [7, 8]


def test_an_empty_tensor_is_refused() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(InvalidRequest, match="at least one token"):
        Request(torch.empty(1, 0, dtype=torch.int64))


@pytest.mark.parametrize("prefill_step", [1, 7, 128])
def test_a_module_that_keeps_its_cache_gets_tensors(
    tiny_llama: Any, llama_reference: list[list[int]], prefill_step: int
) -> None:
    import torch
    from transformers import DynamicCache

    class Tutorial(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = tiny_llama
            self.cache: Any = None

        def forward(self, input_ids: Any, offset: int) -> Any:
            self.cache = DynamicCache() if offset == 0 else self.cache
            with torch.inference_mode():
                return self.net(input_ids, past_key_values=self.cache, use_cache=True).logits[:, -1, :]

    answers = batch_generate(Tutorial(), NumberTokenizer(), LLAMA_PROMPTS, 3, prefill_step, 36)
    assert [answer.token_ids for answer in answers] == llama_reference


def test_a_compiled_module_is_called_like_the_module() -> None:
    torch = pytest.importorskip("torch")

    class Counting(torch.nn.Module):
        def forward(self, tokens: Any, offset: int) -> Any:
            return torch.nn.functional.one_hot(tokens + 1, 50)[:, -1, :].float()

    model = torch.compile(Counting(), backend="eager")
    request = Request(torch.tensor([5, 6, 7]), 2, model=model, tokenizer=NumberTokenizer())
    assert (request.try_prefill(), request.try_prefill(), request.next_token) == (2, 1, 8)


# ---- Metrics and priorities


def test_metrics_start_empty() -> None:
    metrics = ChunkedPrefillMetrics()
    assert (metrics.prefill_chunks_processed, metrics.decode_requests_served, metrics.avg_chunk_time) == (0, 0, 0.0)
    assert metrics.get_interleaving_ratio() == math.inf
    assert metrics.prefill_to_decode_ratio == math.inf


def test_the_first_sample_is_the_average_and_later_ones_move_it_by_a_tenth() -> None:
    metrics = ChunkedPrefillMetrics()
    metrics.record_prefill_chunk(2.0, 128)
    assert metrics.avg_chunk_time == 2.0
    metrics.record_prefill_chunk(4.0, 44)
    assert metrics.avg_chunk_time == pytest.approx(2.2)
    assert (metrics.prefill_chunks_processed, metrics.prefill_tokens_processed) == (2, 172)
    metrics.record_decode_step(1.0)
    metrics.record_decode_step(0.0)
    assert metrics.avg_decode_time == pytest.approx(0.9)
    assert metrics.decode_requests_served == 2


def test_a_first_sample_of_no_time_counts_as_a_sample() -> None:
    metrics = ChunkedPrefillMetrics()
    metrics.record_prefill_chunk(0.0, 1)
    metrics.record_prefill_chunk(1.0, 1)
    assert metrics.avg_chunk_time == pytest.approx(0.1)


def test_the_ratio_is_chunks_for_each_decode_step() -> None:
    metrics = ChunkedPrefillMetrics()
    metrics.record_prefill_chunk(1.0, 128)
    assert metrics.get_interleaving_ratio() == math.inf
    metrics.record_decode_step(1.0)
    metrics.record_decode_step(1.0)
    assert metrics.get_interleaving_ratio() == metrics.prefill_to_decode_ratio == 0.5


def test_batch_generate_fills_the_metrics_it_is_given() -> None:
    metrics = ChunkedPrefillMetrics()
    batch_generate(CallLog(), NumberTokenizer(), [[1] * 5, [1]], prefill_step=2, max_seq_len=7, metrics=metrics)
    # Chunks 2, 2, 1 and 1; the first answer's one decode runs beside the second prompt, whose five follow alone.
    assert (metrics.prefill_chunks_processed, metrics.prefill_tokens_processed) == (4, 6)
    assert metrics.decode_requests_served == 6


def test_queues_are_plain_lists() -> None:
    first, second, third = (Request("Hello") for _ in range(3))
    queue = PriorityScheduler().high_priority_queue
    queue.append(second)
    queue.insert(0, first)
    queue += [third]
    assert (len(queue), queue[0], queue.pop(0), queue) == (3, first, first, [second, third])


def test_high_priority_goes_first_and_each_queue_is_fair() -> None:
    low = [Request("low") for _ in range(2)]
    high = [Request("high") for _ in range(2)]
    waiting = queued(*low)
    assert waiting.schedule_next() is low[0]
    waiting.high_priority_queue.extend(high)
    assert [waiting.schedule_next() for _ in range(4)] == [*high, low[1], None]
    assert not waiting.high_priority_queue
    assert not waiting.low_priority_queue


# ---- The tutorial


def test_the_tutorial_shows_what_smaller_chunks_do(capsys: pytest.CaptureFixture[str]) -> None:
    load_tutorial().main([])
    rows = {line[:28].strip(): line[28:].split() for line in capsys.readouterr().out.splitlines() if line[28:].strip()}
    names = ["chunks of 32", "chunks of 128", "chunks of 512", "unchunked"]
    worst_gaps = [float(rows[name][0]) for name in names]
    totals = [float(rows[name][2]) for name in names]
    assert worst_gaps == sorted(set(worst_gaps))  # smaller chunks, shorter gaps
    assert totals == sorted(set(totals), reverse=True)  # at the price of a longer whole
    assert float(rows["chunks of 32, Hello first"][1]) < float(rows["chunks of 32"][1]) / 2
