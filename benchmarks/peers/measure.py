"""Takes turns: every engine does the same job before any does the next, round after round, one process at a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from peers.other_load import OtherLoad, wait_until_quiet
from peers.process import AdapterFailedError, AdapterProcess
from peers.protocol import Answer, Job, Setup

NUM_STREAMS = 6
Say = Callable[[str], None]


@dataclass(frozen=True)
class Effort:
    """How much is measured."""

    num_prefill_tokens: int
    num_prompt_tokens: int
    num_decode_tokens: int
    num_rounds: int
    num_starts: int


FULL = Effort(num_prefill_tokens=3000, num_prompt_tokens=30, num_decode_tokens=64, num_rounds=3, num_starts=1)
QUICK = Effort(num_prefill_tokens=512, num_prompt_tokens=30, num_decode_tokens=16, num_rounds=1, num_starts=1)


@dataclass(frozen=True)
class Sample:
    """One measurement, and the share of the machine that other programs used during it."""

    seconds: float
    others_share: float


@dataclass
class Contestant:
    """One engine with one kind of weights: where it runs, its samples, and its problem if it has none."""

    engine: str
    weights: str
    python: str
    adapter: str
    setup: Setup
    version: str | None
    problem: str | None = None
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    token_ids: list[int] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.engine} {self.weights}"

    def add(self, job_name: str, sample: Sample) -> None:
        self.samples.setdefault(job_name, []).append(sample)


def make_jobs(text_ids: list[int], effort: Effort) -> dict[str, Job]:
    """The jobs by name. Decoding is timed as `_all` less `_first`, which excludes the prompts."""
    length = effort.num_prompt_tokens
    streams = [text_ids[index * length : (index + 1) * length] for index in range(NUM_STREAMS)]
    repeats = effort.num_prefill_tokens // len(text_ids) + 1
    return {
        "prefill": Job([(text_ids * repeats)[: effort.num_prefill_tokens]], 1),
        "one_first": Job(streams[:1], 1),
        "one_all": Job(streams[:1], effort.num_decode_tokens),
        "six_first": Job(streams, 1),
        "six_all": Job(streams, effort.num_decode_tokens),
    }


class Race:
    """The contestants' turns. If one fails, its problem is kept and the others go on."""

    def __init__(
        self, contestants: list[Contestant], jobs: dict[str, Job], logs: Path, patience_s: float, say: Say
    ) -> None:
        self._contestants = contestants
        self._jobs = jobs
        self._logs = logs
        self._patience_s = patience_s
        self._say = say
        self._running: dict[str, AdapterProcess] = {}

    def run(self, effort: Effort) -> None:
        """Start all contestants, then run the rounds; the first round only warms up."""
        try:
            for number in range(1, effort.num_starts + 1):
                for contestant in self._able():
                    self._say(f"start {number} of {effort.num_starts}: {contestant.name}")
                    self._start(contestant)
            # Engines compile, pack weights and size buffers at the first job of a shape, so that round does not count.
            for number in range(effort.num_rounds + 1):
                for job_name in self._jobs:
                    for contestant in self._able():
                        self._say(f"round {number} of {effort.num_rounds}: {job_name} on {contestant.name}")
                        self._take_turn(contestant, job_name, counted=number > 0)
        finally:
            for process in self._running.values():
                process.close()

    def _able(self) -> list[Contestant]:
        return [contestant for contestant in self._contestants if contestant.problem is None]

    def _start(self, contestant: Contestant) -> None:
        if contestant.name in self._running:
            self._running.pop(contestant.name).close()
        wait_until_quiet(self._patience_s)
        started = time.perf_counter()
        log_path = self._logs / f"{contestant.name.replace(' ', '-')}.log"
        process = AdapterProcess(contestant.python, contestant.adapter, contestant.setup, log_path)
        self._running[contestant.name] = process
        watch = OtherLoad(process.session_id)
        if self._answer(contestant, "one_first") is not None:
            contestant.add("start_up", Sample(time.perf_counter() - started, watch.share()))

    def _take_turn(self, contestant: Contestant, job_name: str, counted: bool) -> None:
        wait_until_quiet(self._patience_s)
        watch = OtherLoad(self._running[contestant.name].session_id)
        answer = self._answer(contestant, job_name)
        if answer is None:
            return
        if job_name == "one_all":
            contestant.token_ids = answer.token_ids[0]
        if counted:
            contestant.add(job_name, Sample(answer.seconds, watch.share()))

    def _answer(self, contestant: Contestant, job_name: str) -> Answer | None:
        job = self._jobs[job_name]
        try:
            answer = self._running[contestant.name].run(job)
        except AdapterFailedError as error:
            contestant.problem = f"failed at {job_name}: {error}"
            return None
        lengths = [len(token_ids) for token_ids in answer.token_ids]
        if lengths != [job.max_tokens] * len(job.prompts):
            contestant.problem = f"failed at {job_name}: got {lengths} tokens but expected {job.max_tokens} each"
            return None
        return answer
