"""evenflow's own engine in virtual time, on a CPU whose steps take what recorded ones took.

A step takes what a dense fit to all recorded steps gives, times how much slower than that the CPU was at that moment of
the recording. Whatever else ran on it slowed many steps in a row: a policy has to live with that. Engines of one seed
see the same moments. All layers of a step take alike, and may shed rows in between, as on a CPU. What the host does
between steps takes no time.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from itertools import accumulate

from recorded_device import RECORDINGS, Chunk, DenseFit, StepWork, caps_of, work_of
from step_recording import read_recording

from evenflow.core.plan import Shed, StepPlan, StepShape
from evenflow.core.policies import PolicySpec
from evenflow.core.scheduler import Scheduler, SchedulerConfig
from evenflow.engine.calibration import Calibration
from evenflow.engine.engine import Engine
from evenflow.engine.intake import Limits
from evenflow.executors.fake import FakeExecutor, VirtualClock
from evenflow.executors.shedding import Shedder

_NUM_BLOCKS, _BLOCK_SIZE = 20_000, 16
_NUM_LAYERS = 30  # of the recorded model
_LIMITS = Limits(max_model_len=8192, vocab_size=1000)


class RecordedCpu:
    """Seconds of steps, from a recording."""

    def __init__(self, name: str) -> None:
        recording = read_recording(RECORDINGS / f"{name}.jsonl.gz")
        steps = [step for load in recording.loads for step in load.steps]
        works = [work_of(step) for step in steps]
        seconds = [(step.gpu_end_us - step.gpu_begin_us) / 1e6 for step in steps]
        self.caps = caps_of(recording)
        self._fit = DenseFit(self.caps, works, seconds)
        self._slowness = [taken / self._fit.seconds(work) for work, taken in zip(works, seconds, strict=True)]
        self._ends = list(accumulate(seconds))  # as if each step had begun when the one before ended

    @property
    def recorded_seconds(self) -> float:
        return self._ends[-1]

    def seconds(self, work: StepWork, at: float, share: float = 1.0) -> float:
        """Of a step, or a share of it, that begins at this moment of the recording, which starts over at its end."""
        at %= self.recorded_seconds
        left, taken = share * self._fit.seconds(work), 0.0
        moment = bisect_right(self._ends, at)
        while left > (self._ends[moment] - at) / self._slowness[moment]:
            left -= (self._ends[moment] - at) / self._slowness[moment]
            taken += self._ends[moment] - at
            at, moment = self._ends[moment], moment + 1
            if moment == len(self._ends):
                at, moment = 0.0, 0
        return taken + left * self._slowness[moment]


class RecordedExecutor(FakeExecutor):
    """Runs each plan in the time that a CPU takes for it."""

    def __init__(self, cpu: RecordedCpu, began: float, *, sheds_rows: bool = True) -> None:
        self._cpu, self._began = cpu, began
        self._seconds = 0.0  # of the step that runs
        super().__init__(
            vocab_size=_LIMITS.vocab_size,
            block_size=_BLOCK_SIZE,
            caps=replace(cpu.caps, sheds_rows=sheds_rows),
            clock=VirtualClock(),
            cost=self._take_seconds,
            shed=self._run_layers,
        )

    def submit(self, plan: StepPlan) -> None:
        self._plan = plan
        super().submit(plan)

    def _run_layers(self, plan: StepPlan) -> Mapping[int, Shed]:
        """Run a step that may shed rows; its seconds are for `_take_seconds`."""
        assert plan.most_seconds is not None
        clock = VirtualClock(self.clock.now)
        lengths = [chunk.length for chunk in plan.chunks]
        end = clock.now + plan.most_seconds
        shedder = Shedder(len(plan.decodes), lengths, _NUM_LAYERS, end, clock)
        for done in range(1, _NUM_LAYERS + 1):
            chunks = tuple((one.start, length) for one, length in zip(plan.chunks, shedder.lengths, strict=True))
            clock.now += self._cpu.seconds(_work(plan, chunks), self._began + clock.now, 1 / _NUM_LAYERS)
            if done < _NUM_LAYERS:
                shedder.after_layer(done)
        self._seconds = clock.now - self.clock.now
        return shedder.shed()

    def _take_seconds(self, _: StepShape) -> float:
        seconds, self._seconds = self._seconds, 0.0
        if seconds:
            return seconds
        plan = self._plan
        chunks = tuple((chunk.start, chunk.length) for chunk in plan.chunks)
        return self._cpu.seconds(_work(plan, chunks), self._began + self.clock.now)


def _work(plan: StepPlan, chunks: tuple[Chunk, ...]) -> StepWork:
    positions = plan.decodes.positions
    return StepWork(len(positions), sum(positions) + len(positions), chunks)


@cache
def recorded_cpu(name: str) -> RecordedCpu:
    return RecordedCpu(name)


def recorded_engine(
    recording: str, seed: int, policy: PolicySpec, *, sheds_rows: bool = True
) -> tuple[Engine, VirtualClock]:
    """An engine that has measured its steps at start, as on a machine where it never ran before, and its clock."""
    cpu = recorded_cpu(recording)
    executor = RecordedExecutor(cpu, random.Random(seed).uniform(0.0, cpu.recorded_seconds), sheds_rows=sheds_rows)
    calibration = Calibration(
        executor=executor,
        num_blocks=_NUM_BLOCKS,
        block_size=_BLOCK_SIZE,
        vocab_size=_LIMITS.vocab_size,
        max_position=_LIMITS.max_model_len,
    )
    config = SchedulerConfig(num_blocks=_NUM_BLOCKS, block_size=_BLOCK_SIZE, policy=policy, enable_prefix_caching=False)
    scheduler = Scheduler(config, executor.caps, step_time=calibration.measure())
    return Engine(scheduler, executor, _LIMITS, clock=executor.clock), executor.clock
