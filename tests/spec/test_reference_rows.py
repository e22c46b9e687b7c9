"""The one-file reference, called as the tutorials on chunked prefill call it: by position and by name, with lists and
tensors. A test stands for each row of its table; `tests/test_minimal.py` looks at the details.
"""

from __future__ import annotations

import inspect
import math
from functools import cache
from typing import Any

import pytest
import torch

from evenflow import minimal
from evenflow.errors import EngineFailed
from evenflow.minimal import (
    AdaptiveChunker,
    ChunkedPrefillMetrics,
    PriorityScheduler,
    Request,
    batch_generate,
    batch_generate_with_chunked_prefill,
    chunked_attention_mask,
    run_steps,
    select_optimal_chunk_size,
)

VOCABULARY = 64


class Tokenizer:
    """A token per character; none ends an answer."""

    eos_token_id = None

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [ord(character) % VOCABULARY for character in text]

    def decode(self, token_ids: list[int]) -> str:
        return " ".join(map(str, token_ids))


class TinyAttention(torch.nn.Module):
    """One attention layer in float64 that keeps its keys and values itself, as tutorials write it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(VOCABULARY, 16, dtype=torch.float64)
        self.places = torch.nn.Embedding(512, 16, dtype=torch.float64)
        self.head = torch.nn.Linear(16, VOCABULARY, dtype=torch.float64)
        self.keys = torch.zeros(0, 16, dtype=torch.float64)

    @torch.no_grad()
    def forward(self, tokens: torch.Tensor, offset: int) -> torch.Tensor:
        assert tokens.dtype == torch.int64
        assert tokens.shape[0] == 1
        length = tokens.shape[1]
        states = self.embedding(tokens[0]) + self.places(torch.arange(offset, offset + length))
        self.keys = torch.cat([self.keys[:offset], states])
        mask = torch.tensor(chunked_attention_mask(offset, length, offset + length), dtype=torch.float64)
        assert mask.shape == (length, offset + length)
        weights = torch.softmax(states @ self.keys.T / 4 + mask, dim=-1)
        logits: torch.Tensor = self.head(weights @ self.keys).unsqueeze(0)
        return logits[:, -1, :]


@cache
def unchunked(prompt: str, max_seq_len: int) -> list[int]:
    """The model by hand: the whole sequence again for every token."""
    model, tokens = TinyAttention(), Tokenizer().encode(prompt)
    for _ in range(max_seq_len - len(tokens)):
        tokens.append(int(model(torch.tensor([tokens]), 0).argmax()))
    return tokens[len(prompt) :]


# ---- 1.1 Request


def test_request_by_position_and_by_name() -> None:
    assert [Request("x" * 300).prefill_max_step, Request("x", 32).prefill_max_step] == [128, 32]
    for request in (Request("x" * 300, 128), Request(prompt="x" * 300, prefill_max_step=128)):
        assert len(request.prefill_tokens) == 300
        assert (request.offset, request.is_prefill_done, request.next_token) == (0, False, None)
        assert [request.try_prefill(), request.try_prefill()] == [128, 128]
        assert (request.offset, request.is_prefill_done, request.next_token) == (256, False, None)
        assert request.try_prefill() == 44
        assert request.is_prefill_done
        assert isinstance(request.next_token, int)
        with pytest.raises(ValueError, match="300 tokens"):
            request.try_prefill()


@pytest.mark.parametrize("prompt", ["abc", [33, 34, 35], torch.tensor([33, 34, 35]), torch.tensor([[33, 34, 35]])])
def test_request_of_text_lists_and_tensors(prompt: Any) -> None:
    request = Request(prompt, 2, model=TinyAttention(), tokenizer=Tokenizer())
    assert [request.try_prefill(), request.try_prefill()] == [2, 1]
    assert request.prefill_tokens == [33, 34, 35]
    assert request.next_token == unchunked("abc", 4)[0]


# ---- 1.2 batch_generate

PROMPTS = ["Hello", "Write an essay about attention", "a", "xy"]


def test_batch_generate_has_the_signature_and_both_names() -> None:
    assert batch_generate_with_chunked_prefill is batch_generate
    positional = list(inspect.signature(batch_generate).parameters.values())[:6]
    assert [(each.name, each.default) for each in positional[3:]] == [
        ("batch_size", 5),
        ("prefill_step", 128),
        ("max_seq_len", 512),
    ]
    assert [each.name for each in positional[:3]] == ["model", "tokenizer", "prompts"]


@pytest.mark.parametrize("prefill_step", [1, 8, 128])
@pytest.mark.parametrize("batch_size", [1, 5])
def test_batch_generate_equals_the_unchunked_run(batch_size: int, prefill_step: int) -> None:
    expected = [unchunked(prompt, 40) for prompt in PROMPTS]
    by_position = batch_generate(TinyAttention(), Tokenizer(), PROMPTS, batch_size, prefill_step, 40)
    by_name = batch_generate_with_chunked_prefill(
        model=TinyAttention(),
        tokenizer=Tokenizer(),
        prompts=PROMPTS,
        batch_size=batch_size,
        prefill_step=prefill_step,
        max_seq_len=40,
    )
    assert [request.token_ids for request in by_position] == expected
    assert [request.token_ids for request in by_name] == expected


def test_the_phases_of_a_step() -> None:
    long, short = Request("x" * 6, 2, max_seq_len=8), Request("y", 2, max_seq_len=4)
    waiting = PriorityScheduler()
    waiting.low_priority_queue += [short, long]
    steps = [(step.prefilled, step.chunk_size, list(step.decoded)) for step in run_steps(waiting)]
    assert steps == [
        (short, 1, []),
        (long, 2, [short]),
        (long, 2, [short]),
        (long, 2, []),
        (None, 0, [long]),
    ]
    assert list(run_steps(PriorityScheduler())) == []


def test_a_step_without_progress_is_an_error() -> None:
    class Stuck(Request):
        def try_prefill(self) -> int:
            return 0

    waiting = PriorityScheduler()
    waiting.high_priority_queue.append(Stuck("x"))
    with pytest.raises(EngineFailed, match="ran no tokens"):
        list(run_steps(waiting))


# ---- 1.3 chunked_attention_mask


def test_the_mask_is_additive_and_ends_with_the_chunk() -> None:
    hidden = -math.inf
    expected = [[0, 0, 0, hidden], [0, 0, 0, 0]]
    assert chunked_attention_mask(2, 2) == expected
    assert chunked_attention_mask(2, 2, 4) == expected
    assert chunked_attention_mask(chunk_start=2, chunk_size=2, total_length=4) == expected
    assert chunked_attention_mask(chunk_start=2, chunk_size=2, total_length=3) == expected
    assert chunked_attention_mask(2, 2, 6) == [[*row, hidden, hidden] for row in expected]
    assert torch.equal(
        torch.tensor(chunked_attention_mask(0, 4)), torch.triu(torch.full((4, 4), -math.inf), diagonal=1)
    )


def test_the_mask_makes_a_chunk_of_torchs_attention_equal_to_the_whole() -> None:
    torch.manual_seed(1)
    query, key, value = (torch.randn(1, 1, 10, 8, dtype=torch.float64) for _ in range(3))
    attention = torch.nn.functional.scaled_dot_product_attention
    whole = attention(query, key, value, is_causal=True)
    mask = torch.tensor(chunked_attention_mask(4, 3, 10), dtype=torch.float64)
    assert torch.allclose(attention(query[:, :, 4:7], key, value, attn_mask=mask), whole[:, :, 4:7])
    mask = torch.tensor(chunked_attention_mask(4, 3), dtype=torch.float64)
    chunk = attention(query[:, :, 4:7], key[:, :, :7], value[:, :, :7], attn_mask=mask)
    assert torch.allclose(chunk, whole[:, :, 4:7])


# ---- 1.4 chunk sizes


@pytest.mark.parametrize(
    ("sequence_length", "available_memory", "active_decode_requests", "expected"),
    [
        (100, 10_000, 5, 64),
        (4000, 10_000, 5, 64),  # decodes come first
        (100, 10_000, 4, 128),  # 80% is not over 80%
        (2048, 10_000, 0, 128),
        (2049, 10_000, 0, 256),
        (4000, 100, 0, 100),
        (100, 10, 5, 10),
        (100, 0, 0, 0),
    ],
)
def test_select_optimal_chunk_size(
    sequence_length: int, available_memory: int, active_decode_requests: int, expected: int
) -> None:
    figures = (sequence_length, available_memory, active_decode_requests)
    assert select_optimal_chunk_size(*figures) == expected
    assert select_optimal_chunk_size(*figures, 5) == expected
    by_name = {
        "sequence_length": sequence_length,
        "available_memory": available_memory,
        "active_decode_requests": active_decode_requests,
    }
    assert select_optimal_chunk_size(**by_name, batch_size=5) == expected


def test_adaptive_chunker() -> None:
    assert AdaptiveChunker().decode_latency_target == 0.05
    chunker = AdaptiveChunker(decode_latency_target=0.1)
    assert chunker.select_chunk_size(128, 0.5) == 128  # no history
    assert chunker.select_chunk_size(base_chunk_size=128, decode_pressure=0.9) == 64
    assert chunker.select_chunk_size(40, 0.9) == 32
    chunker.recent_chunk_times.append(0.02)
    assert chunker.select_chunk_size(128, 0.8) == 256
    assert chunker.select_chunk_size(400, 0.8) == 512
    chunker.recent_chunk_times.append(0.2)
    assert chunker.select_chunk_size(128, 0.8) == 128


# ---- 1.5 metrics


def test_metrics() -> None:
    metrics = ChunkedPrefillMetrics()
    assert metrics.get_interleaving_ratio() == math.inf
    metrics.record_prefill_chunk(2.0, 128)
    assert (metrics.prefill_chunks_processed, metrics.avg_chunk_time) == (1, 2.0)
    metrics.record_prefill_chunk(chunk_time=4.0, chunk_size=64)
    assert metrics.avg_chunk_time == pytest.approx(0.9 * 2.0 + 0.1 * 4.0)
    assert metrics.get_interleaving_ratio() == math.inf
    metrics.record_decode_step(0.01)
    metrics.record_decode_step(decode_time=0.01)
    metrics.record_decode_step(decode_time=0.01)
    metrics.record_decode_step(decode_time=0.01)
    assert (metrics.prefill_chunks_processed, metrics.decode_requests_served) == (2, 4)
    assert metrics.get_interleaving_ratio() == metrics.prefill_to_decode_ratio == 0.5


# ---- 1.6 priorities


def test_priority_scheduler() -> None:
    scheduler = PriorityScheduler()
    assert scheduler.schedule_next() is None
    low, high, later = Request("low"), Request("high"), Request("later")
    scheduler.low_priority_queue.append(low)
    scheduler.high_priority_queue.append(high)
    scheduler.high_priority_queue.append(later)
    assert len(scheduler.high_priority_queue) == 2
    assert scheduler.high_priority_queue[0] is high
    assert scheduler.schedule_next() is high
    assert scheduler.high_priority_queue.pop(0) is later
    assert not scheduler.high_priority_queue
    assert scheduler.schedule_next() is low
    assert scheduler.schedule_next() is None


def test_every_name_is_in_the_one_file() -> None:
    names = ("Request", "batch_generate", "batch_generate_with_chunked_prefill", "chunked_attention_mask")
    names += ("select_optimal_chunk_size", "AdaptiveChunker", "ChunkedPrefillMetrics", "PriorityScheduler")
    assert all(hasattr(minimal, name) for name in names)
