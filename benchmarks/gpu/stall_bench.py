"""The stall load on one engine in this process: fixed budgets and latency targets, one run after the other.

Random weights in the shape of Llama 3.1 8B. What differs between host engines is in a subclass of `StallBench`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from mode_file import MODE_VARIABLE
from record_vllm_steps import LLAMA_8B
from stall_client import run_clients, running_chats
from stall_curve import table, to_json

from evenflow.bench.endpoints import Answer, Ask
from evenflow.bench.stall_load import StallLoad
from evenflow.bench.stall_run import ClientFigures, is_pending
from evenflow.core.policies import PolicySpec
from evenflow.core.report import StepReport

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
WARM_UP_ROWS = 16
SECONDS_TO_ABORT = 0.5
STEP_COLUMNS = ["at", "seconds", "predicted_seconds", "num_decodes", "chunks", "num_late_tokens", "is_own_time"]


def stall_load(
    vocab_size: int, chats: tuple[int, int], long: tuple[int, int], interval: float, chat_tokens: int
) -> StallLoad:
    """Chats that outlast a run, and prompts that share no beginning; both given as number and prompt tokens."""
    prompts = [
        [(number * 7919 + 31 * i) % (vocab_size - 16) + 8 for i in range(num_tokens)]
        for number, num_tokens in enumerate([chats[1]] * chats[0] + [long[1]] * long[0])
    ]
    return StallLoad(chats[0], prompts[: chats[0]], chat_tokens, prompts[chats[0] :], 2, interval)


def write_model(folder: Path, args: argparse.Namespace, chat_tokens: int) -> StallLoad:
    """A model without weights, and the load for it."""
    (folder / "config.json").write_text(json.dumps(TINY if args.tiny else LLAMA_8B))
    if args.tiny:
        return stall_load(4096, (4, 64), (3, 2000), 1.0, chat_tokens)
    return stall_load(128_256, (64, 1024), (args.num_long, 32_768), args.interval, chat_tokens)


class StallBench(ABC):
    """One engine, and the step reports of evenflow in it. Between runs, a file switches it from mode to mode."""

    def __init__(self, engine: Any, load: StallLoad, mode_path: Path) -> None:
        self.engine, self.load, self.mode_path = engine, load, mode_path
        self._num_requests = 0
        self._num_runs = 0
        self._frames: list[bytes] = []  # decoded after a run, to take no time from the clients

    @abstractmethod
    async def generate(self, ask: Ask, answer: Answer) -> None:
        """Stream an answer from the engine."""

    async def warm_up(self) -> None:
        """Run steps of all sizes once: CUDA loads each kernel on first use, and everything waits for that."""
        long_prompt = self.load.long_prompts[0]
        for num_tokens in range(WARM_UP_ROWS, len(long_prompt) // 16 + 1, WARM_UP_ROWS):
            await self.generate(Ask(long_prompt[:num_tokens], 1), Answer())

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

    def _switch(self, mode: str) -> None:
        self._num_runs += 1
        self.mode_path.write_text(mode)
        os.utime(self.mode_path, ns=(self._num_runs, self._num_runs))
        self._frames = []

    async def stall(self, mode: str) -> tuple[ClientFigures, list[StepReport], list[StepReport]]:
        """One run under a mode: its figures, its steered steps, and those of them beside a long prompt."""
        self._switch(mode)
        run = await run_clients(self.generate, self.load)
        await asyncio.sleep(SECONDS_TO_ABORT)
        steps = self._reports()
        pending = [step for step in steps if is_pending(run.waits, step.at - run.began)]
        return ClientFigures.of(mode, _target_of(mode), [run]), steps, pending

    async def decode_alone(self, mode: str, seconds: float) -> float:
        """Tokens per second of each chat while nothing else runs."""
        self._switch(mode)
        async with running_chats(self.generate, self.load) as chats:
            await asyncio.sleep(0.5)
            began, before = time.perf_counter(), sum(chat.num_tokens for chat in chats)
            await asyncio.sleep(seconds)
            num_tokens, seconds = sum(chat.num_tokens for chat in chats) - before, time.perf_counter() - began
        await asyncio.sleep(SECONDS_TO_ABORT)
        return num_tokens / seconds / self.load.num_chats

    async def measure(self, modes: Sequence[str], alone: tuple[str, str], is_tiny: bool) -> dict[str, Any]:
        """All runs, each printed when it ends; then the chats alone under these two modes in turn."""
        started = time.perf_counter()
        listener = await asyncio.start_unix_server(self.read_reports, os.environ["EVENFLOW_STEP_SOCKET"])
        await self.warm_up()
        points, errors, steps_of_runs = [], {}, {}
        for mode in modes:
            point, steps, pending = await self.stall(mode)
            points.append(point)
            print(f"{time.perf_counter() - started:.0f} s: {point}", flush=True)
            if steps:
                run = f"{len(points)} {mode}"
                mixed = (step.prediction_error for step in pending if step.is_mixed)
                errors[run] = fmean([error for error in mixed if error is not None] or [0.0])
                steps_of_runs[run] = [step_row(step) for step in steps]
        speeds: dict[str, list[float]] = {}
        for mode in alone * 3:
            speeds.setdefault(mode, []).append(await self.decode_alone(mode, 1.0 if is_tiny else 4.0))
        self.engine.shutdown()
        await asyncio.sleep(0.1)  # the plug-in's connection closes
        listener.close()
        return {
            "points": points,
            "step_time_errors": errors,
            "decode_tokens_per_s": speeds,
            "columns": STEP_COLUMNS,
            "steps": steps_of_runs,
        }


def step_row(step: StepReport) -> list[Any]:
    """A step's values for STEP_COLUMNS."""
    chunks = [[chunk.start, chunk.length, chunk.reason] for chunk in step.chunks]
    times = [step.at, step.seconds, step.predicted_seconds]
    return [*times, step.num_decodes, chunks, len(step.late), step.is_own_time]


def _target_of(mode: str) -> float | None:
    return PolicySpec.parse(mode).target if mode.startswith("target:") else None


def make_parser(description: str | None, modes: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--modes", default=modes, help="runs, in this order; the first has no step times to start from")
    parser.add_argument("--num-long", type=int, default=8)
    parser.add_argument("--interval", type=float, default=2.5, help="seconds between long prompts")
    parser.add_argument("--json", type=Path, default=None, help="write all figures there")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and load, to test the script")
    return parser


def environment(folder: Path, *search_path: Path) -> dict[str, str]:
    """What the engine's processes must find."""
    return {
        MODE_VARIABLE: str(folder / "mode"),
        "EVENFLOW_STEP_SOCKET": str(folder / "steps"),
        "EVENFLOW_TBT_TARGET": "50ms",
        "PYTHONPATH": os.pathsep.join([*map(str, search_path), os.environ.get("PYTHONPATH", "")]),
    }


def report(figures: dict[str, Any], path: Path | None) -> None:
    print(table(figures["points"]))
    print("step-time errors:", {mode: f"{100 * error:.1f}%" for mode, error in figures["step_time_errors"].items()})
    for mode, speeds in figures["decode_tokens_per_s"].items():
        print(f"chats alone, {mode}: " + ", ".join(f"{speed:.2f}" for speed in speeds) + " tokens/s each")
    if path is not None:
        path.write_text(json.dumps(figures | {"points": [to_json(point) for point in figures["points"]]}))
