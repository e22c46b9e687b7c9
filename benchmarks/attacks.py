"""What one client can do to the others: worst /health and completion times, and the front's memory, under attack.

    python benchmarks/attacks.py --model MODEL              # each attack, then all of them for two minutes
    python benchmarks/attacks.py --seconds 3 --together 10  # quicker

Starts `evenflow serve` with a model (a small one is best: the front is measured), then attacks it in each way with two
keys, and asks for /health and for completions with a third one all the while. Ends with an error if a figure is over
its bound. Times depend on what else the machine does: the attackers and the engine run on it too.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import resource
import select
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import count, cycle
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import httpx

MAX_HEALTH_S = 1.0
MAX_COMPLETION_S = 2.0
MAX_MB = 150  # of the front, more than before
MAX_LEFT_MB = 75  # afterwards: the allocator keeps some
MAX_LEFT_FILES = 4

ALL = "all at once"
_NUM_FILES = 1024  # that the server may open: what many systems allow by default
_HONEST = "an-honest-client"
_ATTACKERS = cycle(("one-attacker", "another-attacker"))
_NUMBERS = count()
_STATUSES: Counter[int | str] = Counter()  # what the attackers got
_CONTEXT = 4096
_UNREAD = select.POLLRDHUP | select.POLLHUP | select.POLLERR  # how a connection's end shows without reading


class Target(NamedTuple):
    url: str
    end: float  # of the attack

    @property
    def seconds_left(self) -> float:
        return max(0.0, self.end - time.monotonic())


Attack = Callable[[Target], object]


def headers(key: str) -> dict[str, str]:
    return {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}


def post(path: str, content: bytes | Callable[[], bytes]) -> Attack:
    """Reads the response, as it comes."""

    def attack(target: Target) -> None:
        body = content if isinstance(content, bytes) else content()
        key = headers(next(_ATTACKERS))
        with httpx.stream("POST", target.url + path, content=body, headers=key, timeout=60, verify=False) as got:
            _STATUSES[got.status_code] += 1
            for _ in got.iter_raw():
                if not target.seconds_left:
                    return

    return attack


def completion(**fields: Any) -> bytes:
    return json.dumps({"prompt": "a", "ignore_eos": True, **fields}).encode()


def chat(**fields: Any) -> bytes:
    """Its answer goes on until its response is full."""
    return json.dumps({"messages": [{"role": "user", "content": "a"}], "ignore_eos": True, **fields}).encode()


def token_ids(num_tokens: int = 4000, num_prompts: int = 1) -> list[list[int]]:
    """Always others: no cached prefix saves the engine's time, or the front's."""
    number = next(_NUMBERS)
    return [[(number * 31 + row * 7 + place) % 500 + 5 for place in range(num_tokens)] for row in range(num_prompts)]


def repeated(before: bytes, item: bytes, after: bytes) -> bytes:
    """A body just under 8 MB."""
    return before + b",".join([item] * ((8_000_000 - len(before)) // (len(item) + 1))) + after


def slow_grammar(target: Target) -> None:
    number = next(_NUMBERS)
    patterns = [{"type": "string", "pattern": f".*{letter}.{{{60 + number}}}.*"} for letter in "abcdefghijklmnopqrst"]
    post("/v1/completions", completion(max_tokens=1, guided_json={"allOf": patterns}))(target)


def endless_headers(target: Target) -> None:
    with connect(target) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n")
        for _ in range(60):
            connection.sendall(b"X: %s\r\n" % (b"y" * (1 << 20)))


@contextmanager
def connect(target: Target) -> Iterator[socket.socket]:
    """With little room for what is not read."""
    host, _, port = target.url.removeprefix("http://").partition(":")
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(5)
        connection.connect((host, int(port)))
        yield connection


def unread(requests: Callable[[], Sequence[bytes]], drip: bytes = b"", every_s: float = 1.0) -> Attack:
    """Sends each on a connection of its own, perhaps goes on with a little at a time, and never reads."""

    def attack(target: Target) -> None:
        with ExitStack() as opened:
            connections = []
            for request in requests():
                if not target.seconds_left:
                    return
                with suppress(OSError):
                    connections.append(opened.enter_context(connect(target)))
                    connections[-1].sendall(request)
            ends = select.poll()
            for connection in connections:
                ends.register(connection, _UNREAD)
            num_open, at = len(connections), time.monotonic()
            while target.seconds_left and num_open > len(connections) // 2:
                for number, _ in ends.poll(1000 * min(every_s, target.seconds_left)):
                    ends.unregister(number)
                    num_open -= 1
                if drip and time.monotonic() - at > every_s:
                    at = time.monotonic()
                    for connection in connections:
                        with suppress(OSError):
                            connection.send(drip)

    return attack


def request(path: str, content: bytes = b"", num_bytes: int | None = None) -> bytes:
    """As it goes over a connection; with `num_bytes` it announces more than it has."""
    size = len(content) if num_bytes is None else num_bytes
    lines = [f"{'POST' if size else 'GET'} {path} HTTP/1.1", "Host: localhost", f"Content-Length: {size}"]
    lines += [f"{name}: {value}" for name, value in headers(next(_ATTACKERS)).items()]
    return "\r\n".join([*lines, "", ""]).encode() + content


COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
SCHEMA = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n"
CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
ATTACKS: dict[str, Attack] = {
    "nothing": lambda target: time.sleep(0.2),
    "slow grammars": slow_grammar,
    "a million messages": post(CHATS, repeated(b'{"messages":[', b"{}", b"]}")),
    "a million input items": post("/v1/responses", repeated(b'{"input":[', b"{}", b"]}")),
    "a million blocks": post(
        "/v1/messages",
        repeated(b'{"model":"default","max_tokens":1,"messages":[{"role":"user","content":[', b"{}", b"]}]}"),
    ),
    "many biases": post(
        COMPLETIONS,
        b'{"prompt":"a","n":8,"logit_bias":{%s}}' % b",".join(b'"%d":1' % token for token in range(100_000)),
    ),
    "two million choices": post(COMPLETIONS, repeated(b'{"prompt":"a","guided_choice":[', b'"a"', b"]}")),
    "8 MB to tokenize": post("/tokenize", b'{"prompt":"%s"}' % (b"a b " * 1_900_000)),
    "8 MB of prompt": post(COMPLETIONS, b'{"prompt":"%s"}' % (b"a b " * 1_900_000)),
    "60 MB of headers": endless_headers,
    "200 unfinished requests": unread(lambda: [b"GET / HTTP/1.1\r\nX: " + b"y" * 30_000] * 200),
    # Large answers to small requests, too large and as large as they may be.
    "prompt logprobs x 128": post(
        COMPLETIONS, lambda: completion(prompt=token_ids(), prompt_logprobs=20, n=128, max_tokens=1)
    ),
    "prompt logprobs": post(COMPLETIONS, lambda: completion(prompt=token_ids(), prompt_logprobs=20, n=3, max_tokens=1)),
    "logprobs x 128 x 4000": post(COMPLETIONS, completion(n=128, logprobs=20, max_tokens=4000)),
    "logprobs x 128": post(COMPLETIONS, completion(n=128, logprobs=20, max_tokens=130)),
    "logprobs of a stream": post(COMPLETIONS, completion(n=128, logprobs=20, max_tokens=4000, stream=True)),
    "a chat without end": post(CHATS, chat(n=128, logprobs=True, top_logprobs=20)),
    "batches of 60 prompts": post(
        COMPLETIONS, lambda: completion(prompt=token_ids(num_prompts=60), max_tokens=1, prompt_logprobs=0)
    ),
    "60 short prompts": post(
        COMPLETIONS, lambda: completion(prompt=token_ids(250, num_prompts=60), max_tokens=1, prompt_logprobs=20)
    ),
    "echo with logprobs": post(
        COMPLETIONS, lambda: completion(prompt=token_ids(), echo=True, logprobs=20, n=4, max_tokens=0)
    ),
    "stored responses": post(
        "/v1/responses",
        json.dumps({"input": "a", "top_logprobs": 20, "include": ["message.output_text.logprobs"]}).encode(),
    ),
    # Connections that read nothing, or send as little as they may.
    "1,050 unread pipelines": unread(lambda: [SCHEMA * 45] * 1050),
    "10 unread streams": unread(
        lambda: [request(COMPLETIONS, completion(n=128, logprobs=20, max_tokens=4000, stream=True)) for _ in range(10)]
    ),
    "unread responses": unread(
        lambda: [request(COMPLETIONS, completion(n=128, logprobs=20, max_tokens=130)) for _ in range(6)]
    ),
    "slow bodies": unread(
        lambda: [request(COMPLETIONS, b'{"prompt": "' + b"a" * 17_000, 8_000_000) for _ in range(4)],
        drip=b"a" * 17_000,
        every_s=15,
    ),
    "slow bodies of 7 MB": unread(
        lambda: [request(COMPLETIONS, b'{"prompt": "' + b"a" * 7_000_000, 8_000_000) for _ in range(20)],
        drip=b"a" * 17_000,
    ),
    "one-byte chunks": unread(lambda: [CHUNKED + b"1\r\na\r\n" * 60_000] * 100),
    "unread live feeds": unread(lambda: [request("/live/feed") for _ in range(64)]),
}


@contextmanager
def served(model: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-m", "evenflow", "serve", "--model", model, "--port", "0", "--threads", "1"]
    command += ["--max-model-len", str(_CONTEXT), "--kv-cache-memory", "256MiB"]
    for key in (_HONEST, "one-attacker", "another-attacker"):
        command += ["--api-key", key]
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (_NUM_FILES, most))
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, most))
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if found := re.search(r"at (http://\S+)/v1", line):
                threading.Thread(target=show_log, args=(process.stderr,), daemon=True).start()
                yield process, found[1]
                return
        raise SystemExit("evenflow serve did not start")
    finally:
        process.terminate()
        process.wait()


def show_log(lines: Iterator[str]) -> None:
    """What attackers make the server write: nothing, if all is well."""
    for line in lines:
        print(f"  log: {line.rstrip()[:200]}", flush=True)


def status_mb(pid: int, field: str) -> float:
    """VmRSS: resident now; VmHWM: the most since `forget_peak`."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(rf"{field}:\s+(\d+) kB", status)[1]) / 1024  # type: ignore[index]


def forget_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def num_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def run_attacks(names: Sequence[str], url: str, seconds: float, num_clients: int, begun: Connection) -> None:
    """In a process of its own: what it computes must not delay who measures."""
    target = Target(url, time.monotonic() + seconds)
    begun.send(target)

    def run(name: str) -> None:
        while target.seconds_left:
            with suppress(httpx.HTTPError, OSError):
                ATTACKS[name](target)
                _STATUSES["attacks"] += 1

    attackers = [threading.Thread(target=run, args=(name,)) for name in names for _ in range(num_clients)]
    for attacker in attackers:
        attacker.start()
    for attacker in attackers:
        attacker.join()
    print(f"  {dict(_STATUSES)}", flush=True)


class Figures(NamedTuple):
    """The worst of an attack."""

    health_s: float
    completion_s: float
    large_s: float  # of a completion with a body of 70 kB
    most_mb: float
    left_mb: float
    left_files: int

    def __str__(self) -> str:
        times = f"{self.health_s:8.2f} {self.completion_s:13.2f} {self.large_s:13.2f}"
        return f"{times} {self.most_mb:8.0f} {self.left_mb:8.0f} {self.left_files:10}"

    @property
    def is_within_bounds(self) -> bool:
        return (
            self.health_s <= MAX_HEALTH_S
            and max(self.completion_s, self.large_s) <= MAX_COMPLETION_S
            and self.most_mb <= MAX_MB
            and self.left_mb <= MAX_LEFT_MB
            and self.left_files <= MAX_LEFT_FILES
        )


def measure(pid: int, url: str, names: Sequence[str], num_clients: int, seconds: float) -> Figures:
    before, files_before = status_mb(pid, "VmRSS"), num_files(pid)
    forget_peak(pid)
    context = multiprocessing.get_context("spawn")
    begun, begins = context.Pipe(duplex=False)
    attackers = context.Process(target=run_attacks, args=(names, url, seconds, num_clients, begins))
    attackers.start()
    target: Target = begun.recv()
    worst = [0.0] * len(PROBES)
    while target.seconds_left:
        for place, ask in enumerate(PROBES):
            began = time.monotonic()
            try:
                ask(url)
            except httpx.HTTPError as error:
                said = error.response.text if isinstance(error, httpx.HTTPStatusError) else repr(error)
                print(f"  honest client, {ask.__name__}: {said:.200}", flush=True)
                worst[place] = float("inf")
            worst[place] = max(worst[place], time.monotonic() - began)
        time.sleep(0.05)
    attackers.join()
    most = status_mb(pid, "VmHWM") - before
    for _ in range(50):  # what has been closed is noticed soon
        if (left_files := num_files(pid) - files_before) <= 0:
            break
        time.sleep(0.1)
    time.sleep(1)
    return Figures(worst[0], worst[1], worst[2], most, status_mb(pid, "VmRSS") - before, left_files)


def ask_health(url: str) -> None:
    httpx.get(url + "/health", timeout=30, verify=False).raise_for_status()


def ask_completion(url: str, **fields: Any) -> None:
    body = {"prompt": "a", "max_tokens": 4, **fields}
    httpx.post(url + COMPLETIONS, json=body, headers=headers(_HONEST), timeout=30, verify=False).raise_for_status()


def ask_with_large_body(url: str) -> None:
    ask_completion(url, user="b" * 70_000)


PROBES = (ask_health, ask_completion, ask_with_large_body)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--seconds", type=float, default=8.0, help="per attack; 0: none alone")
    parser.add_argument("--together", type=float, default=120.0, help="seconds of all attacks together; 0: none")
    parser.add_argument("--clients", type=int, default=8, help="that attack at a time")
    parser.add_argument("--attacks", nargs="+", choices=ATTACKS, default=list(ATTACKS), metavar="NAME")
    options = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {options.clients} attackers")
    print(f"{'':24} health s  completion s  large body s  most MB  left MB  left files")
    runs = [(name, [name], options.clients, options.seconds) for name in options.attacks if options.seconds]
    if options.together:
        runs.append((ALL, options.attacks, 1, options.together))
    over = []
    with served(options.model) as (process, url):
        for ask in PROBES:
            ask(url)
        for name, attacks, num_clients, seconds in runs:
            figures = measure(process.pid, url, attacks, num_clients, seconds)
            over += [] if figures.is_within_bounds else [name]
            print(f"{name:24} {figures}{'' if figures.is_within_bounds else '  OVER'}", flush=True)
    if over:
        print(f"over a bound: {', '.join(over)}")
    return int(bool(over))


if __name__ == "__main__":
    sys.exit(main())
