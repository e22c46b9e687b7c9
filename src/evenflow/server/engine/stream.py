"""One request's answer on its way from the engine's steps to whoever awaits it, as text.

Lives on the event loop's thread. Must not know: sockets, processes, HTTP.
"""

from __future__ import annotations

import asyncio

from evenflow.core.plan import RowLogprobs
from evenflow.core.request import FinishReason, Request
from evenflow.engine.outputs import Delta, OutputBuilder, RequestOutput, TextDecoder
from evenflow.errors import EvenflowError
from evenflow.server.engine.wire import Ended, Started

_NO_TOKENS: frozenset[int] = frozenset()


class Stream:
    """An async iterator of deltas. What comes while nobody awaits is handed over as one."""

    def __init__(self, request: Request, decoder: TextDecoder) -> None:
        self.request = request
        self.output = RequestOutput(request.id, request.tokens)
        self._builder = OutputBuilder(self.output, decoder, request.sampling.stop, request.arrival_time)
        self._tokens: tuple[int, ...] = ()
        self._text = ""
        self._failure: EvenflowError | None = None
        self._is_handed_over = False  # the last delta, or the failure
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_finished(self) -> bool:
        return self.output.finish_reason is not None

    # ---- from the engine ----

    def start(self, started: Started) -> None:
        """Note what is known with the first token."""
        self.output.num_cached_tokens, self.output.chunks, self.output.prompt_logprobs = started

    def take(
        self, tokens: tuple[int, ...], logprobs: tuple[RowLogprobs, ...] | None, ended: Ended | None, now: float
    ) -> bool:
        """Add what a step gave; True where its text met a stop string that the engine does not know of."""
        by_stop_token = ended is not None and ended.reason == FinishReason.STOP
        stop_tokens = self.request.stop_token_ids if by_stop_token else _NO_TOKENS
        text, stopped = self._builder.take_tokens(tokens, logprobs, stop_tokens, now)
        if stopped:
            text += self._builder.finish(FinishReason.STOP, None, stopped_by_text=True)
        elif ended is not None:
            text += self._builder.finish(ended.reason, ended.error)
        self._tokens += tokens
        self._text += text
        self._wake()
        return stopped and ended is None

    def fail(self, failure: EvenflowError) -> None:
        """End it by an error that its reader gets to see, after what came before."""
        self._builder.finish(FinishReason.ERROR, str(failure))
        self._failure = failure
        self._wake()

    def abort(self) -> None:
        """End it where it is."""
        self._text += self._builder.finish(FinishReason.ABORT, None)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # ---- to the reader ----

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Delta:
        if self._is_handed_over:
            raise StopAsyncIteration
        if not (self._tokens or self.is_finished):
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
            self._waiter = None
        if self._failure is not None and not self._tokens:
            self._is_handed_over = True
            raise self._failure
        reason = None if self._failure is not None else self.output.finish_reason
        delta = Delta(self.request.id, self._tokens, self._text, reason, self.output)
        self._tokens, self._text = (), ""
        self._is_handed_over = reason is not None
        return delta
