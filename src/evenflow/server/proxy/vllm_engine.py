"""vLLM behind evenflow's front: starts it, starts it again when it dies, changes its target, and leaves none of its
processes behind.

Everything here happens on the event loop's thread. Must not know: what is proxied, what a step means.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

import httpx

from evenflow.core.policies import retarget
from evenflow.errors import EngineFailed, EvenflowError
from evenflow.server.engine.restarts import RestartDelay
from evenflow.server.metrics.events import EngineState
from evenflow.server.metrics.observer import Observer
from evenflow.server.proxy.step_feed import StepFeed
from evenflow.vllm.launch import RunFolder, VllmLaunch

logger = logging.getLogger("evenflow")

_HEALTH_CHECK_S = 0.5  # while it starts
_END_S = 20.0  # for vLLM to end by itself
_FORGET_S = 1.0  # after the last request: for the last step to be told
_STDERR = 2
# Ends vLLM and its workers when its own standard input ends: they must not outlive a front that was killed.
_GUARD = 'read -r _; kill -s TERM "$1" && sleep 10; kill -s KILL -- "-$1"'


class Relay(Protocol):
    """A request on its way through vLLM."""

    def fail(self, failure: EvenflowError) -> None: ...


class VllmEngine:
    """One vLLM server for the routes to use. Its HTTP is `http`; whoever relays a request is told when vLLM dies."""

    def __init__(self, launch: VllmLaunch, observer: Observer) -> None:
        self._launch = launch
        self._observer = observer
        self._policy = launch.policy
        self._folder = RunFolder(Path(tempfile.mkdtemp(prefix="evenflow-")))
        self._folder.prepare()
        transport = httpx.AsyncHTTPTransport(
            uds=str(self._folder.http_socket),
            # vLLM closes idle connections at a time of its own, and a new one on this machine costs little.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        )
        self.http = httpx.AsyncClient(transport=transport, base_url="http://vllm", timeout=None, trust_env=False)
        self._feed = StepFeed(observer)
        self._relays: set[Relay] = set()
        self._num_restarts = 0
        self._supervisor: asyncio.Task[None] | None = None
        self.is_up = False
        self.failure: EvenflowError = EngineFailed("vLLM is starting")  # why it is not up

    # ---- what routes use ----

    @property
    def policy(self) -> str:
        return self._policy

    def set_target(self, seconds: float, paced: bool | None = None) -> None:
        """Keep another target from the next step on; None: paced or strict as before."""
        self._policy = retarget(self._policy, seconds, paced)
        self._folder.set_target(self._policy)
        self._tell_state()

    @contextmanager
    def relaying(self, relay: Relay) -> Iterator[None]:
        """Within this, the relay is told when vLLM is gone."""
        if not self.is_up:
            raise self.failure
        self._relays.add(relay)
        try:
            yield
        finally:
            self._relays.discard(relay)
            if not self._relays:
                asyncio.get_running_loop().call_later(_FORGET_S, self._forget_requests)

    def fail_all(self, failure: EvenflowError) -> None:
        """End every open request with this error."""
        for relay in list(self._relays):
            relay.fail(failure)

    # ---- the life of the process ----

    def start(self) -> asyncio.Future[None]:
        """Begin to start vLLM. What is returned is done when vLLM is ready, or has failed to become so."""
        first_start = asyncio.get_running_loop().create_future()
        self._supervisor = asyncio.create_task(self._supervise(first_start))
        return first_start

    async def close(self) -> None:
        """End vLLM, and every open request with it."""
        self.fail_all(EngineFailed("the server is shutting down"))
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.wait([self._supervisor])
        self._feed.close()
        await self.http.aclose()
        shutil.rmtree(self._folder.path, ignore_errors=True)

    async def _supervise(self, first_start: asyncio.Future[None]) -> None:
        loop, delays = asyncio.get_running_loop(), RestartDelay()
        await self._feed.listen(self._folder.step_socket)
        while True:
            began = loop.time()
            await self._run_process(first_start)
            if not first_start.done():
                first_start.set_exception(self.failure)
                return
            self._num_restarts += 1
            delay = delays.after(loop.time() - began)
            logger.error("%s; it is started again in %.1f s", self.failure, delay)
            await asyncio.sleep(delay)

    async def _run_process(self, first_start: asyncio.Future[None]) -> None:
        """One vLLM, from its start to its end."""
        self._folder.http_socket.unlink(missing_ok=True)
        process = subprocess.Popen(
            self._launch.command(self._folder),
            env=self._launch.environment(self._folder, self._policy),
            stdin=subprocess.DEVNULL,
            stdout=_STDERR,
            start_new_session=True,  # an interrupt at the terminal is for the front to handle
        )
        guard = start_guard(process.pid)
        ended = asyncio.ensure_future(asyncio.to_thread(process.wait))
        try:
            if await self._becomes_ready(ended):
                self._go_up(first_start)
                await asyncio.wait([ended])
            self._go_down(_last_words(process.returncode, self.is_up))
        finally:
            self._go_down(self.failure)
            await asyncio.to_thread(_end_group, process)
            await asyncio.to_thread(guard.communicate)

    async def _becomes_ready(self, ended: asyncio.Future[int]) -> bool:
        while not ended.done():
            with suppress(httpx.HTTPError):
                if (await self.http.get("/health", timeout=_HEALTH_CHECK_S)).is_success:
                    return True
            await asyncio.wait([ended], timeout=_HEALTH_CHECK_S)
        return False

    def _go_up(self, first_start: asyncio.Future[None]) -> None:
        self.is_up = True
        self._tell_state()
        if not first_start.done():
            first_start.set_result(None)

    def _go_down(self, failure: EvenflowError) -> None:
        self.failure = failure
        if self.is_up:
            self.is_up = False
            self.fail_all(failure)
            self._forget_requests()
            self._tell_state()

    def _tell_state(self) -> None:
        self._observer.on_engine_state(EngineState(self.is_up, self._num_restarts, policy=self._policy))

    def _forget_requests(self) -> None:
        if not self._relays:
            self._feed.forget_requests()


def _last_words(exit_code: int, was_up: bool) -> EngineFailed:
    if was_up:
        return EngineFailed(f"vLLM died (exit code {exit_code})")
    return EngineFailed(f"vLLM ended before it was ready (exit code {exit_code}); its own log says why")


def start_guard(group: int) -> subprocess.Popen[bytes]:
    """A process that ends this group of processes once its standard input ends: with whoever holds the other end."""
    return subprocess.Popen(
        ["/bin/sh", "-c", _GUARD, "evenflow-guard", str(group)],
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Ask vLLM to end, then end by force whichever of its processes are left."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_END_S)
    with suppress(ProcessLookupError, PermissionError):  # macOS refuses where only dead ones are left
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
