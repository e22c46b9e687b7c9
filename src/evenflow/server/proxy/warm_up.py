"""Warms up a host engine before it serves, so that its kernels are loaded and its step times are known.

Sends prompts beside streams as ordinary requests to the engine's OpenAI API. Must not depend on the kind of engine.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import random
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import httpx

from evenflow.errors import EndpointFailed

Answer = TypeVar("Answer")

logger = logging.getLogger("evenflow")

REQUEST_ID = "evenflow-warm-up"  # part of each request's id, which marks it in the engine's reports
TIME_LIMIT_S = 10.0
ANSWER_LIMIT_S = 120.0  # of the first answer, which may compile kernels, and of the last one, behind what was cancelled
# Decoding streams, and the prompts sent beside them in turn. Both grow slowly, so that a slow engine has seen some of
# every kind when time is up. The numbers of streams are one below powers of two, the usual limits of engines, which
# leaves a slot for the prompt.
_STAGES: tuple[tuple[int, tuple[int, ...]], ...] = (
    (0, (256,)),
    (1, (256, 1024)),
    (7, (256, 1024, 4096)),
    (31, (256, 1024, 4096)),
    (127, (256, 1024, 4096, 16_384)),
    (7, (16_384,)),
    (0, (4096, 16_384)),
)
_STREAM_PROMPT, _STREAM_OUTPUT = 64, 1024  # tokens; streams end with their stage
_PROMPT_OUTPUT = 8  # tokens decoded at the prompt's context
_STREAMS_START_S = 3.0  # after the first one; others take longer only if the engine has no room
_ASSUMED_CONTEXT = 2048  # if the engine does not report it
# Vocabularies begin with up to a thousand control tokens. A very small one has no other ids.
_TOKEN_IDS = range(1000, 2000)
_LOW_TOKEN_IDS = range(10, 110)


async def warm_up(http: httpx.AsyncClient, name: str) -> None:
    """Warm up the engine within `TIME_LIMIT_S`. A failure is only logged: the engine can serve without warm-up."""
    started_at = time.monotonic()
    logger.info("Warming up %s: prompts beside streams, for at most %.0f s.", name, TIME_LIMIT_S)
    try:
        await _run_until(started_at + TIME_LIMIT_S, await _answered(_connect(http)))
    except Exception as error:
        cause = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
        reason = str(cause) or type(cause).__name__
        logger.warning("The warm-up of %s failed (%s); its first requests will be slower.", name, reason)
    else:
        logger.info("Warmed up in %.1f s.", time.monotonic() - started_at)


async def _run_until(limit: float, endpoint: _Endpoint) -> None:
    try:
        async with asyncio.timeout(limit - time.monotonic()):
            await _run_stages(endpoint)
    except TimeoutError:
        logger.info("The warm-up used its %.0f s; longer prompts beside more streams were not run.", TIME_LIMIT_S)
        # Answered once the engine has finished its current step and dropped cancelled requests.
        await _check(await _answered(endpoint.complete(1, 1)))


async def _answered(answer: Coroutine[Any, Any, Answer]) -> Answer:
    """An engine that does not answer must not keep the front from serving."""
    try:
        async with asyncio.timeout(ANSWER_LIMIT_S):
            return await answer
    except TimeoutError:
        raise EndpointFailed(f"no answer within {ANSWER_LIMIT_S:g} s") from None


@dataclass(frozen=True, slots=True)
class _Endpoint:
    http: httpx.AsyncClient
    model: str
    max_model_len: int
    token_ids: Sequence[int] = _TOKEN_IDS
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    async def complete(self, num_prompt_tokens: int, max_tokens: int) -> httpx.Response:
        return await self.http.post("/v1/completions", json=self._body(num_prompt_tokens, max_tokens))

    @asynccontextmanager
    async def stream(self) -> AsyncIterator[None]:
        """Open a stream and read its first token only. The engine continues until the context ends."""
        num_prompt_tokens = min(_STREAM_PROMPT, self.max_model_len // 2)
        max_tokens = min(_STREAM_OUTPUT, self.max_model_len - num_prompt_tokens)
        body = self._body(num_prompt_tokens, max_tokens) | {"stream": True}
        async with self.http.stream("POST", "/v1/completions", json=body) as response:
            await _check(response)
            parts = response.aiter_raw()
            await anext(parts)
            yield

    def _body(self, num_prompt_tokens: int, max_tokens: int) -> dict[str, Any]:
        # Random tokens match nothing in a prefix cache, now or later.
        prompt = random.choices(self.token_ids, k=num_prompt_tokens)
        body = {"model": self.model, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
        request_id = f"{REQUEST_ID}-{next(self._numbers)}"
        return body | {"request_id": request_id, "rid": request_id}  # vLLM's and SGLang's names for it


async def _connect(http: httpx.AsyncClient) -> _Endpoint:
    response = await http.get("/v1/models")
    await _check(response)
    model = response.json()["data"][0]
    endpoint = _Endpoint(http, model["id"], model.get("max_model_len") or _ASSUMED_CONTEXT)
    has_ids = (await endpoint.complete(1, 1)).is_success
    return endpoint if has_ids else replace(endpoint, token_ids=_LOW_TOKEN_IDS)


async def _run_stages(endpoint: _Endpoint) -> None:
    too_many = math.inf
    for num_streams, prompts in _STAGES:
        started_at = time.monotonic()
        fitting = [size for size in prompts if size + _PROMPT_OUTPUT <= endpoint.max_model_len]
        if not fitting or num_streams >= too_many:
            continue
        async with AsyncExitStack() as streams:
            if not await _open_streams(endpoint, streams, num_streams):
                logger.info("Warm-up (streams: %d): left out, the engine does not run them all at a time.", num_streams)
                too_many = num_streams
                continue
            for size in fitting:
                await _check(await endpoint.complete(size, _PROMPT_OUTPUT))
        seconds = time.monotonic() - started_at
        logger.info("Warm-up (streams: %d): prompts of up to %d tokens took %.1f s.", num_streams, fitting[-1], seconds)


async def _open_streams(endpoint: _Endpoint, streams: AsyncExitStack, count: int) -> bool:
    """False if the engine does not run all of them at once."""
    if count:
        await streams.enter_async_context(endpoint.stream())
    try:
        async with asyncio.timeout(_STREAMS_START_S), asyncio.TaskGroup() as group:
            for _ in range(count - 1):
                group.create_task(streams.enter_async_context(endpoint.stream()))
    except TimeoutError:
        return False
    return True


async def _check(response: httpx.Response) -> None:
    if not response.is_success:
        text = (await response.aread()).decode(errors="replace")
        raise EndpointFailed(f"{response.url.path} returned status {response.status_code}: {text[:200]}")
