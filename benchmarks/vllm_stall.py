"""vLLM's server under the stall load over HTTP: its default, fixed budgets, and evenflow's latency targets.

Each setting gets a server of its own, one after the other, with the same requests. Needs a Python that has vLLM, where
evenflow need not be installed, and a Hugging Face folder of the model.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import httpx
from tokenizers import Tokenizer

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from stall_curve import StallPoint, pending_gaps, summarise, table  # noqa: E402

from evenflow.bench.stall_load import Prompts, english_prompts  # noqa: E402
from evenflow.core.policies import PolicySpec  # noqa: E402

SETTINGS = "default,fixed:128,fixed:512,target:400ms,target:800ms"
SECONDS_TO_START = 600


@dataclass(slots=True)
class Seen:
    """What the clients of one server saw; times of time.perf_counter."""

    chat_times: list[list[float]] = field(default_factory=list)
    long_spans: list[tuple[float, float]] = field(default_factory=list)
    long_answers: list[str] = field(default_factory=list)


@contextmanager
def server(args: argparse.Namespace, setting: str, log: IO[bytes]) -> Iterator[str]:
    """vLLM's server under a setting, once it answers."""
    command = [args.vllm_python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(args.model)]
    command += ["--served-model-name", "model", "--port", str(args.port), "--dtype", "float32"]
    command += ["--no-enable-prefix-caching", "--max-model-len", "4096"]
    python_path = os.pathsep.join(filter(None, [str(HERE.parent / "src"), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": python_path, "VLLM_CPU_KVCACHE_SPACE": "2"}
    kind, _, value = setting.partition(":")
    if kind == "fixed":
        command += ["--max-num-batched-tokens", value, "--max-num-seqs", str(min(128, int(value)))]
    elif kind == "target":
        command += ["--scheduler-cls", "evenflow.vllm.LatencyTargetScheduler"]
        environment["EVENFLOW_TBT_TARGET"] = value
    process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
    url = f"http://127.0.0.1:{args.port}"
    try:
        _wait_until_healthy(process, url)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait_until_healthy(process: subprocess.Popen[bytes], url: str) -> None:
    for _ in range(SECONDS_TO_START):
        if process.poll() is not None:
            raise SystemExit(f"vLLM ended with {process.returncode} before it answered; see its log")
        try:
            if httpx.get(f"{url}/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(1)
    raise SystemExit(f"vLLM did not answer within {SECONDS_TO_START} s; see its log")


async def complete(client: httpx.AsyncClient, prompt: list[int], max_tokens: int, moments: list[float]) -> str:
    """One streamed completion: its text, and the time of each of its tokens."""
    body = {"model": "model", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    text = ""
    async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                moments.append(time.perf_counter())
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
    return text


async def run(url: str, prompts: Prompts, args: argparse.Namespace) -> tuple[Seen, float]:
    """The load, once: chats are replaced as they end, until the last long prompt has its answer."""
    seen = Seen()
    async with httpx.AsyncClient(base_url=url, timeout=None) as client:
        await complete(client, prompts.long[0], 2, [])  # what is compiled on first use is not what is measured

        async def chat(number: int) -> None:
            while True:
                moments: list[float] = []
                seen.chat_times.append(moments)
                await complete(client, prompts.chats[number % len(prompts.chats)], 200 + 7 * number, moments)

        async def long(number: int) -> str:
            await asyncio.sleep(number * args.interval)
            start, moments = time.perf_counter(), list[float]()
            span = len(seen.long_spans)
            seen.long_spans.append((start, float("inf")))
            answer = await complete(client, prompts.long[number], 16, moments)
            seen.long_spans[span] = (start, moments[0])
            return answer

        chats = [asyncio.create_task(chat(number)) for number in range(args.chats)]
        while len(seen.chat_times) < args.chats or any(len(moments) < 4 for moments in seen.chat_times):
            await asyncio.sleep(0.02)
        began = time.perf_counter()
        seen.long_answers = list(await asyncio.gather(*(long(number) for number in range(len(prompts.long)))))
        total = time.perf_counter() - began
        for task in chats:
            task.cancel()
        await asyncio.gather(*chats, return_exceptions=True)
    return seen, total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm-python", required=True, help="a Python that has vLLM")
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face folder, such as cpu_peers.py makes")
    parser.add_argument("--settings", default=SETTINGS)
    parser.add_argument("--chats", type=int, default=6)
    parser.add_argument("--long-prompts", type=int, default=4)
    parser.add_argument("--long-tokens", type=int, default=3000)
    parser.add_argument("--interval", type=float, default=25.0, help="seconds between long prompts")
    parser.add_argument("--port", type=int, default=8811)
    parser.add_argument("--log", type=Path, default=Path(os.devnull), help="what the servers say")
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    prompts = english_prompts(
        lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids), args.long_prompts, args.long_tokens
    )
    points: list[StallPoint] = []
    answers: dict[str, list[str]] = {}
    with args.log.open("wb") as log:
        for setting in args.settings.split(","):
            with server(args, setting, log) as url:
                seen, total = asyncio.run(run(url, prompts, args))
            target = (
                None if setting == "default" else PolicySpec.parse(setting).target
            )  # "default" is no policy of ours
            ttfts = [end - start for start, end in seen.long_spans]
            points.append(summarise(setting, target, pending_gaps(seen.chat_times, seen.long_spans), ttfts, total))
            answers[setting] = seen.long_answers
            print(points[-1], flush=True)
    print(table(points))
    first = next(iter(answers.values()))
    same = {setting: sum(a == b for a, b in zip(texts, first, strict=True)) for setting, texts in answers.items()}
    print(f"long answers equal to the first setting's, of {len(first)}: {same}")
    if args.json is not None:
        report: dict[str, Any] = {"points": [asdict(point) for point in points], "answers": answers}
        args.json.write_text(json.dumps(report))


if __name__ == "__main__":
    main()
