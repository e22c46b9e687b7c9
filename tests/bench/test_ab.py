"""Paired comparisons: what is paired, what the intervals say, and what is told of answers that differ."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from evenflow.bench.ab import Goals, Outcome, Pair, Round, compare, make_asks, summarise
from evenflow.bench.ab_report import draw, same_outputs, write_html
from evenflow.bench.endpoints import Answer, Ask
from evenflow.bench.figures import Estimate
from evenflow.errors import EndpointFailed, InvalidConfig

GOALS = Goals(ttft_s=1.0, tbt_s=0.1)


@dataclass
class Scripted:
    """Answers at once, and remembers what it was asked."""

    name: str
    log: list[tuple[str, str]] = field(default_factory=list)
    error: str | None = None

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        yield

    async def begin_round(self) -> None:
        self.log.append((self.name, ""))

    async def stream(self, ask: Ask, answer: Answer) -> None:
        assert isinstance(ask.prompt, str)
        self.log.append((self.name, ask.prompt))
        answer.text, answer.piece_times_s, answer.num_tokens, answer.error = ask.prompt, [0.5, 0.6], 2, self.error


def answers(generator: random.Random, slowness: float, count: int = 12) -> list[Answer]:
    found = []
    for _ in range(count):
        times, at = [], slowness * generator.uniform(0.2, 0.6)
        for _ in range(20):
            times.append(at)
            at += slowness * generator.uniform(0.02, 0.06)
        found.append(Answer("same", times, 20))
    return found


def pairs(slowness: float, seed: int = 0, count: int = 5) -> list[Pair]:
    generator = random.Random(seed)
    return [
        Pair(Round(answers(generator, 1.0), 10.0), Round(answers(generator, slowness), 10.0 * slowness))
        for _ in range(count)
    ]


def estimate(outcome: Outcome, name: str) -> Estimate:
    return next(found for found in outcome.estimates if found.name.startswith(name))


def test_both_sides_of_a_pair_get_the_same_requests_and_no_two_pairs_do() -> None:
    log: list[tuple[str, str]] = []
    a, b = Scripted("a", log), Scripted("b", log)
    outcome = asyncio.run(compare(a, b, make_asks(["x", "y"], 4, 0.0, 0), num_pairs=4, goals=GOALS))
    rounds = [log[start : start + 3] for start in range(4, len(log), 3)]  # behind two warm-ups
    assert len(rounds) == 8
    for first, second in zip(rounds[::2], rounds[1::2], strict=True):
        assert {first[0][0], second[0][0]} == {"a", "b"}
        assert [prompt for _, prompt in first] == [prompt for _, prompt in second]
    assert len({prompt for _, prompt in log[4:] if prompt}) == 2 * 4
    assert {first[0][0] for first in rounds[::2]} == {"a", "b"}  # by lot, not always the same one first
    assert (outcome.num_answers, outcome.differences, outcome.errors) == (8, [], [])


def test_rounds_say_how_long_the_rest_takes() -> None:
    lines: list[str] = []
    asks = [*make_asks(["x"], 4, 0.0, 0), Ask("y", 4, at=0.3)]
    asyncio.run(compare(Scripted("a"), Scripted("b"), asks, num_pairs=2, goals=GOALS, on_round=lines.append))
    assert [line.split(";")[0][:-3] for line in lines[2:]] == ["pair 1 of 2"] * 2 + ["pair 2 of 2"] * 2
    assert lines[2].endswith("; at least 1 s left")
    assert re.search(r"; 25% done, about \d+ s left$", lines[3])


def test_the_basis_of_a_verdict_is_stated_and_called_little_if_it_is() -> None:
    assert summarise(pairs(1.3), GOALS).basis == '"differ" rests on 5 pairs of 12 requests.'
    assert "3 pairs of 12 requests, which is little" in summarise(pairs(1.3, count=3), GOALS).basis


def test_the_longest_gap_is_compared() -> None:
    pair = Pair(Round([Answer("", [0.1, 0.2, 0.3], 3)], 1.0), Round([Answer("", [0.1, 0.2, 2.2], 3)], 1.0))
    found = estimate(summarise([pair], GOALS), "longest gap, s")
    assert (found.a, found.b) == (pytest.approx(0.1), pytest.approx(2.0))


def test_prompts_can_be_kept() -> None:
    a, b = Scripted("a"), Scripted("b")
    asyncio.run(compare(a, b, make_asks(["x"], 4, 0.0, 0), num_pairs=2, goals=GOALS, keep_prompts=True))
    assert {prompt for _, prompt in a.log if prompt} == {"x"}


def test_an_endpoint_that_cannot_answer_ends_it_before_the_rounds() -> None:
    with pytest.raises(EndpointFailed, match="b: no model"):
        asyncio.run(
            compare(Scripted("a"), Scripted("b", error="no model"), make_asks(["x"], 4, 0, 0), num_pairs=2, goals=GOALS)
        )


def test_a_true_difference_is_found_and_its_interval_holds_it() -> None:
    outcome = summarise(pairs(slowness=1.3), GOALS)
    for name in ("TTFT p50", "TBT p50", "TBT p99"):
        found = estimate(outcome, name)
        assert found.differs
        assert found.interval is not None
        assert found.interval[0] < 1.3 < found.interval[1]
    assert estimate(outcome, "output tokens/s").ratio == pytest.approx(1 / 1.3)


@pytest.mark.slow
def test_no_difference_is_rarely_called_one() -> None:
    called = [
        found.differs
        for seed in range(12)
        for found in summarise(pairs(1.0, seed), GOALS).estimates
        if "TTFT" in found.name
    ]
    assert sum(called) <= 0.2 * len(called)


def test_requests_served_well_are_those_within_both_goals() -> None:
    fast, late, gap = Answer("", [0.5, 0.55], 2), Answer("", [1.5, 1.55], 2), Answer("", [0.5, 0.7], 2)
    failed = Answer("", [0.5], 1, "gone")
    assert [GOALS.are_met(answer) for answer in (fast, late, gap, failed, Answer())] == [
        True,
        False,
        False,
        False,
        False,
    ]


def test_a_figure_that_is_zero_has_no_ratio() -> None:
    none_good = [Pair(Round([Answer("", [9.0, 9.5], 2)], 1.0), Round([Answer("", [0.1, 0.15], 2)], 1.0))]
    found = estimate(summarise(none_good, GOALS), "requests/s")
    assert (found.a, found.b, found.ratio, found.interval, found.differs) == (0.0, 1.0, None, None, False)


def test_answers_that_differ_are_shown_from_where_they_do() -> None:
    pair = Pair(
        Round([Answer("the sea is", [0.1], 3), Answer("x", [0.1], 1)], 1.0),
        Round([Answer("the sky is", [0.1], 3), Answer("", [], 0, "lost")], 1.0),
    )
    outcome = summarise([pair], GOALS)
    (found,) = outcome.differences
    assert found.as_json() == {"pair": 0, "request": 0, "character": 5, "a": "ea is", "b": "ky is"}
    assert outcome.errors == ["lost"]
    assert same_outputs(outcome) == "0 of 1 greedy answers are the same on both sides. 1 request failed."


def test_arrivals_are_the_same_for_a_seed_and_come_at_the_rate() -> None:
    asks = make_asks(["x"] * 2000, 4, rate=5.0, seed=1)
    assert asks == make_asks(["x"] * 2000, 4, rate=5.0, seed=1)
    assert asks[-1].at == pytest.approx(400, rel=0.1)
    with pytest.raises(InvalidConfig, match="no prompts"):
        make_asks([], 4, 1.0, 0)


@pytest.mark.slow
def test_the_page_and_the_picture_hold_the_figures(tmp_path: Path) -> None:
    outcome = summarise(pairs(1.3), GOALS)
    write_html(tmp_path / "ab.html", ("<one>", "two"), outcome)
    text = (tmp_path / "ab.html").read_text()
    assert "&lt;one&gt;" in text
    assert "TBT p99, s" in text
    assert "data:image/png;base64," in text
    draw(tmp_path / "ab.png", ("one", "two"), outcome)
    assert (tmp_path / "ab.png").read_bytes().startswith(b"\x89PNG")
