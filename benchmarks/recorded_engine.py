"""evenflow's own engine in virtual time, on a CPU whose steps take what recorded ones took.

A step takes what a dense fit to all recorded steps gives, times how much slower than that the CPU was at that moment of
the recording. Whatever else ran on it slowed many steps in a row: a policy has to live with that. Engines of one seed
see the same moments. What the host does between steps takes no time.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections import deque
from functools import cache
from itertools import accumulate

from recorded_device import RECORDINGS, Chunk, DenseFit, StepWork, caps_of, work_of
from step_recording import read_recording

from evenflow.core.plan import StepPlan
from evenflow.core.policies import PolicySpec
from evenflow.core.scheduler import Scheduler, SchedulerConfig
from evenflow.engine.calibration import Calibration
from evenflow.engine.engine import Engine
from evenflow.engine.intake import Limits
from evenflow.executors.fake import FakeExecutor, VirtualClock

_NUM_BLOCKS, _BLOCK_SIZE = 20_000, 16
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

    def seconds(self, work: StepWork, at: float) -> float:
        """Of a step that begins at this moment of the recording, which starts over at its end."""
        at %= self.recorded_seconds
        left, taken = self._fit.seconds(work), 0.0
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

    def __init__(self, cpu: RecordedCpu, began: float) -> None:
        clock = VirtualClock()
        self._works: deque[StepWork] = deque()
        super().__init__(
            vocab_size=_LIMITS.vocab_size,
            block_size=_BLOCK_SIZE,
            caps=cpu.caps,
            clock=clock,
            cost=lambda _: cpu.seconds(self._works.popleft(), began + clock.now),
        )

    def submit(self, plan: StepPlan) -> None:
        positions = plan.decodes.positions
        chunks: tuple[Chunk, ...] = tuple((chunk.start, chunk.length) for chunk in plan.chunks)
        self._works.append(StepWork(len(positions), sum(positions) + len(positions), chunks))
        super().submit(plan)


@cache
def recorded_cpu(name: str) -> RecordedCpu:
    return RecordedCpu(name)


def recorded_engine(recording: str, seed: int, policy: PolicySpec) -> tuple[Engine, VirtualClock]:
    """An engine that has measured its steps at start, as on a machine where it never ran before, and its clock."""
    cpu = recorded_cpu(recording)
    executor = RecordedExecutor(cpu, random.Random(seed).uniform(0.0, cpu.recorded_seconds))
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
