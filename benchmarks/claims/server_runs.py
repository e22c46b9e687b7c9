"""What the claims about serving are tested by on a server with a GPU: a few requests over HTTP.

`gpu/serve_loads.py` starts such a server and calls `experiments`.
"""

from __future__ import annotations

import asyncio
import random
import re
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from evenflow.bench.endpoints import Answer, Ask, Endpoint

Switch = Callable[[str], Awaitable[None]]  # to a mode by name: `default`, `target:50ms`

_REPEATS = 5
_LONG, _SMALL = 8000, 50  # tokens of a prompt; one long prompt fits into a step of vLLM's default budget
_LONG_ANSWER, _SMALL_ANSWER = 8, 40
_PROMPT, _SHARED = 10_000, 7_200
_SECONDS_LOGGED = 14.0  # vLLM writes a line every 10 s
_TARGET = "target:50ms"


async def experiments(endpoint: Endpoint, switch: Switch, log: Sequence[str]) -> dict[str, Any]:
    """`log`: the server's lines, which grow while it runs."""
    await switch("default")
    return {
        "speeds": await _speeds(endpoint, log),
        "prefix_hits": await _prefix_hits(endpoint),
        "small_and_large": await _small_and_large(endpoint, switch),
    }


async def _speeds(endpoint: Endpoint, log: Sequence[str]) -> dict[str, Any]:
    """Prefill and decode, tokens per second of one request; and what the log calls prompt throughput meanwhile."""
    prefill = [_LONG / (await _answer(endpoint, _prompt(_LONG), 1)).piece_times_s[0] for _ in range(_REPEATS)]
    times = (await _answer(endpoint, _prompt(_SMALL), 200)).piece_times_s
    decode = (len(times) - 1) / (times[-1] - times[0])
    first_line = len(log)
    await _answer(endpoint, _prompt(1000), int(_SECONDS_LOGGED * decode))
    found = [re.search(r"Avg prompt throughput: ([\d.]+)", line) for line in log[first_line:]]
    logged = [float(match[1]) for match in found if match and float(match[1])]
    return {
        "prefill_tokens_per_s": statistics.median(prefill),
        "decode_tokens_per_s": decode,
        "logged_prompt_tokens_per_s": logged[0] if logged else None,
    }


async def _prefix_hits(endpoint: Endpoint) -> dict[str, Any]:
    """Seconds to the first token, with 72% of a prompt in the prefix cache and with none."""
    shared, num_own = _prompt(_SHARED), _PROMPT - _SHARED
    await _answer(endpoint, [*shared, *_prompt(num_own)], 1)
    warm = [await _answer(endpoint, [*shared, *_prompt(num_own)], 1) for _ in range(_REPEATS)]
    cold = [await _answer(endpoint, _prompt(_PROMPT), 1) for _ in range(_REPEATS)]
    return {
        "hit_rate": statistics.median(answer.num_cached_tokens or 0 for answer in warm) / _PROMPT,
        "warm_s": statistics.median(answer.piece_times_s[0] for answer in warm),
        "cold_s": statistics.median(answer.piece_times_s[0] for answer in cold),
    }


async def _small_and_large(endpoint: Endpoint, switch: Switch) -> dict[str, Any]:
    """A long prompt, three small ones behind it, another long one: each prompt whole in a step, and under a target."""
    runs: dict[str, Any] = {}
    for name, mode in (("unchunked", "default"), ("chunked", _TARGET)):
        await switch(mode)
        rounds = [await _round(endpoint) for _ in range(_REPEATS)]
        medians = {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
        runs[name] = {"policy": mode, **medians}
    return runs


async def _round(endpoint: Endpoint) -> dict[str, float]:
    started = time.perf_counter()
    sizes = (_LONG, _SMALL, _SMALL, _SMALL, _LONG)
    asks = [Ask(_prompt(size), _LONG_ANSWER if size == _LONG else _SMALL_ANSWER) for size in sizes]
    answers = [Answer() for _ in asks]
    await asyncio.gather(*map(endpoint.stream, asks, answers))
    seconds = time.perf_counter() - started
    small, large = (
        [answer.piece_times_s for answer, size in zip(answers, sizes, strict=True) if size == wanted]
        for wanted in (_SMALL, _LONG)
    )
    return {
        "small_s": statistics.fmean(times[-1] for times in small),
        "small_ttft_s": statistics.fmean(times[0] for times in small),
        "large_s": statistics.fmean(times[-1] for times in large),
        "total_s": seconds,
        "requests_per_s": len(sizes) / seconds,
    }


async def _answer(endpoint: Endpoint, prompt: list[int], max_tokens: int) -> Answer:
    await endpoint.stream(Ask(prompt, max_tokens), answer := Answer())
    assert answer.error is None, answer.error
    return answer


def _prompt(num_tokens: int) -> list[int]:
    return random.choices(range(1000, 2000), k=num_tokens)
