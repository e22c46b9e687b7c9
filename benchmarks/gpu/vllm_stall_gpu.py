"""vLLM on one GPU under the stall load: fixed budgets and latency targets, on one engine, in one process.

Random weights in the shape of Llama 3.1 8B. Each mode serves chats and long prompts; then the chats decode alone,
without steering and with it in turn. Needs vLLM with CUDA; `--tiny` tests the script itself on any machine with vLLM.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from record_vllm_steps import LLAMA_8B  # noqa: E402
from stall_client import run_clients, running_chats  # noqa: E402
from stall_curve import table, to_json  # noqa: E402

from evenflow.bench.endpoints import Answer, Ask  # noqa: E402
from evenflow.bench.stall_load import StallLoad  # noqa: E402
from evenflow.bench.stall_run import ClientFigures, is_pending  # noqa: E402
from evenflow.core.policies import PolicySpec  # noqa: E402
from evenflow.core.report import StepReport  # noqa: E402

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


def stall_load(vocab_size: int, chats: tuple[int, int], long: tuple[int, int], interval: float) -> StallLoad:
    """Chats that outlast a run, and prompts that share no beginning; both given as number and prompt tokens."""
    prompts = [
        [(number * 7919 + 31 * i) % (vocab_size - 16) + 8 for i in range(num_tokens)]
        for number, num_tokens in enumerate([chats[1]] * chats[0] + [long[1]] * long[0])
    ]
    return StallLoad(chats[0], prompts[: chats[0]], 30_000, prompts[chats[0] :], 2, interval)


class Bench:
    """One engine, and the step reports of its plug-in."""

    def __init__(self, engine: Any, load: StallLoad, mode_path: Path) -> None:
        self.engine, self.load, self.mode_path = engine, load, mode_path
        self._num_requests = 0
        self._num_runs = 0
        self._frames: list[bytes] = []  # decoded after a run, to take no time from the clients

    async def generate(self, ask: Ask, answer: Answer) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._num_requests += 1
        sampling = SamplingParams(
            max_tokens=ask.max_tokens,
            ignore_eos=True,
            temperature=0.0,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        prompt, request_id = {"prompt_token_ids": ask.prompt}, f"request-{self._num_requests}"
        async for output in self.engine.generate(prompt, sampling, request_id):
            answer.add_piece("", len(output.outputs[0].token_ids))

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
        return ClientFigures.of(mode, PolicySpec.parse(mode).target, [run]), steps, pending

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


async def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    (folder / "config.json").write_text(json.dumps(TINY if args.tiny else LLAMA_8B))
    if args.tiny:
        load = stall_load(4096, (4, 64), (3, 2000), 1.0)
    else:
        load = stall_load(128_256, (64, 1024), (args.num_long, 32_768), args.interval)
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
    bench = Bench(engine, load, mode_path)
    listener = await asyncio.start_unix_server(bench.read_reports, os.environ["EVENFLOW_STEP_SOCKET"])
    print(f"ready after {time.perf_counter() - started:.0f} s", flush=True)
    await bench.warm_up()
    points, errors, steps_of_runs = [], {}, {}
    for mode in args.modes.split(","):
        point, steps, pending = await bench.stall(mode)
        points.append(point)
        print(f"{time.perf_counter() - started:.0f} s: {point}", flush=True)
        if steps:
            run = f"{len(points)} {mode}"
            mixed = (step.prediction_error for step in pending if step.is_mixed)
            errors[run] = fmean([error for error in mixed if error is not None] or [0.0])
            steps_of_runs[run] = [step_row(step) for step in steps]
    speeds: dict[str, list[float]] = {}
    for mode in [args.modes.split(",")[0], "fixed:8192"] * 3:
        speeds.setdefault(mode, []).append(await bench.decode_alone(mode, 1.0 if args.tiny else 4.0))
    engine.shutdown()
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    modes = "target:50ms,fixed:512,target:25ms,fixed:1024,target:50ms,fixed:2048,target:25ms,fixed:256,fixed:8192"
    parser.add_argument("--modes", default=modes, help="runs, in this order; the first has no step times to start from")
    parser.add_argument("--num-long", type=int, default=8)
    parser.add_argument("--interval", type=float, default=2.5, help="seconds between long prompts")
    parser.add_argument("--json", type=Path, default=None, help="write all figures there")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and load, to test the script")
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
        args.json.write_text(json.dumps(figures | {"points": [to_json(point) for point in figures["points"]]}))


if __name__ == "__main__":
    main()
