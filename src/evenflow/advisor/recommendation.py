"""From a decision to vLLM's settings, each with its reason, and the other causes to turn chunking on."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from evenflow.advisor.decision import LONG_CONTEXT_TOKENS, Chunking, Decision, Trigger, decide
from evenflow.advisor.vllm_flags import NEWEST_VERSION, caps_lone_prompts
from evenflow.core.chunk_rules import chunk_size_for_prompt
from evenflow.counts import counted

if TYPE_CHECKING:
    from evenflow.advisor.analysis import Analysis, DatasetAnalysis

DEFAULT_BUDGET = 2048  # the smallest of vLLM's own defaults for a server
ASSUMED_STREAMS = 64
_BUDGET_MULTIPLE = 64  # the tile size of kernels: other sizes are padded


@dataclass(frozen=True, slots=True)
class Recommendation:
    """`chunk` is the prefill of a step; the budget also holds one token per decoding stream."""

    chunk: int
    max_per_prompt: int  # of one step, beside others: a longer prompt is cut
    settings: dict[str, Any]
    reasons: dict[str, str]


def decide_for(analysis: Analysis | DatasetAnalysis) -> Decision:
    return decide(analysis.tokens.max, analysis.tokens.p95, analysis.tokens.min)


def recommend(
    analysis: Analysis, decision: Decision, streams: int | None = None, vllm_version: str = NEWEST_VERSION
) -> Recommendation:
    """Settings for a fixed budget: vLLM itself has no latency target."""
    longest, p95 = analysis.tokens.max, analysis.tokens.p95
    if decision.decision is Chunking.DISABLED:
        budget = max(DEFAULT_BUDGET, _rounded_up(longest + (streams or 0)))
        why = f"the longest input ({longest:,} tokens) fits into one step, so no input needs to be cut"
        return Recommendation(budget, budget, {"max_num_batched_tokens": budget}, {"max_num_batched_tokens": why})
    chunk = chunk_size_for_prompt(p95)
    leaves_room = decision.decision is Chunking.SELECTIVE and streams != 1  # for short prompts beside long ones
    max_per_prompt = 3 * chunk // 4 if leaves_room else chunk
    assumed = f"{ASSUMED_STREAMS} assumed" if streams is None else str(streams)
    steps = counted(math.ceil(p95 / max_per_prompt), "step")
    settings: dict[str, Any] = {
        "enable_chunked_prefill": True,
        "max_num_batched_tokens": _rounded_up(chunk + (streams or ASSUMED_STREAMS)),
    }
    reasons = {
        "enable_chunked_prefill": "vLLM's default for every generative model, stated explicitly",
        "max_num_batched_tokens": (
            f"{chunk:,} tokens of prefill (for a 95th percentile of {p95:,}, which takes {steps} beside others) plus "
            f"one per decoding stream ({assumed}), rounded up to a multiple of {_BUDGET_MULTIPLE}"
        ),
    }
    if leaves_room:
        alone = "a prompt that is alone is capped too" if caps_lone_prompts(vllm_version) else "alone, it is not capped"
        settings["long_prefill_token_threshold"] = max_per_prompt
        reasons["long_prefill_token_threshold"] = (
            "the maximum prefill of one prompt in a step beside other requests; a quarter of the step stays free for "
            f"short prompts. It caps chunks: it is not the length above which prompts are cut. In vLLM {vllm_version}, "
            f"{alone}"
        )
    return Recommendation(chunk, max_per_prompt, settings, reasons)


def find_triggers(
    analysis: Analysis,
    decision: Decision,
    *,
    streams: int | None = None,
    memory_pressure: str | None = None,
    no_memory_pressure: str = "none found; --log can show it",
) -> list[Trigger]:
    """Every cause to turn chunking on, whether or not it applies. `memory_pressure` is the evidence for it."""
    long = [dataset for dataset in analysis.datasets if dataset.tokens.p95 >= LONG_CONTEXT_TOKENS]
    long_text = ", ".join(f"{dataset.name} (p95 {dataset.tokens.p95:,} tokens)" for dataset in long)
    not_long_text = f"no dataset's 95th percentile reaches {LONG_CONTEXT_TOKENS:,} tokens"
    return [
        Trigger("input over the threshold", *_over_threshold(analysis, decision.threshold)),
        Trigger("memory pressure", memory_pressure is not None, memory_pressure or no_memory_pressure),
        Trigger("long-context tasks", bool(long), long_text or not_long_text),
        Trigger("parallel processing", *_parallel(analysis.datasets, streams)),
    ]


def _over_threshold(analysis: Analysis, threshold: int | None) -> tuple[bool, str]:
    if threshold is None:
        return False, f"all inputs are short: the longest has {analysis.tokens.max:,} tokens"
    share = analysis.lengths.share_over(threshold)
    return share > 0, f"{share:.1%} of the inputs are over {threshold:,} tokens"


def _parallel(datasets: Iterable[DatasetAnalysis], streams: int | None) -> tuple[bool, str]:
    if streams is not None:
        return streams > 1, f"concurrent requests: {streams}"
    peak = max((dataset.arrivals.most_in_a_second for dataset in datasets if dataset.arrivals), default=0)
    if peak > 1:
        return True, f"up to {peak} requests arrive within one second"
    return False, "no concurrency was given, and no two requests are known to arrive within one second"


def _rounded_up(num_tokens: int) -> int:
    return -(-num_tokens // _BUDGET_MULTIPLE) * _BUDGET_MULTIPLE
