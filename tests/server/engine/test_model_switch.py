"""Several models over one engine: who waits for whom, by a stand-in; and through HTTP, by engines in real processes."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from typing import Any, cast

import httpx
import pytest

from evenflow.engine.engine import Engine
from evenflow.errors import EngineFailed, EvenflowError, OutOfMemory
from evenflow.server.engine.model_switch import ModelSwitch
from evenflow.server.engine.served_engine import ServedEngine, ServedModel
from evenflow.server.serving import ModelSource
from tests.server.engines import scripted_engine
from tests.server.serving import MODEL, RunningServer, running_server, small_tokenizer

TEXTS = {MODEL: "the first model", "second": "another one", "third": "one more"}


def on_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test that awaits."""

    @functools.wraps(test)
    def run(*args: Any, **fixtures: Any) -> None:
        asyncio.run(test(*args, **fixtures))

    return run


class Switchable:
    """The part of an engine that a switch uses."""

    def __init__(self, model: ServedModel) -> None:
        self.model = model
        self.has_stopped = False
        self.broken: set[ServedModel] = set()
        self.loaded: list[ServedModel] = []

    async def switch(self, model: ServedModel) -> None:
        self.model, self.has_stopped = model, True
        await asyncio.sleep(0)
        if model in self.broken:
            raise OutOfMemory("too large")
        self.has_stopped = False
        self.loaded.append(model)


@pytest.fixture
def models() -> list[ServedModel]:
    return [ServedModel(name, cast("Any", None), cast("Any", None)) for name in "abc"]


def new_switch(engine: Switchable, **settings: float) -> ModelSwitch:
    return ModelSwitch(cast("ServedEngine", engine), **settings)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@on_a_loop
async def test_requests_wait_for_those_that_run_and_for_those_that_came_before(models: list[ServedModel]) -> None:
    a, b, c = models
    engine = Switchable(a)
    switch = new_switch(engine)
    first = await switch.hold(a)
    waiting = [asyncio.ensure_future(switch.hold(model)) for model in (b, a, b, c)]
    await settle()
    assert not any(one.done() for one in waiting)
    assert switch.is_switching
    assert not switch.is_free(a)  # it is loaded, but others are next
    first.release()
    first.release()  # as after an error: counts once
    await settle()
    assert [one.done() for one in waiting] == [True, False, True, False]
    waiting[0].result().release()
    await settle()
    assert not waiting[1].done()  # the second request for b still runs
    waiting[2].result().release()
    await settle()
    waiting[1].result().release()
    await settle()
    waiting[3].result().release()
    await settle()
    assert engine.loaded == [b, a, c]
    assert not switch.is_switching
    assert switch.is_free(c)


@on_a_loop
async def test_who_gives_up_holds_nothing_and_loads_nothing(models: list[ServedModel]) -> None:
    a, b, _ = models
    engine = Switchable(a)
    switch = new_switch(engine)
    held = await switch.hold(a)
    gone = asyncio.ensure_future(switch.hold(b))
    await settle()
    gone.cancel()
    await settle()
    held.release()
    await settle()
    assert engine.loaded == []
    assert switch.is_free(a)
    held = await switch.hold(a)
    both = [asyncio.ensure_future(switch.hold(b)) for _ in range(2)]
    await settle()
    held.release()
    while not engine.loaded:  # it leaves at the moment in which its turn comes
        await asyncio.sleep(0)
    both[0].cancel()
    (await both[1]).release()
    await asyncio.gather(*both, return_exceptions=True)
    (await asyncio.wait_for(switch.hold(a), 5)).release()
    assert engine.loaded == [b, a]


@on_a_loop
async def test_the_wait_has_a_bound(models: list[ServedModel]) -> None:
    a, b, _ = models
    switch = new_switch(Switchable(a), max_wait_s=0.01)
    with await switch.hold(a), pytest.raises(EngineFailed, match=r"the model 'b' waits: .* within 0.01 s"):
        await switch.hold(b)
    await settle()
    assert switch.is_free(a)


@on_a_loop
async def test_a_model_that_cannot_be_loaded_leaves_the_one_before(models: list[ServedModel]) -> None:
    a, b, c = models
    engine = Switchable(a)
    engine.broken = {b}
    switch = new_switch(engine)
    with pytest.raises(EngineFailed, match="'b' could not be loaded: too large"):
        await switch.hold(b)
    await settle()
    assert switch.is_free(a)
    engine.broken = {a, b}
    with pytest.raises(EngineFailed, match="'b' could not be loaded"):
        await switch.hold(b)
    await settle()
    assert engine.has_stopped
    assert not switch.is_free(a)
    with await switch.hold(c):  # the next request brings the engine back
        assert engine.model is c


@on_a_loop
async def test_a_server_that_shuts_down_loads_nothing(models: list[ServedModel]) -> None:
    a, b, _ = models
    engine = Switchable(a)
    switch = new_switch(engine)
    held = await switch.hold(a)
    waiting = asyncio.ensure_future(switch.hold(b))
    await settle()
    failure: EvenflowError = EngineFailed("the server is shutting down")
    switch.close(failure)
    for one in (waiting, switch.hold(b)):
        with pytest.raises(EngineFailed, match="shutting down"):
            await one
    held.release()
    await settle()
    assert engine.loaded == []


# ---- through HTTP ----


def source(name: str, **engine: Any) -> ModelSource:
    script = tuple(small_tokenizer().encode(TEXTS[name], add_special_tokens=False))
    return ModelSource((name,), partial(scripted_engine, script=script, **engine), small_tokenizer)


def broken_engine() -> Engine:
    raise OutOfMemory("the weights need 1 TB")


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    first = source(MODEL, step_s=0.02)
    broken = ModelSource(("broken",), broken_engine, small_tokenizer)
    others = [source("second", max_model_len=500), source("third"), broken]
    with running_server(first.factory, first.load_tokenizer, others) as running:
        yield running


def ask(server: RunningServer, model: str | None, num_tokens: int = 3) -> str:
    body = {"model": model, "prompt": "hi", "max_tokens": num_tokens}
    answer = server.post("/v1/completions", body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == (model or MODEL)
    return str(answer.json()["choices"][0]["text"])


def test_each_api_reaches_each_model_by_name(server: RunningServer) -> None:
    chat = [{"role": "user", "content": "hi"}]
    for name, text in list(TEXTS.items())[::-1]:
        words = text[:5]
        num_tokens = len(small_tokenizer().encode(text, add_special_tokens=False))
        assert ask(server, name, num_tokens) == text
        openai = server.openai().chat.completions.create(model=name, messages=cast("Any", chat), max_tokens=num_tokens)
        assert openai.choices[0].message.content == text
        message = {"model": name, "messages": chat, "max_tokens": num_tokens}
        assert server.post("/v1/messages", message).json()["content"][0]["text"].startswith(words)
        made = server.post("/v1/responses", {"model": name, "input": "hi", "max_output_tokens": num_tokens})
        assert made.json()["output"][0]["content"][0]["text"].startswith(words)
        ollama = {"model": f"{name}:latest", "messages": chat, "stream": False}
        assert server.post("/api/chat", ollama).json()["message"]["content"].startswith(words)
        assert server.post("/tokenize", {"model": name, "prompt": "hi"}).json()["max_model_len"] in (500, 1000)
        assert server.post("/v1/messages/count_tokens", {"model": name, "messages": chat}).status_code == 200
        [loaded] = {one["name"] for one in server.get("/api/ps").json()["models"]} - {"another-name"}
        assert loaded == name
        assert f'evenflow:model_loaded{{engine="0",model_name="{MODEL}",served_model="{name}"}} 1' in metrics(server)
    assert ask(server, None) == ask(server, MODEL)


def metrics(server: RunningServer) -> str:
    return server.get("/metrics").text


def test_all_models_are_listed(server: RunningServer) -> None:
    ask(server, "second")
    wanted = [MODEL, "another-name", "second", "third", "broken"]
    listed = {one["id"]: one for one in server.get("/v1/models").json()["data"]}
    assert list(listed) == wanted
    assert listed["second"]["max_model_len"] == 500
    assert listed["broken"]["max_model_len"] is None  # it never was loaded
    assert [one["name"] for one in server.get("/api/tags").json()["models"]] == wanted
    assert server.post("/api/show", {"model": "broken"}).status_code == 200
    refused = server.post("/v1/completions", {"model": "fourth", "prompt": "hi"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
    assert "served: a-model, another-name, second, third, broken" in refused.json()["error"]["message"]


def test_streams_of_the_loaded_model_finish_first(server: RunningServer) -> None:
    ask(server, MODEL)
    url, ended = server.url + "/v1/completions", list[str]()

    def ask_later(name: str) -> None:
        ask(server, name)
        ended.append(name)

    body = {"model": MODEL, "prompt": "hi", "max_tokens": 40, "stream": True}
    with httpx.stream("POST", url, json=body, timeout=30, verify=False) as stream:
        lines = stream.iter_lines()
        next(lines)
        switch = cast("Any", server.server.service).switch
        threads = [threading.Thread(target=ask_later, args=(name,)) for name in ("second", MODEL)]
        for thread in threads:
            thread.start()
            server.until(lambda: switch.is_switching)
        assert server.get("/ready").status_code == 200  # requests are accepted
        assert server.get("/health").status_code == 200
        rest = [line for line in lines if line]
        ended.append("stream")
    for thread in threads:
        thread.join()
    assert rest[-1] == "data: [DONE]"
    assert sum('"text"' in line for line in rest) >= 30  # the whole stream
    assert ended[0] == "stream"
    assert sorted(ended[1:]) == sorted(["second", MODEL])


def test_a_model_that_fails_to_load_is_named_and_the_others_go_on(server: RunningServer) -> None:
    ask(server, MODEL)
    refused = server.post("/v1/completions", {"model": "broken", "prompt": "hi"})
    assert refused.status_code == 503
    assert "the model 'broken' could not be loaded: the weights need 1 TB" in refused.json()["error"]["message"]
    server.until(lambda: server.get("/ready").status_code == 200)
    assert ask(server, MODEL) == TEXTS[MODEL][: len(ask(server, MODEL))]


def test_a_changed_target_stays_with_its_model() -> None:
    first = source(MODEL, policy="target:500ms")
    with running_server(first.factory, first.load_tokenizer, [source("second", policy="target:300ms")]) as server:
        assert server.request("PUT", "/v1/target", {"tbt_target": "400ms"}).status_code == 200
        ask(server, "second")
        assert server.get("/v1/target").json()["tbt_target"] == 0.3
        ask(server, MODEL)
        assert server.get("/v1/target").json()["tbt_target"] == 0.4
