"""Record every step that vLLM runs on one GPU under random loads, with token budgets that vary at random.

    python benchmarks/gpu/record_vllm_steps.py --out steps.jsonl.gz --seconds 560 [--graphs 2048]

Random weights, by default in the shape of Llama 3.1 8B: `--model` names another of `model_shapes`. Each load's steps
are appended to the file as soon as it has ended: `step_recording.read_recording` reads them, to fit a model of step
times and judge it on loads that it was not fitted on. The first load runs right after the start and is marked cold.
Needs vLLM with CUDA.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from model_shapes import SHAPES  # noqa: E402
from random_loads import Client, Load, random_load  # noqa: E402
from step_recording import VERSION, append_line, decode_steps  # noqa: E402

from evenflow.vllm.graphs import CAPTURE_SIZES  # noqa: E402

MAX_MODEL_LEN = 70_000
SECONDS_TO_DRAIN = 40.0  # a request cancelled while it was being sent runs to its end


class Recorder:
    """One engine, the clients of a load at a time, and the file of its steps."""

    def __init__(self, engine: Any, path: Path) -> None:
        self._engine, self._path = engine, path
        self._num_requests = 0
        self._token_ids = [i * 7919 % 100_000 + 8 for i in range(MAX_MODEL_LEN)]

    async def write_header(self, settings: dict[str, Any]) -> None:
        (described,) = await self._engine.collective_rpc("describe_recording")
        append_line(self._path, {"version": VERSION, "settings": settings} | json.loads(described))

    async def record(self, load: Load, is_cold: bool) -> str:
        """Run the load, append its steps to the file and return a line on them."""
        await self._engine.collective_rpc("begin_load", args=(load.seed,))
        await self._run(load)
        content = json.loads(await self._end_load())
        append_line(self._path, {"seed": load.seed, "is_cold": is_cold, "load": asdict(load)} | content)
        steps = decode_steps(content["columns"])
        rows = sum(step.num_rows for step in steps)
        median_us = statistics.median([step.gpu_end_us - step.gpu_begin_us for step in steps] or [0])
        return (
            f"seed {load.seed}: {len(load.chats)} chats, {len(load.long_prompts)} long ({load.arrivals}), "
            f"{len(steps)} steps, {rows / load.seconds:.0f} rows/s, median step {median_us / 1000:.2f} ms, "
            f"{content['num_preempted']} preempted"
        )

    async def _end_load(self) -> str:
        deadline = time.perf_counter() + SECONDS_TO_DRAIN
        while time.perf_counter() < deadline:
            (content,) = await self._engine.collective_rpc("end_load")
            if content is not None:
                return str(content)
            await asyncio.sleep(0.05)
        raise TimeoutError(f"vLLM still had requests {SECONDS_TO_DRAIN:g} s after they were aborted")

    async def _run(self, load: Load) -> None:
        tasks = [asyncio.create_task(self._serve(client)) for client in (*load.chats, *load.long_prompts)]
        await asyncio.sleep(load.seconds)
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):  # cancellation is none
                raise result

    async def _serve(self, client: Client) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        await asyncio.sleep(client.start_s)
        for turn in itertools.cycle(client.turns) if client.repeats else client.turns:
            self._num_requests += 1
            sampling = SamplingParams(
                max_tokens=turn.output_tokens,
                ignore_eos=True,
                temperature=0.0,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            prompt = {"prompt_token_ids": self._token_ids[: turn.prompt_tokens]}
            async for _ in self._engine.generate(prompt, sampling, f"request-{self._num_requests}"):
                pass
            await asyncio.sleep(client.pause_s)


def capture_sizes(largest: int) -> list[int]:
    return [size for size in CAPTURE_SIZES if size <= largest]


async def record(args: argparse.Namespace, folder: Path) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    started = time.perf_counter()
    shape = SHAPES[args.model]
    (folder / "config.json").write_text(json.dumps(shape.config))
    options: dict[str, Any] = {
        "dtype": "bfloat16",
        "max_model_len": MAX_MODEL_LEN,
        "max_num_batched_tokens": 8192,
        "max_num_seqs": 256,
        "enable_prefix_caching": False,
        "gpu_memory_utilization": 0.85,
        **shape.vllm,
    }
    if args.graphs:
        options["compilation_config"] = {"cudagraph_capture_sizes": capture_sizes(args.graphs)}
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=str(folder),
            skip_tokenizer_init=True,
            load_format="dummy",
            scheduler_cls="vllm_recording.RecordingScheduler",
            worker_cls="vllm_recording.RecordingWorker",
            **options,
        )
    )
    recorder = Recorder(engine, args.out)
    await recorder.write_header(
        {"model": args.model} | options | {"seconds_to_start": round(time.perf_counter() - started, 1)}
    )
    print(f"ready after {time.perf_counter() - started:.0f} s", flush=True)
    seed = args.first_seed
    while time.perf_counter() - started + args.seconds_per_load + 5.0 < args.seconds:
        line = await recorder.record(random_load(seed, args.seconds_per_load), is_cold=seed == args.first_seed)
        size_kb = args.out.stat().st_size / 1000
        print(f"{time.perf_counter() - started:.0f} s, {size_kb:.0f} kB: {line}", flush=True)
        seed += 1
    engine.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the recording, *.jsonl.gz; must not exist")
    parser.add_argument("--model", choices=SHAPES, default="llama-8b")
    parser.add_argument("--seconds", type=float, default=560.0, help="in all, vLLM's start included")
    parser.add_argument("--seconds-per-load", type=float, default=12.0)
    parser.add_argument("--first-seed", type=int, default=1, help="of the loads; each further one has the next")
    parser.add_argument("--graphs", type=int, default=0, help="capture graphs up to this many rows (default: vLLM's)")
    args = parser.parse_args()
    if args.out.exists():
        parser.error(f"{args.out} exists: give another path or remove it")
    # vLLM's engine process imports the scheduler and the worker by name.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as name:
        asyncio.run(record(args, Path(name)))


if __name__ == "__main__":
    main()
