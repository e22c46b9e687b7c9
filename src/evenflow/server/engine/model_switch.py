"""Several models over one engine: one at a time in memory, in the order of requests.

A request holds its model while it runs. One for another model waits until those that hold the loaded one have ended;
requests that come meanwhile wait behind it, whatever their model, so that no model keeps the others out.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Self

from evenflow.errors import EngineFailed, EvenflowError
from evenflow.server.engine.served_engine import ServedEngine, ServedModel

logger = logging.getLogger("evenflow")

MAX_WAIT_S = 600.0  # of a request for its model


class Hold:
    """A request's hold of the loaded model, until it is released; as a context, until that ends."""

    def __init__(self, switch: ModelSwitch) -> None:
        self._switch: ModelSwitch | None = switch

    def release(self) -> None:
        switch, self._switch = self._switch, None
        if switch is not None:
            switch.let_go()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


class ModelSwitch:
    """Decides which model the engine has loaded."""

    def __init__(self, engine: ServedEngine, max_wait_s: float = MAX_WAIT_S) -> None:
        self._engine = engine
        self._max_wait_s = max_wait_s
        self._num_held = 0  # requests that use the loaded model
        self._all_ended = asyncio.Event()
        self._waiting: dict[ServedModel, list[asyncio.Future[None]]] = {}  # by model, oldest first
        self._switching: asyncio.Task[None] | None = None
        self._failure: EvenflowError | None = None  # of a server that shuts down

    @property
    def is_switching(self) -> bool:
        """Requests of the loaded model are being waited for, or another one is being loaded."""
        return self._switching is not None

    def is_free(self, model: ServedModel) -> bool:
        """Whether this model is loaded and nobody waits for another."""
        return self._engine.model is model and not self.is_switching and not self._engine.has_stopped

    async def hold(self, model: ServedModel) -> Hold:
        """Keep this model loaded, after loading it if needed. Raises the error if it cannot be loaded."""
        if self._failure is not None:
            raise self._failure
        if self.is_free(model):
            self._num_held += 1
        else:
            await self._wait(model)
        return Hold(self)

    def let_go(self) -> None:
        """One request holds the model no longer."""
        self._num_held -= 1
        if not self._num_held:
            self._all_ended.set()

    def close(self, failure: EvenflowError) -> None:
        """Load no model any more: whoever waits for one gets this error."""
        self._failure = failure
        if self._switching is not None:
            self._switching.cancel()
        self._end_waiting(list(self._waiting), failure)

    async def _wait(self, model: ServedModel) -> None:
        """Ends with the model held, which the one who ends it counts."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(model, []).append(turn)
        if self._switching is None:
            self._switching = asyncio.create_task(self._take_turns())
        try:
            async with asyncio.timeout(self._max_wait_s):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled() and turn.exception() is None:  # held, and given up at once
                self.let_go()
            if isinstance(error, TimeoutError):
                waited = f"it was not loaded within {self._max_wait_s:g} s, because requests for others still run"
                raise EngineFailed(f"the model {model.name!r} waits: {waited}") from None
            raise

    async def _take_turns(self) -> None:
        try:
            while self._waiting:
                model = next(iter(self._waiting))
                while self._num_held:
                    self._all_ended.clear()
                    await self._all_ended.wait()
                failure = await self._load(model) if any(not turn.done() for turn in self._waiting[model]) else None
                self._end_waiting([model], failure)
        finally:
            self._switching = None

    async def _load(self, model: ServedModel) -> EvenflowError | None:
        """Load it in place of the other one, which comes back if that fails."""
        engine, before = self._engine, self._engine.model
        if model is before and not engine.has_stopped:
            return None
        began_at = time.monotonic()
        logger.info("Loading the model %r in place of %r.", model.name, before.name)
        try:
            await engine.switch(model)
        except EvenflowError as error:
            failure = EngineFailed(f"the model {model.name!r} could not be loaded: {error}")
            logger.error("%s; %r is loaded again.", failure, before.name)
            if model is not before:
                try:
                    await engine.switch(before)
                except EvenflowError as again:
                    logger.error("The model %r could not be loaded: %s; the next request tries.", before.name, again)
            return failure
        logger.info("Loaded the model %r in %.1f s.", model.name, time.monotonic() - began_at)
        return None

    def _end_waiting(self, models: list[ServedModel], failure: EvenflowError | None) -> None:
        for model in models:
            for turn in self._waiting.pop(model):
                if turn.done():
                    continue
                if failure is None:
                    self._num_held += 1
                    turn.set_result(None)
                else:
                    turn.set_exception(failure)
