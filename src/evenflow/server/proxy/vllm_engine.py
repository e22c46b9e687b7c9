"""vLLM behind evenflow's front: starts it, restarts it when it dies, changes its target, and cleans up its processes.

Everything here happens on the event loop's thread.
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

from evenflow.core.policies import PolicySpec
from evenflow.errors import EngineFailed, EvenflowError
from evenflow.hosts.policy_file import NO_TARGET
from evenflow.server.engine.restarts import RestartDelay
from evenflow.server.metrics.observer import EngineState, Observer
from evenflow.server.proxy.step_feed import StepFeed
from evenflow.vllm.launch import RunFolder, VllmLaunch

logger = logging.getLogger("evenflow")

_HEALTH_CHECK_S = 0.5  # while it starts
_EXIT_TIMEOUT_S = 20.0
_FORGET_S = 1.0  # after the last request: time for the last report to arrive
_STDERR = 2
# Ends vLLM and its workers when its standard input closes: they must not outlive a killed front.
_GUARD = 'read -r _; kill -s TERM "$1" && sleep 10; kill -s KILL -- "-$1"'


class OpenRequest(Protocol):
    """A request that is being proxied to vLLM."""

    def fail(self, failure: EvenflowError) -> None: ...


class VllmEngine:
    """One vLLM server for the routes to use, over `http`. When vLLM dies, all open requests fail."""

    def __init__(self, launch: VllmLaunch, observer: Observer) -> None:
        self._launch = launch
        self._observer = observer
        self.policy: PolicySpec | None = launch.policy  # None: vLLM is left to its own budget
        self._last_target = launch.policy
        self._folder = RunFolder(Path(tempfile.mkdtemp(prefix="evenflow-")))
        self._folder.prepare()
        transport = httpx.AsyncHTTPTransport(
            uds=str(self._folder.http_socket),
            # vLLM closes idle connections at a time of its own, and a new one on this machine costs little.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        )
        self.http = httpx.AsyncClient(transport=transport, base_url="http://vllm", timeout=None, trust_env=False)
        self._feed = StepFeed(observer)
        self._open: set[OpenRequest] = set()
        self._num_restarts = 0
        self._supervisor: asyncio.Task[None] | None = None
        self.is_up = False
        self.failure: EvenflowError = EngineFailed("vLLM is starting")  # why it is not up

    # ---- what routes use ----

    def set_target(self, seconds: float | None, paced: bool | None = None) -> None:
        """Keep another target from the next step on, paced as before unless stated; None: keep none."""
        if seconds is not None:
            self._last_target = self._last_target.with_target(seconds, paced)
        self.policy = None if seconds is None else self._last_target
        self._folder.set_policy(self.policy)
        self._publish_state()

    @contextmanager
    def proxying(self, request: OpenRequest) -> Iterator[None]:
        """Within this, `request.fail` is called if vLLM dies."""
        if not self.is_up:
            raise self.failure
        self._open.add(request)
        try:
            yield
        finally:
            self._open.discard(request)
            if not self._open:
                asyncio.get_running_loop().call_later(_FORGET_S, self._forget_requests)

    def fail_all(self, failure: EvenflowError) -> None:
        """End every open request with this error."""
        for request in list(self._open):
            request.fail(failure)

    # ---- the life of the process ----

    def start(self) -> asyncio.Future[None]:
        """Start vLLM in the background. The result is set when it is ready, or has failed."""
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
            logger.error("%s; restarting it in %.1f s", self.failure, delay)
            await asyncio.sleep(delay)

    async def _run_process(self, first_start: asyncio.Future[None]) -> None:
        """One vLLM, from its start to its end."""
        self._folder.http_socket.unlink(missing_ok=True)
        process = subprocess.Popen(
            self._launch.command(self._folder),
            env=self._launch.environment(self._folder, self._last_target),
            stdin=subprocess.DEVNULL,
            stdout=_STDERR,
            start_new_session=True,  # the front handles an interrupt at the terminal
        )
        guard = start_guard(process.pid)
        ended = asyncio.ensure_future(asyncio.to_thread(process.wait))
        try:
            if await self._becomes_ready(ended):
                self._go_up(first_start)
                await asyncio.wait([ended])
            self._go_down(_exit_error(process.returncode, self.is_up))
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
        self._publish_state()
        if not first_start.done():
            first_start.set_result(None)

    def _go_down(self, failure: EvenflowError) -> None:
        self.failure = failure
        if self.is_up:
            self.is_up = False
            self.fail_all(failure)
            self._forget_requests()
            self._publish_state()

    def _publish_state(self) -> None:
        policy = NO_TARGET if self.policy is None else str(self.policy)
        target = None if self.policy is None else self.policy.target
        self._observer.on_engine_state(EngineState(self.is_up, self._num_restarts, policy=policy, target_s=target))

    def _forget_requests(self) -> None:
        if not self._open:
            self._feed.forget_requests()


def _exit_error(exit_code: int, was_up: bool) -> EngineFailed:
    if was_up:
        return EngineFailed(f"vLLM died (exit code {exit_code})")
    return EngineFailed(f"vLLM ended before it was ready (exit code {exit_code}); its own log says why")


def start_guard(group: int) -> subprocess.Popen[bytes]:
    """A process that ends this process group once its standard input closes."""
    return subprocess.Popen(
        ["/bin/sh", "-c", _GUARD, "evenflow-guard", str(group)],
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Terminate vLLM, then kill what is left of its processes."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_EXIT_TIMEOUT_S)
    with suppress(ProcessLookupError, PermissionError):  # macOS refuses where only dead ones are left
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
