"""From a decision to vLLM's settings, each with its reason, and the other causes to turn chunking on."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from evenflow.advisor.analysis import Analysis, DatasetAnalysis
from evenflow.advisor.decision import LONG_CONTEXT_TOKENS, Chunking, Decision, Trigger, decide
from evenflow.core.chunk_rules import chunk_size_for_prompt

DEFAULT_BUDGET = 2048  # the smallest of vLLM's own defaults for a server
ASSUMED_STREAMS = 64
_BUDGET_MULTIPLE = 64  # the tile size of kernels: other sizes are padded


@dataclass(frozen=True, slots=True)
class Recommendation:
    """`chunk` is the prefill of a step; the budget also holds one token per decoding stream."""

    chunk: int
    settings: dict[str, Any]
    reasons: dict[str, str]


def decide_for(analysis: Analysis | DatasetAnalysis) -> Decision:
    return decide(analysis.tokens.max, analysis.tokens.p95, analysis.tokens.min)


def recommend(analysis: Analysis, decision: Decision, streams: int | None = None) -> Recommendation:
    """Settings for a fixed budget: vLLM itself has no latency target."""
    longest, p95 = analysis.tokens.max, analysis.tokens.p95
    if decision.decision is Chunking.DISABLED:
        budget = max(DEFAULT_BUDGET, _rounded_up(longest + (streams or 0)))
        why = f"the longest input ({longest:,} tokens) fits into one step, so none needs to be cut"
        return Recommendation(budget, {"max_num_batched_tokens": budget}, {"max_num_batched_tokens": why})
    chunk = chunk_size_for_prompt(p95)
    is_selective = decision.decision is Chunking.SELECTIVE
    max_per_prompt = 3 * chunk // 4 if is_selective else chunk
    assumed = f"{ASSUMED_STREAMS} assumed" if streams is None else str(streams)
    settings: dict[str, Any] = {
        "enable_chunked_prefill": True,
        "max_num_batched_tokens": _rounded_up(chunk + (streams or ASSUMED_STREAMS)),
    }
    reasons = {
        "enable_chunked_prefill": "the default for every generative model, stated to be explicit",
        "max_num_batched_tokens": (
            f"{chunk:,} tokens of prefill (by the 95th percentile of {p95:,}, which takes "
            f"{math.ceil(p95 / max_per_prompt)} steps) and one per decoding stream ({assumed}), "
            f"rounded up to a multiple of {_BUDGET_MULTIPLE}"
        ),
    }
    if is_selective:
        settings["long_prefill_token_threshold"] = max_per_prompt
        reasons["long_prefill_token_threshold"] = (
            "the most prefill that one prompt gets in a step: a quarter stays free for short prompts that arrive "
            "meanwhile. It caps chunks; it is not the length from which prompts are cut"
        )
    return Recommendation(chunk, settings, reasons)


def find_triggers(
    analysis: Analysis, decision: Decision, *, streams: int | None = None, memory_pressure: str | None = None
) -> list[Trigger]:
    """Every cause to turn chunking on, whether or not it applies. `memory_pressure` says how it showed."""
    return [
        _over_threshold(analysis, decision),
        Trigger("memory pressure", memory_pressure is not None, memory_pressure or "none found: no log was given"),
        _long_context(analysis.datasets),
        _parallel(analysis.datasets, streams),
    ]


def _over_threshold(analysis: Analysis, decision: Decision) -> Trigger:
    name = "input over the threshold"
    if decision.threshold is None:
        return Trigger(name, False, f"all inputs are short: the longest has {analysis.tokens.max:,} tokens")
    share = analysis.lengths.share_over(decision.threshold)
    return Trigger(name, share > 0, f"{share:.1%} of the inputs are over {decision.threshold:,} tokens")


def _long_context(datasets: Iterable[DatasetAnalysis]) -> Trigger:
    long = [dataset for dataset in datasets if dataset.tokens.p95 >= LONG_CONTEXT_TOKENS]
    named = ", ".join(f"{dataset.name} (p95 {dataset.tokens.p95:,} tokens)" for dataset in long)
    reason = named or f"no dataset's 95th percentile reaches {LONG_CONTEXT_TOKENS:,} tokens"
    return Trigger("long-context tasks", bool(long), reason)


def _parallel(datasets: Iterable[DatasetAnalysis], streams: int | None) -> Trigger:
    name = "parallel processing"
    if streams is not None:
        return Trigger(name, streams > 1, f"{streams} concurrent requests were asked for")
    most = max((dataset.arrivals.most_in_a_second for dataset in datasets if dataset.arrivals), default=0)
    if most > 1:
        return Trigger(name, True, f"up to {most} requests arrive within one second")
    return Trigger(name, False, "not asked for, and no arrival times are known")


def _rounded_up(num_tokens: int) -> int:
    return -(-num_tokens // _BUDGET_MULTIPLE) * _BUDGET_MULTIPLE
