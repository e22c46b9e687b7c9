"""vLLM behind evenflow's front: starts it, changes its target, and cleans up its processes."""

from __future__ import annotations

import asyncio
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

from evenflow.core.request import FinishReason
from evenflow.errors import EngineFailed, EvenflowError
from evenflow.hosts.policy_file import PolicyFile
from evenflow.server.engine.supervised import SupervisedEngine
from evenflow.server.metrics.observer import Observer
from evenflow.server.proxy.step_receiver import StepReceiver
from evenflow.vllm.launch import RunFolder, VllmLaunch

_HEALTH_CHECK_S = 0.5  # while it starts
_EXIT_TIMEOUT_S = 20.0
_FORGET_S = 1.0  # after the last request: time for the last report to arrive
_STDERR = 2
# Ends vLLM and its workers when its standard input closes: they must not outlive a killed front.
_GUARD = 'read -r _; kill -s TERM "$1" && sleep 10; kill -s KILL -- "-$1"'


class OpenRequest(Protocol):
    """A request that is being proxied to vLLM."""

    def fail(self, failure: EvenflowError) -> None: ...


class VllmEngine(SupervisedEngine):
    """One vLLM server, which routes reach over `http`."""

    def __init__(self, launch: VllmLaunch, observer: Observer) -> None:
        super().__init__("vLLM", launch.policy, observer)
        self._launch = launch
        self._last_target = launch.policy
        self._folder = RunFolder(Path(tempfile.mkdtemp(prefix="evenflow-")))
        transport = httpx.AsyncHTTPTransport(
            uds=str(self._folder.http_socket),
            # vLLM closes idle connections at a time of its own, and a new one on this machine costs little.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        )
        self.http = httpx.AsyncClient(transport=transport, base_url="http://vllm", timeout=None, trust_env=False)
        self._open: set[OpenRequest] = set()

    # ---- what routes use ----

    def set_target(self, seconds: float | None, paced: bool | None = None) -> None:
        if seconds is not None:
            self._last_target = self._last_target.with_target(seconds, paced)
        self.policy = None if seconds is None else self._last_target
        PolicyFile(self._folder.policy_path).write(self.policy)
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
        for request in list(self._open):
            request.fail(failure)

    async def close(self) -> None:
        await super().close()
        await self.http.aclose()
        shutil.rmtree(self._folder.path, ignore_errors=True)

    def _forget_requests(self) -> None:
        """End the requests whose end was lost or will not be reported, once none is open."""
        if not self._open:
            for request_id in list(self._observer.requests):
                self._observer.on_request_finished(request_id, FinishReason.ABORT, 0, self._observer.clock())

    # ---- the process ----

    async def _run_process(self) -> None:
        self._folder.http_socket.unlink(missing_ok=True)
        feed = await asyncio.get_running_loop().create_unix_server(
            lambda: StepReceiver(self._observer), self._folder.step_socket
        )
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
                self._go_up()
                await asyncio.wait([ended])
            self._go_down(_exit_error(process.returncode, self.is_up))
        finally:
            feed.close()
            await asyncio.to_thread(_end_group, process)
            await asyncio.to_thread(guard.communicate)

    async def _becomes_ready(self, ended: asyncio.Future[int]) -> bool:
        while not ended.done():
            with suppress(httpx.HTTPError):
                if (await self.http.get("/health", timeout=_HEALTH_CHECK_S)).is_success:
                    return True
            await asyncio.wait([ended], timeout=_HEALTH_CHECK_S)
        return False


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
