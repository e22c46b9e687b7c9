"""evenflow's own engine on one GPU: decode and prefill against the device's limits, and loads as vLLM is given them.

    python benchmarks/gpu/engine.py decode prefill mixed --json steps.json
    python benchmarks/gpu/engine.py 32k,65k=target:50ms,target:25ms random:7=target:50ms --json loads.json

Random weights in the shape of Llama 3.1 8B, no prefix caching, the settings of `vllm_loads`. The first run is that of a
new process: nothing is warmed up but what every start of the engine does. `EVENFLOW_ATTENTION_BACKEND` chooses the
attention. The model is loaded once. A stage prints as it begins and ends, its figures are in the JSON file at once, and
one that fails leaves the others to run. `--tiny` tests the script on any machine, with the GPU's executor on the CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import torch  # noqa: E402
from host_bench import (  # noqa: E402
    TINY_MODEL_LEN,
    RunFigures,
    line_of,
    planned_runs,
    run_argument,
    table,
    write_model,
    write_run,
)
from load_client import LoadRun  # noqa: E402
from outcomes import outcome_of  # noqa: E402
from record_vllm_steps import MAX_MODEL_LEN  # noqa: E402
from stages import Stages  # noqa: E402

from evenflow import LLM, AsyncLLM, SamplingParams  # noqa: E402
from evenflow.bench.endpoints import Answer, Ask  # noqa: E402
from evenflow.config import EngineConfig  # noqa: E402
from evenflow.core.plan import ExecutorCaps, StepPlan  # noqa: E402
from evenflow.core.report import StepReport  # noqa: E402
from evenflow.core.roofline import known_device, roofline  # noqa: E402
from evenflow.core.step_costs import StepCosts, figures_of  # noqa: E402
from evenflow.engine.build import BuiltEngine, build_engine  # noqa: E402
from evenflow.engine.messages import Event, Stepped  # noqa: E402
from evenflow.engine.placement import place, place_paged  # noqa: E402
from evenflow.executors.base import Executor  # noqa: E402
from evenflow.model.formats.weights import model_work  # noqa: E402
from evenflow.model.loader import load_model  # noqa: E402

BUDGET = 8192  # tokens a step while decode and prefill are measured, as in vLLM's figures
DECODE_PROMPT, DECODE_STEPS, SKIPPED_STEPS = 1024, 160, 10
PREFILL_RUNS = 5
MIXED_STREAMS, MIXED_PROMPT = 64, 32768


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """Medians. `floor_s` is what the device's limits leave, None if they are unknown."""

    what: str
    size: int  # streams, or prompt tokens
    context: int
    seconds: float  # seen by the caller
    device_s: float
    launch_s: float  # on the host, for a step; while the step before runs
    floor_s: float | None
    worst_s: float

    @property
    def percent_of_floor(self) -> float | None:
        return None if self.floor_s is None else 100 * self.floor_s / self.seconds

    def line(self) -> str:
        line = f"{self.what} {self.size:6}: {1000 * self.seconds:8.2f} ms, on the device {1000 * self.device_s:8.2f}"
        line += f", launched in {1000 * self.launch_s:.2f}, worst {1000 * self.worst_s:.2f}"
        if self.floor_s is not None and self.percent_of_floor is not None:
            line += f", floor {1000 * self.floor_s:.2f} ({self.percent_of_floor:.0f}% of it reached)"
        return line


class TimedExecutor:
    """An executor, and how long each of its launches took."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.caps, self.wait, self.close = executor.caps, executor.wait, executor.close
        self.launches: list[float] = []

    def submit(self, plan: StepPlan) -> None:
        began = time.perf_counter()
        self._executor.submit(plan)
        self.launches.append(time.perf_counter() - began)


class Steps:
    """Decode and prefill, step by step on this thread."""

    def __init__(self, built: BuiltEngine, costs: StepCosts | None, profile: Path | None) -> None:
        self._llm = LLM.over(built.engine, built.intake)
        self._llm.config = built.config
        self._executor = built.engine.executor = TimedExecutor(built.engine.executor)
        self._costs, self._profile = costs, profile
        self._vocab_size = built.engine.limits.vocab_size
        self._random = random.Random(0)

    def _prompt(self, num_tokens: int) -> list[int]:
        return self._random.choices(range(100, self._vocab_size - 100), k=num_tokens)

    def _add(self, prompt: list[int], output_tokens: int) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True)
        self._llm.engine.add(self._llm.prepare(prompt, sampling))

    def _reports(self) -> Iterator[StepReport]:
        while (report := self._llm.engine.step()) is not None:
            yield report

    def drain(self) -> None:
        """End what a failed stage has left."""
        for request_id in list(self._llm.engine.scheduler.requests):
            self._llm.engine.abort(request_id)
        for _ in self._reports():
            pass

    def decode(self, batch: int, prompt_tokens: int) -> Figure:
        self._llm.set_policy(f"fixed:{max(BUDGET, batch)}")
        for _ in range(batch):
            self._add(self._prompt(prompt_tokens), DECODE_STEPS)
        gaps, on_device = [], []
        before = None
        with self._profiled(f"decode-{batch}"):
            for report in self._reports():
                is_pure = report.num_decodes == batch and not report.chunks
                if is_pure and before is not None:
                    gaps.append(report.at - before)
                    on_device.append(report.seconds)
                before = report.at if is_pure else None
        gaps, on_device = gaps[SKIPPED_STEPS:], on_device[SKIPPED_STEPS:]
        launches = self._executor.launches[-len(gaps) :]
        context = prompt_tokens + DECODE_STEPS // 2
        shape = ExecutorCaps().step_shape(num_decodes=batch, decode_context=batch * context)
        return Figure(
            what="decode",
            size=batch,
            context=context,
            seconds=median(gaps),
            device_s=median(on_device),
            launch_s=median(launches),
            floor_s=None if self._costs is None else self._costs.seconds(figures_of(shape)),
            worst_s=max(gaps),
        )

    def mixed(self, chunk: int, batch: int, prompt_tokens: int, long_tokens: int) -> Figure:
        """Streams that decode while a long prompt is prefilled in chunks of this size; its middle half counts."""
        self._llm.set_policy(f"fixed:{BUDGET}")
        for _ in range(batch):
            self._add(self._prompt(prompt_tokens), 2 * (long_tokens // chunk) + DECODE_STEPS)
        for report in self._reports():
            if report.num_decodes == batch:
                break
        self._llm.set_policy(f"fixed:{batch + chunk}")
        self._add(self._prompt(long_tokens), 2)
        gaps, on_device, launches, before = [], [], [], None
        with self._profiled(f"mixed-{chunk}"):
            for report in self._reports():
                starts = [one.start for one in report.chunks if one.length == chunk]
                is_inside = starts and long_tokens <= 4 * starts[0] <= 3 * long_tokens
                if is_inside and before is not None:
                    gaps.append(report.at - before)
                    on_device.append(report.seconds)
                    launches.append(self._executor.launches[-1])
                before = report.at if is_inside else None
                if report.chunks and report.chunks[-1].start + report.chunks[-1].length == long_tokens:
                    break
        self.drain()
        shape = ExecutorCaps().step_shape(
            num_decodes=batch, decode_context=batch * prompt_tokens, chunks=[(long_tokens // 2, chunk)]
        )
        return Figure(
            what="mixed",
            size=chunk,
            context=long_tokens // 2,
            seconds=median(gaps),
            device_s=median(on_device),
            launch_s=median(launches),
            floor_s=None if self._costs is None else self._costs.seconds(figures_of(shape)),
            worst_s=max(gaps),
        )

    def prefill(self, tokens: int) -> Figure:
        self._llm.set_policy(f"fixed:{BUDGET}")
        took, on_device, floor = [], [], 0.0
        with self._profiled(f"prefill-{tokens}"):
            for prompt in [self._prompt(tokens) for _ in range(PREFILL_RUNS)]:
                began = time.perf_counter()
                self._add(prompt, 1)
                reports = list(self._reports())
                took.append(time.perf_counter() - began)
                on_device.append(sum(report.seconds for report in reports))
        for start in range(0, tokens, BUDGET):
            shape = ExecutorCaps().prefill_shape(start, min(BUDGET, tokens - start))
            floor += 0 if self._costs is None else self._costs.seconds(figures_of(shape))
        return Figure(
            what="prefill",
            size=tokens,
            context=tokens,
            seconds=median(took),
            device_s=median(on_device),
            launch_s=median(self._executor.launches[-PREFILL_RUNS:]),
            floor_s=floor or None,
            worst_s=max(took),
        )

    @contextmanager
    def _profiled(self, name: str) -> Iterator[None]:
        """With `--profile`, a trace and a table of kernels by their time."""
        if self._profile is None:
            yield
            return
        with torch.profiler.profile() as profiler:
            yield
        profiler.export_chrome_trace(str(self._profile / f"{name}.json.gz"))
        key = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        print(f"{name}:\n{profiler.key_averages().table(sort_by=key, row_limit=25)}", flush=True)


class WatchedLLM(AsyncLLM):
    """Keeps the reports of its steps."""

    reports: list[StepReport]

    def _take(self, event: Event) -> None:
        if isinstance(event, Stepped):
            self.reports.append(event.report)
        super()._take(event)


class Loads:
    """Loads of many clients on the engine's own thread."""

    def __init__(self, built: BuiltEngine) -> None:
        self._built = built

    async def measure(self, runs: Sequence[tuple[Any, str]], stages: Stages, steps: Path | None) -> list[RunFigures]:
        llm = WatchedLLM.over(self._built.engine, self._built.intake)
        llm.config = self._built.config
        figures = []
        async with llm:
            for load, mode in runs:
                with stages.stage(f"{load.name}={mode}"):
                    stages.check_time()
                    figures.append(await self._run(llm, load, mode))
                    stages.add("loads", asdict(figures[-1]), line_of(figures[-1]))
                    if steps is not None:
                        write_run(steps, figures[-1], llm.reports)
        return figures

    async def _run(self, llm: WatchedLLM, load: Any, mode: str) -> RunFigures:
        llm.reports = []
        await _generate(llm, Ask(range(100, 108), 1), Answer())  # until the steps of the load before have ended
        llm.reports.clear()
        llm.set_policy(mode)
        run = LoadRun(partial(_generate, llm), load, self._built.engine.limits.vocab_size)
        streams = await run.run()
        errors = [report.prediction_error for report in llm.reports if report.is_mixed]
        outcome = outcome_of(streams, [error for error in errors if error is not None], run.seconds)
        return RunFigures.of(load.name, mode, outcome)


async def _generate(llm: AsyncLLM, ask: Ask, answer: Answer) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=ask.max_tokens, ignore_eos=True)
    async for delta in llm.stream(ask.prompt, sampling):
        answer.add_piece("", len(delta.token_ids))


def build(folder: Path, is_tiny: bool, is_deterministic: bool) -> BuiltEngine:
    write_model(folder, is_tiny)
    settings: dict[str, Any] = {"model": str(folder), "load_format": "dummy", "enable_prefix_caching": False}
    if is_tiny:
        settings |= {"device": "cpu", "max_model_len": TINY_MODEL_LEN, "max_num_seqs": 16, "max_steps_in_flight": 2}
        settings["kv_cache_memory"] = 64 << 20
        on_cpu = partial(place_paged, device=torch.device("cpu"))
        return build_engine(EngineConfig(**settings), place=on_cpu)
    settings |= {"device": "cuda", "max_model_len": MAX_MODEL_LEN, "gpu_memory_utilization": 0.85}
    settings["deterministic"] = is_deterministic
    return build_engine(EngineConfig(**settings), place=place)


def measure(options: argparse.Namespace, stages: Stages, folder: Path) -> None:
    built = None
    with stages.stage("start"):
        built = build(folder, options.tiny, options.deterministic)
    if built is None:
        return
    print(f"ready after {stages.seconds:.1f} s", flush=True)
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor()
    for key, value in {
        "device": name,
        "torch": torch.__version__,
        "attention": os.environ.get("EVENFLOW_ATTENTION_BACKEND", "auto"),
        "deterministic": options.deterministic,
        "ready_s": stages.seconds,
    }.items():
        stages.put(key, value)
    device = known_device(name)
    work = model_work(load_model(folder, is_dummy=True).config, 4 if options.tiny else 2)
    steps = Steps(built, roofline(work, device) if device else None, options.profile)
    measure_steps(options, stages, steps, built.engine.scheduler.config.max_num_seqs)
    runs = planned_runs([run for run in options.runs if "=" in run], options.tiny)
    loads = asyncio.run(Loads(built).measure(runs, stages, options.steps)) if runs else []
    if loads:
        print(table(loads))
    elif not runs:
        built.engine.close()


def measure_steps(options: argparse.Namespace, stages: Stages, steps: Steps, max_num_seqs: int) -> None:
    scale = 16 if options.tiny else 1
    planned: list[tuple[str, Callable[[], Figure]]] = []
    for run in options.runs:
        if run == "decode":
            batches = dict.fromkeys(min(batch, max_num_seqs) for batch in options.batches)
            planned += [(f"decode {batch}", partial(steps.decode, batch, DECODE_PROMPT // scale)) for batch in batches]
        elif run == "mixed":
            sizes = (min(MIXED_STREAMS, max_num_seqs - 1), DECODE_PROMPT // scale, MIXED_PROMPT // scale)
            planned += [(f"mixed {chunk}", partial(steps.mixed, chunk // scale, *sizes)) for chunk in options.chunks]
        elif run == "prefill":
            planned += [(f"prefill {tokens}", partial(steps.prefill, tokens // scale)) for tokens in options.prompts]
    for name, run_stage in planned:
        with stages.stage(name):
            stages.check_time()
            steps.drain()
            figure = run_stage()
            stages.add("steps", asdict(figure) | {"percent_of_floor": figure.percent_of_floor}, figure.line())
    if planned:
        with stages.stage("end"):
            steps.drain()


def _run_argument(text: str) -> str:
    return text if text in ("decode", "prefill", "mixed") else run_argument(text)


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "runs",
        type=_run_argument,
        nargs="*",
        default=["decode", "prefill"],
        help="decode, prefill, mixed, or LOAD,...=POLICY,...",
    )
    parser.add_argument("--batches", type=_numbers, default=[1, 32, 128, 256], help="of decode")
    parser.add_argument("--chunks", type=_numbers, default=[128, 256, 512, 1024, 2048], help="of mixed, in tokens")
    parser.add_argument("--prompts", type=_numbers, default=[8192, 32768], help="of prefill, in tokens")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--steps", type=Path, default=None, help="append figures and steps of loads there, *.jsonl.gz")
    parser.add_argument(
        "--profile", type=Path, default=None, help="write traces of decode and prefill into this folder"
    )
    parser.add_argument("--cache", type=Path, default=None, help="keep step times there (default: measured anew)")
    parser.add_argument("--deterministic", action="store_true", help="the engine's deterministic mode")
    parser.add_argument("--seconds", type=float, default=None, help="begin no stage after this time")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and tiny loads, to test the script")
    options = parser.parse_args()
    if options.tiny and options.deterministic:
        parser.error("--deterministic needs a GPU")
    with tempfile.TemporaryDirectory() as name:
        os.environ["EVENFLOW_CACHE"] = str(options.cache or Path(name) / "cache")
        folder = Path(name) / "model"
        folder.mkdir()
        stages = Stages(options.json, options.seconds)
        measure(options, stages, folder)
    sys.exit(stages.exit_status())


if __name__ == "__main__":
    main()
