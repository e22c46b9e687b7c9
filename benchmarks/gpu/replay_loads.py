"""Random loads in virtual time on recorded steps of an H200: a target against every fixed budget, in hindsight.

    python benchmarks/gpu/replay_loads.py --seeds 5000 5050 --targets 25 50 100
    python benchmarks/gpu/replay_loads.py 32k,65k=target:50ms,fixed:512,fixed:1024

Every run starts with a model that has seen nothing. For each load and target the table gives the 99th percentile of the
gaps between tokens over the target, and the median TTFT of the long prompts over that of the best fixed budget whose
99th percentile is no higher. The last lines count how many loads keep the bounds. Loads by name are given with their
policies, and print what `vllm_loads.py` prints on a GPU.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from statistics import fmean, median
from typing import Any

from host_bench import RunFigures, planned_runs, run_argument, table
from named_loads import NAMES, NamedLoad
from outcomes import Outcome
from random_loads import random_load
from recorded_device import RECORDINGS, RecordedDevice
from virtual_run import host_run

from evenflow.core.policies import PolicySpec

BUDGETS = (192, 256, 320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1536, 2048, 3072, 4096, 8192)
MAX_P99, MAX_TTFT = 1.1, 1.1  # over the target, over the best budget


@dataclass(frozen=True, slots=True)
class Verdict:
    """One load under one target."""

    seed: int
    target: float
    p99: float
    longest_gap: float
    ttft: float
    slowest_ttft: float
    best_budget_ttft: float  # NaN: no fixed budget has so low a 99th percentile
    all_ttft: float  # mean over all prompts, those of chats too
    best_budget_all_ttft: float
    error: float

    @property
    def p99_ratio(self) -> float:
        return self.p99 / self.target

    @property
    def ttft_ratio(self) -> float:
        return self.ttft / self.best_budget_ttft

    @property
    def all_ttft_ratio(self) -> float:
        return self.all_ttft / self.best_budget_all_ttft


@cache
def device(recording: str) -> RecordedDevice:
    return RecordedDevice.load(recording)


def run(recording: str, seed: int, policy: str, named: NamedLoad | None = None) -> Outcome:
    """The random load of this seed, or a named one with this seed for the device."""
    machine = device(recording)
    machine.reseed(seed)
    load = random_load(seed) if named is None else named.load
    return host_run(machine, load, policy).run(until_answered=named is not None and named.ends_with_answers)


def judge(seed: int, recording: str, targets: tuple[float, ...]) -> list[Verdict]:
    curve = [run(recording, seed, f"fixed:{budget}") for budget in BUDGETS]
    return [verdict_of(seed, target / 1000, run(recording, seed, f"target:{target:g}ms"), curve) for target in targets]


def verdict_of(seed: int, target: float, outcome: Outcome, curve: Sequence[Outcome]) -> Verdict:
    """A run under a target against those of the same load under fixed budgets."""
    p99 = outcome.gap(0.99)
    rivals = [rival for rival in curve if rival.gap(0.99) <= p99]
    return Verdict(
        seed=seed,
        target=target,
        p99=p99,
        longest_gap=outcome.gap(1.0),
        ttft=outcome.ttft(),
        slowest_ttft=outcome.long_ttft[-1] if outcome.long_ttft else math.nan,
        best_budget_ttft=min((rival.ttft() for rival in rivals), default=math.nan),
        all_ttft=outcome.mean_ttft,
        best_budget_all_ttft=min((rival.mean_ttft for rival in rivals), default=math.nan),
        error=outcome.mean_error,
    )


def print_table(verdicts: list[Verdict]) -> None:
    print(" seed target   p99/target  longest gap  TTFT p50 (max)  best budget's  ratio  of all prompts  error")
    for v in verdicts:
        print(
            f"{v.seed:5d} {1000 * v.target:4.0f} ms {v.p99_ratio:10.2f} {1000 * v.longest_gap:9.0f} ms"
            f" {v.ttft:8.2f} ({v.slowest_ttft:.2f}) s {v.best_budget_ttft:9.2f} s {v.ttft_ratio:8.2f}"
            f" {v.all_ttft_ratio:8.2f} {100 * v.error:10.1f}%"
        )
    for target in sorted({v.target for v in verdicts}):
        of_target = [v for v in verdicts if v.target == target and not math.isnan(v.p99)]  # with tokens to compare
        if not of_target:
            continue
        kept = sum(v.p99_ratio <= MAX_P99 for v in of_target)
        errors = [v.error for v in of_target if not math.isnan(v.error)]
        print(
            f"target {1000 * target:.0f} ms: p99 <= {MAX_P99} x target in {kept} of {len(of_target)} loads, worst "
            f"{max(v.p99_ratio for v in of_target):.2f}; step-time error {100 * fmean(errors or [math.nan]):.1f}%"
        )
        for what, ratios in (
            ("TTFT p50 of long prompts", [v.ttft_ratio for v in of_target]),
            ("mean TTFT of all prompts", [v.all_ttft_ratio for v in of_target]),
        ):
            known = [ratio for ratio in ratios if not math.isnan(ratio)]
            if not known:
                continue
            within = sum(ratio <= MAX_TTFT for ratio in known)
            print(
                f"  {what} over the best budget's: median {median(known):.2f}, worst {max(known):.2f}, "
                f"<= {MAX_TTFT} in {within} of {len(known)}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    help_on_runs = f"LOAD,...=POLICY,... instead of seeds; loads: {NAMES}"
    parser.add_argument("runs", type=_run_argument, nargs="*", help=help_on_runs)
    add_recording_and_seeds(parser, 5000, 5050)
    parser.add_argument("--targets", type=milliseconds, nargs="+", default=(25.0, 50.0, 100.0), help="milliseconds")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), choices=range(1, 257), metavar="COUNT")
    options = parser.parse_args()
    if options.runs:
        found = []
        for load, mode in planned_runs(options.runs, is_tiny=False):
            outcome = run(options.recording, 0, mode.removeprefix("new+"), load)
            found.append(RunFigures.of(load.name, mode, outcome))
        print(table(found))
        return
    one = partial(judge, recording=options.recording, targets=tuple(options.targets))
    with ProcessPoolExecutor(options.processes) as pool:
        print_table([verdict for verdicts in pool.map(one, range(*options.seeds)) for verdict in verdicts])


def add_recording_and_seeds(parser: argparse.ArgumentParser, first: int, last: int) -> None:
    names = recording_names(of_gpus=True)
    parser.add_argument("--recording", default="h200_vllm026_graphs2048", choices=names)
    add_seeds(parser, first, last)


def recording_names(*, of_gpus: bool) -> list[str]:
    names = sorted(path.name.partition(".")[0] for path in RECORDINGS.glob("*.jsonl.gz"))
    return [name for name in names if ("vllm" in name) == of_gpus]


def add_seeds(parser: argparse.ArgumentParser, first: int, last: int) -> None:
    parser.add_argument(
        "--seeds", type=int, nargs=2, action=_Seeds, default=(first, last), help="the first, and the one after the last"
    )


class _Seeds(argparse.Action):
    """Two numbers, the second above the first."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, *_: object) -> None:
        first, end = values
        if first >= end:
            parser.error(f"argument --seeds: got {first} {end}, but the second is not above the first")
        setattr(namespace, self.dest, values)


def milliseconds(text: str) -> float:
    try:
        return 1000 * (PolicySpec.parse(f"target:{float(text):g}ms").target or 0.0)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _run_argument(text: str) -> str:
    for mode in run_argument(text).partition("=")[2].split(","):
        if not mode.startswith(("fixed:", "target:", "new+target:")):
            raise argparse.ArgumentTypeError(f"Got {mode!r} but virtual time has fixed:N and target:T only.")
    return text


if __name__ == "__main__":
    main()
