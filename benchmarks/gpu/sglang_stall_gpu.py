"""SGLang on one GPU under the stall load: its default, fixed chunks with and without mixing, and latency targets.

All on one engine in one process, as `vllm_stall_gpu.py` does with vLLM. Then greedy answers under the target are
compared with SGLang's own; a fixed chunk shows how many differ by rounding alone. Needs SGLang with CUDA.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from mode_file import MODE_VARIABLE  # noqa: E402
from stall_bench import StallBench, environment, make_parser, report, write_model  # noqa: E402
from switchable_sglang import write_entry_point  # noqa: E402

from evenflow.bench.endpoints import Answer, Ask  # noqa: E402

PLAIN = "default"
MODES = "target:50ms,default,fixed:1024,target:25ms,unmixed:1024,fixed:512,target:50ms,unmixed:512,target:25ms"
ANSWER_TOKENS = 32
# More than a run takes. SGLang reserves memory for all of them where the end of text is ignored.
CHAT_TOKENS = 6000


class Bench(StallBench):
    """SGLang's engine, with the plug-in of `switchable_sglang`."""

    async def generate(self, ask: Ask, answer: Answer) -> None:
        self._num_requests += 1
        request_id = f"request-{self._num_requests}-"  # SGLang aborts every request whose id begins with the one given
        num_tokens = 0
        try:
            async for output in await self._send(ask, stream=True, rid=request_id):
                new = output["meta_info"]["completion_tokens"] - num_tokens
                num_tokens += new
                answer.add_piece("", new)
        finally:  # for a client that left
            self.engine.tokenizer_manager.abort_request(request_id)

    def _send(self, ask: Ask, **more: Any) -> Awaitable[Any]:
        sampling = {"max_new_tokens": ask.max_tokens, "ignore_eos": True, "temperature": 0.0}
        sent: Awaitable[Any] = self.engine.async_generate(input_ids=list(ask.prompt), sampling_params=sampling, **more)
        return sent

    async def compare_answers(self, modes: Sequence[str]) -> dict[str, int]:
        """How many greedy answers of each mode equal those of the first, of prompts sent one by one."""
        answers: dict[str, list[Any]] = {}
        for mode in modes:
            self._switch(mode)
            for prompt in (*self.load.chat_prompts[:8], *(long[:2000] for long in self.load.long_prompts)):
                output = await self._send(Ask(prompt, ANSWER_TOKENS))
                answers.setdefault(mode, []).append(output["output_ids"])
        expected = answers[modes[0]]
        same = {mode: sum(map(lambda a, b: a == b, found, expected)) for mode, found in answers.items()}
        print(f"equal answers of {len(expected)}: {same}", flush=True)
        return same


async def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    import sglang

    load = write_model(folder, args, CHAT_TOKENS)
    mode_path = Path(os.environ[MODE_VARIABLE])
    mode_path.write_text(PLAIN)
    started = time.perf_counter()
    settings: dict[str, Any] = {
        "attention_backend": "flashinfer",
        "sampling_backend": "pytorch",
        "mem_fraction_static": 0.85,
        "max_running_requests": 256,
        "context_length": 49152,
    }
    if args.tiny:
        settings = {"attention_backend": "torch_native", "device": "cpu", "chunked_prefill_size": 1024}
        settings |= {"max_total_tokens": 40_000, "max_running_requests": 8}
    engine = sglang.Engine(
        model_path=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        grammar_backend="none",
        disable_radix_cache=True,
        log_level="info",
        **settings,
    )
    print(f"ready after {time.perf_counter() - started:.0f} s", flush=True)
    bench, modes = Bench(engine, load, mode_path), args.modes.split(",")
    target = next((mode for mode in modes if mode.startswith("target:")), "target:50ms")
    same = await bench.compare_answers((PLAIN, target, "fixed:512"))
    return await bench.measure(modes, (modes[0], PLAIN), args.tiny) | {"equal_answers": same}


def main() -> None:
    args = make_parser(__doc__, MODES).parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_entry_point(folder / "packages")
        sys.path.insert(0, str(folder / "packages"))  # SGLang's processes get this one's search path
        os.environ |= environment(folder, HERE) | {"SGLANG_PLUGINS": "evenflow_bench"}
        figures = asyncio.run(measure(args, folder))
    report(figures, args.json)


if __name__ == "__main__":
    main()
