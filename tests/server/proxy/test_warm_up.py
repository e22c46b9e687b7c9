"""The warm-up against an endpoint that notes what is sent to it."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator

import httpx
import pytest

from evenflow.server.proxy import warm_up as module
from evenflow.server.proxy.warm_up import warm_up


class Endpoint:
    """Answers at once. Notes each prompt with the streams that were open; `limit` is the most that run at a time."""

    def __init__(self, max_model_len: int | None = 32_768, vocabulary: int = 128_000, limit: int = 10_000) -> None:
        self.max_model_len, self.vocabulary, self.limit = max_model_len, vocabulary, limit
        self.num_open = 0
        self.most_open = 0
        self.prompts: list[tuple[int, int]] = []  # open streams, tokens
        self.ids: list[str] = []
        self.longest = 0  # of a prompt and its answer
        self.first_blocks: list[tuple[int, ...]] = []
        self.refuses_from = 10_000  # the number of the first prompt that fails

    async def handle(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m", "max_model_len": self.max_model_len}]})
        body = json.loads(request.content)
        prompt = body["prompt"]
        assert (body["model"], body["ignore_eos"]) == ("m", True)
        assert body["request_id"] == body["rid"]
        assert module.REQUEST_ID in body["rid"]
        self.ids.append(body["rid"])
        if max(prompt) >= self.vocabulary:
            return httpx.Response(400, text="out of vocabulary")
        self.longest = max(self.longest, len(prompt) + body["max_tokens"])
        self.first_blocks.append(tuple(prompt[:16]))
        if body.get("stream"):
            return httpx.Response(200, stream=EndlessStream(self))
        if len(self.prompts) == self.refuses_from:
            return httpx.Response(500, text="out of everything")
        self.prompts.append((self.num_open, len(prompt)))
        return httpx.Response(200, json={})

    async def warm_up(self) -> None:
        transport = httpx.MockTransport(self.handle)
        async with httpx.AsyncClient(transport=transport, base_url="http://engine") as http:
            await warm_up(http, "the engine")


class EndlessStream(httpx.AsyncByteStream):
    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint, self._has_begun = endpoint, False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        endpoint = self._endpoint
        while endpoint.num_open >= endpoint.limit:
            await asyncio.sleep(0.001)
        self._has_begun = True
        endpoint.num_open += 1
        endpoint.most_open = max(endpoint.most_open, endpoint.num_open)
        yield b"data: {}\n\n"
        await asyncio.Event().wait()

    async def aclose(self) -> None:
        self._endpoint.num_open -= self._has_begun
        self._has_begun = False


def run(endpoint: Endpoint) -> None:
    asyncio.run(endpoint.warm_up())
    assert endpoint.num_open == 0
    assert len(set(endpoint.ids)) == len(endpoint.ids)


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "evenflow")
    return caplog


def test_prompts_of_growing_size_run_beside_more_and_more_streams(log: pytest.LogCaptureFixture) -> None:
    endpoint = Endpoint()
    run(endpoint)
    assert endpoint.prompts == [
        (0, 1),  # does the vocabulary have such ids?
        *((0, 256), (1, 256), (1, 1024), (7, 256), (7, 1024), (7, 4096), (31, 256), (31, 1024), (31, 4096)),
        *((127, 256), (127, 1024), (127, 4096), (127, 16_384), (7, 16_384), (0, 4096), (0, 16_384)),
    ]
    assert len(set(endpoint.first_blocks)) == len(endpoint.first_blocks)  # a prefix cache is of no use
    assert "(streams: 127): prompts of up to 16384 tokens took" in log.text
    assert "Warmed up in" in log.text


@pytest.mark.parametrize("context", [16, 300, 5000, None])
def test_nothing_is_longer_than_the_context(context: int | None) -> None:
    endpoint = Endpoint(max_model_len=context)
    run(endpoint)
    assert endpoint.longest <= (context or 2048)
    assert max(tokens for _, tokens in endpoint.prompts) == {16: 1, 300: 256, 5000: 4096, None: 1024}[context]


def test_a_small_vocabulary_is_enough() -> None:
    endpoint = Endpoint(vocabulary=512)
    run(endpoint)
    assert endpoint.prompts[-1] == (0, 16_384)


def test_an_engine_that_runs_few_streams_gets_no_more(
    log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_STREAMS_START_S", 1.0)
    endpoint = Endpoint(limit=10)
    run(endpoint)
    assert endpoint.most_open == 10
    assert {streams for streams, _ in endpoint.prompts} == {0, 1, 7}
    assert endpoint.prompts[-1] == (0, 16_384)
    assert log.text.count("(streams: 31): left out") == 1


def test_it_ends_when_its_time_is_up(log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TIME_LIMIT_S", 0.2)
    endpoint = Endpoint(limit=0)  # no stream ever begins
    run(endpoint)
    assert endpoint.prompts == [(0, 1), (0, 256), (0, 1)]  # the last one ends behind all that was cancelled
    assert "longer prompts beside more streams were not run" in log.text


def test_a_failure_is_only_logged(log: pytest.LogCaptureFixture) -> None:
    endpoint = Endpoint()
    endpoint.refuses_from = 5
    run(endpoint)
    assert len(endpoint.prompts) == 5
    (warning,) = (record for record in log.records if record.levelno >= logging.WARNING)
    assert "status 500: out of everything" in warning.getMessage()


def test_an_engine_without_completions_is_only_logged(log: pytest.LogCaptureFixture) -> None:
    async def handle(request: httpx.Request) -> httpx.Response:
        models = request.url.path == "/v1/models"
        return httpx.Response(200, json={"data": [{"id": "m"}]}) if models else httpx.Response(404)

    async def warm() -> None:
        async with httpx.AsyncClient(transport=httpx.MockTransport(handle), base_url="http://engine") as http:
            await warm_up(http, "the engine")

    asyncio.run(warm())
    assert "/v1/completions returned status 404" in log.text


@pytest.mark.parametrize("answered", [0, 2], ids=["never", "until the time is up"])
def test_an_engine_that_does_not_answer_is_only_logged(
    log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, answered: int
) -> None:
    """Before, the front waited for it for ever, and never served."""
    monkeypatch.setattr(module, "TIME_LIMIT_S", 0.2)
    monkeypatch.setattr(module, "ANSWER_LIMIT_S", 0.3)

    class Silent(Endpoint):
        async def handle(self, request: httpx.Request) -> httpx.Response:
            if len(self.prompts) >= answered:
                await asyncio.Event().wait()
            return await super().handle(request)

    asyncio.run(Silent().warm_up())
    assert "The warm-up of the engine failed (no answer within 0.3 s)" in log.text


def test_an_engine_that_is_gone_is_only_logged(log: pytest.LogCaptureFixture) -> None:
    async def warm() -> None:
        async with httpx.AsyncClient(base_url="http://127.0.0.1:9", trust_env=False) as http:
            await warm_up(http, "the engine")

    asyncio.run(warm())
    assert "The warm-up of the engine failed" in log.text
