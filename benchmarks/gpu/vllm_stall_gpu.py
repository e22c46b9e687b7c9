"""vLLM on one GPU under the stall load: fixed budgets and latency targets, on one engine, in one process.

Random weights in the shape of Llama 3.1 8B. Each mode serves chats and long prompts; then the chats decode alone,
without steering and with it in turn. Needs vLLM with CUDA; `--tiny` tests the script itself on any machine with vLLM.
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

from mode_file import MODE_VARIABLE  # noqa: E402
from stall_bench import StallBench, environment, make_parser, report, write_model  # noqa: E402

from evenflow.bench.endpoints import Answer, Ask  # noqa: E402

MODES = "target:50ms,fixed:512,target:25ms,fixed:1024,target:50ms,fixed:2048,target:25ms,fixed:256,fixed:8192"
PLAIN = "fixed:8192"
CHAT_TOKENS = 30_000  # more than a run takes


class Bench(StallBench):
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
        prompt, request_id = {"prompt_token_ids": ask.prompt}, f"request-{self._num_requests}"
        async for output in self.engine.generate(prompt, sampling, request_id):
            answer.add_piece("", len(output.outputs[0].token_ids))


async def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    load = write_model(folder, args, CHAT_TOKENS)
    mode_path = Path(os.environ[MODE_VARIABLE])
    mode_path.write_text(PLAIN)
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
    print(f"ready after {time.perf_counter() - started:.0f} s", flush=True)
    modes = args.modes.split(",")
    return await Bench(engine, load, mode_path).measure(modes, (modes[0], PLAIN), args.tiny)


def main() -> None:
    args = make_parser(__doc__, MODES).parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ |= environment(folder, HERE)
        figures = asyncio.run(measure(args, folder))
    report(figures, args.json)


if __name__ == "__main__":
    main()
