"""A host engine behind evenflow's front: starts it, changes its target, and cleans up its processes."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from evenflow.core.policies import DEFAULT_POLICY
from evenflow.core.request import FinishReason
from evenflow.errors import EngineFailed, EvenflowError, InvalidConfig
from evenflow.hosts.launch import HostLaunch, RunFolder
from evenflow.hosts.policy_file import PolicyFile
from evenflow.hosts.settings import classes_by_environment
from evenflow.server.engine.supervised import SupervisedEngine
from evenflow.server.metrics.observer import Observer
from evenflow.server.proxy.step_receiver import StepReceiver
from evenflow.server.proxy.warm_up import warm_up

_HEALTH_CHECK_S = 0.5  # during its start
_SETTLE_TIMEOUT_S = 10.0
_EXIT_TIMEOUT_S = 20.0
_FORGET_S = 1.0  # after the last request, so that the last report can arrive
_STDERR = 2
# Ends the host and its workers once its standard input closes: they must not outlive a killed front.
_GUARD = 'read -r _; kill -s TERM "$1" && sleep 10; kill -s KILL -- "-$1"'


class HostEngine(SupervisedEngine):
    """A host engine's server. Routes use `http` to reach it."""

    def __init__(self, launch: HostLaunch, observer: Observer, has_keys: bool) -> None:
        self.name = launch.package.name
        self.launch_kind = type(launch)
        self.classes = classes_by_environment()
        self._has_keys = has_keys
        super().__init__(self.name, launch.policy, observer)
        self._launch = launch
        self._last_target = launch.policy or DEFAULT_POLICY  # the next target is paced alike
        self._folder = RunFolder(Path(tempfile.mkdtemp(prefix="evenflow-")))
        transport = httpx.AsyncHTTPTransport(
            uds=str(self._folder.http_socket) if launch.port is None else None,
            # No idle connections: the host may close one at any time, and a new local one is cheap.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        )
        self.http = httpx.AsyncClient(transport=transport, base_url=launch.base_url, timeout=None, trust_env=False)
        self._open: set[Callable[[EvenflowError], None]] = set()

    # ---- used by routes ----

    def set_target(self, target: float | str | None, paced: bool | None = None) -> None:
        started_with = self._launch.policy
        if target is None:
            self.policy = None if started_with is None or started_with.target else started_with
        elif (reason := self._launch.why_no_target) is not None:
            raise InvalidConfig(f"Got tbt_target={target} but {self.name} cannot keep a target: {reason}.")
        else:
            self._last_target = self._last_target.with_target(target, paced)
            self.policy = self._last_target
        PolicyFile(self._folder.policy_path).write(self.policy)
        self._publish_state()

    async def max_model_len(self) -> int | None:
        """The context of its first listed model; None if unknown."""
        if not self.is_up:
            raise self.failure
        try:
            return int((await self.http.get("/v1/models")).json()["data"][0]["max_model_len"])
        except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError):
            return None

    @contextmanager
    def proxying(self, fail: Callable[[EvenflowError], None]) -> Iterator[None]:
        """Register an open request; `fail` ends it if the host dies."""
        if not self.is_up:
            raise self.failure
        self._open.add(fail)
        try:
            yield
        finally:
            self._open.discard(fail)
            if not self._open:
                asyncio.get_running_loop().call_later(_FORGET_S, self._forget_requests)

    def fail_all(self, failure: EvenflowError) -> None:
        for fail in list(self._open):
            fail(failure)

    async def close(self) -> None:
        await super().close()
        await self.http.aclose()
        shutil.rmtree(self._folder.path, ignore_errors=True)

    def _forget_requests(self) -> None:
        """Once no request is open, end requests whose end the host did not report."""
        if not self._open:
            for request_id in list(self._observer.requests):
                self._observer.on_request_finished(request_id, FinishReason.ABORT, 0)

    # ---- the process ----

    async def _run_process(self) -> None:
        loop, folder = asyncio.get_running_loop(), self._folder
        loop.set_exception_handler(log_loop_error)
        folder.http_socket.unlink(missing_ok=True)
        with closing(await loop.create_unix_server(self._receive_steps, folder.step_socket)):
            process = subprocess.Popen(
                self._launch.command(folder),
                env=self._launch.environment(folder, self.policy),
                stdin=subprocess.DEVNULL,
                stdout=_STDERR,
                start_new_session=True,  # the front handles Ctrl-C
            )
            guard = start_guard(process.pid)
            ended = asyncio.ensure_future(asyncio.to_thread(process.wait))
            try:
                if await self._becomes_ready(ended) and await self._stays_up_while_warming(ended):
                    self._go_up()
                    await asyncio.wait([ended])
                self._go_down(self._exit_error(process.returncode))
            finally:
                await asyncio.to_thread(_end_group, process)
                await asyncio.to_thread(guard.communicate)

    def _receive_steps(self) -> StepReceiver:
        return StepReceiver(self._observer, self._has_keys)

    async def _stays_up_while_warming(self, ended: asyncio.Future[int]) -> bool:
        if self._launch.warm_up:
            self.is_warming_up, self.failure = True, EngineFailed(f"{self.name} is warming up")
            try:
                await warm_up(self.http, self.name)
            finally:
                self.is_warming_up = False
        return await self._becomes_ready(ended) and await self._settles(ended)

    async def _settles(self, ended: asyncio.Future[int]) -> bool:
        if (path := self._launch.settle_path) is not None:
            with suppress(httpx.HTTPError):  # optional
                await self.http.post(path, timeout=_SETTLE_TIMEOUT_S)
        return not ended.done()

    async def _becomes_ready(self, ended: asyncio.Future[int]) -> bool:
        while not ended.done():
            with suppress(httpx.HTTPError):
                if (await self.http.get("/health", timeout=_HEALTH_CHECK_S)).is_success:
                    return True
            await asyncio.wait([ended], timeout=_HEALTH_CHECK_S)
        return False

    def _exit_error(self, exit_code: int) -> EngineFailed:
        if self.is_up:
            return EngineFailed(f"{self.name} died (exit code {exit_code})")
        return EngineFailed(f"{self.name} ended before it was ready (exit code {exit_code}); its own log says why")


def log_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log like the event loop, but drop one harmless error.

    httpx's sockets wait for data with a future set by the loop. If data arrive in the same turn as a client's
    disconnect, the future is already cancelled.
    """
    is_late_result = (
        isinstance(context.get("exception"), asyncio.InvalidStateError) and "set_result" in context["message"]
    )
    if not is_late_result:
        loop.default_exception_handler(context)


def start_guard(group: int) -> subprocess.Popen[bytes]:
    """Start a process that ends this process group once its standard input closes."""
    return subprocess.Popen(
        ["/bin/sh", "-c", _GUARD, "evenflow-guard", str(group)],
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Terminate the host, then kill its remaining processes."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_EXIT_TIMEOUT_S)
    with suppress(ProcessLookupError, PermissionError):  # macOS refuses if all of them are dead
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
