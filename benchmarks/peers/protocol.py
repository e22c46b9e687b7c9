"""What an engine's process reads and writes on its standard streams: JSON lines in, JSON lines out.

Standard library only, because it runs in every peer's own environment.

    in   {"model": path, "weights": "float32", "threads": 2}         once
    in   {"prompts": [[token id, ...], ...], "max_tokens": 64}       any number of times, until end of file
    out  {"seconds": 1.25, "token_ids": [[token id, ...], ...]}      one for each job, in order
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Setup:
    """Which model to load, and how."""

    model: str
    weights: str
    threads: int


@dataclass(frozen=True)
class Job:
    """Prompts to continue together, greedily, by exactly `max_tokens` tokens each."""

    prompts: list[list[int]]
    max_tokens: int


@dataclass(frozen=True)
class Answer:
    """How long a job took, from prompts to the last token, and its output."""

    seconds: float
    token_ids: list[list[int]]


Generate = Callable[[Job], list[list[int]]]


def serve(load: Callable[[Setup], Generate]) -> None:
    """Load the engine as the first line says, then answer every job."""
    # Engines print to standard output, some from native code: reserve it for answers and send the rest to stderr.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    generate = load(Setup(**json.loads(sys.stdin.readline())))
    for line in sys.stdin:
        job = Job(**json.loads(line))
        started = time.perf_counter()
        token_ids = generate(job)
        answer = Answer(time.perf_counter() - started, token_ids)
        print(json.dumps(asdict(answer)), file=answers)
