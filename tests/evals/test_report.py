"""Reports from journals: scores, intervals, busy time, pairs, differences."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from evenflow.evals.journal import Entry, Header, Journal
from evenflow.evals.report import Report, busy_seconds, make_report, paired_interval, wilson_interval
from evenflow.evals.tasks import AnyTask, ExactTask

TASKS: list[AnyTask] = [ExactTask(id=str(n), prompt="?", reference="yes") for n in range(40)]


def entry(side: int, task: int, **changes: Any) -> Entry:
    began_s = float(2 * task + side)
    usual = {"began_s": began_s, "ended_s": began_s + 1.0, "text": "yes", "is_correct": True, "ttft_s": 0.5}
    return Entry(**{"side": side, "task": str(task), "start": 0, "num_tokens": 10} | usual | changes)


def report(tmp_path: Path, entries: list[Entry], *sides: str) -> Report:
    header = Header(tasks="t", digest="", sides=list(sides), settings={"concurrency": 2, "seed": 0})
    with Journal.create(tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl", header) as journal:
        for one in entries:
            journal.add(one)
        return make_report(TASKS, journal)


def test_failed_requests_and_missing_tasks_are_in_no_score(tmp_path: Path) -> None:
    entries = [entry(0, n, is_correct=n < 6) for n in range(8)]
    entries += [entry(0, 8, error="too long", is_correct=False, text="")]
    [side] = report(tmp_path, entries, "x").sides
    assert (side.num_scored, side.num_correct, side.num_failed, side.num_missing) == (8, 6, 1, 31)
    assert side.score == 0.75
    assert side.interval is not None
    assert side.interval[0] < 0.75 < side.interval[1]
    assert side.figures["output tokens/s"] == 10.0  # 8 answers of 10 tokens, in 8 s of requests in flight
    assert side.figures["TTFT mean, s"] == 0.5


def test_nothing_done_is_no_score(tmp_path: Path) -> None:
    [side] = report(tmp_path, [], "x").sides
    assert (side.score, side.interval, side.num_missing) == (None, None, 40)
    found = report(tmp_path, [entry(0, 1)], "x", "y").comparison
    assert found is not None
    assert (found.num_pairs, found.score_difference, found.estimates) == (0, None, [])


def test_pairs_are_of_tasks_that_both_have_answered(tmp_path: Path) -> None:
    entries = [entry(side, n) for n in range(6) for side in (0, 1)]
    entries[1] = entry(1, 0, text="yet", is_correct=False)
    entries[2] = entry(0, 1, error="refused")
    found = report(tmp_path, [*entries, entry(0, 9)], "x", "y").comparison
    assert found is not None
    assert (found.num_pairs, found.only_a_correct, found.only_b_correct) == (5, 1, 0)
    assert found.score_difference == -0.2
    [difference] = found.differences
    assert difference.as_json() == {"task": "0", "character": 2, "a": "s", "b": "t"}


def test_equal_sides_do_not_differ_and_a_slower_one_does(tmp_path: Path) -> None:
    def entries(slowness: float) -> list[Entry]:
        noise, found = random.Random(1), []
        for n in range(40):
            for side, factor in ((0, 1.0), (1, slowness)):
                seconds = factor * noise.uniform(0.8, 1.2)
                began_s = 5.0 * (2 * n + side)
                found.append(entry(side, n, began_s=began_s, ended_s=began_s + seconds, ttft_s=seconds / 2))
        return found

    for slowness, differ in (
        (1.0, set[str]()),
        (1.5, {"TTFT mean, s", "latency mean, s", "output tokens/s", "tasks/s"}),
    ):
        found = report(tmp_path, entries(slowness), "x", "y").comparison
        assert found is not None
        assert {one.name for one in found.estimates if one.differs} >= differ
        assert differ or not any(one.differs for one in found.estimates)
        assert (found.score_difference, found.differences) == (0.0, [])


def test_throughput_is_as_uncertain_as_the_times_and_few_pairs_have_no_interval(tmp_path: Path) -> None:
    def throughput(num_tasks: int) -> tuple[float, float] | None:
        noise = random.Random(4)
        entries = [
            entry(side, n, began_s=9.0 * n, ended_s=9.0 * n + noise.uniform(1, 3))
            for n in range(num_tasks)
            for side in (0, 1)
        ]
        found = report(tmp_path, entries, "x", "y").comparison
        assert found is not None
        return next(one.interval for one in found.estimates if one.name == "output tokens/s")

    few, some, many = throughput(4), throughput(8), throughput(40)
    assert few is None
    assert some is not None
    assert many is not None
    assert some[1] - some[0] > many[1] - many[0] > 0.05


def test_the_report_depends_on_the_answers_and_not_on_their_order(tmp_path: Path) -> None:
    entries = [entry(side, n, is_correct=(n + side) % 3 > 0) for n in range(20) for side in (0, 1)]
    shuffled = random.Random(2).sample(entries, len(entries))
    assert report(tmp_path, entries, "x", "y") == report(tmp_path, shuffled, "x", "y")


def test_busy_time_is_when_a_request_was_in_flight() -> None:
    spans = [(0.0, 2.0), (1.0, 3.0), (1.5, 1.8), (10.0, 11.0)]
    first = [entry(0, 0, began_s=began, ended_s=ended) for began, ended in spans]
    again = [entry(0, 0, start=1, began_s=0.0, ended_s=0.5)]  # of a later start, whose clock began anew
    assert busy_seconds(first) == pytest.approx(4.0)
    assert busy_seconds(again + first) == pytest.approx(4.5)
    assert busy_seconds([]) == 0.0


def test_intervals_of_known_cases() -> None:
    assert wilson_interval(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert wilson_interval(10, 10)[1] == 1.0
    assert wilson_interval(10, 10)[0] == pytest.approx(0.7225, abs=1e-4)
    low, high = paired_interval(0, 0, 50)
    assert low == -high < 0 < high < 0.06  # no task differed, yet others might
    low, high = paired_interval(30, 2, 50)
    assert high < 0


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    generator, covered, trials = random.Random(3), 0, 400
    for _ in range(trials):
        outcomes = [generator.random() for _ in range(60)]
        only_a, only_b = sum(x < 0.1 for x in outcomes), sum(0.1 <= x < 0.25 for x in outcomes)
        low, high = paired_interval(only_a, only_b, 60)
        covered += low <= 0.05 <= high
    assert 0.92 <= covered / trials <= 0.99
