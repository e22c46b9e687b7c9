"""`evenflow demo --live` on a tiny model: it serves, sends its load, and ends with it or at an interrupt."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import webbrowser
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from io import StringIO
from typing import Any

import httpx
import pytest
from rich.console import Console

from evenflow.bench.live_load import Load, LoadLimits, make_load
from evenflow.cli import demo_live
from evenflow.cli.demo_live import _LiveDemo, open_browser
from tests.cli.running import command_line, long_context_llama, restore_interrupts, run_cli


@pytest.fixture(autouse=True)
def _no_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.platform", "linux")


@pytest.mark.slow
def test_it_sends_the_load_and_ends_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    finished = run_cli(capsys, "demo", "--live", "--load-time", "1s", "--model", long_context_llama(), "--threads", 1)
    assert finished.code == 0, finished.err
    place, sending, end = finished.out.splitlines()
    assert re.fullmatch(r"The live page is at http://127\.0\.0\.1:\d+/\. Open it in a browser .*", place)
    assert sending.startswith("Sending 2 chats at a time, and beside them prompts of ")
    assert re.match(r"Sent \d+ chats? and 1 long prompt in \d+ s\. Between two tokens of a chat: ", end)
    assert re.search(r"The policy was target:\d+ms\.$", end)


@pytest.fixture
def live_demo() -> Iterator[subprocess.Popen[str]]:
    line = command_line(["demo", "--live", "--model", long_context_llama(), "--threads", 1])
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(line, preexec_fn=restore_interrupts, **pipes) as process:
        yield process
        if process.poll() is None:
            process.kill()


@pytest.mark.slow
def test_an_interrupt_ends_it_cleanly(live_demo: subprocess.Popen[str]) -> None:
    assert live_demo.stdout is not None
    [address] = re.findall(r"http://[\d.:]+", live_demo.stdout.readline())
    assert "Sending" in live_demo.stdout.readline()
    assert httpx.get(address).status_code == 200
    live_demo.send_signal(signal.SIGINT)
    out, err = live_demo.communicate(timeout=60)
    assert live_demo.returncode == 0
    assert re.fullmatch(r"Stopped\.( Sent .*)?\n", out)
    assert "Traceback" not in err


class SlowToStop:
    """An endpoint whose requests never end, and take a moment when they are cancelled."""

    num_open_at_close: int | None = None

    def __init__(self, address: str) -> None:
        self.num_open = 0

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        try:
            yield
        finally:
            SlowToStop.num_open_at_close = self.num_open

    async def stream(self, ask: object, answer: object) -> None:
        self.num_open += 1
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            self.num_open -= 1


def test_requests_end_before_their_connections_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    load = make_load(LoadLimits(max_model_len=4096), prefill_rate=1000.0, nonce="")

    async def fetch(_demo: object, _seconds: float) -> Load:
        return load

    monkeypatch.setattr(demo_live, "HttpEndpoint", SlowToStop)
    monkeypatch.setattr(_LiveDemo, "_fetch_load", fetch)
    monkeypatch.setattr(_LiveDemo, "_policy", "target:50ms")

    async def interrupt() -> None:
        server: Any = None
        sending = asyncio.ensure_future(_LiveDemo(server, "", Console(file=StringIO()))._put_load(10.0))
        await asyncio.sleep(0.1)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending

    asyncio.run(interrupt())
    assert SlowToStop.num_open_at_close == 0


@pytest.mark.parametrize("arguments", [["simple"], ["--json", "-"], ["--plot", "x.png"]])
def test_what_has_no_use_with_it_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    finished = run_cli(capsys, "demo", *arguments, "--live")
    assert finished.code == 2
    assert f"Got --live with {arguments[0]}," in finished.err


def test_without_it_its_time_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    finished = run_cli(capsys, "demo", "--load-time", "1s")
    assert finished.code == 2
    assert "Got --load-time without --live" in finished.err


def test_a_browser_is_opened_only_where_there_is_a_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda address: not opened.append(address))
    assert not open_browser("http://a/")
    monkeypatch.setenv("DISPLAY", ":0")
    assert open_browser("http://b/")
    assert opened == ["http://b/"]

    def fail(address: str) -> bool:
        raise webbrowser.Error("no browser")

    monkeypatch.setattr(webbrowser, "open", fail)
    assert not open_browser("http://c/")
