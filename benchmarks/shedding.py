"""What leaving out rows of slow steps buys: random loads on evenflow's engine under a target, with it and without.

    python benchmarks/shedding.py --seeds 1 11 --target 400
    python benchmarks/shedding.py --seeds 1 51 --target 400 --recording x86_smollm2

In real time both run each load on one engine, in turn, while another process takes a core in bursts. In virtual time
each has an engine of its own, and both see the same disturbances.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean

from cpu_random_loads import add_load_options, load_of, run_in_real_time, run_in_virtual_time
from outcomes import Outcome
from random_loads import Load
from replay_loads import MAX_P99, add_seeds, milliseconds, recording_names

from evenflow import LLM
from evenflow.core.policies import PolicySpec
from evenflow.engine.engine import Engine

BURST_S, PAUSE_S = (0.1, 1.5), (0.2, 4.0)  # of the other process


@dataclass(frozen=True, slots=True)
class Pair:
    """One load, whose steps shed rows in one run and not in the other."""

    seed: int
    with_shedding: Outcome
    without: Outcome


def take_core_in_bursts(seed: int) -> None:
    rng = random.Random(seed)
    while True:
        end = time.perf_counter() + rng.uniform(*BURST_S)
        while time.perf_counter() < end:
            pass
        time.sleep(rng.uniform(*PAUSE_S))


@contextmanager
def neighbours(count: int) -> Iterator[None]:
    processes = [multiprocessing.Process(target=take_core_in_bursts, args=(n,), daemon=True) for n in range(count)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def run_pair(load: Load, run: Callable[[bool], Outcome]) -> Pair:
    """`run` runs the load with shedding or without; every second load begins without."""
    outcomes = {sheds: run(sheds) for sheds in ((True, False) if load.seed % 2 else (False, True))}
    return Pair(load.seed, outcomes[True], outcomes[False])


def run_on(engine: Engine, load: Load, policy: PolicySpec, sheds_rows: bool) -> Outcome:
    engine.scheduler.caps = replace(engine.scheduler.caps, sheds_rows=sheds_rows)
    return run_in_real_time(engine, load, policy)


def pair_in_virtual_time(seed: int, options: argparse.Namespace) -> Pair:
    load, policy = load_of(seed, options), PolicySpec.for_target(options.target / 1000)
    return run_pair(load, lambda sheds: run_in_virtual_time(options.recording, load, policy, sheds_rows=sheds))


def print_pairs(pairs: Sequence[Pair], target: float) -> None:
    print(" seed  p99/target, longest gap, mean TTFT with shedding        without")
    for pair in pairs:
        print(f"{pair.seed:5d}  {_figures(pair.with_shedding, target)}  {_figures(pair.without, target)}")


def _figures(outcome: Outcome, target: float) -> str:
    gaps = f"{outcome.gap(0.99) / target:6.2f} {1000 * outcome.gap(1.0):7.0f} ms"
    return f"{gaps} {outcome.mean_ttft:8.2f} s"


def summary(name: str, outcomes: Sequence[Outcome], target: float) -> str:
    ratios = [ratio for one in outcomes if not math.isnan(ratio := one.gap(0.99) / target)]
    kept = f"{sum(ratio <= MAX_P99 for ratio in ratios)} of {len(ratios)} loads, worst {max(ratios):.2f}"
    return f"{name}: p99 <= {MAX_P99:g} x target in {kept}; mean TTFT {fmean(one.mean_ttft for one in outcomes):.2f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_seeds(parser, 1, 11)
    parser.add_argument("--target", type=milliseconds, default=400.0, help="milliseconds")
    parser.add_argument("--recording", choices=recording_names(of_gpus=False), help="in virtual time on these steps")
    parser.add_argument("--neighbours", type=int, default=1, help="other processes, in real time")
    add_load_options(parser)
    options = parser.parse_args()
    target, pairs = options.target / 1000, list[Pair]()
    if options.recording:
        with ProcessPoolExecutor(os.cpu_count()) as pool:
            pairs = list(pool.map(partial(pair_in_virtual_time, options=options), range(*options.seeds)))
        print_pairs(pairs, target)
    else:
        policy = PolicySpec.for_target(target)
        with LLM(options.model, policy=str(policy), enable_prefix_caching=False) as llm, neighbours(options.neighbours):
            for seed in range(*options.seeds):
                load = load_of(seed, options)
                pairs.append(run_pair(load, partial(run_on, llm.engine, load, policy)))
                print_pairs(pairs[-1:], target)
    print(summary("with shedding", [pair.with_shedding for pair in pairs], target))
    print(summary("without", [pair.without for pair in pairs], target))


if __name__ == "__main__":
    main()
