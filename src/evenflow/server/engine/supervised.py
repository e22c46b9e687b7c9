"""An engine in a process that is restarted when it dies: the part that evenflow's own engine and host engines share."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod

from evenflow.core.policies import PolicySpec
from evenflow.errors import EngineFailed, EvenflowError
from evenflow.hosts.policy_file import NO_TARGET
from evenflow.server.metrics.observer import EngineState, Observer

logger = logging.getLogger("evenflow")

_FIRST_DELAY_S = 0.5
_MAX_DELAY_S = 30.0
_STABLE_S = 10.0  # a process that ran this long is restarted after the first delay


class SupervisedEngine(ABC):
    """An engine for the routes to use. Call it on the event loop's thread.

    When its process dies, open requests fail, except those that the next process can compute again; new ones are
    refused until that is ready.
    """

    def __init__(self, name: str, policy: PolicySpec | None, observer: Observer) -> None:
        self.is_up = False
        self.is_warming_up = False  # it runs, and serves no requests yet
        self.failure: EvenflowError = EngineFailed(f"{name} is starting")  # why it is not up
        self.policy: PolicySpec | None = policy  # None: it keeps no target
        self._observer = observer
        self._sizes: dict[str, int] = {}
        self._num_restarts = 0
        self._first_start: asyncio.Future[None] | None = None
        self._supervisor: asyncio.Task[None] | None = None

    @property
    def feasible_target_s(self) -> float | None:
        """The lowest feasible target, while steps show that the current one is infeasible."""
        return self._observer.feasible_target_s

    @property
    def admission_failure(self) -> str | None:
        """What is wrong if the engine admits nothing although it could."""
        return self._observer.admission_failure

    @abstractmethod
    def set_target(self, target: float | str | None, paced: bool | None = None) -> None:
        """Keep another target from the next step on, paced as before unless stated; None: keep none."""

    @abstractmethod
    def fail_all(self, failure: EvenflowError) -> None:
        """End every open request with this error, after the tokens that it has."""

    def _lose_requests(self, failure: EvenflowError) -> None:
        """The process has died with requests open."""
        self.fail_all(failure)

    def start(self) -> asyncio.Future[None]:
        """Start the process in the background. The future ends when it is ready, or with the error it failed with."""
        self._first_start = asyncio.get_running_loop().create_future()
        self._supervisor = asyncio.create_task(self._supervise(self._first_start))
        return self._first_start

    async def close(self) -> None:
        """End the process, and every open request with it."""
        self.fail_all(EngineFailed("the server is shutting down"))
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.wait([self._supervisor])

    @property
    def has_stopped(self) -> bool:
        """Whether no process runs, and none will by itself: its first start failed, or it is closed."""
        return self._supervisor is None or self._supervisor.done()

    @abstractmethod
    async def _run_process(self) -> None:
        """One process from start to end, or until cancelled. Calls `_go_up` and `_go_down`."""

    async def _supervise(self, first_start: asyncio.Future[None]) -> None:
        clock, delay = asyncio.get_running_loop().time, 0.0
        while True:
            started_at = clock()
            try:
                await self._run_process()
            except OSError as error:
                self._go_down(EngineFailed(f"the engine process cannot be started: {error}"))
            if not first_start.done():
                first_start.set_exception(self.failure)
                return
            self._num_restarts += 1
            was_stable = clock() - started_at > _STABLE_S
            delay = _FIRST_DELAY_S if was_stable or not delay else min(2 * delay, _MAX_DELAY_S)
            logger.error("%s; restarting it in %.1f s", self.failure, delay)
            await asyncio.sleep(delay)

    def _go_up(self, **sizes: int) -> None:
        """The process is ready. `sizes` are fields of EngineState."""
        self.is_up, self._sizes = True, sizes
        self._publish_state()
        if self._first_start is not None and not self._first_start.done():
            self._first_start.set_result(None)

    def _go_down(self, failure: EvenflowError) -> None:
        """The process has ended."""
        self.failure = failure
        if self.is_up:
            self.is_up = False
            self._lose_requests(failure)
            self._publish_state()
        else:  # it did not even start: requests that waited for it have waited long enough
            self.fail_all(failure)

    def _publish_state(self) -> None:
        policy = NO_TARGET if self.policy is None else str(self.policy)
        target = None if self.policy is None else self.policy.target
        state = EngineState(self.is_up, self._num_restarts, policy=policy, target_s=target, **self._sizes)
        self._observer.on_engine_state(state)
