"""Starts `evenflow serve` as a user does, and waits until it answers. Has only the standard library."""

from __future__ import annotations

import re
import subprocess
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

_START_S = 300.0


def start_server(command: Sequence[str], log: Path) -> tuple[subprocess.Popen[bytes], str]:
    """The process of `evenflow serve` with these words, and its address; what it prints goes to `log`."""
    with log.open("wb") as output:
        process = subprocess.Popen([*command, "--port", "0"], stdout=output, stderr=subprocess.STDOUT)
    end = time.monotonic() + _START_S
    while time.monotonic() < end and process.poll() is None:
        found = re.search(r"at (http://[\d.]+:\d+)/v1", log.read_text())
        if found is not None and _answers(found[1]):
            return process, found[1]
        time.sleep(0.1)
    process.kill()
    process.wait()
    raise RuntimeError(f"the server did not start:\n{log.read_text()}")


def stop_server(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait(60)


def _answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=10) as response:
            return bool(response.status == 200)
    except OSError:
        return False
