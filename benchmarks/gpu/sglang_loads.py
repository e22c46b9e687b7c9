"""SGLang on one GPU under several loads: its default, fixed chunks with and without mixing, and latency targets.

All on one engine in one process, as `vllm_loads.py` does with vLLM. First, greedy answers under the target are compared
with SGLang's own; a fixed chunk shows how many differ by rounding alone. Needs SGLang with CUDA.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import tempfile
import time
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from host_bench import (  # noqa: E402
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
from record_vllm_steps import MAX_MODEL_LEN  # noqa: E402
from switchable_sglang import write_entry_point  # noqa: E402

from evenflow.bench.endpoints import Answer, Ask  # noqa: E402
from evenflow.sglang.launch import SGLANG  # noqa: E402

PLAIN = "default"
RUNS = ("32k,65k=new+target:50ms,new+target:25ms,default,fixed:512,fixed:1024,unmixed:512,unmixed:1024",)
ANSWER_TOKENS = 32
_PROMPTS_TO_COMPARE = (*[1024] * 8, *[2000] * 6, 9000, 12_000)


class Bench(HostBench):
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
        """How many greedy answers of each mode equal those of the first, of prompts that run beside each other."""
        drawn = random.Random(0)
        prompts = [drawn.choices(range(100, self._vocab_size - 100), k=length) for length in _PROMPTS_TO_COMPARE]
        answers: dict[str, list[Any]] = {}
        for mode in modes:
            await self.switch(mode)
            outputs = await asyncio.gather(*(self._send(Ask(prompt, ANSWER_TOKENS)) for prompt in prompts))
            answers[mode] = [output["output_ids"] for output in outputs]
        expected = answers[modes[0]]
        same = {mode: sum(map(lambda a, b: a == b, found, expected)) for mode, found in answers.items()}
        print(f"equal answers of {len(expected)}: {same}", flush=True)
        return same


def start_engine(folder: Path, attention: str, is_tiny: bool) -> tuple[Any, dict[str, Any]]:
    """SGLang's engine with random weights, and the model's configuration."""
    import sglang

    config = write_model(folder, is_tiny)
    settings: dict[str, Any] = {
        "attention_backend": attention,
        "sampling_backend": "pytorch",
        "mem_fraction_static": 0.85,
        "max_running_requests": 256,
        "context_length": MAX_MODEL_LEN,
    }
    if is_tiny:
        settings = {"attention_backend": "torch_native", "device": "cpu", "chunked_prefill_size": 1024}
        settings |= {"max_total_tokens": 40_000, "max_running_requests": 8}
    started = time.perf_counter()
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
    return engine, config


async def measure(options: argparse.Namespace, folder: Path) -> list[RunFigures]:
    mode_path = Path(os.environ[MODE_VARIABLE])
    mode_path.write_text(PLAIN)
    engine, config = start_engine(folder, options.attention, options.tiny)
    bench = Bench(engine, mode_path, config["vocab_size"])
    if options.compare:
        await bench.compare_answers((PLAIN, "target:50ms", "fixed:512"))
    await engine.tokenizer_manager.freeze_gc()  # as `evenflow serve` has SGLang do
    return await bench.measure(planned_runs(options.runs, options.tiny), options.steps)


def main() -> None:
    parser = make_parser(__doc__, RUNS)
    parser.add_argument("--no-compare", dest="compare", action="store_false", help="leave out the answers")
    parser.add_argument("--attention", default="flashinfer", help="SGLang's --attention-backend")
    options = parse_for(parser, SGLANG)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_entry_point(folder / "packages")
        sys.path.insert(0, str(folder / "packages"))  # SGLang's processes get this one's search path
        os.environ |= environment(folder, HERE) | {"SGLANG_PLUGINS": "evenflow_bench"}
        figures = asyncio.run(measure(options, folder))
    print(table(figures))


if __name__ == "__main__":
    main()
