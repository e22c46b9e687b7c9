"""What one client can do to the others: worst /health and completion times, and the front's memory, under attack.

    python benchmarks/attacks.py --model MODEL

Starts `evenflow serve` with a model (a small one is best: the front is measured), then attacks it for a few seconds in
each way and asks for /health and for a completion of 4 tokens all the while.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

import httpx

_JSON = {"content-type": "application/json"}
_NUMBERS = count()
Attack = Callable[[str], object]


def post(path: str, content: bytes) -> Attack:
    return lambda url: httpx.post(url + path, content=content, headers=_JSON, timeout=60)


def repeated(before: bytes, item: bytes, after: bytes) -> bytes:
    """A body just under 8 MB."""
    return before + b",".join([item] * ((8_000_000 - len(before)) // (len(item) + 1))) + after


def slow_grammar(url: str) -> None:
    number = next(_NUMBERS)
    patterns = [{"type": "string", "pattern": f".*{letter}.{{{60 + number}}}.*"} for letter in "abcdefghijklmnopqrst"]
    httpx.post(
        url + "/v1/completions", json={"prompt": "a", "max_tokens": 1, "guided_json": {"allOf": patterns}}, timeout=60
    )


def endless_headers(url: str) -> None:
    with connect(url) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n")
        for _ in range(60):
            connection.sendall(b"X: %s\r\n" % (b"y" * (1 << 20)))


def unfinished_requests(url: str) -> None:
    held = []
    for _ in range(200):
        with connect(url) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\nX: " + b"y" * 30_000)
            held.append(connection.dup())
    for one in held:
        one.close()


@contextmanager
def connect(url: str) -> Iterator[socket.socket]:
    host, _, port = url.removeprefix("http://").partition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            yield connection
    except (BrokenPipeError, ConnectionResetError):
        return


ATTACKS: dict[str, Attack] = {
    "nothing": lambda url: time.sleep(0.2),
    "slow grammars": slow_grammar,
    "a million messages": post("/v1/chat/completions", repeated(b'{"messages":[', b"{}", b"]}")),
    "a million input items": post("/v1/responses", repeated(b'{"input":[', b"{}", b"]}")),
    "a million blocks": post(
        "/v1/messages",
        repeated(b'{"model":"default","max_tokens":1,"messages":[{"role":"user","content":[', b"{}", b"]}]}"),
    ),
    "many biases": post(
        "/v1/completions",
        b'{"prompt":"a","n":8,"logit_bias":{%s}}' % b",".join(b'"%d":1' % token for token in range(100_000)),
    ),
    "two million choices": post("/v1/completions", repeated(b'{"prompt":"a","guided_choice":[', b'"a"', b"]}")),
    "8 MB to tokenize": post("/tokenize", b'{"prompt":"%s"}' % (b"a b " * 1_900_000)),
    "8 MB of prompt": post("/v1/completions", b'{"prompt":"%s"}' % (b"a b " * 1_900_000)),
    "60 MB of headers": endless_headers,
    "200 unfinished requests": unfinished_requests,
}


@contextmanager
def served(model: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-m", "evenflow", "serve", "--model", model, "--port", "0", "--threads", "1"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if found := re.search(r"at (http://\S+)/v1", line):
                threading.Thread(target=process.stderr.read, daemon=True).start()
                yield process, found[1]
                return
        raise SystemExit("evenflow serve did not start")
    finally:
        process.terminate()
        process.wait()


def resident_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def run_attack(name: str, url: str, num_clients: int, end: float) -> None:
    """In a process of its own: what it computes must not delay who measures."""

    def run() -> None:
        while time.monotonic() < end:
            with suppress(httpx.HTTPError):
                ATTACKS[name](url)

    attackers = [threading.Thread(target=run) for _ in range(num_clients)]
    for attacker in attackers:
        attacker.start()
    for attacker in attackers:
        attacker.join()


def measure(process: subprocess.Popen[str], url: str, name: str, num_clients: int, seconds: float) -> list[float]:
    """Worst seconds of /health and of a completion, then the most memory and what is left of it, in MB."""
    end = time.monotonic() + seconds
    before = most = resident_mb(process.pid)
    attackers = multiprocessing.get_context("spawn").Process(target=run_attack, args=(name, url, num_clients, end))
    attackers.start()
    worst = [0.0, 0.0]
    while time.monotonic() < end:
        for place, ask in enumerate((health, completion)):
            began = time.monotonic()
            with suppress(httpx.TimeoutException):  # counts as the time that it waited
                ask(url)
            worst[place] = max(worst[place], time.monotonic() - began)
        most = max(most, resident_mb(process.pid))
        time.sleep(0.05)
    attackers.join()
    time.sleep(1)
    return [*worst, most - before, resident_mb(process.pid) - before]


def health(url: str) -> None:
    httpx.get(url + "/health", timeout=60).raise_for_status()


def completion(url: str) -> None:
    httpx.post(url + "/v1/completions", json={"prompt": "a", "max_tokens": 4}, timeout=60).raise_for_status()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--seconds", type=float, default=8.0, help="per attack")
    parser.add_argument("--clients", type=int, default=8, help="that attack at a time")
    parser.add_argument("--attacks", nargs="+", choices=ATTACKS, default=list(ATTACKS), metavar="NAME")
    options = parser.parse_args()
    print(f"{os.cpu_count()} cores, {options.clients} attackers\n{'':24} health s  completion s  most MB  left MB")
    with served(options.model) as (process, url):
        completion(url)
        for name in options.attacks:
            figures = measure(process, url, name, options.clients, options.seconds)
            print("{:24} {:8.2f} {:13.2f} {:8.0f} {:8.0f}".format(name, *figures), flush=True)


if __name__ == "__main__":
    main()
