"""What the claims about serving are tested by: short runs of evenflow's engine on the default model."""

from __future__ import annotations

import logging
import random
import re
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

from scheduler_cost import decoding_scheduler, step
from torch_runs import chunk_costs

from evenflow import LLM, SamplingParams
from evenflow.bench.demo import compare_policies, mixed_prompts
from evenflow.bench.demo_run import DemoRunner
from evenflow.bench.figures import percentile
from evenflow.core.policies import PolicySpec
from evenflow.core.report import LOG_INTERVAL_S
from evenflow.core.request import Request
from evenflow.engine.outputs import RequestOutput

_CHUNK = 512
_LONG, _MIDDLE, _SHORT = 6144, 2048, 256  # tokens of a prompt; the default model's context is 8,192
_REPEATS = 5


def chunk_times() -> dict[str, Any]:
    """Equal chunks of one long prompt."""
    with LLM(policy=f"fixed:{_CHUNK}", enable_prefix_caching=False) as llm:
        runs = [_answer(llm, _prompt(_LONG, seed), 1).chunks for seed in range(2)]
    rows = [{"context": same[0].start, "seconds": min(one.seconds for one in same)} for same in zip(*runs, strict=True)]
    return {"chunk": _CHUNK, "chunks": rows}


def speeds() -> dict[str, Any]:
    """Prefill and decode, tokens per second of one request; and what the log calls prompt throughput meanwhile."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("evenflow")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        with LLM(policy="fixed:2048", enable_prefix_caching=False) as llm:
            _answer(llm, _prompt(_MIDDLE, 0), 8)
            output = _answer(llm, _prompt(_MIDDLE, 1), 64)
            times = output.token_times_s
            prefill, decode = _MIDDLE / times[0], (len(times) - 1) / (times[-1] - times[0])
            lines.clear()
            # Long enough for a line in the log: most of its interval decodes.
            _answer(llm, _prompt(_SHORT, 2), min(int((LOG_INTERVAL_S + 2) * decode), 4000))
    finally:
        logger.removeHandler(handler)
    logged = [float(found[1]) for line in lines if (found := re.search(r"Avg prompt throughput: ([\d.]+)", line))]
    return {
        "prefill_tokens_per_s": prefill,
        "decode_tokens_per_s": decode,
        "logged_prompt_tokens_per_s": logged[0] if logged else None,
    }


def stalls() -> dict[str, Any]:
    """The gaps of a stream while a prompt is prefilled that shares nothing with any other: no prefix is ever found."""
    rows = []
    for policy in ("unchunked", "fixed:512", "fixed:64"):
        with LLM(policy=policy) as llm:
            stream = llm.prepare(_prompt(32, 1), SamplingParams(max_tokens=2000, ignore_eos=True))
            prompt = llm.prepare(_prompt(3000, 2), SamplingParams(max_tokens=1, ignore_eos=True))
            llm.add(stream)
            times = _times_until(llm, stream.id, 20)
            llm.add(prompt)
            while not prompt.is_finished:
                times += [time.perf_counter() for delta in llm.step() if delta.request_id == stream.id]
            hit_rate = llm.engine.stats.totals.prefix_hit_rate
        gaps = sorted(after - before for before, after in pairwise(times[19:]))
        rows.append({"policy": policy, "hit_rate": hit_rate, "gap_p50_s": percentile(gaps, 50), "gap_max_s": gaps[-1]})
    return {"prompt_tokens": 3000, "runs": rows}


def step_parts() -> dict[str, Any]:
    """Host time of one chunk, by part: planning and committing, allocating its blocks, writing its keys and values."""
    with LLM(policy=f"fixed:{_CHUNK}", enable_prefix_caching=False) as llm:
        _answer(llm, _prompt(_LONG, 0), 1)
        llm.add(llm.prepare(_prompt(_LONG, 1), SamplingParams(max_tokens=1)))
        outside = []
        while llm.engine.has_work:
            started = time.perf_counter()
            report = llm.engine.step()
            assert report is not None
            outside.append(time.perf_counter() - started - report.seconds)
    return {
        "chunk": _CHUNK,
        # All that a step takes beside the model, planning included.
        "coordination_ms": 1e3 * statistics.median(outside),
        "scheduling_ms": 1e3 * _scheduling_seconds(),
        **chunk_costs(_CHUNK),
    }


def _scheduling_seconds() -> float:
    """Planning and committing one chunk beside eight decodes, without a model."""
    scheduler = decoding_scheduler(8)
    scheduler.set_policy(PolicySpec.parse(f"fixed:{_CHUNK}"))
    sampling = SamplingParams(max_tokens=1)
    prompt = Request("long", _prompt(_LONG, 0), sampling, seed=0, max_model_len=1 << 20, block_hashes=[])
    scheduler.add(prompt)
    times = []
    while not prompt.is_finished:
        started = time.perf_counter()
        step(scheduler)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def small_and_large() -> dict[str, Any]:
    """The demo: three small requests behind a large one, and another large one, unchunked and with a target."""
    with LLM() as llm:
        found = compare_policies(DemoRunner(llm.engine, llm.tokenizer), mixed_prompts(llm))
    figures = {
        name: {
            "policy": run.policy,
            "small_s": run.mean_latency_s("small"),
            "small_ttft_s": statistics.fmean(answer.ttft_s for answer in run.answers if answer.size == "small"),
            "large_s": run.mean_latency_s("large"),
            "total_s": run.total_s,
            "requests_per_s": len(run.answers) / run.total_s,
        }
        for name, run in (("chunked", found.chunked), ("unchunked", found.unchunked))
    }
    return {**figures, "same_text": found.same_text}


def prefix_hits() -> dict[str, Any]:
    """Seconds to the first token of prompts of 1,000 tokens, with 720 of them in the prefix cache and with none."""
    num_tokens, num_shared = 1000, 720
    shared = _prompt(num_shared, 7)
    with LLM(policy="fixed:2048") as llm:
        _answer(llm, [*shared, *_prompt(num_tokens - num_shared, 8)], 1)
        pairs = []
        for seed in range(_REPEATS):
            warm = _answer(llm, [*shared, *_prompt(num_tokens - num_shared, 100 + seed)], 1)
            cold = _answer(llm, _prompt(num_tokens, 200 + seed), 1)
            assert cold.num_cached_tokens == 0
            pairs.append((warm.token_times_s[0], cold.token_times_s[0]))
    return {
        "hit_rate": warm.num_cached_tokens / num_tokens,
        "warm_s": statistics.median(one for one, _ in pairs),
        "cold_s": statistics.median(one for _, one in pairs),
    }


def data_parallel() -> dict[str, Any]:
    """Tokens per second of one engine on one core, and of two engines on a core each."""
    return {"engines": {str(count): _tokens_per_s(count) for count in (1, 2)}}


def _tokens_per_s(num_engines: int) -> float:
    command = [sys.executable, str(Path(__file__).with_name("one_core.py"))]
    workers = [subprocess.Popen(command, stdin=-1, stdout=-1, text=True) for _ in range(num_engines)]
    total = 0.0
    for worker in workers:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "ready\n"
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write("go\n")
        worker.stdin.flush()
    for worker in workers:
        output, _ = worker.communicate()
        total += float(output)
    return total


def _prompt(num_tokens: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(1000, 40_000), k=num_tokens)


def _answer(llm: LLM, prompt: list[int], max_tokens: int) -> RequestOutput:
    [output] = llm.generate([prompt], SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    return output


def _times_until(llm: LLM, request_id: str, count: int) -> list[float]:
    times: list[float] = []
    while len(times) < count:
        times += [time.perf_counter() for delta in llm.step() if delta.request_id == request_id]
    return times
