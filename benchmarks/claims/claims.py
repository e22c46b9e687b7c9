"""The claims, and how each is judged by a run's figures. Knows nothing of how they were measured or are shown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

Figures = Mapping[str, Any]  # of one experiment


class Finding(NamedTuple):
    """What one run says about a claim."""

    text: str
    holds: bool


@dataclass(frozen=True, slots=True)
class Claim:
    text: str
    experiment: str
    judge: Callable[[Figures], Finding | None]  # None: the run lacks what it takes
    because: str  # of the verdict, in words: no figures

    def verdict(self, findings: Iterable[Finding]) -> str:
        held = {finding.holds for finding in findings}
        return {frozenset(): "not measured", frozenset({True}): "holds", frozenset({False}): "does not hold"}.get(
            frozenset(held), "depends on the machine"
        )


def _between(value: float, low: float, high: float) -> bool:
    return low <= value <= high


def _percent(value: float) -> str:
    return f"{100 * value:.0f}%"


# ---- memory and latency of one prefill ----


class _Pair(NamedTuple):
    """One input, whole and in chunks."""

    tokens: int
    attention: str
    whole: Figures
    chunked: Figures

    @property
    def memory_saved(self) -> float:
        return 1 - float(self.chunked["peak_mb"] / self.whole["peak_mb"])

    @property
    def time_saved(self) -> float:
        return 1 - float(self.chunked["seconds"] / self.whole["seconds"])


def _pairs(figures: Figures, needed: str) -> list[_Pair]:
    rows = {(row["tokens"], row["attention"], row["run"]): row for row in figures["rows"]}
    pairs = [
        _Pair(tokens, attention, row, rows[tokens, attention, "chunked"])
        for (tokens, attention, run), row in rows.items()
        if run == "whole" and (tokens, attention, "chunked") in rows
    ]
    return [pair for pair in pairs if needed in pair.whole and needed in pair.chunked]


def _saved(figures: Figures, lengths: Sequence[int], needed: str, value: Callable[[_Pair], float]) -> dict[Any, float]:
    return {(pair.attention, pair.tokens): value(pair) for pair in _pairs(figures, needed) if pair.tokens in lengths}


def _by_attention(saved: Mapping[Any, float], lengths: Sequence[int]) -> str:
    parts = []
    for attention in ("eager", "sdpa"):
        cells = [_percent(saved[attention, length]) if (attention, length) in saved else "-" for length in lengths]
        parts.append(f"{attention} {' / '.join(cells)}")
    return ", ".join(parts)


def _memory_saved(claimed: Mapping[int, float]) -> Callable[[Figures], Finding]:
    """Holds if eager or SDPA attention saves at least nine tenths of what is claimed, at every length."""

    def judge(figures: Figures) -> Finding:
        saved = _saved(figures, tuple(claimed), "peak_mb", lambda pair: pair.memory_saved)
        holds = any(
            all(saved.get((attention, length), 0) >= 0.9 * share for length, share in claimed.items())
            for attention in ("eager", "sdpa")
        )
        return Finding(_by_attention(saved, tuple(claimed)), holds)

    return judge


def _quadratic_in_the_chunk(figures: Figures) -> Finding:
    pair = next(pair for pair in _pairs(figures, "peak_mb") if (pair.attention, pair.tokens) == ("eager", 8000))
    left, claimed = 1 - pair.memory_saved, (1024 / 8000) ** 2
    return Finding(
        f"eager, 8,000 tokens in chunks of 1,024: {_percent(left)} of the whole's memory is left, not {claimed:.1%}",
        left <= 2 * claimed,
    )


def _in_practice(figures: Figures) -> Finding:
    saved = [
        pair.memory_saved for pair in _pairs(figures, "peak_mb") if pair.attention == "sdpa" and pair.tokens > 2048
    ]
    text = f"SDPA, beyond the weights: {_percent(min(saved))} to {_percent(max(saved))}"
    return Finding(text, all(_between(share, 0.15, 0.40) for share in saved))


def _ten_times_less(figures: Figures) -> Finding:
    best = max(_pairs(figures, "peak_mb"), key=lambda pair: pair.memory_saved)
    times = 1 / (1 - best.memory_saved)
    impossible = sorted({row["tokens"] for row in figures["rows"] if row["run"] == "whole" and "peak_mb" not in row})
    text = f"at most {times:.1f}x ({best.attention}, {best.tokens:,} tokens)"
    if impossible:
        text += f"; whole, eager attention does not fit at {' and '.join(f'{tokens:,}' for tokens in impossible)}"
    return Finding(text, times >= 10)


def _latency(claimed: Mapping[int, float]) -> Callable[[Figures], Finding | None]:
    def judge(figures: Figures) -> Finding | None:
        saved = _saved(figures, tuple(claimed), "seconds", lambda pair: pair.time_saved)
        if not saved:
            return None
        holds = all(saved.get(("sdpa", length), 0) >= 0.9 * share for length, share in claimed.items())
        return Finding("time saved: " + _by_attention(saved, tuple(claimed)), holds)

    return judge


def _short_input(low: float, high: float) -> Callable[[Figures], Finding]:
    def judge(figures: Figures) -> Finding:
        wrapped, chunked = (figures[f"{name}_s"] / figures["plain_s"] - 1 for name in ("wrapped", "chunked"))
        text = f"left whole {wrapped:+.1%}, run as one chunk {chunked:+.1%}"
        return Finding(text, _between(chunked, low, high))

    return judge


def _scores_of_30_000(figures: Figures) -> Finding:
    whole, chunked = 30_000**2 * 2 / 1e9, 2048 * 30_000 * 2 / 1e6
    return Finding(f"one head in 16 bits, by arithmetic: {whole:.1f} GB and {chunked:.0f} MB", True)


def _activations_of_30_000(figures: Figures) -> Finding | None:
    pairs = [pair for pair in _pairs(figures, "peak_mb") if (pair.attention, pair.tokens) == ("sdpa", 30_000)]
    if not pairs:
        return None
    whole, chunked = (row["peak_mb"] - row["kv_mb"] for row in (pairs[0].whole, pairs[0].chunked))
    text = (
        f"{figures['model']}, SDPA, beyond the KV cache: {whole:,.0f} MB and {chunked:,.0f} MB ({whole / chunked:.1f}x)"
    )
    return Finding(text, whole / chunked >= 10)


# ---- serving ----


def _same_time(figures: Figures) -> Finding:
    chunks = figures["chunks"]
    ratio = chunks[-1]["seconds"] / chunks[0]["seconds"]
    first, last = (1000 * chunk["seconds"] for chunk in (chunks[0], chunks[-1]))
    text = (
        f"{figures['chunk']:,} tokens: {first:,.0f} ms at the start, {last:,.0f} ms behind {chunks[-1]['context']:,} "
        f"tokens ({ratio:.1f}x)"
    )
    return Finding(text, ratio < 1.1)


def _log_is_prefill_speed(figures: Figures) -> Finding | None:
    logged, prefill = figures.get("logged_prompt_tokens_per_s"), figures["prefill_tokens_per_s"]
    if logged is None:
        return None
    text = f"the log said {logged:,.0f} tokens/s, prefill ran at {prefill:,.0f}"
    return Finding(text, _between(logged / prefill, 0.9, 1.1))


def _decode_is_faster(figures: Figures) -> Finding:
    prefill, decode = figures["prefill_tokens_per_s"], figures["decode_tokens_per_s"]
    ratio = f"{prefill / decode:.0f}x faster" if prefill > decode else f"{decode / prefill:.1f}x slower"
    text = f"prefill {prefill:,.0f}, decode {decode:,.0f} tokens/s of one request: prefill is {ratio}"
    return Finding(text, decode > prefill)


def _no_hits_no_use(figures: Figures) -> Finding:
    first, last = figures["runs"][0], figures["runs"][-1]
    ratio = first["gap_max_s"] / last["gap_max_s"]
    text = (
        f"hit rate {_percent(last['hit_rate'])}: the longest wait for a token is {1000 * first['gap_max_s']:,.0f} ms "
        f"with {first['policy']}, {1000 * last['gap_max_s']:,.0f} ms with {last['policy']} ({ratio:.1f}x less)"
    )
    return Finding(text, ratio < 1.1)


def _vllm_thresholds(figures: Figures) -> Finding:
    threshold, partial = figures["long_prefill_token_threshold"], figures["max_num_partial_prefills"]
    text = (
        f"vLLM {figures['vllm']}: chunked prefill {figures['enable_chunked_prefill']} for any length, "
        f"long_prefill_token_threshold {threshold}, max_num_partial_prefills {partial}"
    )
    return Finding(text, not figures["enable_chunked_prefill"])


def _step_part(name: str, low: float, high: float) -> Callable[[Figures], Finding | None]:
    def judge(figures: Figures) -> Finding | None:
        milliseconds = figures.get(name)
        if milliseconds is None:
            return None
        return Finding(f"{milliseconds:.3g} ms", _between(milliseconds, low, high))

    return judge


def _small_requests(figures: Figures) -> Finding:
    chunked, unchunked = figures["chunked"], figures["unchunked"]
    text = (
        f"small {chunked['small_s']:.1f} s beside large ones of {chunked['large_s']:.1f} s ({chunked['policy']}), the "
        f"first token after {chunked['small_ttft_s']:.2f} s; unchunked {unchunked['small_s']:.1f} s and "
        f"{unchunked['small_ttft_s']:.2f} s"
    )
    return Finding(text, unchunked["small_s"] / chunked["small_s"] >= 5)


def _throughput(figures: Figures) -> Finding:
    ratio = figures["chunked"]["requests_per_s"] / figures["unchunked"]["requests_per_s"]
    return Finding(f"{ratio:.2f}x the requests/s of unchunked", ratio >= 3)


def _doubles(figures: Figures) -> Finding:
    one, two = (figures["engines"][count] for count in ("1", "2"))
    text = f"one engine on a core {one:,.0f} tokens/s, two on a core each {two:,.0f} ({two / one:.2f}x)"
    return Finding(text, two / one >= 1.8)


def _free_prefill(figures: Figures) -> Finding:
    saved = 1 - figures["warm_s"] / figures["cold_s"]
    text = f"hit rate {_percent(figures['hit_rate'])}: {_percent(saved)} of the time to the first token saved"
    return Finding(text, abs(saved - figures["hit_rate"]) <= 0.05)


KNOWN_TO_BE_WRONG = (
    Claim(
        "Chunking cuts attention memory from n^2 to chunk^2",
        "memory",
        _quadratic_in_the_chunk,
        "A chunk's scores are chunk x context. With a flash or SDPA kernel neither matrix exists: chunks bound the "
        "activations, the logits and the step's time.",
    ),
    Claim(
        "All chunks take the same time",
        "chunk_times",
        _same_time,
        "A chunk attends to everything before it.",
    ),
    Claim(
        "The prompt throughput in the log is the prefill speed",
        "speeds",
        _log_is_prefill_speed,
        "It is the tokens prefilled in an interval over that interval, idle time and decoding included.",
    ),
    Claim(
        "Decode is 5.2x faster than prefill",
        "speeds",
        _decode_is_faster,
        "Per token it is the other way round: prefill reads the weights once for many tokens.",
    ),
    Claim(
        "A low prefix hit rate means that chunking does not help",
        "stalls",
        _no_hits_no_use,
        "The two are independent: no prefix was ever found in these runs.",
    ),
    Claim(
        "vLLM enables chunking above 32K tokens (or above 8,192)",
        "vllm_defaults",
        _vllm_thresholds,
        "It is on for every generative model; the budget's default depends on the hardware. The limits of partial "
        "prefills were removed in 0.27.",
    ),
)

UNMEASURED = (
    Claim(
        "Memory saved: 94 / 98 / 99% at 2,156 / 4,000 / 8,000 tokens",
        "memory",
        _memory_saved({2156: 0.94, 4000: 0.98, 8000: 0.99}),
        "These figures assume chunk x chunk.",
    ),
    Claim(
        "Memory saved: 75 / 90 / 95% at 4,000 / 12,000 / 24,000 tokens",
        "memory",
        _memory_saved({4000: 0.75, 12_000: 0.90, 24_000: 0.95}),
        "Eager attention comes near at first; engines do not use it, and with SDPA only activations are saved.",
    ),
    Claim(
        "Memory saved: 15-40% in practice",
        "memory",
        _in_practice,
        "Of the memory beyond the weights; with the weights counted in, it is less.",
    ),
    Claim(
        "10-15x less memory for long contexts",
        "memory",
        _ten_times_less,
        "What is left grows with the context: the KV cache, and with eager attention a chunk's scores.",
    ),
    Claim(
        "30,000 tokens in chunks of 2,048: a score matrix of 122 MB instead of 1.8 GB",
        "memory",
        _scores_of_30_000,
        "For one head of one layer; flash and SDPA kernels never write it.",
    ),
    Claim(
        "30,000 tokens in chunks of 2,048: activations of 200-300 MB instead of 3-4 GB",
        "memory",
        _activations_of_30_000,
        "Judged by the ratio (at least 10x), because the sizes are those of another model.",
    ),
    Claim(
        "Latency better by 40 / 60 / 80% at 4,000 / 12,000 / 24,000 tokens",
        "memory",
        _latency({4000: 0.4, 12_000: 0.6, 24_000: 0.8}),
        "A prompt alone is no faster in chunks, unless its score matrices were too large for the caches. The streams "
        "beside it are what gains.",
    ),
    Claim(
        "Latency worse by 15% at 47 tokens; 10-15% overhead on short sequences",
        "short_calls",
        _short_input(0.08, 0.17),
        "Below the threshold the wrapper passes the call on.",
    ),
    Claim(
        "Coordination costs 5-10 ms a chunk",
        "step_parts",
        _step_part("coordination_ms", 5, 10),
        "All host time of a step beside the model: planning, committing, reporting. A host that plans ahead hides it: "
        "on the GPU, it is what the device waits between two steps.",
    ),
    Claim(
        "The KV cache costs 2-5 ms a chunk",
        "step_parts",
        _step_part("kv_write_ms", 2, 5),
        "Writing the keys and values of a chunk of 512 tokens, 30 layers (32 on the GPU).",
    ),
    Claim(
        "Allocation costs 1-3 ms a chunk",
        "step_parts",
        _step_part("allocation_ms", 1, 3),
        "Taking the chunk's blocks from the pool.",
    ),
    Claim(
        "Scheduling costs 3-7 ms a chunk",
        "step_parts",
        _step_part("scheduling_ms", 3, 7),
        "Planning one step and committing it.",
    ),
    Claim(
        "Small requests take 0.1-0.2 s beside large ones of 2-3 s, which they would wait out without chunks",
        "small_and_large",
        _small_requests,
        "Judged by the ratio (whole answers at least 5x sooner than unchunked), because the times are those of another "
        "machine. First tokens come much sooner; the rest comes at the target's pace while prompts are prefilled.",
    ),
    Claim(
        "3-5x throughput",
        "small_and_large",
        _throughput,
        "The same tokens are computed either way. Chunks change who waits, not how much is done.",
    ),
    Claim(
        "Data parallel doubles throughput",
        "data_parallel",
        _doubles,
        "Cores of one machine share its memory rate; GPUs do not. One GPU cannot test it.",
    ),
    Claim(
        "A 72% prefix hit rate makes 72% of prefill free",
        "prefix_hits",
        _free_prefill,
        "The rest of the prompt still attends to the cached prefix.",
    ),
)
