"""vLLM on one GPU under several loads: fixed budgets and latency targets, on one engine, in one process.

    python benchmarks/gpu/vllm_loads.py --graphs 2048 32k,65k=new+target:50ms,fixed:512,fixed:1024 random:7=target:50ms

Random weights, by default in the shape of Llama 3.1 8B. Nothing is warmed up and nothing is left out. `mode_file` says
which modes there are. Needs vLLM with CUDA; `--tiny` tests the script itself on any machine with vLLM.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from host_bench import (  # noqa: E402
    TINY_MODEL_LEN,
    HostBench,
    RunFigures,
    environment,
    make_parser,
    parse_for,
    planned_runs,
    table,
    write_model,
)
from mode_file import MODE_VARIABLE  # noqa: E402
from model_shapes import SHAPES  # noqa: E402
from record_vllm_steps import MAX_MODEL_LEN, capture_sizes  # noqa: E402

from evenflow.bench.endpoints import Answer, Ask  # noqa: E402
from evenflow.vllm.launch import VLLM  # noqa: E402

RUNS = ("32k,65k=new+target:50ms,new+target:25ms,kept+target:50ms,kept+target:25ms,fixed:512,fixed:1024,fixed:2048",)
PLAIN = "fixed:8192"


class Bench(HostBench):
    """vLLM's engine, with the scheduler of `switchable`."""

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
        prompt, request_id = {"prompt_token_ids": list(ask.prompt)}, f"request-{self._num_requests}"
        async for output in self.engine.generate(prompt, sampling, request_id):
            answer.add_piece("", len(output.outputs[0].token_ids))


async def measure(options: argparse.Namespace, folder: Path) -> list[RunFigures]:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.gc_utils import freeze_gc_heap
    from vllm.v1.engine.async_llm import AsyncLLM

    shape = SHAPES[options.model]
    config = write_model(folder, options.tiny, shape.config)
    mode_path = Path(os.environ[MODE_VARIABLE])
    mode_path.write_text(PLAIN)
    settings: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": MAX_MODEL_LEN, "max_num_batched_tokens": 8192}
    settings |= {"max_num_seqs": 256, "gpu_memory_utilization": 0.85} | shape.vllm
    if options.tiny:
        settings = {"dtype": "float32", "max_model_len": TINY_MODEL_LEN, "max_num_batched_tokens": 1024}
        settings |= {"max_num_seqs": 16, "gpu_memory_utilization": 0.2, "enforce_eager": True}
    if options.graphs:
        settings["compilation_config"] = {"cudagraph_capture_sizes": capture_sizes(options.graphs)}
    started = time.perf_counter()
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=str(folder),
            skip_tokenizer_init=True,
            load_format="dummy",
            enable_prefix_caching=False,
            scheduler_cls="switchable.Switchable",
            worker_cls="evenflow.vllm.WarmWorker",
            **settings,
        )
    )
    freeze_gc_heap()  # as vLLM's own server does: a collection of all it has imported would stop every stream
    print(f"ready after {time.perf_counter() - started:.0f} s", flush=True)
    return await Bench(engine, mode_path, config["vocab_size"]).measure(
        planned_runs(options.runs, options.tiny), options.steps
    )


def main() -> None:
    parser = make_parser(__doc__, RUNS)
    parser.add_argument("--model", choices=SHAPES, default="llama-8b", help="random weights of this shape")
    parser.add_argument("--graphs", type=int, default=0, help="capture graphs up to this many rows (default: vLLM's)")
    options = parse_for(parser, VLLM)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ |= environment(folder, HERE)
        figures = asyncio.run(measure(options, folder))
    print(table(figures))


if __name__ == "__main__":
    main()
