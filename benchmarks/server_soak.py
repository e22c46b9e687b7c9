"""A soak test of the server: a steady load for minutes, then clients that misbehave; nothing may be lost or leak.

    python benchmarks/server_soak.py --model PATH [--streams 200] [--minutes 10] [--requests 5000]

First a constant number of streams: every answer must have the requested length. Prints the longest wait of any stream
and the memory of the server's processes. Then requests that mostly go wrong: clients disconnect before, during and
after the answer, or send invalid requests. At the end every request must be accounted for and every block free.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import httpx

_SAMPLE_S = 5.0
_WARM_UP = 0.2  # of the run, while pools and caches fill; then memory is compared
_MAX_PROMPT, _MAX_ANSWER = 150, 100
_MAX_GROWTH = 0.02  # of a process's memory over the rest of the run
_NUM_KV_BLOCKS_SPARE = 2


@dataclass
class Load:
    """Results of the streams."""

    num_answers: int = 0
    num_tokens: int = 0
    waits: list[float] = field(default_factory=list)  # the longest wait for an event, of each stream
    failures: list[str] = field(default_factory=list)


@dataclass
class Memory:
    """Resident bytes of the front and of its child processes together, over time."""

    times: list[float] = field(default_factory=list)
    front: list[int] = field(default_factory=list)
    children: list[int] = field(default_factory=list)

    def sample(self, pid: int) -> None:
        listed = subprocess.run(["ps", "-axo", "pid=,ppid=,rss="], capture_output=True, text=True, check=True).stdout
        rows = [tuple(map(int, line.split())) for line in listed.splitlines()]
        self.times.append(time.monotonic())
        self.front.append(sum(1024 * rss for own, _, rss in rows if own == pid))
        self.children.append(sum(1024 * rss for _, parent, rss in rows if parent == pid))


# ---- the server and its metrics ----


class Served(NamedTuple):
    """A server that runs."""

    pid: int
    address: str
    log: Path  # its own


@contextmanager
def running_server(model: str, kv_cache_memory: str, *more: str) -> Iterator[Served]:
    """Run `evenflow serve`, with more options."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        program = Path(sys.executable).with_name("evenflow")
        options = ["--model", model, "--port", "0", "--kv-cache-memory", kv_cache_memory, *more]
        with log.open("wb") as output:
            process = subprocess.Popen([str(program), "serve", *options], stdout=output, stderr=subprocess.STDOUT)
        try:
            while not (found := re.search(r"at (http://[\d.]+:\d+)/v1", log.read_text())):
                if process.poll() is not None:
                    sys.exit(f"the server did not start:\n{log.read_text()}")
                time.sleep(0.1)
            yield Served(process.pid, found[1], log)
        finally:
            process.terminate()
            process.wait(60)
            if "Traceback" in log.read_text():
                print(f"FAILED the server's log:\n{log.read_text()[-3000:]}")


def figures(address: str) -> dict[str, float]:
    """Metrics by name, summed over their labels."""
    found: defaultdict[str, float] = defaultdict(float)
    for line in httpx.get(f"{address}/metrics").text.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            found[name.partition("{")[0]] += float(value)
            if reason := re.search(r'finished_reason="(\w+)"', name):
                found[f"{name.partition('{')[0]}:{reason[1]}"] += float(value)
    return dict(found)


# ---- one request ----


@asynccontextmanager
async def events_of(address: str, body: dict[str, Any]) -> AsyncIterator[AsyncIterator[bytes]]:
    """The lines of an answer. Leaving the context closes the connection."""
    host, _, port = address.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(content)}\r\nConnection: close\r\n"
    writer.write(head.encode() + b"Content-Type: application/json\r\n\r\n" + content)

    async def lines() -> AsyncIterator[bytes]:
        while line := await reader.readline():
            yield line

    try:
        yield lines()
    finally:
        writer.close()


def random_body(source: random.Random) -> dict[str, Any]:
    prompt = [source.randrange(3, 500) for _ in range(source.randint(4, _MAX_PROMPT))]
    num_tokens = source.randint(10, _MAX_ANSWER)
    return {
        "prompt": prompt,
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "seed": source.randrange(1000),
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def read_whole(address: str, body: dict[str, Any], load: Load) -> None:
    """Read one stream to its end."""
    last, longest, usage = time.monotonic(), 0.0, None
    async with events_of(address, body) as lines:
        async for line in lines:
            if line.startswith(b"data: "):
                now = time.monotonic()
                longest, last = max(longest, now - last), now
                if b'"choices":[]' in line:
                    usage = json.loads(line[6:])["usage"]
            if line.startswith(b"data: [DONE]"):
                break
    if usage is None or usage["completion_tokens"] != body["max_tokens"]:
        load.failures.append(f"expected {body['max_tokens']} tokens, got {usage}")
        return
    load.num_answers += 1
    load.num_tokens += usage["completion_tokens"]
    load.waits.append(longest)


# ---- the two loads ----


async def keep_busy(address: str, pid: int, num_streams: int, minutes: float) -> tuple[Load, Memory]:
    """Keep `num_streams` streams open."""
    load, memory = Load(), Memory()
    end = time.monotonic() + 60 * minutes

    async def stream(number: int) -> None:
        source = random.Random(number)
        while time.monotonic() < end:
            await read_whole(address, random_body(source), load)

    async def watch() -> None:
        while time.monotonic() < end:
            await asyncio.to_thread(memory.sample, pid)
            await asyncio.sleep(_SAMPLE_S)

    await asyncio.gather(watch(), *(stream(number) for number in range(num_streams)))
    return load, memory


async def misbehave(address: str, num_requests: int, concurrency: int) -> Counter[str]:
    """Requests whose clients disconnect, give up or send invalid requests; counts how each ended."""
    source, ended, places = random.Random(1), Counter[str](), asyncio.Semaphore(concurrency)

    async def one() -> None:
        async with places:
            ended[await _one_request(address, source)] += 1

    await asyncio.gather(*(one() for _ in range(num_requests)))
    return ended


async def _one_request(address: str, source: random.Random) -> str:
    body = random_body(source)
    way = source.choice(["whole", "leaves", "leaves", "leaves at once", "gives up", "is refused", "several"])
    if way == "whole":
        load = Load()
        await read_whole(address, body, load)
        return "lost" if load.failures else way
    if way == "is refused":
        body |= source.choice([{"n": 0}, {"prompt": [10**6]}, {"max_tokens": 10**6}, {"model": "none"}])
    if way == "several":
        body |= {"n": 3, "max_tokens": 10}
    num_events = source.randint(1, body["max_tokens"])
    limit_s = source.uniform(0.001, 0.3) if way == "gives up" else None
    async with events_of(address, body) as lines:
        if way == "leaves at once":
            return way
        try:
            async with asyncio.timeout(limit_s):
                async for line in lines:
                    if way == "is refused":
                        return way if b" 40" in line else "wrongly taken"
                    num_events -= line.startswith(b"data: ")
                    if (way == "leaves" and num_events == 0) or b"[DONE]" in line:
                        return way
        except TimeoutError:
            return way
    return "lost"


# ---- checks at the end ----


def check_accounts(address: str) -> list[str]:
    """Differences in the metrics once nothing runs."""
    for _ in range(100):
        found = figures(address)
        if not found["vllm:num_requests_running"] + found["vllm:num_requests_waiting"]:
            break
        time.sleep(0.1)
    wrong = []
    started, finished = found["vllm:request_params_n_sum"], found["vllm:request_success_total"]
    reasons = {name.rpartition(":")[2]: int(value) for name, value in found.items() if "success_total:" in name}
    print(f"  answers started {started:.0f}, finished {finished:.0f}: {reasons}")
    if started != finished:
        wrong.append(f"{started:.0f} answers were started but {finished:.0f} finished")
    if reasons["error"]:
        wrong.append(f"{reasons['error']} answers failed")
    zero = ("vllm:num_requests_running", "vllm:num_requests_waiting", "evenflow:engine_restarts_total")
    return wrong + [f"{name} is {found[name]:.0f}" for name in zero if found[name]]


async def check_blocks(address: str, num_blocks: int) -> list[str]:
    """By the engine's own metric: with one request running, only its own blocks may be in use."""
    num_tokens, seen = 200, 0.0
    body = {"prompt": [5] * 16, "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
    async with events_of(address, body) as lines:
        async for line in lines:
            if line.startswith(b"data: {"):
                usage = (await asyncio.to_thread(figures, address))["vllm:kv_cache_usage_perc"]
                seen = max(seen, usage * num_blocks)
            if b"[DONE]" in line:
                break
    own = math.ceil((16 + num_tokens) / 16) + _NUM_KV_BLOCKS_SPARE
    print(f"  blocks in use while one request runs alone: at most {seen:.0f} of {num_blocks}")
    return [] if 0 < seen <= own else [f"{seen:.0f} blocks are in use but one request needs at most {own}"]


def check_memory(memory: Memory) -> list[str]:
    grown = []
    start = int(_WARM_UP * len(memory.times))
    minutes = [(at - memory.times[start]) / 60 for at in memory.times[start:]]
    for name, sizes in (("front", memory.front[start:]), ("engine", memory.children[start:])):
        if len(sizes) < 10:
            continue
        slope = statistics.linear_regression(minutes, sizes).slope
        growth = slope * minutes[-1] / sizes[0]
        print(
            f"  memory of the {name}: {sizes[0] / 2**20:.1f} MiB after the warm-up, "
            f"{sizes[-1] / 2**20:.1f} at the end, {slope / 2**20:+.3f} MiB per minute"
        )
        if growth > _MAX_GROWTH:
            grown.append(f"the {name} grew by {growth:.1%} in {minutes[-1]:.1f} minutes")
    return grown


async def soak(options: argparse.Namespace, pid: int, address: str) -> list[str]:
    sizes = re.search(r'num_gpu_blocks="(\d+)"', httpx.get(f"{address}/metrics").text)
    assert sizes is not None
    print(f"{options.streams} streams for {options.minutes:g} minutes:")
    began = time.monotonic()
    load, memory = await keep_busy(address, pid, options.streams, options.minutes)
    seconds = time.monotonic() - began
    waits = sorted(load.waits)
    print(f"  {load.num_answers} answers, {load.num_tokens / seconds:.0f} tokens/s, {len(load.failures)} lost")
    if waits:
        print(f"  longest wait of a stream: median {waits[len(waits) // 2]:.2f} s, worst {waits[-1]:.2f} s")
    wrong = [*load.failures[:5], *check_memory(memory), *check_accounts(address)]
    print(f"{options.requests} requests that mostly go wrong:")
    ended = await misbehave(address, options.requests, options.streams // 2)
    print("  " + ", ".join(f"{way}: {count}" for way, count in sorted(ended.items())))
    wrong += [f"{ended[way]} requests: {way}" for way in ("lost", "wrongly taken") if ended[way]]
    return [*wrong, *check_accounts(address), *await check_blocks(address, int(sizes[1]))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--kv-cache-memory", default="64MiB", help="small, so that the streams compete for it")
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--requests", type=int, default=5000)
    options = parser.parse_args()
    with running_server(options.model, options.kv_cache_memory) as server:
        wrong = asyncio.run(soak(options, server.pid, server.address))
    print("\n".join(f"FAILED {line}" for line in wrong) or "Nothing was lost or leaked.")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
