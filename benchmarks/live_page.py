"""How smooth the live page is: frames per second in Chromium, on an idle server and at many steps per second.

    python benchmarks/live_page.py

The executor computes nothing and finishes a step at every tick of a clock, as in `server_overhead.py`. Chats decode and
long prompts arrive, so that there are chunks to draw. Browser, server, engine and clients share the machine; only the
time that the page's own thread spends per frame carries over to others.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvloop
from playwright.sync_api import Page, sync_playwright

sys.path.insert(0, str(Path(__file__).parent))
from server_overhead import StreamReader, free_port, run_server, wait_for

_NUM_CHATS = 16
_LONG_PROMPT = 15_000  # tokens
_CHAT_TOKENS = 10_000
_LONG_PROMPTS_PER_S = 0.5
_SIZES = ((1600, 1000), (375, 800))
_LEAST_RATE = 0.9  # of the requested steps; below that, the engine did not keep up

_COUNT_FRAMES = """async (seconds) => {
  const end = performance.now() + 1000 * seconds, gaps = [];
  for (let last = performance.now(); last < end;) {
    await new Promise(requestAnimationFrame);
    const now = performance.now();
    gaps.push(now - last);
    last = now;
  }
  return gaps;
}"""


async def _ask(port: int, prompt: list[int], max_tokens: int) -> None:
    body = json.dumps({"prompt": prompt, "max_tokens": max_tokens, "stream": True}).encode()
    reader = StreamReader(body)
    transport, _ = await asyncio.get_running_loop().create_connection(lambda: reader, "127.0.0.1", port)
    await reader.done
    transport.close()


async def _chat_on(port: int, number: int) -> None:
    while True:
        await _ask(port, [number] * 8, _CHAT_TOKENS)


async def _load(port: int) -> None:
    """Endless chats, and a long prompt every two seconds."""
    async with asyncio.TaskGroup() as group:
        for number in range(_NUM_CHATS):
            group.create_task(_chat_on(port, number))
        for number in range(1_000_000):
            await asyncio.sleep(1 / _LONG_PROMPTS_PER_S)
            group.create_task(_ask(port, [number % 900, *(token % 900 for token in range(_LONG_PROMPT))], 1))


def _run_load(port: int) -> None:
    asyncio.Runner(loop_factory=uvloop.new_event_loop).run(_load(port))


@contextmanager
def _served(steps_per_s: float, folder: Path) -> Iterator[str]:
    """A server that runs this many steps per second; 0: it gets no requests."""
    context, port = multiprocessing.get_context("spawn"), free_port()
    period_s = 1 / (steps_per_s or 1)
    server = context.Process(target=run_server, args=(port, period_s, _NUM_CHATS + 1, folder / "engine.json"))
    load = context.Process(target=_run_load, args=(port,))
    server.start()
    try:
        wait_for(port)
        if steps_per_s:
            load.start()
        yield f"http://127.0.0.1:{port}"
    finally:
        if load.pid is not None:
            load.kill()
            load.join()
        server.terminate()
        server.join()


def _main_thread_s(session: Any) -> float:
    metrics = session.send("Performance.getMetrics")["metrics"]
    return float(next(metric["value"] for metric in metrics if metric["name"] == "TaskDuration"))


def _num_steps(page: Page) -> float:
    """From the server's metrics."""
    text: str = page.evaluate("async () => (await fetch('metrics')).text()")
    line = next(line for line in text.splitlines() if line.startswith("evenflow:step_seconds_count"))
    return float(line.split()[-1])


def _measure(page: Page, seconds: float) -> dict[str, float]:
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable")
    num_steps, busy_s = _num_steps(page), _main_thread_s(session)
    gaps: list[float] = sorted(page.evaluate(_COUNT_FRAMES, seconds))
    busy_s = _main_thread_s(session) - busy_s
    return {
        "steps_per_s": (_num_steps(page) - num_steps) / seconds,
        "frames_per_s": len(gaps) / seconds,
        "p99_gap_ms": gaps[int(0.99 * len(gaps))],
        "busy_ms": 1000 * busy_s / len(gaps),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=8.0, help="to watch each page for")
    parser.add_argument("--steps", nargs="+", type=float, default=[0, 50, 200], metavar="N", help="steps per second")
    options = parser.parse_args()
    chromium = shutil.which(os.environ.get("CHROMIUM") or "chromium") or shutil.which("google-chrome")
    if chromium is None:
        parser.error("found no Chromium as chromium, google-chrome or $CHROMIUM: install one or set $CHROMIUM")
    print(f"{os.cpu_count()} cores for browser, server, engine and {_NUM_CHATS} clients")
    print("     page steps/s frames/s  p99 ms between  thread ms per frame")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for width, height in _SIZES:
            for steps_per_s in options.steps:
                with _served(steps_per_s, Path(folder)) as address:
                    page = browser.new_page(viewport={"width": width, "height": height})
                    page.goto(address)
                    page.wait_for_timeout(4000)  # until the chart is full
                    found = _measure(page, options.seconds)
                    page.close()
                remark = "" if found["steps_per_s"] >= _LEAST_RATE * steps_per_s else "  (the engine did not keep up)"
                print(
                    f"{width:>9} {found['steps_per_s']:7.0f} {found['frames_per_s']:8.1f} "
                    f"{found['p99_gap_ms']:15.0f} {found['busy_ms']:20.1f}{remark}",
                    flush=True,
                )
        browser.close()


if __name__ == "__main__":
    main()
