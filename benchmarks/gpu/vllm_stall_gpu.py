"""vLLM on one GPU under the stall load: fixed budgets and latency targets, on one engine, in one process.

Random weights in the shape of Llama 3.1 8B. Chats decode while long prompts arrive at a fixed interval; then the chats
decode alone, plain and steered in turn. Needs vLLM with CUDA; `--tiny` tries the script itself on any machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from stall_curve import StallPoint, is_pending, pending_gaps, summarise, table  # noqa: E402

from evenflow.core.policies import PolicySpec  # noqa: E402

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "torch_dtype": "bfloat16",
}
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


@dataclass(frozen=True, slots=True)
class Load:
    num_chats: int
    chat_prompt_tokens: int
    num_long: int
    long_prompt_tokens: int
    interval_s: float
    decode_seconds: float  # of the chats alone


@dataclass(slots=True)
class Seen:
    """What the clients of one run saw."""

    token_times: dict[str, list[float]] = field(default_factory=dict)
    long_spans: list[tuple[float, float]] = field(default_factory=list)  # arrival and first token of each


class Bench:
    """One engine, and what its steps tell."""

    def __init__(self, engine: Any, load: Load, mode_path: Path, vocab_size: int) -> None:
        self.engine, self.load, self.mode_path, self.vocab_size = engine, load, mode_path, vocab_size
        self._number = 0
        self._runs = 0
        self._told: list[bytes] = []  # what steps told, read after a run: reading takes time from the clients

    async def _generate(self, num_tokens: int, max_tokens: int, moments: list[float]) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._number += 1
        number = self._number
        prompt = [(number * 7919 + 31 * i) % (self.vocab_size - 16) + 8 for i in range(num_tokens)]
        sampling = SamplingParams(
            max_tokens=max_tokens,
            ignore_eos=True,
            temperature=0.0,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        async for output in self.engine.generate({"prompt_token_ids": prompt}, sampling, f"request-{number}"):
            moments.extend([time.perf_counter()] * len(output.outputs[0].token_ids))

    async def _chats(self, seen: Seen) -> list[asyncio.Task[None]]:
        """Start the chats and wait until all of them decode."""
        tasks = []
        for number in range(self.load.num_chats):
            moments = seen.token_times.setdefault(f"chat-{number}", [])
            tasks.append(asyncio.create_task(self._generate(self.load.chat_prompt_tokens, 30_000, moments)))
        while any(len(moments) < 8 for moments in seen.token_times.values()):
            await asyncio.sleep(0.01)
        return tasks

    async def _end(self, tasks: list[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0.5)  # the engine core drops them

    async def warm_up(self) -> None:
        """Run steps of all sizes once, alone: CUDA loads a kernel when it is first used, and all wait for that."""
        for num_tokens in range(WARM_UP_ROWS, self.load.long_prompt_tokens // 16 + 1, WARM_UP_ROWS):
            await self._generate(num_tokens, 1, [])

    def _switch(self, mode: str) -> None:
        self._runs += 1
        self.mode_path.write_text(mode)
        os.utime(self.mode_path, ns=(self._runs, self._runs))
        self._told = []

    async def read_steps(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take in what the plug-in tells of its steps."""
        from evenflow.framing import FrameReader

        frames = FrameReader()
        while content := await reader.read(1 << 20):
            self._told.extend(frames.feed(content))
        writer.close()

    def _steps(self) -> list[Any]:
        import msgspec

        from evenflow.hosts.messages import HostStep

        return [msgspec.msgpack.decode(frame, type=HostStep).report for frame in self._told]

    async def stall(self, mode: str) -> tuple[StallPoint, list[Any], list[Any]]:
        """One run under a mode: its figures and, if they were steered, its steps and those beside a long prompt."""
        self._switch(mode)
        seen = Seen()
        tasks = await self._chats(seen)
        began = time.perf_counter()
        long_tasks = []
        for number in range(self.load.num_long):
            while time.perf_counter() < began + number * self.load.interval_s:
                await asyncio.sleep(0.005)
            long_tasks.append(asyncio.create_task(self._long(seen)))
        await asyncio.gather(*long_tasks)
        total = time.perf_counter() - began
        await self._end(tasks)
        ttfts = [end - start for start, end in seen.long_spans]
        steps = self._steps()
        pending = [step for step in steps if is_pending(seen.long_spans, step.at)]
        gaps = pending_gaps(seen.token_times.values(), seen.long_spans)
        return summarise(mode, PolicySpec.parse(mode).target, gaps, ttfts, total), steps, pending

    async def _long(self, seen: Seen) -> None:
        start, moments = time.perf_counter(), list[float]()
        span = len(seen.long_spans)
        seen.long_spans.append((start, float("inf")))
        await self._generate(self.load.long_prompt_tokens, 2, moments)
        seen.long_spans[span] = (start, moments[0])

    async def decode_alone(self, mode: str) -> float:
        """Tokens a second of each chat while nothing else runs."""
        self._switch(mode)
        seen = Seen()
        tasks = await self._chats(seen)
        await asyncio.sleep(0.5)
        began, before = time.perf_counter(), sum(map(len, seen.token_times.values()))
        await asyncio.sleep(self.load.decode_seconds)
        tokens, seconds = sum(map(len, seen.token_times.values())) - before, time.perf_counter() - began
        await self._end(tasks)
        return tokens / seconds / self.load.num_chats


async def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    config = TINY if args.tiny else LLAMA_8B
    (folder / "config.json").write_text(json.dumps(config))
    load = Load(4, 64, 3, 2000, 1.0, 1.0) if args.tiny else Load(64, 1024, args.num_long, 32768, args.interval, 4.0)
    mode_path = Path(os.environ["EVENFLOW_BENCH_MODE_FILE"])
    mode_path.write_text("fixed:8192")
    started = time.perf_counter()
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=str(folder),
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype="float32" if args.tiny else "bfloat16",
            max_model_len=4096 if args.tiny else 49152,
            max_num_batched_tokens=1024 if args.tiny else 8192,
            max_num_seqs=8 if args.tiny else 256,
            enable_prefix_caching=False,
            gpu_memory_utilization=0.2 if args.tiny else 0.85,
            enforce_eager=args.tiny,
            scheduler_cls="switchable.Switchable",
        )
    )
    bench = Bench(engine, load, mode_path, int(config["vocab_size"]))  # type: ignore[call-overload]
    listener = await asyncio.start_unix_server(bench.read_steps, os.environ["EVENFLOW_STEP_SOCKET"])
    print(f"ready in {time.perf_counter() - started:.0f} s", flush=True)
    await bench.warm_up()
    points, errors, steps_of_runs = [], {}, {}
    for mode in args.modes.split(","):
        point, steps, pending = await bench.stall(mode)
        points.append(point)
        print(f"{time.perf_counter() - started:.0f} s: {point}", flush=True)
        if steps:
            run = f"{len(points)} {mode}"
            errors[run] = mean_error(pending)
            steps_of_runs[run] = [step_row(step) for step in steps]
    speeds: dict[str, list[float]] = {}
    for mode in [args.modes.split(",")[0], "fixed:8192"] * 3:
        speeds.setdefault(mode, []).append(await bench.decode_alone(mode))
    engine.shutdown()
    await asyncio.sleep(0.1)  # the plug-in's connection ends
    listener.close()
    return {
        "points": points,
        "step_time_errors": errors,
        "decode_tokens_per_s": speeds,
        "columns": STEP_COLUMNS,
        "steps": steps_of_runs,
    }


STEP_COLUMNS = ["at", "seconds", "predicted_seconds", "num_decodes", "chunks", "num_late_tokens", "is_own_time"]


def step_row(step: Any) -> list[Any]:
    """A step as `STEP_COLUMNS` says."""
    chunks = [[chunk.start, chunk.length, chunk.reason] for chunk in step.chunks]
    return [
        step.at,
        step.seconds,
        step.predicted_seconds,
        step.num_decodes,
        chunks,
        step.num_late_tokens,
        step.is_own_time,
    ]


def mean_error(steps: list[Any]) -> float:
    """Mean of |predicted - actual| / actual over steps with prefill and decodes whose time is known apart."""
    mixed = [step for step in steps if step.chunks and step.num_decodes and step.is_own_time]
    total: float = sum(abs(step.predicted_seconds - step.seconds) / step.seconds for step in mixed)
    return total / max(1, len(mixed))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    modes = "target:50ms,fixed:512,target:25ms,fixed:1024,target:50ms,fixed:2048,target:25ms,fixed:256,fixed:8192"
    parser.add_argument("--modes", default=modes, help="runs, in this order; the first starts without any step times")
    parser.add_argument("--num-long", type=int, default=8)
    parser.add_argument("--interval", type=float, default=2.5, help="seconds between long prompts")
    parser.add_argument("--json", type=Path, default=None, help="write all figures there")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and load: tries the script, measures nothing")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ |= {
            "EVENFLOW_BENCH_MODE_FILE": str(folder / "mode"),
            "EVENFLOW_STEP_SOCKET": str(folder / "steps"),
            "EVENFLOW_TBT_TARGET": "50ms",
            "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
        }
        figures = asyncio.run(measure(args, folder))
    print(table(figures["points"]))
    print("step-time errors:", {mode: f"{100 * error:.1f}%" for mode, error in figures["step_time_errors"].items()})
    for mode, speeds in figures["decode_tokens_per_s"].items():
        print(f"chats alone, {mode}: " + ", ".join(f"{speed:.2f}" for speed in speeds) + " tokens/s each")
    if args.json is not None:
        args.json.write_text(json.dumps(figures | {"points": [asdict(p) for p in figures["points"]]}))


if __name__ == "__main__":
    main()
