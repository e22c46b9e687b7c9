"""`evenflow serve` on one GPU, over HTTP, before vLLM or its own engine: its start, its warm-up, and loads on it.

    python benchmarks/gpu/serve_loads.py 32k,65k=target:50ms restart 32k=target:25ms agents=default,target:50ms

Random weights in the shape of Llama 3.1 8B, and a tokenizer with a word for each token. `restart` starts the server
again, with what the first one has stored. Modes are set by `PUT /v1/target`; `default` takes the target back, and
vLLM's own budget counts. `agents` is the load of `evenflow bench agents`; `claims=FILE` writes figures for
`claims/measure.py`. Needs vLLM with CUDA; `--tiny` tests the script on any machine with vLLM. `--engine evenflow` needs
no vLLM: beside the loads of `engine.py` it shows what the server costs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "claims")]

import httpx  # noqa: E402
import server_runs  # noqa: E402
from host_bench import (  # noqa: E402
    TINY_MODEL_LEN,
    RunFigures,
    line_of,
    planned_runs,
    run_argument,
    table,
    target_of,
    write_model,
)
from load_client import LoadRun  # noqa: E402
from named_loads import NAMES, NamedLoad  # noqa: E402
from outcomes import outcome_of  # noqa: E402
from record_vllm_steps import MAX_MODEL_LEN  # noqa: E402

from evenflow.bench.agents import AgentFigures, compare  # noqa: E402
from evenflow.bench.agents_load import AgentsLoad  # noqa: E402
from evenflow.bench.endpoints import HttpEndpoint  # noqa: E402

RUNS = ("32k,65k=target:50ms", "restart", "32k,65k=target:50ms,target:25ms", "60k=default,target:50ms")
START_S = 400.0
_PYTHON = sys.executable
_AGENTS = AgentsLoad(
    num_agents=16,
    prefix_tokens=16_000,
    turn_tokens=500,
    answer_tokens=60,
    think_s=0.5,
    num_misses=4,
    miss_tokens=50_000,
    miss_pause_s=1.0,
)
_AGENTS_OF_TINY = replace(_AGENTS, num_agents=2, num_misses=1).scaled(1 / 16)


class Server:
    """The command in a process of its own, and what it logs."""

    def __init__(self, model: Path, options: argparse.Namespace) -> None:
        self.url = f"http://127.0.0.1:{options.port}"
        self.log: list[str] = []
        length = TINY_MODEL_LEN if options.tiny else MAX_MODEL_LEN
        command = [_PYTHON, "-m", "evenflow", "serve", "--engine", options.engine, "--model", str(model)]
        command += ["--port", str(options.port), "--tbt-target", "50ms", "--max-model-len", str(length)]
        if options.engine == "evenflow":
            command += ["--load-format", "dummy", "--enable-prefix-caching", "false", *options.flag]
            command += ["--gpu-memory-utilization", "0.85"]
        else:
            command += ["--", "--load-format", "dummy", "--enable-prompt-tokens-details", *options.flag]
        self._started = time.perf_counter()
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        threading.Thread(target=self._read_log, daemon=True).start()

    def _read_log(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.log.append(line.rstrip())
            if "arm" in line or "infeasible" in line or "rror" in line:
                print(f"{time.perf_counter() - self._started:5.1f} s log: {line.rstrip()[-160:]}", flush=True)

    def wait_until_ready(self) -> None:
        deadline = time.perf_counter() + START_S
        while time.perf_counter() < deadline and self._process.poll() is None:
            try:
                if httpx.get(f"{self.url}/ready").is_success:
                    print(f"ready after {time.perf_counter() - self._started:.0f} s", flush=True)
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.2)
        raise SystemExit("\n".join([*self.log[-40:], "the server did not become ready"]))

    def set_mode(self, mode: str) -> None:
        seconds = target_of(mode)
        target = None if seconds is None else f"{1000 * seconds:g}ms"
        httpx.put(f"{self.url}/v1/target", json={"tbt_target": target}).raise_for_status()

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()


class SwitchedEndpoint(HttpEndpoint):
    """One side of a comparison on one server: its rounds run under its mode."""

    server: Server
    mode: str

    async def begin_round(self) -> None:
        await asyncio.to_thread(self.server.set_mode, self.mode)


@contextmanager
def running(model: Path, options: argparse.Namespace) -> Iterator[Server]:
    server = Server(model, options)
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.stop()


async def run_load(server: Server, mode: str, load: NamedLoad, vocab_size: int) -> RunFigures:
    server.set_mode(mode)
    endpoint = HttpEndpoint(server.url)
    async with endpoint.open():
        run = LoadRun(endpoint.stream, load, vocab_size)
        streams = await run.run()
    figures = RunFigures.of(load.name, mode, outcome_of(streams, [], run.seconds))
    print(line_of(figures), flush=True)
    return figures


async def run_agents(server: Server, modes: list[str], is_tiny: bool) -> None:
    sides = []
    for mode in modes:
        side = SwitchedEndpoint(server.url)
        side.server, side.mode = server, mode
        sides.append(side)
    load = _AGENTS_OF_TINY if is_tiny else replace(_AGENTS, seed=random.randrange(10**6))
    print(f"agents, seed {load.seed}", flush=True)
    compared = await compare(sides, load, scale=None, repeat=1)
    for mode, found in zip(modes, compared.figures, strict=True):
        print(f"agents, {mode}: {agents_line(found)}", flush=True)


def agents_line(found: AgentFigures) -> str:
    beside, miss, gaps = found.turn_ttft_beside_miss_s, found.miss_ttft_s, found.gap_beside_miss_s
    return (
        f"{beside.count} turns beside a miss: TTFT p50 {beside.p50:.3f} p99 {beside.p99:.3f} s, misses' TTFT p50 "
        f"{miss.p50:.2f} max {miss.max:.2f} s, gaps beside a miss p99 {1000 * gaps.p99:.0f} ms, all turns' TTFT p50 "
        f"{found.turn_ttft_s.p50:.3f} s, {found.requests_per_s:.2f} requests/s, errors {len(found.errors)}"
    )


async def run_claims(server: Server, path: Path) -> None:
    endpoint = HttpEndpoint(server.url)

    async def switch(mode: str) -> None:
        await asyncio.to_thread(server.set_mode, mode)

    async with endpoint.open():
        found = await server_runs.experiments(endpoint, switch, server.log)
    path.write_text(json.dumps(found, indent=1))
    print(json.dumps(found), flush=True)


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """One word a token, so that every token of an answer is visible."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({f"w{number}": number for number in range(vocab_size)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0", "eos_token": "w2", "bos_token": "w1"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def measure(options: argparse.Namespace, folder: Path) -> list[RunFigures]:
    model = folder / "model"
    model.mkdir()
    vocab_size = write_model(model, options.tiny)["vocab_size"]
    if options.engine != "evenflow":  # which makes one like it
        write_tokenizer(model, vocab_size)
    figures: list[RunFigures] = []
    for runs in _by_start(options.runs):
        with running(model, options) as server:
            for given in runs:
                name, _, modes = given.partition("=")
                if name == "agents":
                    asyncio.run(run_agents(server, modes.split(","), options.tiny))
                elif name == "claims":
                    asyncio.run(run_claims(server, Path(modes)))
                else:
                    for load, mode in planned_runs([given], options.tiny):
                        figures.append(asyncio.run(run_load(server, mode, load, vocab_size)))
    return figures


def _run_argument(text: str) -> str:
    is_own = text == "restart" or text.partition("=")[0] in ("agents", "claims")
    return text if is_own else run_argument(text)


def _by_start(runs: list[str]) -> list[list[str]]:
    starts: list[list[str]] = [[]]
    for run in runs:
        if run == "restart":
            starts.append([])
        else:
            starts[-1].append(run)
    return starts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "runs", type=_run_argument, nargs="*", default=RUNS, help=f"LOAD,...=MODE,...; loads: {NAMES}, agents"
    )
    parser.add_argument("--port", type=int, default=8231)
    parser.add_argument("--engine", choices=["vllm", "evenflow"], default="vllm")
    parser.add_argument("--flag", action="append", default=[], help="passed to the engine; give it as --flag=--X")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and tiny loads, to test the script")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["EVENFLOW_CACHE"] = str(folder / "cache")
        print(table(measure(options, folder)))


if __name__ == "__main__":
    main()
