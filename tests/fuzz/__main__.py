"""Loads mutated model files and asks the models that load.

    python -m tests.fuzz --count 100000 --seed 1 --workers 2
    python -m tests.fuzz --seed 1 --only 4711 --keep folder

The first form prints what came of the mutants, by file, and exits with 1 if there are findings; the second runs one
mutant again and keeps its file.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import platform
import sys
import time
from collections import Counter
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "EVENFLOW_LOG_LEVEL": "WARNING"}

import torch

from tests.fuzz.mutants import MANIFEST, SHARES, Mutants
from tests.fuzz.trying import ANSWERED, FAILED, FINDING, REFUSED
from tests.fuzz.workers import Result, run_mutants

_M_ARENA_MAX = -8


def warm_up(shares: dict[str, int]) -> None:
    """Import in this process what a trial needs, so that forked ones have it; starts no thread that stays."""
    import evenflow.executors.torch_executor
    import evenflow.model.loader
    import evenflow.model.text.grammar
    from evenflow.native.build import library

    if MANIFEST in shares:
        import evenflow.compile.aot.packages  # noqa: F401
    torch.set_num_threads(1)  # a forked process has none of its parent's other threads
    library()
    ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 2)  # each thread's arena would take from the limit on memory
    gc.freeze()  # a collection need not look at what all processes share
    platform.processor()  # asks another program, once
    for file in shares:
        Mutants(0, "", {file: 1}).make(0)


def chosen_shares(files: list[str]) -> dict[str, int]:
    unknown = set(files) - SHARES.keys()
    if unknown:
        raise SystemExit(f"Got --files {' '.join(sorted(unknown))} but expected some of {' '.join(SHARES)}.")
    return {file: SHARES[file] for file in SHARES if file in files}


def print_table(counts: Counter[tuple[str, str]]) -> None:
    outcomes = (REFUSED, ANSWERED, FAILED, FINDING)
    print(f"{'':32}" + "".join(f"{outcome:>22}" for outcome in outcomes))
    for file in [*SHARES, "all"]:
        row = [
            sum(n for (one, o), n in counts.items() if file in (one, "all") and o == outcome) for outcome in outcomes
        ]
        if any(row):
            print(f"{file:32}" + "".join(f"{number:22,}" for number in row))


def print_findings(findings: list[Result]) -> None:
    by_reason: dict[tuple[str, str], list[int]] = {}
    for one in findings:
        by_reason.setdefault((one.file, one.reason), []).append(one.number)
    for (file, reason), numbers in sorted(by_reason.items(), key=lambda item: -len(item[1])):
        print(f"{len(numbers):6} x {file}: {reason} (mutant {min(numbers)})")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="the first mutant's number")
    parser.add_argument("--only", type=int, help="run one mutant")
    parser.add_argument("--files", nargs="+", default=list(SHARES), metavar="NAME", help="mutate only these")
    parser.add_argument("--keep", type=Path, help="a folder for the files of findings")
    options = parser.parse_args()
    shares = chosen_shares(options.files)
    first, count = (options.first, options.count) if options.only is None else (options.only, 1)
    print(f"seed {options.seed}, mutants {first} to {first + count - 1}", flush=True)
    warm_up(shares)
    counts: Counter[tuple[str, str]] = Counter()
    findings, end = [], time.monotonic() + options.seconds
    for result in run_mutants(options.seed, range(first, first + count), shares, options.workers):
        counts[result.file, result.outcome] += 1
        if result.outcome == FINDING:
            findings.append(result)
            print(f"mutant {result.number}, {result.file}: {result.reason}", flush=True)
        if options.only is not None:
            print(f"{result.file}: {result.outcome}: {result.reason}")
        if options.keep is not None and (result.outcome == FINDING or options.only is not None):
            options.keep.mkdir(parents=True, exist_ok=True)
            mutant = Mutants(options.seed, "outside", shares).make(result.number)
            (options.keep / f"{result.number}-{mutant.file}").write_bytes(mutant.content)
        if sum(counts.values()) % 10_000 == 0:
            print(f"{sum(counts.values()):,} mutants, {len(findings)} findings", flush=True)
        if time.monotonic() > end:
            break
    print_table(counts)
    print_findings(findings)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
