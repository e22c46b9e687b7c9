"""What each part of the step-time model buys: its errors on recorded steps with the part left out.

    python benchmarks/step_time_ablation.py

The model predicts every recorded step when it was scheduled, from what the host had seen by then: inside vLLM another
step is in flight, on a CPU none. It starts anew with each load. Loads with an even number may be looked at while the
model is changed; the odd ones are held out. For mixed steps that took 15 ms or more, which are those that a target
limits, the table gives the mean error, the 99th percentile of actual / allowed (the prediction with its margin), and
the mean margin; then the mean error of steps without prefill.
"""

from __future__ import annotations

import argparse
import sys
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import NamedTuple
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parent / "gpu"))

from recorded_device import RECORDINGS, caps_of, prior_of
from step_recording import RecordedLoad, Step, read_recording

from evenflow.core import step_costs, step_time
from evenflow.core.plan import ExecutorCaps, StepShape
from evenflow.core.step_costs import StepCosts
from evenflow.core.step_time import StepTimeModel
from evenflow.hosts import in_flight
from evenflow.hosts.in_flight import InFlightStep, InFlightSteps

_SHORTEST_US = 15_000


class Prediction(NamedTuple):
    actual: float
    predicted: float
    allowed: float
    has_prefill: bool


# ---- running a model over a load ----


def predictions(load: RecordedLoad, caps: ExecutorCaps, model: StepTimeModel) -> Iterator[Prediction]:
    """Of the load's longer mixed steps and of those without prefill, in the order and at the times of the recording."""
    in_flight_steps, gpu_free_us, unseen = InFlightSteps(), 0, deque[Step]()
    for step in load.steps:
        while unseen and unseen[0].seen_us <= step.schedule_us:
            ended = unseen.popleft()
            in_flight_steps.end(ended, ended.seen_us / 1e6)
            if in_flight_steps.observation is not None:
                model.observe(*in_flight_steps.observation)
        unseen.append(step)
        shape = _shape(step, caps)
        flying = InFlightStep(planned_at=step.schedule_us / 1e6, key=step, shape=shape)
        in_flight_steps.add(flying)
        if in_flight_steps.launched(step, step.launched_us / 1e6) is not None:
            model.observe_launch(shape, flying.launch_seconds)
        taken_us, gpu_free_us = step.gpu_end_us - max(gpu_free_us, step.gpu_begin_us), step.gpu_end_us
        shortest_us = _SHORTEST_US if shape.prefill_rows else 1
        if taken_us >= shortest_us and shape.decode_sequences and model.predict(shape):
            yield Prediction(taken_us / 1e6, model.predict(shape), model.upper(shape), shape.prefill_rows > 0)


def _shape(step: Step, caps: ExecutorCaps) -> StepShape:
    return caps.step_shape(
        num_decodes=step.num_decodes,
        decode_context=step.decode_context,
        chunks=[(chunk.start, chunk.length) for chunk in step.chunks],
        prefill_logit_rows=sum(chunk.ends_prompt for chunk in step.chunks),
    )


# ---- leaving parts out ----


@contextmanager
def whole() -> Iterator[None]:
    yield


def without_figure(index: int) -> Callable[[], object]:
    figures_of = step_costs.figures_of

    def zeroed(shape: StepShape) -> step_costs.Figures:
        figures = list(figures_of(shape))
        figures[index] = 0
        return tuple(figures)

    return lambda: patch.multiple(step_time, figures_of=zeroed)


def no_robustness(samples: object, current: StepCosts, prior: StepCosts, knees: object) -> StepCosts:
    with patch.object(step_costs, "median", lambda misfits: 1e9):
        return step_costs.fit_costs(samples, current, prior, knees)  # type: ignore[arg-type]


VARIANTS: dict[str, Callable[[], object]] = {
    "all parts": whole,
    "no prior": whole,
    "ends as the host sees them": lambda: patch.object(in_flight, "_LAUNCH_OF_SAMPLING", -1.0),
    "no speed": lambda: patch.object(StepTimeModel, "_update_speeds", lambda _: None),
    "speed of the last step": lambda: patch.object(step_time, "_LAST_STEPS", 1),
    "speed of 16 steps": lambda: patch.object(step_time, "_LAST_STEPS", 16),
    "last 128 samples of any kind": lambda: patch.multiple(step_time, _kind=lambda _: (), _SAMPLES_PER_KIND=128),
    "outliers count in full": lambda: patch.object(step_time, "fit_costs", no_robustness),
    "no knee": lambda: patch.multiple(step_time, KNEES=(0,)),
    "no cost of prefill": without_figure(1),
    "no cost of attention": without_figure(3),
    "no cost of logits": without_figure(4),
    "no cost of context": without_figure(5),
    "no cost of calls": without_figure(6),
    "no launches": lambda: patch.object(StepTimeModel, "observe_launch", lambda *_: None),
    "no cost of waves": without_figure(7),
}


def evaluate(job: tuple[str, str]) -> str:
    name, variant = job
    recording = read_recording(RECORDINGS / name)
    caps = caps_of(recording)
    known = None if variant == "no prior" else prior_of(recording)
    cells = []
    with VARIANTS[variant]():  # type: ignore[attr-defined]
        for parity in range(2):
            found = [
                prediction
                for load in recording.loads[parity::2]
                for prediction in predictions(load, caps, StepTimeModel(known))
            ]
            mixed, decodes = ([p for p in found if p.has_prefill == kind] for kind in (True, False))
            exceeded = sorted(p.actual / p.allowed for p in mixed)[int(0.99 * len(mixed))]
            margin = fmean(p.allowed / p.predicted for p in mixed)
            cells.append(f"{_error(mixed):5.1f}% {exceeded:5.2f} {margin:5.2f} {_error(decodes):5.1f}%")
    return f"{variant:30s} {cells[0]}   | {cells[1]}"


def _error(found: list[Prediction]) -> float:
    return 100 * fmean(abs(one.predicted / one.actual - 1) for one in found)


def main() -> None:
    names = sorted(path.name for path in RECORDINGS.glob("*.gz"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recording", choices=names, help="one of them (default: all)")
    chosen = parser.parse_args().recording
    jobs = list(product([chosen] if chosen else names, VARIANTS))
    with ProcessPoolExecutor() as pool:
        for (name, variant), line in zip(jobs, pool.map(evaluate, jobs), strict=True):
            if variant == "all parts":
                print(f"\n{name}\n{'':30s} error   p99 margin decodes   | held out", flush=True)
            print(line, flush=True)


if __name__ == "__main__":
    main()
