"""The decision's rules, at their boundaries and for any set of lengths."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenflow.advisor.decision import (
    Chunking,
    Decision,
    automatic_threshold,
    band_of,
    decide,
    should_enable_chunked_prefill,
)
from evenflow.advisor.lengths import Lengths
from evenflow.errors import InvalidInput


def decide_on(*lengths: int) -> Decision:
    figures = Lengths(lengths).figures()
    return decide(figures.max, figures.p95, figures.min)


def test_an_input_at_the_threshold_is_not_over_it() -> None:
    assert not should_enable_chunked_prefill(2048)
    assert should_enable_chunked_prefill(2049)
    for wrong in ("a.jsonl", None, True, [3000]):
        with pytest.raises(
            InvalidInput, match=r"Got input_length=.* but expected a number of tokens; `evenflow.advisor"
        ):
            should_enable_chunked_prefill(wrong)  # type: ignore[arg-type]
    assert should_enable_chunked_prefill(101, threshold=100)
    assert not should_enable_chunked_prefill(100, threshold=100)


@pytest.mark.parametrize(
    ("longest", "p95", "threshold"),
    [
        (999, 999, None),
        (1000, 1000, 2048),
        (1000, 10, 2048),
        (50_000, 2047, 2048),
        (2048, 2048, 1638),
        (24_000, 24_000, 19_200),
        (8000, 7315, 5852),
    ],
)
def test_the_automatic_threshold(longest: int, p95: int, threshold: int | None) -> None:
    assert automatic_threshold(longest, p95) == threshold


@pytest.mark.parametrize(
    ("longest", "band"),
    [
        (1, "skip"),
        (999, "skip"),
        (1000, "optional"),
        (1999, "optional"),
        (2000, "consider"),
        (3999, "consider"),
        (4000, "recommended"),
        (7999, "recommended"),
        (8000, "required"),
        (131_072, "required"),
    ],
)
def test_bands(longest: int, band: str) -> None:
    assert band_of(longest) == band


@pytest.mark.parametrize(
    ("lengths", "chunking"),
    [
        ([47] * 20, Chunking.DISABLED),
        ([47] * 10 + [8000] * 10, Chunking.SELECTIVE),
        ([24_000] * 20, Chunking.ALWAYS),
        ([999], Chunking.DISABLED),
        ([1000], Chunking.DISABLED),  # not short, but not over 2,048 either
        ([2047] * 20, Chunking.DISABLED),
        ([2048] * 20, Chunking.SELECTIVE),  # over 1,638, not over 2,048
        ([2049] * 20, Chunking.ALWAYS),
        ([2048] + [3000] * 19, Chunking.SELECTIVE),
        ([10] * 99 + [2049], Chunking.SELECTIVE),
        ([10] * 99 + [2048], Chunking.DISABLED),
    ],
)
def test_decisions(lengths: list[int], chunking: Chunking) -> None:
    assert decide_on(*lengths).decision is chunking


@given(st.lists(st.integers(1, 40_000), min_size=1, max_size=60))
def test_the_rules_hold_for_any_lengths(lengths: list[int]) -> None:
    found = decide_on(*lengths)
    is_short = max(lengths) < 1000
    assert (found.threshold is None) == is_short
    assert found.band == band_of(max(lengths))
    none_is_over = found.threshold is None or max(lengths) <= found.threshold
    assert (found.decision is Chunking.DISABLED) == none_is_over
    assert (found.decision is Chunking.ALWAYS) == (min(lengths) > 2048)
    assert found.reason


@given(st.integers(1, 100_000), st.integers(1, 100_000))
def test_without_the_shortest_inputs_of_different_lengths_are_never_always(one: int, other: int) -> None:
    longest, p95 = max(one, other), min(one, other)
    expected = longest == p95 > 8000
    assert (decide(longest, p95).decision is Chunking.ALWAYS) == expected


def test_without_the_shortest_equal_figures_are_taken_for_equal_inputs() -> None:
    found = decide(24_000, 24_000)
    assert (found.decision, found.threshold) == (Chunking.ALWAYS, 19_200)
    assert "assumed" in found.reason
    assert "the shortest input is not known" in found.reason
    assert decide(24_000, 24_000, shortest=47).decision is Chunking.SELECTIVE
    assert decide(24_000, 23_999).decision is Chunking.SELECTIVE
    assert decide(8000, 8000).decision is Chunking.SELECTIVE  # such as half of the inputs
