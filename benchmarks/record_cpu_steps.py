"""Record every step of evenflow's own engine under random loads, with token budgets that vary at random.

    python benchmarks/record_cpu_steps.py --out steps.jsonl.gz --seeds 1 25

The engine records itself, as with `--record`. After each load its steps are appended to the file, in the format of
`gpu/step_recording.py`, to fit models of step times and to judge them on loads that they were not fitted on.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import median

from cpu_peers import cpu_name
from cpu_random_loads import EngineRun, add_load_options, load_of
from random_loads import Load
from replay_loads import add_seeds
from step_recording import VERSION, Chunk, Step, append_line, encode_steps

from evenflow import LLM
from evenflow.core.plan import StepPlan
from evenflow.core.policies import PolicySpec
from evenflow.core.report import StepReport
from evenflow.engine.engine import Engine
from evenflow.engine.recorder import Recorder
from evenflow.executors.recorded import read
from evenflow.host import num_cpus
from evenflow.simulation.loop import Timed

_BUDGETS = (16, 1024)
_STEPS_WITH_A_BUDGET = 8


class RecordedRun(EngineRun):
    """A load under token budgets that change every few steps."""

    def __init__(self, engine: Engine, load: Load, sleep: Callable[[float], None] = time.sleep) -> None:
        super().__init__(engine, load, sleep)
        self._drawn = random.Random(load.seed)
        self._num_steps = 0

    def _take(self, report: StepReport) -> list[Timed]:
        if self._num_steps % _STEPS_WITH_A_BUDGET == 0:
            least, most = _BUDGETS
            budget = round(least * (most / least) ** self._drawn.random())
            self._engine.set_policy(PolicySpec.parse(f"fixed:{budget}"))
        self._num_steps += 1
        return super()._take(report)


def recorded_steps(path: Path) -> Iterator[Step]:
    """The steps of an engine's recording, if it has one in flight at a time. They have the host's clock alone."""
    budget, scheduled = 0, 0.0
    with path.open(encoding="utf-8") as file:
        for event in map(json.loads, file):
            match event.get("event"):
                case None:  # the header
                    budget = event["scheduler"]["max_num_batched_tokens"] or 0
                case "policy":
                    budget = event["max_num_batched_tokens"] or 0
                case "schedule":
                    scheduled = event["now"]
                case "step":
                    yield _step(read(event["plan"], StepPlan), budget, scheduled, event["now"], event["seconds"])


def _step(plan: StepPlan, budget: int, scheduled: float, ended: float, seconds: float) -> Step:
    began_us, ended_us = round(1e6 * (ended - seconds)), round(1e6 * ended)
    contexts = [position + 1 for position in plan.decodes.positions]
    return Step(
        schedule_us=round(1e6 * scheduled),
        scheduled_us=began_us,
        launched_us=began_us,
        sampled_us=began_us,
        seen_us=ended_us,
        gpu_begin_us=began_us,
        gpu_forward_us=ended_us,
        gpu_end_us=ended_us,
        budget=budget,
        padded_rows=plan.padded_rows,
        num_decodes=len(contexts),
        decode_context=sum(contexts),
        longest_decode_context=max(contexts, default=0),
        chunks=[Chunk(chunk.start, chunk.length, chunk.samples) for chunk in plan.chunks],
    )


def record(engine: Engine, load: Load, path: Path, *, is_cold: bool) -> str:
    """Run the load, append its steps to the file and return a line on them."""
    with tempfile.TemporaryDirectory() as folder:
        events = Path(folder) / "events.jsonl"
        engine.recorder = Recorder(events, engine.scheduler)
        RecordedRun(engine, load).run()
        engine.recorder.close()
        engine.recorder = None
        steps = list(recorded_steps(events))
    append_line(path, {"seed": load.seed, "is_cold": is_cold, "load": asdict(load), "columns": encode_steps(steps)})
    median_us = median([step.gpu_end_us - step.gpu_begin_us for step in steps] or [0])
    return f"seed {load.seed}: {len(steps)} steps, median {median_us / 1000:.1f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the recording, *.jsonl.gz; must not exist")
    add_seeds(parser, 1, 25)
    add_load_options(parser)
    options = parser.parse_args()
    if options.out.exists():
        parser.error(f"{options.out} exists: give another path or remove it")
    with LLM(options.model, policy="fixed:256", enable_prefix_caching=False) as llm:
        header = {
            "version": VERSION,
            "device": f"{num_cpus()} cores of {cpu_name()}",
            "model": options.model,
            "capture_sizes": [],
        }
        append_line(options.out, header)
        for seed in range(*options.seeds):
            load = load_of(seed, options)
            print(record(llm.engine, load, options.out, is_cold=seed == options.seeds[0]), flush=True)


if __name__ == "__main__":
    main()
