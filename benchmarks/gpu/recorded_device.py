"""A device in virtual time whose steps take what recorded steps of a vLLM engine took.

A step of a shape that was recorded takes what one of those steps took, drawn at random. A step of another shape takes
what a dense fit to all recorded steps gives, times the deviation of one of the nearest.

Launches op by op that took more than twice the median are left out (10 of 237, and 8 of 5,768): at the first steps of a
size CUDA loaded kernels, once for a process, which `evenflow.vllm.WarmWorker` has since done before the first request.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from types import SimpleNamespace

from model_shapes import SHAPES
from step_recording import Recording, Step, read_recording

from evenflow.core.plan import ExecutorCaps
from evenflow.core.step_costs import StepCosts
from evenflow.hosts.prior import Prior
from evenflow.hosts.prior import prior_of as estimate
from evenflow.simulation.dense_fit import DenseFit
from evenflow.simulation.devices import Ran, StepWork

RECORDINGS = Path(__file__).parents[1] / "recordings"
_FEWEST_NEIGHBOURS = 4
WAITED_US = 300  # the host had launched everything this long before a step ended: it was the device that took the time


def caps_of(recording: Recording) -> ExecutorCaps:
    """What is known of an executor before it runs. A CPU has neither graphs nor waves."""
    return ExecutorCaps(
        row_buckets=tuple(sorted(recording.header["capture_sizes"])), attention_waves=_known(recording).waves
    )


def prior_of(recording: Recording) -> StepCosts | None:
    """What its steps should cost by the figures of the model and the device, if these are known."""
    return _known(recording).costs


def _known(recording: Recording) -> Prior:
    settings = recording.header.get("settings", {})
    shape = SHAPES[settings.get("model", "llama-8b")]
    config = SimpleNamespace(**shape.config)
    return estimate(config, recording.header["device"], 1, 2, quantization=shape.vllm.get("quantization"))


class RecordedDevice:
    """Seconds of the device and of the host for a step, from a recording."""

    def __init__(self, recording: Recording) -> None:
        self.caps = caps_of(recording)
        self.prior = prior_of(recording)
        self.reseed(0)
        self._launches: dict[tuple[bool, bool], list[float]] = defaultdict(list)
        self._ratios: list[dict[tuple[int, ...], list[float]]] = [defaultdict(list) for _ in _GRAINS]
        works: list[StepWork] = []
        seconds: list[float] = []
        for load in recording.loads:
            for before, step, after in zip(load.steps, load.steps[1:], load.steps[2:], strict=False):
                work = work_of_step(step)
                self._launches[self._kind(work)].append((step.sampled_us - step.scheduled_us) / 1e6)
                if before.seen_us - step.sampled_us > 0 and step.seen_us - after.sampled_us > WAITED_US:
                    works.append(work)
                    seconds.append((step.gpu_end_us - max(before.gpu_end_us, step.gpu_begin_us)) / 1e6)
        for (_, is_launched), launches in self._launches.items():
            if is_launched:
                most = 2 * median(launches)
                launches[:] = [taken for taken in launches if taken <= most]
        self._fit = DenseFit.fitted(self.caps, works, seconds)
        for work, taken in zip(works, seconds, strict=True):
            ratio = taken / self._fit.seconds(work)
            for grain, ratios in zip(_GRAINS, self._ratios, strict=True):
                ratios[_cell(work, grain)].append(ratio)

    @classmethod
    def load(cls, name: str) -> RecordedDevice:
        return cls(read_recording(RECORDINGS / f"{name}.jsonl.gz"))

    def reseed(self, seed: int) -> None:
        """Draw from here on as any other device of this recording and seed would."""
        self._rng = random.Random(seed)

    def run(self, work: StepWork, at: float) -> Ran:
        return Ran(self.device_seconds(work))

    def device_seconds(self, work: StepWork) -> float:
        """How long the device computes such a step."""
        for grain, ratios in zip(_GRAINS, self._ratios, strict=True):
            near = ratios.get(_cell(work, grain), ())
            if len(near) >= _FEWEST_NEIGHBOURS:
                return self._fit.seconds(work) * self._rng.choice(near)
        return self._fit.seconds(work)

    def launch_seconds(self, work: StepWork, at: float) -> float:
        """How long the host launches it, which overlaps with the step before."""
        return self._rng.choice(self._launches[self._kind(work)])

    def _kind(self, work: StepWork) -> tuple[bool, bool]:
        return bool(work.chunks), work.num_rows > self.caps.row_buckets[-1]


# Cells of similar steps, from fine to coarse: per octave of rows, attention, decodes and their context.
_GRAINS = ((8.0, 4.0, 4.0, 2.0), (4.0, 2.0, 2.0, 1.0), (2.0, 1.0, 1.0, 0.5), (1.0, 0.5, 0.5, 0.25))


def _cell(work: StepWork, grain: Iterable[float]) -> tuple[int, ...]:
    figures = (work.num_rows, _attention(work.chunks), work.num_decodes, work.decode_context)
    return (
        min(len(work.chunks), 3),
        *(round(cells * math.log2(1 + figure)) for cells, figure in zip(grain, figures, strict=True)),
    )


def _attention(chunks: Iterable[tuple[int, int]]) -> int:
    return sum(length * (2 * start + length + 1) // 2 for start, length in chunks)


def work_of_step(step: Step) -> StepWork:
    return StepWork(step.num_decodes, step.decode_context, tuple((c.start, c.length) for c in step.chunks))
