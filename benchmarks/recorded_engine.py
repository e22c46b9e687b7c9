"""evenflow's own engine in virtual time, on a CPU whose steps take what recorded ones took.

A step takes what a dense fit to all recorded steps gives, times how much slower than that the CPU was at that moment of
the recording. Whatever else ran on it slowed many steps in a row: a policy has to live with that. Engines of one seed
see the same moments. All layers of a step take alike, and may shed rows in between, as on a CPU. What the host does
between steps takes no time.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

from outcomes import Stream
from random_loads import Load
from recorded_device import RECORDINGS, caps_of, work_of_step
from step_recording import read_recording
from virtual_run import Tokens, VirtualRun

from evenflow.core.outcome import Committed
from evenflow.core.plan import ExecutorCaps, StepPlan, StepResult
from evenflow.core.policies import PolicySpec
from evenflow.core.request import Request, SamplingParams
from evenflow.core.scheduler import Scheduler, SchedulerConfig
from evenflow.engine.calibration import Calibration
from evenflow.simulation.dense_fit import DenseFit
from evenflow.simulation.devices import BlockNoise, Device, ModelDevice
from evenflow.simulation.own_engine import OwnEngine, result_of, work_of

_NUM_BLOCKS, _BLOCK_SIZE = 20_000, 16
_NUM_LAYERS = 30  # of the recorded model
_MAX_MODEL_LEN, _VOCAB_SIZE = 8192, 1000


class RecordedCpu:
    """Seconds of steps, from a recording."""

    def __init__(self, name: str) -> None:
        recording = read_recording(RECORDINGS / f"{name}.jsonl.gz")
        steps = [step for load in recording.loads for step in load.steps]
        works = [work_of_step(step) for step in steps]
        seconds = [(step.gpu_end_us - step.gpu_begin_us) / 1e6 for step in steps]
        self.caps = caps_of(recording)
        self._fit = DenseFit.fitted(self.caps, works, seconds)
        # As if each step had begun when the one before ended.
        slowness = [taken / self._fit.seconds(work) for work, taken in zip(works, seconds, strict=True)]
        self.noise = BlockNoise(seconds, slowness)

    def device(self, start: float) -> ModelDevice:
        """The CPU from this moment of the recording on."""
        return ModelDevice(self._fit.seconds, replace(self.noise, start=start), num_layers=_NUM_LAYERS)


class DeviceExecutor:
    """Runs plans on a device, one after the other."""

    def __init__(self, device: Device, caps: ExecutorCaps) -> None:
        self.caps = caps
        self.now = 0.0
        self._device = device

    def submit(self, plan: StepPlan) -> None:
        self._plan = plan

    def wait(self) -> StepResult:
        ran = self._device.run(work_of(self._plan), self.now)
        self.now += ran.seconds
        return result_of(self._plan, ran)

    def close(self) -> None:
        return


@cache
def recorded_cpu(name: str) -> RecordedCpu:
    return RecordedCpu(name)


def recorded_run(recording: str, load: Load, policy: PolicySpec, *, sheds_rows: bool = True) -> VirtualRun[Committed]:
    """A load on an engine that has measured its steps at start, as on a machine where it never ran before."""
    cpu = recorded_cpu(recording)
    start = random.Random(load.seed).uniform(0.0, cpu.noise.period)
    executor = DeviceExecutor(cpu.device(start), replace(cpu.caps, sheds_rows=sheds_rows))
    calibration = Calibration(
        executor=executor,
        num_blocks=_NUM_BLOCKS,
        block_size=_BLOCK_SIZE,
        vocab_size=_VOCAB_SIZE,
        max_position=_MAX_MODEL_LEN,
    )
    config = SchedulerConfig(num_blocks=_NUM_BLOCKS, block_size=_BLOCK_SIZE, policy=policy, enable_prefix_caching=False)
    scheduler = Scheduler(config, executor.caps, step_time=calibration.measure())

    def add(stream: Stream, now: float) -> None:
        sampling = SamplingParams(max_tokens=stream.max_tokens, ignore_eos=True)
        prompt, due = [0] * stream.num_prompt_tokens, stream.due
        scheduler.add(Request(stream.id, prompt, sampling, seed=0, max_model_len=_MAX_MODEL_LEN, arrival_time=due))

    return VirtualRun(load, OwnEngine(scheduler), cpu.device(start + executor.now), add, _tokens_of)


def _tokens_of(committed: Committed) -> Tokens:
    is_judged = len(committed.plan.decodes) and committed.plan.chunks and committed.predicted_seconds
    error = committed.predicted_seconds / committed.result.seconds - 1 if is_judged else None
    return Tokens([request.id for request, _, tokens in committed.emissions if tokens], error)
