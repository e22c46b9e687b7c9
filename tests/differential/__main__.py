"""Runs random configurations of the engine, and judges every answer by transformers' logits.

    python -m tests.differential --seconds 3600 --seed 1
    python -m tests.differential --seed 1 --start 4711 --count 1

The first form prints each finding with a line that repeats it, and what happened in all runs; it exits with 1 if there
are findings. The second form is such a line.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections import Counter
from itertools import count
from multiprocessing.connection import Connection
from typing import NamedTuple

os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "EVENFLOW_LOG_LEVEL": "WARNING"}

import torch
import transformers

from tests.differential.configurations import MODELS, PARTS, Configuration, draw
from tests.differential.judge import Finding, judge_of
from tests.differential.runs import run

_WALL_SECONDS = 300  # of one run, on a busy machine
_SHRINK_SECONDS = 120


class Outcome(NamedTuple):
    finding: str  # empty: none
    events: Counter[str]


def try_out(configuration: Configuration) -> Outcome:
    """In a process of its own: one that dies or hangs is a finding too."""
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe(duplex=False)
    process = fork.Process(target=_run, args=(configuration, theirs))
    process.start()
    theirs.close()
    try:
        outcome = ours.recv() if ours.poll(_WALL_SECONDS) else Outcome(f"no end in {_WALL_SECONDS} s", Counter())
    except EOFError:
        process.join()
        code = process.exitcode or 0
        outcome = Outcome(f"the process died: {signal.Signals(-code).name if code < 0 else code}", Counter())
    process.kill()
    process.join()
    return outcome


def _run(configuration: Configuration, pipe: Connection) -> None:
    try:
        pipe.send(Outcome("", run(configuration)))
    except Finding as finding:
        pipe.send(Outcome(str(finding), Counter()))
    except BaseException:
        pipe.send(Outcome(traceback.format_exc(), Counter()))
    os._exit(0)


def shrink(found: Configuration, end: float) -> Configuration:
    """Leave out what the finding does not need: first requests, then parts."""
    size = len(found.asks)
    while size := size // 2:
        for first in reversed(range(0, len(found.asks), size)):
            numbers = [ask.number for ask in found.asks]
            del numbers[first : first + size]
            if 0 < len(numbers) < len(found.asks):
                found = _smaller(found, draw(found.seed, found.number, found.without, numbers), end)
    for part in PARTS:
        found = _smaller(found, draw(found.seed, found.number, found.without | {part}, found.only), end)
    return found


def _smaller(found: Configuration, other: Configuration, end: float) -> Configuration:
    return other if other.asks and time.monotonic() < end and try_out(other).finding else found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--start", type=int, default=0, help="the first configuration's number")
    parser.add_argument("--count", type=int, help="stop after as many")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time")
    parser.add_argument("--without", default="", metavar="PARTS", help=f"leave out some of: {', '.join(PARTS)}")
    parser.add_argument("--only", metavar="NUMBERS", help="leave out all requests but these")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    without = frozenset(filter(None, options.without.split(",")))
    only = None if options.only is None else [int(number) for number in options.only.split(",")]
    _warm_up()
    events: Counter[str] = Counter()
    num_findings, end = 0, time.monotonic() + options.seconds
    numbers = count(options.start) if options.count is None else range(options.start, options.start + options.count)
    for number in numbers:
        if time.monotonic() > end:
            break
        configuration = draw(options.seed, number, without, only)
        outcome = try_out(configuration)
        events += outcome.events
        events["configurations"] += 1
        if events["configurations"] % 100 == 0:
            print(f"{events['configurations']} configurations", flush=True)
        if outcome.finding:
            num_findings += 1
            print(f"\n{configuration.command}\n{outcome.finding}", flush=True)
            if options.count != 1:
                small = shrink(configuration, time.monotonic() + _SHRINK_SECONDS)
                print(f"{small.command}\n  {small.describe()}", flush=True)
    print(f"{num_findings} findings; " + ", ".join(f"{number} {name}" for name, number in sorted(events.items())))
    return 1 if num_findings else 0


def _warm_up() -> None:
    """Load in this process what runs need, so that forked ones have it; starts no thread that stays."""
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    for name in MODELS:
        judge_of(name)


if __name__ == "__main__":
    sys.exit(main())
