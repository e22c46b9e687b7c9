"""`evenflow demo --live`: a server with its live page on a free port, and the page's load on it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import webbrowser
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import msgspec
from rich.console import Console

from evenflow.bench.endpoints import HttpEndpoint
from evenflow.bench.live_load import Load, LoadRun
from evenflow.cli.output import engine_imports, progress
from evenflow.cli.serve import event_loop, serve_model
from evenflow.config import EngineConfig
from evenflow.errors import EndpointFailed
from evenflow.model.hub.cached_models import find_model

if TYPE_CHECKING:
    from evenflow.server.serving import Server

_CHECK_S = 0.05
_SHOW_S = 0.5


def run_live(config: EngineConfig, load_s: float, record: Path | None, console: Console) -> None:
    """Serve, put the load on the server, and end with it; or at Ctrl-C, if a page is open then."""
    with engine_imports("the server"):
        from evenflow.server.serving import ServerSettings, bind

        settings = ServerSettings(model_names=(config.model,), drain_s=0.0)
    find_model(config.model)
    # No status line: the engine's process logs what it does.
    print(f"Loading {config.model}.", file=sys.stderr, flush=True)
    with bind(settings.host, 0) as listener, asyncio.Runner(loop_factory=event_loop) as runner:
        address = f"http://{settings.host}:{listener.getsockname()[1]}"

        async def run() -> None:
            started: asyncio.Future[Server] = asyncio.get_running_loop().create_future()
            serving = asyncio.ensure_future(serve_model(settings, listener, config, record, started.set_result))
            either: list[asyncio.Future[Any]] = [started, serving]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if started.done():
                await _LiveDemo(started.result(), address, console).run(load_s)
            await serving

        runner.run(run())


class _LiveDemo:
    def __init__(self, server: Server, address: str, console: Console) -> None:
        self._server = server
        self._address = address
        self._console = console
        self._work: asyncio.Future[None] | None = None
        self._load: LoadRun | None = None
        self._is_interrupted = False

    async def run(self, load_s: float) -> None:
        while not self._server.started:
            await asyncio.sleep(_CHECK_S)
        for number in (signal.SIGINT, signal.SIGTERM):  # in place of the server's own: the load has to end first
            asyncio.get_running_loop().add_signal_handler(number, self._interrupt)
        is_open = await asyncio.to_thread(open_browser, self._address)
        advice = "It is open in your browser." if is_open else "Open it in a browser to see every step."
        self._console.print(f"The live page is at {self._address}/. {advice}")
        self._work = asyncio.ensure_future(self._put_load(load_s))
        try:
            await self._work
            self._say_end()
            while self._server.num_pages and not self._is_interrupted:
                await asyncio.sleep(_CHECK_S)
        except asyncio.CancelledError:
            if not self._is_interrupted:
                raise
            self._console.print("Stopped." if self._load is None else f"Stopped. {self._load.summary()}")
        finally:
            self._server.should_exit = True

    def _interrupt(self) -> None:
        self._server.force_exit = self._is_interrupted  # a second one does not wait
        self._is_interrupted = True
        if self._work is not None:
            self._work.cancel()

    async def _put_load(self, load_s: float) -> None:
        load = await self._fetch_load(load_s)
        self._console.print(f"Sending {load.title}. The target ({self._policy}) can be changed on the page meanwhile.")
        endpoint = HttpEndpoint(self._address)
        async with endpoint.open():
            run = self._load = LoadRun(load, endpoint)
            with progress("Sending") as say:
                running = asyncio.ensure_future(run.run())
                try:
                    while not (await asyncio.wait([running], timeout=_SHOW_S))[0]:
                        say(run.progress())
                    await running
                finally:
                    running.cancel()
                    await asyncio.gather(running, return_exceptions=True)  # its requests end before the endpoint closes

    async def _fetch_load(self, load_s: float) -> Load:
        async with httpx.AsyncClient(base_url=self._address, trust_env=False) as client:
            response = await client.get("/live/load", params={"seconds": load_s})
        if response.status_code != 200:
            raise EndpointFailed(response.json()["error"]["message"])
        return msgspec.json.decode(response.content, type=Load)

    def _say_end(self) -> None:
        run = self._load
        assert run is not None
        stopped = f" Time was over for {run.num_stopped} of them." if run.num_stopped else ""
        failed = f" The load was ended: {run.error}" if run.error is not None else ""
        stays = " The page stays up until Ctrl-C." if self._server.num_pages else ""
        self._console.print(f"{run.summary()} The policy was {self._policy}.{stopped}{failed}{stays}")

    @property
    def _policy(self) -> str:
        return str(self._server.service.client.policy)


def open_browser(address: str) -> bool:
    """Open a page where there is a screen. Without one, a browser would take over the terminal."""
    has_screen = sys.platform in ("darwin", "win32") or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    with suppress(webbrowser.Error, OSError):
        return bool(has_screen) and webbrowser.open(address)
    return False
