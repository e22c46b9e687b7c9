"""Random loads on evenflow's own engine: a target against fixed budgets, in hindsight.

    python benchmarks/cpu_random_loads.py --seeds 1 11 --target 400
    python benchmarks/cpu_random_loads.py --seeds 1 51 --target 200 --recording x86_smollm2

The loads are those of `gpu/random_loads.py`, with an eighth of the chats and a sixteenth of the tokens. In real time
all budgets and the target run on one engine, a load at a time, so that a machine that slows down does so for all. In
virtual time, on recorded steps, each has an engine of its own, and all of a load the same disturbances.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "gpu"))

from outcomes import Outcome, Stream, outcome_of
from random_loads import Load, random_load
from recorded_engine import recorded_run
from replay_loads import Verdict, add_seeds, milliseconds, print_table, recording_names, verdict_of
from virtual_run import Clients

from evenflow import LLM, SamplingParams
from evenflow.core.policies import PolicySpec
from evenflow.core.report import StepReport
from evenflow.engine.engine import Engine
from evenflow.engine.intake import Intake
from evenflow.errors import EngineFailed
from evenflow.simulation.loop import Loop, Timed

BUDGETS = (24, 48, 96, 192, 384)
FEWER_CHATS, FEWER_TOKENS = 8, 16


class EngineRun:
    """One load on an engine in real time. The engine is left idle."""

    def __init__(self, engine: Engine, load: Load, sleep: Callable[[float], None] = time.sleep) -> None:
        self._engine = engine
        self._load = load
        self._sleep = sleep
        self._intake = Intake(engine.limits, engine.scheduler.block_size, clock=engine.clock)
        self._began = engine.clock()
        self._clients = Clients(load, self._add)
        self._errors: list[float] = []

    @property
    def now(self) -> float:
        """Seconds since the run began."""
        return self._engine.clock() - self._began

    @property
    def streams(self) -> list[Stream]:
        return list(self._clients.streams.values())

    def run(self) -> Outcome:
        engine, loop = self._engine, Loop(self._clients.start())
        while self.now < self._load.seconds and (loop.next_at < math.inf or engine.has_work):
            loop.run(by=self.now)
            if not engine.has_work:
                self._sleep(max(0.0, loop.next_at - self.now))
            elif (report := engine.step()) is not None:
                loop.add(self._take(report))
        for request_id in list(engine.scheduler.requests):
            engine.abort(request_id)
        while engine.has_work:
            engine.step()
        return outcome_of(self.streams, self._errors, self.now)

    def _add(self, stream: Stream, now: float) -> Iterable[Timed]:
        number = len(self.streams)
        tokens = [(31 * position + 7 * number) % 1000 for position in range(stream.num_prompt_tokens)]
        sampling = SamplingParams(max_tokens=stream.max_tokens, temperature=0.0, ignore_eos=True)
        request = self._intake.prepare(tokens, sampling, policy=self._engine.policy, request_id=stream.id)
        request.arrival_time = self._began + stream.due
        self._engine.add(request)
        return ()

    def _take(self, report: StepReport) -> list[Timed]:
        if report.is_mixed and report.predicted_seconds:
            self._errors.append(report.predicted_seconds / report.seconds - 1)
        failed = [ended.error for ended in report.ended.values() if ended.error is not None]
        if failed:
            raise EngineFailed(f"a request of load {self._load.seed} failed: {failed[0]}")
        rows = zip(report.ids, report.tokens, strict=True)
        return self._clients.take([request_id for request_id, tokens in rows if tokens], report.at - self._began)


def judge(load: Load, target: float, run: Callable[[PolicySpec], Outcome]) -> Verdict:
    """A target in seconds against the budgets; `run` runs the load under a policy."""
    curve = [run(PolicySpec.parse(f"fixed:{budget}")) for budget in BUDGETS]
    return verdict_of(load.seed, target, run(PolicySpec.for_target(target)), curve)


def run_in_real_time(engine: Engine, load: Load, policy: PolicySpec) -> Outcome:
    engine.set_policy(policy)
    return EngineRun(engine, load).run()


def run_in_virtual_time(recording: str, load: Load, policy: PolicySpec, *, sheds_rows: bool = True) -> Outcome:
    return recorded_run(recording, load, policy, sheds_rows=sheds_rows).run()


def judge_in_virtual_time(seed: int, options: argparse.Namespace) -> Verdict:
    load = load_of(seed, options)
    return judge(load, options.target / 1000, partial(run_in_virtual_time, options.recording, load))


def add_load_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="default")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each run")
    parser.add_argument("--prefill-rate", type=float, default=170.0, help="tokens per second, about")


def load_of(seed: int, options: argparse.Namespace) -> Load:
    return cpu_load(seed, options.seconds, options.prefill_rate)


def cpu_load(seed: int, seconds: float, prefill_rate: float) -> Load:
    return random_load(seed, seconds, FEWER_TOKENS * prefill_rate).scaled(FEWER_CHATS, FEWER_TOKENS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_seeds(parser, 1, 11)
    parser.add_argument("--target", type=milliseconds, default=400.0, help="milliseconds")
    parser.add_argument("--recording", choices=recording_names(of_gpus=False), help="in virtual time on these steps")
    add_load_options(parser)
    options = parser.parse_args()
    seeds = range(*options.seeds)
    if options.recording and options.model != parser.get_default("model"):
        parser.error(f"argument --model: got {options.model} with --recording, whose steps are of one model")
    if options.recording:
        with ProcessPoolExecutor(os.cpu_count()) as pool:
            print_table(list(pool.map(partial(judge_in_virtual_time, options=options), seeds)))
        return
    verdicts = []
    with LLM(options.model, policy=f"target:{options.target:g}ms", enable_prefix_caching=False) as llm:
        for seed in seeds:
            load = load_of(seed, options)
            verdicts.append(judge(load, options.target / 1000, partial(run_in_real_time, llm.engine, load)))
            print_table(verdicts[-1:])
    print_table(verdicts)


if __name__ == "__main__":
    main()
