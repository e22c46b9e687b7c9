"""vLLM's server under the stall load over HTTP: its default, fixed budgets, and evenflow's latency targets.

Starts one server per setting, in turn, and sends each the same requests. Needs a Python with vLLM (evenflow need not be
installed there) and a Hugging Face folder of the model.
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
from pathlib import Path
from typing import IO

import httpx
from tokenizers import Tokenizer

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from stall_client import run_clients  # noqa: E402
from stall_curve import table, to_json  # noqa: E402

from evenflow.bench.endpoints import Answer, Ask, HttpEndpoint  # noqa: E402
from evenflow.bench.stall_load import StallLoad, english_prompts  # noqa: E402
from evenflow.bench.stall_run import ClientFigures, StallRun  # noqa: E402
from evenflow.core.policies import PolicySpec  # noqa: E402

SETTINGS = "default,fixed:128,fixed:512,target:400ms,target:800ms"
SECONDS_TO_START = 600


@contextmanager
def server(args: argparse.Namespace, setting: str, log: IO[bytes]) -> Iterator[str]:
    """Run vLLM's server under a setting; yields its address once it answers."""
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
            raise SystemExit(f"vLLM exited with status {process.returncode} before it answered; see --log")
        try:
            if httpx.get(f"{url}/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(1)
    raise SystemExit(f"vLLM did not answer within {SECONDS_TO_START} s; see --log")


async def run(url: str, load: StallLoad) -> StallRun:
    endpoint = HttpEndpoint(url)
    async with endpoint.open():
        await endpoint.stream(Ask(load.long_prompts[0], 2), Answer())  # compiles what is compiled on first use
        return await run_clients(endpoint.stream, load)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm-python", required=True, help="a Python with vLLM")
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face folder, such as cpu_peers.py makes")
    parser.add_argument("--settings", default=SETTINGS)
    parser.add_argument("--chats", type=int, default=6)
    parser.add_argument("--long-prompts", type=int, default=4)
    parser.add_argument("--long-tokens", type=int, default=3000)
    parser.add_argument("--interval", type=float, default=25.0, help="seconds between long prompts")
    parser.add_argument("--port", type=int, default=8811)
    parser.add_argument("--log", type=Path, default=Path(os.devnull), help="write the servers' output there")
    parser.add_argument("--json", type=Path, default=None, help="write all figures and answers there")
    args = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    prompts = english_prompts(
        lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids), args.long_prompts, args.long_tokens
    )
    load = StallLoad(args.chats, prompts.chats, 200, prompts.long, 16, args.interval)
    points: list[ClientFigures] = []
    answers: dict[str, list[str]] = {}
    with args.log.open("wb") as log:
        for setting in args.settings.split(","):
            with server(args, setting, log) as url:
                seen = asyncio.run(run(url, load))
            target_s = None if setting == "default" else PolicySpec.parse(setting).target
            points.append(ClientFigures.of(setting, target_s, [seen]))
            answers[setting] = seen.long_answers
            print(points[-1], flush=True)
    print(table(points))
    first = next(iter(answers.values()))
    same = {setting: sum(a == b for a, b in zip(texts, first, strict=True)) for setting, texts in answers.items()}
    print(f"long answers equal to the first setting's, of {len(first)}: {same}")
    if args.json is not None:
        args.json.write_text(json.dumps({"points": [to_json(point) for point in points], "answers": answers}))


if __name__ == "__main__":
    main()
