"""Common rules about chunked prefill and vLLM's log, each with the logs it applies to and what is true of it today."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from evenflow.advisor.server_logs import LogFacts


@dataclass(frozen=True, slots=True)
class FolkRule:
    """`verdict` is wrong, partly right or depends; `comes_up` tells whether a log may suggest the rule."""

    rule: str
    verdict: str
    truth: str
    comes_up: Callable[[LogFacts], bool]


def _has_budget(facts: LogFacts) -> bool:
    return facts.budget is not None


def _decodes_faster(facts: LogFacts) -> bool:
    busiest = facts.highest.get("generation_tokens_per_s")
    return (
        busiest is not None and facts.peak("generation_tokens_per_s") > busiest.value.get("prompt_tokens_per_s", 0) > 0
    )


FOLK_RULES = (
    FolkRule(
        "Mean prompt under 1,000 tokens: raise the budget to 4,096.",
        "partly right",
        "Prompts that fit are not cut by a smaller budget either. A larger one lets more of them share a step, which "
        "helps throughput while many wait, and makes every decoding stream wait for that longer step.",
        lambda facts: facts.budget is not None and facts.budget < 4096,
    ),
    FolkRule(
        "Out of memory: lower the budget to 1,024.",
        "partly right",
        "vLLM reserves the activations of one full step when it starts, so a lower budget frees some memory for the "
        "KV cache; but weights and KV take most of it. Lower --gpu-memory-utilization, --max-model-len or "
        "--max-num-seqs first, or quantize.",
        lambda facts: any("memory" in name for name in facts.problems),
    ),
    FolkRule(
        "Mean prompt under 512 tokens: switch chunking off.",
        "wrong",
        "A prompt that fits into the step is not cut, and costs nothing extra. Since 0.12 vLLM warns that without "
        "chunking it may crash or respond wrongly, and every prompt up to the whole context must fit into one step.",
        lambda facts: facts.value("chunked_prefill") is not None or _has_budget(facts),
    ),
    FolkRule(
        "Prefix hit rate under 30%: switch prefix caching off.",
        "wrong",
        "A lookup costs next to nothing, and cached blocks are evicted as soon as the room is needed. Switch it off "
        "only for benchmarks, where repeated prompts must not be free.",
        lambda facts: facts.hit_rate is not None and facts.hit_rate < 0.3,
    ),
    FolkRule(
        "Prefix hit rate under 20%: switch chunking off.",
        "wrong",
        "The two are independent: a cache saves work that repeats, chunks spread work that must be done. With few hits "
        "there is more to spread.",
        lambda facts: facts.hit_rate is not None and facts.hit_rate < 0.2,
    ),
    FolkRule(
        "A 72% hit rate makes 72% of the prefill free.",
        "wrong",
        "It is a share of tokens. The remaining tokens still attend to all the cached ones, so time falls by less; and "
        "the rate covers recent lookups, not one request.",
        lambda facts: (facts.hit_rate or 0.0) >= 0.3,
    ),
    FolkRule(
        "KV cache usage of 1.6%: 50 to 100 times more requests fit.",
        "wrong",
        "They fit into memory at their current length. Each stream gets slower with every other one, requests grow "
        "while they run, and --max-num-seqs bounds them too. The figure is a snapshot, not the mean of the interval.",
        lambda facts: 0 < (facts.peak("kv_cache_usage") or 0.0) < 0.1,
    ),
    FolkRule(
        "Idle GPUs: use data parallel.",
        "depends",
        "Another replica serves more requests only if some wait. If none do, it halves the load of each and makes no "
        "single request much faster; tensor parallel does that. The model must fit on one replica's GPUs.",
        lambda facts: facts.peak("waiting") == 0 and bool(facts.ranks),
    ),
    FolkRule(
        "The prompt throughput in the log is the prefill speed.",
        "wrong",
        "It is the prompt tokens of requests that got their first token between two lines, divided by the whole time. "
        "A server with few prompts shows a low one however fast it is; a prompt of many steps counts at its end.",
        lambda facts: facts.last is not None,
    ),
    FolkRule(
        "Decode is several times faster than prefill, as the throughputs show.",
        "wrong",
        "Per token it is the opposite: a step prefills hundreds of tokens in the time it takes to decode one per "
        "stream. The log shows how much of each there was to do.",
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
