from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenflow.core.chunk_rules import AdaptiveChunker, chunk_size_for_prompt, select_optimal_chunk_size
from evenflow.errors import InvalidConfig


@pytest.mark.parametrize(
    ("sequence_length", "active_decode_requests", "batch_size", "expected"),
    [
        (1, 0, 5, 128),
        (2048, 0, 5, 128),
        (2049, 0, 5, 256),
        (2049, 4, 5, 256),  # exactly 80% is not over 80%
        (100, 4, 5, 128),
        (100, 5, 5, 64),
        (2049, 5, 5, 64),  # decoding streams come before long prompts
        (100, 80, 100, 128),
        (100, 81, 100, 64),
    ],
)
def test_chunk_size_by_load(sequence_length: int, active_decode_requests: int, batch_size: int, expected: int) -> None:
    assert select_optimal_chunk_size(sequence_length, 10**6, active_decode_requests, batch_size) == expected


def test_chunk_size_by_load_counts_five_slots_unless_told() -> None:
    assert select_optimal_chunk_size(100, 10**6, 4) == 128
    assert select_optimal_chunk_size(100, 10**6, 5) == 64


@pytest.mark.parametrize(
    ("available_memory", "expected"), [(0, 0), (1, 1), (127, 127), (128, 128), (129, 128), (7.9, 7), (math.inf, 128)]
)
def test_chunk_size_by_load_never_exceeds_memory(available_memory: float, expected: int) -> None:
    assert select_optimal_chunk_size(1000, available_memory, 0) == expected


@given(st.integers(1, 10**6), st.integers(0, 1000), st.integers(0, 300), st.integers(1, 300))
def test_chunk_size_by_load_is_one_of_three_or_all_that_fits(length: int, memory: int, active: int, slots: int) -> None:
    chunk_size = select_optimal_chunk_size(length, memory, active, slots)
    assert chunk_size <= memory
    assert chunk_size in (64, 128, 256, memory)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((0, 100, 0), "sequence_length=0"),
        ((100, -1, 0), "available_memory=-1"),
        ((100, math.nan, 0), "available_memory=nan"),
        ((100, 100, -1), "active_decode_requests=-1"),
        ((100, 100, 0, 0), "batch_size=0"),
    ],
)
def test_chunk_size_by_load_names_what_is_wrong(arguments: tuple[int, ...], named: str) -> None:
    with pytest.raises(InvalidConfig, match=named):
        select_optimal_chunk_size(*arguments)


@pytest.mark.parametrize(
    ("prompt_length", "expected"), [(1, 512), (4095, 512), (4096, 1024), (16383, 1024), (16384, 2048), (10**6, 2048)]
)
def test_chunk_size_by_prompt_length(prompt_length: int, expected: int) -> None:
    assert chunk_size_for_prompt(prompt_length) == expected


def test_chunk_size_by_prompt_length_needs_a_prompt() -> None:
    with pytest.raises(InvalidConfig, match="prompt_length=0"):
        chunk_size_for_prompt(0)


def chunker_with(*seconds: float, target: float = 0.05) -> AdaptiveChunker:
    chunker = AdaptiveChunker(decode_latency_target=target)
    chunker.recent_chunk_times.extend(seconds)
    return chunker


def test_adaptive_chunker_keeps_the_base_without_a_history() -> None:
    assert AdaptiveChunker().decode_latency_target == 0.05
    assert AdaptiveChunker().select_chunk_size(128, 0.0) == 128
    assert AdaptiveChunker().select_chunk_size(128, 0.8) == 128


@pytest.mark.parametrize(("base", "expected"), [(1, 32), (63, 32), (64, 32), (66, 33), (128, 64), (1024, 512)])
def test_adaptive_chunker_halves_under_pressure(base: int, expected: int) -> None:
    assert AdaptiveChunker().select_chunk_size(base, 0.81) == expected
    assert chunker_with(0.001).select_chunk_size(base, 1.0) == expected  # pressure comes before speed


@pytest.mark.parametrize(("base", "expected"), [(1, 2), (128, 256), (256, 512), (257, 512), (512, 512), (4096, 512)])
def test_adaptive_chunker_doubles_while_under_target(base: int, expected: int) -> None:
    assert chunker_with(0.06, 0.03).select_chunk_size(base, 0.8) == expected


def test_adaptive_chunker_keeps_the_base_at_or_over_target() -> None:
    assert chunker_with(0.25, target=0.25).select_chunk_size(128, 0.0) == 128
    assert chunker_with(0.01, 0.2).select_chunk_size(128, 0.0) == 128


def test_adaptive_chunker_forgets_old_chunks() -> None:
    chunker = chunker_with(100.0)
    chunker.recent_chunk_times.extend([0.001] * (AdaptiveChunker.HISTORY - 1))
    assert chunker.select_chunk_size(128, 0.0) == 128
    chunker.recent_chunk_times.append(0.001)
    assert list(chunker.recent_chunk_times) == [0.001] * AdaptiveChunker.HISTORY
    assert chunker.select_chunk_size(128, 0.0) == 256


@pytest.mark.parametrize("target", [0, -0.05, math.nan, math.inf])
def test_adaptive_chunker_needs_a_target(target: float) -> None:
    with pytest.raises(InvalidConfig, match="decode_latency_target="):
        AdaptiveChunker(target)


def test_adaptive_chunker_names_what_is_wrong() -> None:
    with pytest.raises(InvalidConfig, match="base_chunk_size=0"):
        AdaptiveChunker().select_chunk_size(0, 0.5)
    with pytest.raises(InvalidConfig, match=r"decode_pressure=-0\.1"):
        AdaptiveChunker().select_chunk_size(128, -0.1)
