"""Another process takes one core for a minute: how soon gaps are back under the target, and how soon chunks recover.

Chats decode and long prompts keep arriving throughout. Run: python benchmarks/busy_core.py [--target 400ms]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from statistics import median
from typing import NamedTuple

from evenflow import LLM, SamplingParams
from evenflow.bench.stall_load import english_prompts
from evenflow.duration import parse_duration

CALM_S, BUSY_S = 30.0, 60.0
WITHIN_STEPS = 15
NUM_CHATS, NUM_LONG, LONG_TOKENS = 6, 8, 3000


class Step(NamedTuple):
    """A step with prefill and decodes."""

    at: float
    gap: float  # since the previous step
    num_prefill_tokens: int


def spin(core: int) -> None:
    """Keep one core busy."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core})
    while True:
        pass


class Load:
    """Chats that never end, and always one long prompt, on a real engine."""

    def __init__(self, llm: LLM) -> None:
        self._llm, self._engine = llm, llm.engine
        self._ids = count()
        chats, self._long = english_prompts(llm.tokenizer.encode, NUM_LONG, LONG_TOKENS)
        self._steps: list[Step] = []
        self._last_commit = time.perf_counter()
        self._chats = chats[:NUM_CHATS]
        for chat in self._chats:
            self._add("chat", chat, 4000)

    def _add(self, kind: str, prompt: Sequence[int], max_tokens: int) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        name = f"{kind}-{next(self._ids)}"
        self._engine.add(self._llm.prepare(prompt, sampling, request_id=name))

    def _step(self) -> None:
        report = self._engine.step()
        assert report is not None
        prefill = sum(chunk.length for chunk in report.chunks if chunk.request_id.startswith("long"))
        if prefill and report.num_decodes:
            self._steps.append(Step(report.at, report.at - self._last_commit, prefill))
        self._last_commit = report.at

    def run(self, until: Callable[[], bool]) -> list[Step]:
        """The steps with prefill and decodes until `until()` is true."""
        self._steps.clear()
        while not until():
            running = self._engine.scheduler.requests
            if not any(name.startswith("long") for name in running):
                self._add("long", self._long[next(self._ids) % NUM_LONG], 1)
            for name in range(NUM_CHATS - sum(name.startswith("chat") for name in running)):
                self._add("chat", self._chats[name], 4000)
            self._step()
        return list(self._steps)


def for_seconds(seconds: float) -> Callable[[], bool]:
    end = time.perf_counter() + seconds
    return lambda: time.perf_counter() >= end


def steps_until_kept(gaps: Sequence[float], target: float) -> int:
    """Steps until 90% of the next 60 are within 1.1 times the target."""
    for first in range(len(gaps)):
        rest = gaps[first : first + 60]
        if sum(gap <= 1.1 * target for gap in rest) >= 0.9 * len(rest):
            return first
    return len(gaps)


def steps_until_recovered(sizes: Sequence[int], before: float) -> int:
    """Steps until the median of the next five chunks is at least 90% of what it was."""
    recovered = (place for place in range(len(sizes) - 5) if median(sizes[place : place + 5]) >= 0.9 * before)
    return next(recovered, len(sizes))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=parse_duration, default=0.4)
    parser.add_argument("--model", default="default")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    with LLM(options.model, tbt_target=options.target, enable_prefix_caching=False) as llm:
        load = Load(llm)
        calm = load.run(for_seconds(CALM_S))
        neighbour = multiprocessing.Process(target=spin, args=(0,), daemon=True)
        neighbour.start()
        busy = load.run(for_seconds(BUSY_S))
        neighbour.kill()
        neighbour.join()
        after = load.run(for_seconds(CALM_S))
        feasible = llm.engine.scheduler.policy.feasible_target
    usual = median(step.num_prefill_tokens for step in calm[len(calm) // 2 :])
    report = {
        "target_s": options.target,
        "infeasible_at_the_end": feasible is not None,
        "calm_chunk": usual,
        "busy_chunk": median(step.num_prefill_tokens for step in busy[len(busy) // 2 :]),
        "after_chunk": median(step.num_prefill_tokens for step in after[len(after) // 2 :]),
        "steps_until_kept_with_neighbour": steps_until_kept([step.gap for step in busy], options.target),
        "steps_until_chunks_recover_after": steps_until_recovered([s.num_prefill_tokens for s in after], usual),
        "late_share": {
            name: sum(step.gap > 1.1 * options.target for step in steps) / len(steps)
            for name, steps in (("calm", calm), ("busy", busy), ("after", after))
        },
        "steps": {"calm": len(calm), "busy": len(busy), "after": len(after)},
    }
    print(json.dumps(report, indent=2))
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    kept = report["steps_until_kept_with_neighbour"], report["steps_until_chunks_recover_after"]
    print(f"Goal: both within {WITHIN_STEPS} steps. Measured: {kept[0]} and {kept[1]}.", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
