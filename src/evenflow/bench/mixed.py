"""The mixed benchmark: three long prompts among ten short ones, five at a time, under several policies.

Tests an expectation: smaller chunks give lower decode latency and a slightly longer total.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from evenflow.bench.comparison import Comparison, in_turns, resolved_for
from evenflow.bench.demo_run import DemoPrompt, DemoRunner
from evenflow.bench.figures import Spread
from evenflow.core.policies import PolicySpec
from evenflow.engine.llm import LLM

LONG_PROMPT = "Write a detailed essay about " + "artificial intelligence " * 100
SHORT_PROMPT = "Hello"
BATCH_SIZE = 5
CHUNK_SIZES = ("alternate:32", "alternate:128", "alternate:512")  # from the smallest chunks to the largest
EXPECTATION = "smaller chunks: lower decode latency, slightly longer total"

_SLIGHTLY = 0.25  # of the total

# The short ones come first and end one by one, so that each long prompt starts beside streams that decode.
_ORDER = "SSSSS" + "L" + "SS" + "L" + "SS" + "L" + "S"


def default_policies(target: PolicySpec) -> list[PolicySpec]:
    """Chunk sizes, a latency target, and no chunks."""
    return [*map(PolicySpec.parse, CHUNK_SIZES), target, PolicySpec.parse("unchunked")]


def mixed_load() -> list[tuple[str, int]]:
    """Prompts, and how many tokens each gets."""
    return [
        (LONG_PROMPT if kind == "L" else SHORT_PROMPT, 12 + 6 * (number % BATCH_SIZE))
        for number, kind in enumerate(_ORDER)
    ]


@dataclass(frozen=True, slots=True)
class MixedRun:
    """One run of the load. Gaps are between tokens of one stream, in seconds."""

    total_s: float
    output_tokens: int
    gaps_with_prefill: list[float]  # another request's prefill ran between the two tokens
    gaps_without: list[float]


@dataclass(frozen=True, slots=True)
class PolicyFigures:
    """All runs under one policy."""

    policy: str
    total_s: float  # the median run's
    gap_with_prefill_s: Spread
    gap_without_s: Spread
    output_tokens_per_s: float
    runs_s: tuple[float, ...]

    @classmethod
    def of(cls, policy: str, runs: Sequence[MixedRun]) -> PolicyFigures:
        total_s = median(run.total_s for run in runs)
        return cls(
            policy=policy,
            total_s=total_s,
            gap_with_prefill_s=Spread.of(gap for run in runs for gap in run.gaps_with_prefill),
            gap_without_s=Spread.of(gap for run in runs for gap in run.gaps_without),
            output_tokens_per_s=runs[0].output_tokens / total_s,
            runs_s=tuple(run.total_s for run in runs),
        )


@dataclass(frozen=True, slots=True)
class Verdict:
    """The smallest chunks against the largest."""

    smallest: PolicyFigures
    largest: PolicyFigures

    @property
    def is_latency_lower(self) -> bool:
        return self.smallest.gap_with_prefill_s.p99 < self.largest.gap_with_prefill_s.p99

    @property
    def is_total_slightly_longer(self) -> bool:
        return 0 < self.extra_total <= _SLIGHTLY

    @property
    def extra_total(self) -> float:
        return self.smallest.total_s / self.largest.total_s - 1

    @property
    def held(self) -> bool:
        return self.is_latency_lower and self.is_total_slightly_longer

    def line(self) -> str:
        small, large = self.smallest, self.largest
        return (
            f"The expectation ({EXPECTATION}) {_held(self.held)}. {small.policy} against {large.policy}: "
            f"lower decode latency {_held(self.is_latency_lower)}, the p99 gap beside a prefill is "
            f"{1000 * small.gap_with_prefill_s.p99:.0f} ms against {1000 * large.gap_with_prefill_s.p99:.0f} ms; "
            f"slightly longer total {_held(self.is_total_slightly_longer)}, {small.total_s:.2f} s against "
            f"{large.total_s:.2f} s ({self.extra_total:+.0%}, expected up to {_SLIGHTLY:+.0%})."
        )


def _held(held: bool) -> str:
    return "held" if held else "did not hold"


def compare_policies(
    llm: LLM, policies: Sequence[PolicySpec], repeat: int, on_run: Callable[[str], None] = lambda policy: None
) -> list[PolicyFigures]:
    """Run the load `repeat` times under each policy, in turn. `on_run` gets a line before each run.

    The engine must have BATCH_SIZE slots and no prefix cache, because the prompts are equal.
    """
    on_run("a run to warm up")
    warm_up = run_load(llm)
    turns = in_turns(policies, repeat)
    comparison = Comparison[PolicySpec, MixedRun](turns, [warm_up.total_s] * len(turns))
    for policy, number, _ in comparison:
        on_run(f"{policy}, run {number + 1} of {repeat}; {comparison.progress()}")
        llm.engine.set_policy(resolved_for(llm.engine, policy))
        comparison.add(run_load(llm))
    return [PolicyFigures.of(str(policy), comparison.of(policy)) for policy in policies]


def run_load(llm: LLM) -> MixedRun:
    """Submit the whole load at once."""
    prompts = [
        DemoPrompt(str(number), "small", token_ids, len(token_ids), max_tokens, ignore_eos=True)
        for number, (prompt, max_tokens) in enumerate(mixed_load())
        for token_ids in [llm.tokenizer.encode(prompt)]
    ]
    timeline = DemoRunner(llm.engine, llm.tokenizer).run(prompts, "mixed").timeline
    prefilled = sorted({end for stream in timeline.streams.values() for _, end in stream.prefills})
    with_prefill, without = list[float](), list[float]()
    for stream in timeline.streams.values():
        for before, now in pairwise(stream.tokens):
            gaps = with_prefill if bisect(prefilled, before) < bisect(prefilled, now) else without
            gaps.append(now - before)
    return MixedRun(
        total_s=timeline.last_token_s,
        output_tokens=sum(len(stream.tokens) for stream in timeline.streams.values()),
        gaps_with_prefill=with_prefill,
        gaps_without=without,
    )
