"""Fits the step times that the package ships to the recordings beside this file, and writes them into the package.

    python benchmarks/make_step_times.py

Costs are fitted to all loads, and to loads drawn with replacement. A step counts if the host had launched it in time.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

sys.path += [str(Path(__file__).parent), str(Path(__file__).parent / "gpu")]

from recorded_device import RECORDINGS, WAITED_US, caps_of, work_of_step
from step_recording import RecordedLoad, Recording, read_recording

from evenflow.core.least_squares import fit_nonnegative
from evenflow.core.plan import ExecutorCaps
from evenflow.simulation.dense_fit import DenseFit
from evenflow.simulation.devices import StepWork
from evenflow.simulation.step_times import HostTimes, Largest, Launches, Slowness, StepTimes

FOLDER = Path(__file__).parents[1] / "src/evenflow/simulation/step_times"
_NUM_OTHERS = 12  # costs fitted to drawn loads
_MANY_CHUNKS = 1024  # vLLM has no limit
_SMOLLM2_LAYERS = 30
Timed = tuple[StepWork, float]  # with its seconds on the device

FILES = {
    "h200-llama-8b-vllm": (
        "h200_vllm026_graphs512",
        "vLLM 0.26 on one NVIDIA H200, Llama-3.1-8B's shape in bf16, graphs up to 512 rows (vLLM's default)",
    ),
    "h200-llama-8b-vllm-graphs2048": (
        "h200_vllm026_graphs2048",
        "vLLM 0.26 on one NVIDIA H200, Llama-3.1-8B's shape in bf16, graphs up to 2,048 rows",
    ),
    "x86-smollm2": (
        "x86_smollm2",
        "evenflow's own engine on two cores of an Intel Xeon with AVX-512, SmolLM2-135M in float32",
    ),
}


def timed_steps(recording: Recording, load: RecordedLoad) -> list[Timed]:
    """In order, without steps whose device waited for the host."""
    if not recording.header["capture_sizes"]:  # a CPU: one clock, a step at a time
        return [(work_of_step(step), (step.gpu_end_us - step.gpu_begin_us) / 1e6) for step in load.steps]
    found = []
    for before, step, after in zip(load.steps, load.steps[1:], load.steps[2:], strict=False):
        if before.seen_us > step.sampled_us and step.seen_us - after.sampled_us > WAITED_US:
            seconds = (step.gpu_end_us - max(before.gpu_end_us, step.gpu_begin_us)) / 1e6
            found.append((work_of_step(step), seconds))
    return found


def step_times_of(recording: Recording, loads: Sequence[RecordedLoad], name: str, about: str) -> StepTimes:
    """Fitted to these loads."""
    caps, is_cpu = caps_of(recording), not recording.header["capture_sizes"]
    if is_cpu:
        caps = replace(caps, sheds_rows=True)
    else:
        caps = replace(caps, max_steps_in_flight=2, max_prefill_sequences=_MANY_CHUNKS)
    by_load = [timed_steps(recording, load) for load in loads]
    rng = random.Random(0)
    drawn = [rng.choices(by_load, k=len(by_load)) for _ in range(_NUM_OTHERS)]
    fits = [_fitted(caps, [timed for load in some for timed in load]) for some in (by_load, *drawn)]
    works = [work for load in by_load for work, _ in load]
    return StepTimes(
        name=name,
        about=about,
        caps=caps,
        host=HostTimes() if is_cpu else _host_times(recording, loads, caps),
        num_layers=_SMOLLM2_LAYERS if is_cpu else 1,
        largest=Largest.of(works),
        costs=[fit.costs for fit in fits],
        noise=(_slowness(fits[0], by_load, has_prefill=False), _slowness(fits[0], by_load, has_prefill=True)),
    )


def _fitted(caps: ExecutorCaps, timed: Sequence[Timed]) -> DenseFit:
    return DenseFit.fitted(caps, [work for work, _ in timed], [seconds for _, seconds in timed])


def _slowness(fit: DenseFit, by_load: Sequence[Sequence[Timed]], *, has_prefill: bool) -> Slowness:
    found = [one for load in by_load for one in load if bool(one[0].chunks) == has_prefill]
    return Slowness([seconds for _, seconds in found], [seconds / fit.seconds(work) for work, seconds in found])


def _host_times(recording: Recording, loads: Sequence[RecordedLoad], caps: ExecutorCaps) -> HostTimes:
    steps = [step for load in loads for step in load.steps]
    launches: tuple[list[tuple[int, float]], ...] = ([], [], [])  # with the streams of the step
    for step in steps:
        kind = 2 if step.num_rows > caps.row_buckets[-1] else int(bool(step.chunks))
        launches[kind].append((step.num_decodes, (step.sampled_us - step.scheduled_us) / 1e6))
    decodes, mixed, launched = map(_launches, launches)
    outputs = [(step.seen_us - step.gpu_end_us) / 1e6 for step in steps if step.seen_us > step.gpu_end_us]
    schedules = [(step.scheduled_us - step.schedule_us) / 1e6 for step in steps]
    return HostTimes(median(schedules), median(outputs or [0.0]), (decodes, mixed, launched))


def _launches(found: Sequence[tuple[int, float]]) -> Launches:
    """Without those that took more than twice the median: CUDA loaded kernels, once for a process."""
    most = 2 * median(seconds for _, seconds in found)
    found = [one for one in found if one[1] <= most]
    columns = [[1 / seconds for _, seconds in found], [streams / seconds for streams, seconds in found]]
    step_s, stream_s = fit_nonnegative(columns, [1.0] * len(found), [0.0, 0.0], 1e-6)
    slowness = [seconds / (step_s + stream_s * streams) for streams, seconds in found]
    return Launches(step_s, stream_s, Slowness([seconds for _, seconds in found], slowness))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", nargs="+", choices=FILES, default=list(FILES))
    for name in parser.parse_args().names:
        file, about = FILES[name]
        recording = read_recording(RECORDINGS / f"{file}.jsonl.gz")
        FOLDER.mkdir(exist_ok=True)
        times = step_times_of(recording, recording.loads, name, about)
        times.write(path := FOLDER / f"{name}.json.gz")
        print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB, {times.largest}")


if __name__ == "__main__":
    main()
