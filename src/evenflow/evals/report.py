"""Reports made from a journal: each side's score and speed, and how two sides compare. Deterministic."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter
from statistics import NormalDist, fmean
from typing import NamedTuple

from evenflow.bench.figures import CONFIDENCE, Difference, Estimate, MeasuredRound, estimate_ratios, percentile
from evenflow.evals.journal import Entry, Journal
from evenflow.evals.run import rounds_of
from evenflow.evals.tasks import AnyTask

MIN_PAIRS = 5  # resampling fewer shows less spread than there is
_Z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class SideReport:
    """One side's answers. A request that failed is in no score; a task that was not asked is missing."""

    name: str
    num_scored: int
    num_correct: int
    num_failed: int
    num_missing: int
    score: float | None  # None: nothing was scored
    interval: Interval | None
    num_cut_prompts: int | None  # computed in more than one chunk; None: the side does not say
    figures: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class PairReport:
    """Two sides on the tasks that both have answered."""

    num_pairs: int
    score_difference: float | None  # b - a
    interval: Interval | None
    only_a_correct: int
    only_b_correct: int
    differences: Sequence[Difference]
    largest_logprob_difference: float | None  # of a choice; None: no choices
    estimates: Sequence[Estimate]


@dataclass(frozen=True, slots=True)
class Report:
    sides: Sequence[SideReport]
    comparison: PairReport | None  # None with one side
    answers: Sequence[Entry]  # in the order of the tasks, then of the sides
    errors: Sequence[str]
    guards: Sequence[str]  # how programs were kept from the network and from files


def make_report(tasks: Sequence[AnyTask], journal: Journal) -> Report:
    header = journal.header
    entries = {place: entry for place, entry in journal.entries.items() if entry.is_judged}
    places = range(len(header.sides))
    answers = [entries[side, task.id] for task in tasks for side in places if (side, task.id) in entries]
    sides = [
        _side(name, [entry for entry in answers if entry.side == side], len(tasks))
        for side, name in enumerate(header.sides)
    ]
    comparison = None
    if len(sides) == 2:
        rounds = rounds_of(tasks, 2, header.settings["concurrency"])
        comparison = _compare(rounds, entries, header.settings["seed"])
    errors = [entry.error for entry in answers if entry.error is not None]
    guards = sorted({entry.guards for entry in answers if entry.guards is not None})
    return Report(sides, comparison, answers, errors, guards)


def _side(name: str, answers: Sequence[Entry], num_tasks: int) -> SideReport:
    scored = [entry for entry in answers if entry.error is None]
    num_correct = sum(entry.is_correct for entry in scored)
    known = [entry.num_chunks for entry in scored if entry.num_chunks is not None]
    return SideReport(
        name=name,
        num_scored=len(scored),
        num_correct=num_correct,
        num_failed=len(answers) - len(scored),
        num_missing=num_tasks - len(answers),
        score=num_correct / len(scored) if scored else None,
        interval=wilson_interval(num_correct, len(scored)) if scored else None,
        num_cut_prompts=sum(chunks > 1 for chunks in known) if known else None,
        figures=_figures([(_measured(scored), 0.0)]) if scored else {},
    )


def wilson_interval(num_correct: int, count: int) -> Interval:
    """Wilson's score interval of a share: it does not shrink to a point where all answers are right, or all wrong."""
    share = num_correct / count
    middle = (share + _Z**2 / (2 * count)) / (1 + _Z**2 / count)
    half = _Z / (1 + _Z**2 / count) * math.sqrt(share * (1 - share) / count + (_Z / (2 * count)) ** 2)
    return max(0.0, middle - half), min(1.0, middle + half)


def paired_interval(only_a: int, only_b: int, count: int) -> Interval:
    """Bonett and Price's interval of the difference b - a of two shares on the same tasks.

    It has a width even if no task is right on one side only: other tasks like these might be.
    """
    a, b = (only_a + 1) / (count + 2), (only_b + 1) / (count + 2)
    half = _Z * math.sqrt((a + b - (b - a) ** 2) / (count + 2))
    return max(-1.0, b - a - half), min(1.0, b - a + half)


def busy_seconds(entries: Iterable[Entry]) -> float:
    """The time in which at least one of these requests was in flight, whenever that was."""
    total = 0.0
    for _, group in groupby(sorted(entries, key=attrgetter("start", "began_s")), attrgetter("start")):
        covered = -math.inf
        for entry in group:
            total += max(0.0, entry.ended_s - max(covered, entry.began_s))
            covered = max(covered, entry.ended_s)
    return total


class _Measured(NamedTuple):
    """An answer, and its part of the time in which its round was busy, by how long it took."""

    entry: Entry
    busy_s: float


def _measured(entries: Sequence[Entry]) -> list[_Measured]:
    """With a time for each answer, resampled answers have resampled times, and throughput an interval."""
    share = busy_seconds(entries) / (sum(entry.total_s for entry in entries) or math.inf)
    return [_Measured(entry, share * entry.total_s) for entry in entries]


def _figures(rounds: Sequence[MeasuredRound[_Measured]]) -> dict[str, float]:
    """One side's; 0 if there is nothing to measure."""
    measured = [one for answers, _ in rounds for one in answers]
    entries = [one.entry for one in measured]
    ttfts = sorted(entry.ttft_s for entry in entries if entry.ttft_s is not None)
    totals = sorted(entry.total_s for entry in entries)
    seconds = sum(one.busy_s for one in measured) or math.inf
    return {
        "TTFT mean, s": fmean(ttfts or [0.0]),
        "TTFT p50, s": percentile(ttfts, 50),
        "latency mean, s": fmean(totals or [0.0]),
        "latency p50, s": percentile(totals, 50),
        "prompt tokens/s": sum(entry.num_prompt_tokens for entry in entries) / seconds,
        "output tokens/s": sum(entry.num_tokens for entry in entries) / seconds,
        "tasks/s": len(entries) / seconds,
    }


def _compare(rounds: Sequence[Sequence[AnyTask]], entries: Mapping[tuple[int, str], Entry], seed: int) -> PairReport:
    paired = [_pairs_of(tasks, entries) for tasks in rounds]
    pairs = [pair for one_round in paired for pair in one_round]
    only_a = sum(a.is_correct and not b.is_correct for a, b in pairs)
    only_b = sum(b.is_correct and not a.is_correct for a, b in pairs)
    gaps = [
        abs(x - y)
        for a, b in pairs
        if a.logprobs is not None and b.logprobs is not None
        for x, y in zip(a.logprobs, b.logprobs, strict=True)
    ]
    return PairReport(
        num_pairs=len(pairs),
        score_difference=(only_b - only_a) / len(pairs) if pairs else None,
        interval=paired_interval(only_a, only_b, len(pairs)) if pairs else None,
        only_a_correct=only_a,
        only_b_correct=only_b,
        differences=[Difference.of(a.text, b.text, task=a.task) for a, b in pairs if a.text != b.text],
        largest_logprob_difference=max(gaps) if gaps else None,
        estimates=_estimates(paired, seed),
    )


def _pairs_of(tasks: Sequence[AnyTask], entries: Mapping[tuple[int, str], Entry]) -> list[tuple[Entry, Entry]]:
    found = [(entries.get((0, task.id)), entries.get((1, task.id))) for task in tasks]
    return [(a, b) for a, b in found if a is not None and b is not None and a.error is None and b.error is None]


def _estimates(rounds: Sequence[Sequence[tuple[Entry, Entry]]], seed: int) -> list[Estimate]:
    measured = []
    for pairs in filter(None, rounds):
        a, b = zip(*pairs, strict=True)
        measured.append(((_measured(a), 0.0), (_measured(b), 0.0)))
    if not measured:
        return []
    found = [one for one in estimate_ratios(measured, _figures, random.Random(seed)) if one.a or one.b]
    if sum(map(len, rounds)) < MIN_PAIRS:
        return [replace(one, interval=None) for one in found]
    return found
