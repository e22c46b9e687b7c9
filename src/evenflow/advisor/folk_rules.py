"""Rules that go round about chunked prefill and vLLM's log, each with when it comes up and what is true of it today.

Must not know: how facts are found.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from evenflow.advisor.vllm_logs import Fact, LogFacts


@dataclass(frozen=True, slots=True)
class FolkRule:
    """`verdict` is one of: wrong, partly right, depends."""

    rule: str
    verdict: str
    truth: str
    comes_up: Callable[[LogFacts], bool]


def rules_for(facts: LogFacts) -> list[FolkRule]:
    """Those that a reader of this log may be tempted by."""
    return [rule for rule in FOLK_RULES if rule.comes_up(facts)]


def budget_fact(facts: LogFacts) -> Fact | None:
    """Most tokens of a step. vLLM does not log it where it is 2,048, but compiles for steps of up to so many."""
    found = (facts.settings.get(name) for name in ("chunk_budget", "budget_asked_for", "compiled_tokens"))
    return next((fact for fact in found if fact is not None), None)


def budget(facts: LogFacts) -> int | None:
    fact = budget_fact(facts)
    return None if fact is None else int(fact.value)


def hit_rate(facts: LogFacts) -> float | None:
    return None if facts.last is None else facts.last.prefix_hit_rate


def _budget_under(limit: int) -> Callable[[LogFacts], bool]:
    return lambda facts: (budget(facts) or limit) < limit


def _hit_rate_under(limit: float) -> Callable[[LogFacts], bool]:
    return lambda facts: (rate := hit_rate(facts)) is not None and rate < limit


def _has_budget(facts: LogFacts) -> bool:
    return budget(facts) is not None


def _has_intervals(facts: LogFacts) -> bool:
    return facts.num_intervals > 0


def _has_room(facts: LogFacts) -> bool:
    usage = facts.peak("kv_cache_usage")
    return usage is not None and 0 < usage < 0.1


def _nobody_waits(facts: LogFacts) -> bool:
    return facts.peak("waiting") == 0 and bool(facts.ranks)


def _decodes_faster(facts: LogFacts) -> bool:
    last = facts.highest.get("generation_tokens_per_s")
    return last is not None and last.generation_tokens_per_s > last.prompt_tokens_per_s > 0


FOLK_RULES = (
    FolkRule(
        "Mean prompt under 1,000 tokens: raise the budget to 4,096.",
        "partly right",
        "Prompts that fit are not cut by a smaller budget either. A larger one lets more of them share a step, which "
        "helps throughput while many wait, and makes every decoding stream wait for that longer step.",
        _budget_under(4096),
    ),
    FolkRule(
        "Out of memory: lower the budget to 1,024.",
        "partly right",
        "vLLM sets aside the activations of one full step when it starts, so that a lower budget frees some memory for "
        "the KV cache; weights and KV are most of it. Lower --gpu-memory-utilization, --max-model-len or "
        "--max-num-seqs first, or quantize.",
        lambda facts: any("memory" in name for name in facts.problems),
    ),
    FolkRule(
        "Mean prompt under 512 tokens: switch chunking off.",
        "wrong",
        "A prompt that fits into the step is not cut, and costs nothing extra. Since 0.12 vLLM warns that switching "
        "it off may crash or answer wrongly, and then every prompt up to the whole context must fit into one step.",
        lambda facts: facts.value("chunked_prefill") is not None or _has_budget(facts),
    ),
    FolkRule(
        "Prefix hit rate under 30%: switch prefix caching off.",
        "wrong",
        "Looking up costs next to nothing, and cached blocks are given up as soon as somebody needs the room. Off is "
        "for benchmarks, where repeats must not be answered for free.",
        _hit_rate_under(0.3),
    ),
    FolkRule(
        "Prefix hit rate under 20%: switch chunking off.",
        "wrong",
        "The two are independent: a cache saves work that repeats, chunks spread work that must be done. With few hits "
        "there is more to spread.",
        _hit_rate_under(0.2),
    ),
    FolkRule(
        "A 72% hit rate makes 72% of the prefill free.",
        "wrong",
        "It is a share of tokens. The tokens left to compute still attend to all the cached ones, so that time falls "
        "by less; and the rate covers recent lookups, not one request.",
        lambda facts: (hit_rate(facts) or 0.0) >= 0.3,
    ),
    FolkRule(
        "KV cache usage of 1.6%: 50 to 100 times more requests fit.",
        "wrong",
        "They fit into memory, at the length they have at this moment. Each stream gets slower with every other one, "
        "requests grow while they are answered, and --max-num-seqs bounds them too. The figure is of the instant of "
        "the line, not of the interval.",
        _has_room,
    ),
    FolkRule(
        "Idle GPUs: use data parallel.",
        "depends",
        "Another replica serves more requests only where some wait. Where none do, it halves the load of each and "
        "makes no answer faster; tensor parallel does that. The model must fit on one replica's GPUs.",
        _nobody_waits,
    ),
    FolkRule(
        "The prompt throughput in the log is the prefill speed.",
        "wrong",
        "It is the prompt tokens of the requests that got their first token between two lines, over all that time. "
        "A server with few prompts to read shows a low one, however fast it reads; a prompt of many steps counts whole "
        "at its end.",
        _has_intervals,
    ),
    FolkRule(
        "Decode is several times faster than prefill, as the throughputs show.",
        "wrong",
        "Per token it is the other way round: a step prefills hundreds of tokens in the time it takes to decode one "
        "of each stream. The log compares how much was asked for.",
        _decodes_faster,
    ),
    FolkRule(
        "vLLM switches chunking on for contexts over 32K (or prompts over 8,192).",
        "wrong",
        "In its V1 engine, the only one since 0.11, it is on for every generative model. What differs by hardware is "
        "the budget: for a server 8,192 tokens on GPUs with 70 GiB or more (A100 apart; 16,384 from 160 GiB on since "
        "0.28), 2,048 on smaller ones and CPUs.",
        lambda facts: facts.value("max_model_len") is not None,
    ),
    FolkRule(
        "Chunking cuts attention memory from n^2 to chunk^2.",
        "wrong",
        "It would be chunk x context, and with a flash kernel neither matrix exists. What it bounds is the activations "
        "of a step, the logits of prompt_logprobs, and the step's time.",
        _has_budget,
    ),
    FolkRule(
        "All chunks take the same time.",
        "wrong",
        "Attention grows with the context before a chunk: on an H200 with an 8B model a step of 2,048 tokens goes from "
        "55 ms to 102 ms at 32K and 160 ms at 65K. A fixed budget bounds tokens, not time.",
        _has_budget,
    ),
    FolkRule(
        "Several long prompts at a time: set --max-num-partial-prefills and --max-long-partial-prefills.",
        "wrong",
        "vLLM's V1 engine never took a value but 1, and 0.27 removed both flags. Prompts share a step's budget as they "
        "are; --long-prefill-token-threshold caps what one of them takes of it.",
        lambda facts: (
            "partial-prefills" in str(getattr(facts.problems.get("unknown flags"), "value", ""))
            or "partial prefills" in facts.problems
        ),
    ),
)
