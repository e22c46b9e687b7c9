"""A real server in a process of its own, and streams that keep it busy."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx

_START_S = 120


class Served(NamedTuple):
    address: str
    pid: int

    def kill_engine(self) -> None:
        """End the engine process as a crash would."""
        lines = subprocess.check_output(["ps", "-A", "-ww", "-o", "pid=,ppid=,command="], text=True).splitlines()
        processes = [line.split(maxsplit=2) for line in lines]
        engines = [int(pid) for pid, parent, name in processes if int(parent) == self.pid and "spawn_main" in name]
        assert len(engines) == 2, [line for line in processes if int(line[1]) == self.pid]
        os.kill(max(engines), signal.SIGKILL)  # the other renders chat templates, and starts first


@contextmanager
def served(model: Path | str, log: Path, arguments: Sequence[str] = ()) -> Iterator[Served]:
    """A server of this model, on a port of its own unless the arguments name one."""
    command = [sys.executable, "-c", "from evenflow.cli.main import main; raise SystemExit(main())", "serve"]
    command += ["--model", str(model), "--port", "0", *arguments]
    with log.open("w") as stderr:
        process = subprocess.Popen(command, stderr=stderr, env={**os.environ, "EVENFLOW_CACHE": str(log.parent)})
    try:
        yield Served(_address(process, log), process.pid)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(30)


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    for _ in range(10 * _START_S):
        if found := re.search(r"http://127\.0\.0\.1:\d+", log.read_text()):
            return found[0]
        try:
            process.wait(0.1)
        except subprocess.TimeoutExpired:
            continue
        break
    raise AssertionError(f"the server did not start:\n{log.read_text()}")


@contextmanager
def streaming(address: str, count: int, headers: dict[str, str] | None = None, **fields: str) -> Iterator[None]:
    """Endless chats, each until the context ends; `fields` are part of their requests."""
    is_over = threading.Event()
    threads = [
        threading.Thread(target=_stream, args=(address, number, headers or {}, is_over, fields))
        for number in range(count)
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


def _stream(
    address: str, number: int, headers: dict[str, str], is_over: threading.Event, fields: dict[str, str]
) -> None:
    body = {
        "messages": [{"role": "user", "content": f"chat {number}"}],
        "max_tokens": 3000,
        "ignore_eos": True,
        "stream": True,
        **fields,
    }
    while not is_over.is_set():
        with httpx.stream("POST", f"{address}/v1/chat/completions", json=body, headers=headers, timeout=60) as answer:
            assert answer.status_code == 200, answer.read()
            for _ in answer.iter_lines():
                if is_over.is_set():
                    return


def figures(address: str) -> dict[str, float]:
    """What /metrics says now: each sample that has no further label, by its name."""
    samples = {}
    for line in httpx.get(f"{address}/metrics").text.splitlines():
        if found := re.match(r'([\w:]+)\{engine="0",model_name="[^"]*"\} (\S+)$', line):
            samples[found[1]] = float(found[2])
    return samples
