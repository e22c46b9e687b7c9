"""Loads on one host engine in this process, under fixed budgets and latency targets, one run after the other.

Random weights in the shape of Llama 3.1 8B. What differs between host engines is in a subclass of `HostBench`.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import importlib.util
import json
import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from load_client import LoadRun
from mode_file import APPLIED, MODE_VARIABLE
from model_shapes import LLAMA_8B
from named_loads import NAMES, NamedLoad, named_load
from outcomes import Outcome, outcome_of, quantile_of
from record_vllm_steps import MAX_MODEL_LEN

from evenflow.bench.curves import read_off
from evenflow.bench.endpoints import Answer, Ask
from evenflow.core.policies import PolicySpec
from evenflow.core.report import StepReport
from evenflow.hosts.launch import HostPackage

TINY = LLAMA_8B | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
_FEWER_TINY = 16  # chats and tokens of a load, for the tiny model
TINY_MODEL_LEN = MAX_MODEL_LEN // _FEWER_TINY
_PROBE_TOKENS, _PROBE_PAUSE_S, _SLOWEST_SWITCH_S = 8, 0.05, 60.0
STEP_COLUMNS = ["at", "seconds", "predicted_seconds", "num_decodes", "chunks", "num_late_tokens", "is_own_time"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigures:
    """One load under one mode. Seconds; of all streams, from the first token on."""

    load: str
    mode: str
    target_s: float | None
    num_gaps: int
    gap_p50_s: float
    gap_p99_s: float
    gap_max_s: float
    # Gaps that end while a long prompt waits for its first token.
    beside_p50_s: float
    beside_p90_s: float
    beside_p99_s: float
    long_ttft_p50_s: float
    long_ttft_max_s: float
    chat_ttft_p50_s: float
    chat_ttft_max_s: float
    mean_ttft_s: float
    prefill_tokens_per_s: float
    output_tokens_per_s: float
    step_time_error: float

    @classmethod
    def of(cls, load: str, mode: str, outcome: Outcome) -> RunFigures:
        return cls(
            load=load,
            mode=mode,
            target_s=target_of(mode),
            num_gaps=len(outcome.gaps),
            gap_p50_s=outcome.gap(0.5),
            gap_p99_s=outcome.gap(0.99),
            gap_max_s=outcome.gap(1.0),
            beside_p50_s=quantile_of(outcome.gaps_beside, 0.5),
            beside_p90_s=quantile_of(outcome.gaps_beside, 0.9),
            beside_p99_s=quantile_of(outcome.gaps_beside, 0.99),
            long_ttft_p50_s=outcome.ttft(),
            long_ttft_max_s=outcome.ttft(1.0),
            chat_ttft_p50_s=quantile_of(outcome.chat_ttft, 0.5),
            chat_ttft_max_s=quantile_of(outcome.chat_ttft, 1.0),
            mean_ttft_s=outcome.mean_ttft,
            prefill_tokens_per_s=outcome.prefill_tokens_per_s,
            output_tokens_per_s=outcome.output_tokens_per_s,
            step_time_error=outcome.mean_error,
        )


class HostBench(ABC):
    """One engine, and the step reports of evenflow in it. Between runs, a file switches it from mode to mode."""

    def __init__(self, engine: Any, mode_path: Path, vocab_size: int) -> None:
        self.engine, self.mode_path = engine, mode_path
        self._vocab_size = vocab_size
        self._num_requests = 0
        self._num_runs = 0
        self._frames: list[bytes] = []  # decoded after a run, to take no time from the clients

    @abstractmethod
    async def generate(self, ask: Ask, answer: Answer) -> None:
        """Stream an answer from the engine."""

    async def read_reports(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from evenflow.framing import FrameReader

        frames = FrameReader()
        while content := await reader.read(1 << 20):
            self._frames.extend(frames.feed(content))
        writer.close()

    def _reports(self) -> list[StepReport]:
        import msgspec

        from evenflow.hosts.messages import HostStep

        return [msgspec.msgpack.decode(frame, type=HostStep).report for frame in self._frames]

    async def switch(self, mode: str) -> None:
        """Have the engine change its mode. It does so at a request that finds it idle."""
        self._num_runs += 1
        self.mode_path.write_text(mode)
        os.utime(self.mode_path, ns=(self._num_runs, self._num_runs))
        applied, deadline = self.mode_path.with_suffix(APPLIED), time.perf_counter() + _SLOWEST_SWITCH_S
        while not (applied.exists() and applied.read_text() == str(self._num_runs)):
            if time.perf_counter() > deadline:
                raise TimeoutError(f"the engine was not idle for {_SLOWEST_SWITCH_S:g} s, and so did not take {mode}")
            await asyncio.sleep(_PROBE_PAUSE_S)
            await self.generate(Ask(range(100, 100 + _PROBE_TOKENS), 1), Answer())
        self._frames = []

    async def run(self, mode: str, load: NamedLoad) -> tuple[RunFigures, list[StepReport]]:
        """One load under one mode: its figures, and the steered steps."""
        await self.switch(mode)
        run = LoadRun(self.generate, load, self._vocab_size)
        streams = await run.run()
        steps = self._reports()
        errors = [step.prediction_error for step in steps if step.is_mixed]
        outcome = outcome_of(streams, [error for error in errors if error is not None], run.seconds)
        return RunFigures.of(load.name, mode, outcome), steps

    async def measure(self, runs: Sequence[tuple[NamedLoad, str]], path: Path | None) -> list[RunFigures]:
        """All runs, each printed and written when it ends."""
        started = time.perf_counter()
        listener = await asyncio.start_unix_server(self.read_reports, os.environ["EVENFLOW_STEP_SOCKET"])
        figures: list[RunFigures] = []
        try:
            for load, mode in runs:
                found, steps = await self.run(mode, load)
                figures.append(found)
                print(f"{time.perf_counter() - started:4.0f} s {line_of(found)}", flush=True)
                if path is not None:
                    write_run(path, found, steps)
        finally:
            self.engine.shutdown()
            await asyncio.sleep(0.1)  # the plug-in's connection closes
            listener.close()
        return figures


def write_run(path: Path, figures: RunFigures, steps: Sequence[StepReport]) -> None:
    """Append a run, a line of compressed JSON."""
    content = asdict(figures) | {"columns": STEP_COLUMNS, "steps": [step_row(step) for step in steps]}
    with gzip.open(path, "at") as file:
        file.write(json.dumps(content) + "\n")


def step_row(step: StepReport) -> list[Any]:
    """A step's values for STEP_COLUMNS."""
    chunks = [[chunk.start, chunk.length, chunk.reason] for chunk in step.chunks]
    times = [step.at, step.seconds, step.predicted_seconds]
    return [*times, step.num_decodes, chunks, len(step.late), step.is_own_time]


def target_of(mode: str) -> float | None:
    """In seconds; a mode may say what the engine knows when it starts: `new+target:50ms`, `kept+target:50ms`."""
    policy = mode.rpartition("+")[2]
    return PolicySpec.parse(policy).target if policy.startswith("target:") else None


def line_of(run: RunFigures) -> str:
    gaps = (run.beside_p50_s, run.beside_p90_s, run.beside_p99_s, run.gap_p50_s, run.gap_p99_s, run.gap_max_s)
    line = f"{run.load:16} {run.mode:18}" + "".join(f"{1000 * gap:7.1f}" for gap in gaps)
    line += f" | long TTFT {run.long_ttft_p50_s:6.2f} ({run.long_ttft_max_s:.2f})"
    line += f" | chats' {run.chat_ttft_p50_s:5.2f} ({run.chat_ttft_max_s:.2f})"
    line += f" | {run.prefill_tokens_per_s:6.0f} in/s {run.output_tokens_per_s:5.0f} out/s"
    return line if math.isnan(run.step_time_error) else f"{line} | error {100 * run.step_time_error:.1f}%"


def table(figures: Sequence[RunFigures]) -> str:
    """All runs; those with a target beside the fixed budgets of the same load."""
    head = f"{'load':16} {'mode':18} gaps beside long prompts: p50, p90, p99; all: p50, p99, max (ms)"
    lines = [head]
    for run in figures:
        line = line_of(run)
        if run.target_s is not None:
            fixed = [one for one in figures if one.load == run.load and one.target_s is None]
            curve = [(one.beside_p99_s, one.long_ttft_p50_s) for one in fixed]
            expected = read_off(curve, run.beside_p99_s)
            line += f" | p99/target {run.gap_p99_s / run.target_s:.2f}"
            line += f" | TTFT/curve {'outside' if expected is None else f'{run.long_ttft_p50_s / expected:.2f}'}"
            best = min((one.mean_ttft_s for one in fixed if one.gap_p99_s <= run.gap_p99_s), default=math.nan)
            line += f" | mean TTFT/best budget {run.mean_ttft_s / best:.2f}"
        lines.append(line)
    return "\n".join(lines)


def make_parser(description: str | None, default: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "runs", type=run_argument, nargs="*", default=default, help=f"LOAD,...=MODE,...; loads: {NAMES}"
    )
    parser.add_argument("--steps", type=Path, default=None, help="append figures and steps there, *.jsonl.gz")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and tiny loads, to test the script")
    return parser


def parse_for(parser: argparse.ArgumentParser, host: HostPackage) -> argparse.Namespace:
    """The options, if this environment has the host engine."""
    options = parser.parse_args()
    if importlib.util.find_spec(host.engine) is None:
        parser.error(f"{host.name} is not installed here: {host.install}")
    return options


def run_argument(text: str) -> str:
    """For argparse: one `LOADS=MODES`, if there are such loads and modes."""
    loads, _, modes = text.partition("=")
    try:
        for name in loads.split(","):
            named_load(name)
        for mode in modes.split(","):
            _check_mode(mode)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _check_mode(mode: str) -> None:
    start, _, policy = mode.rpartition("+")
    if start not in ("", "new", "kept") or not policy:
        raise ValueError(f"Got mode {mode!r} but expected one such as fixed:512, target:50ms or new+target:50ms.")
    if policy != "default":
        PolicySpec.parse(policy.replace("unmixed:", "fixed:"))  # SGLang's own chunks


def planned_runs(runs: Sequence[str], is_tiny: bool) -> list[tuple[NamedLoad, str]]:
    """Of each `LOADS=MODES`: every mode under every load, a load at a time."""
    found = []
    for given in runs:
        loads, _, modes = given.partition("=")
        for name in loads.split(","):
            load = named_load(name)
            load = load.scaled(_FEWER_TINY, _FEWER_TINY) if is_tiny else load
            found += [(load, mode) for mode in modes.split(",")]
    return found


def write_model(folder: Path, is_tiny: bool, config: dict[str, Any] = LLAMA_8B) -> dict[str, Any]:
    """A model without weights."""
    config = TINY if is_tiny else config
    (folder / "config.json").write_text(json.dumps(config))
    return config


def environment(folder: Path, *search_path: Path) -> dict[str, str]:
    """What the engine's processes must find."""
    return {
        MODE_VARIABLE: str(folder / "mode"),
        "EVENFLOW_CACHE": str(folder / "cache"),
        "EVENFLOW_STEP_SOCKET": str(folder / "steps"),
        "EVENFLOW_TBT_TARGET": "50ms",
        "PYTHONPATH": os.pathsep.join([*map(str, search_path), os.environ.get("PYTHONPATH", "")]),
    }
