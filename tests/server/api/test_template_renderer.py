"""Chat templates of hostile models: bounded in time and memory, where nothing else waits for them."""

from __future__ import annotations

import asyncio
import threading
from multiprocessing.context import SpawnProcess
from typing import Any

import pytest

from evenflow.errors import InvalidRequest
from evenflow.model.text.chat_template import ChatTemplate
from evenflow.model.text.tokenizer import Tokenizer
from evenflow.server.api.template_renderer import TemplateRenderer
from evenflow.server.engine import helper_process
from tests.server.engines import scripted_engine
from tests.server.serving import running_server, small_tokenizer

LONG = "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}"
HOSTILE = {
    "loops": LONG,
    "a power": "{{ 9 ** (9 ** 9) }}",
    "a long text": "{{ 'a' * 10 ** 10 }}",
    "padding": "{{ 'a'.center(10 ** 10) }}",
    "doubling": "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "replacing": "{{ ('a' * 10 ** 6).replace('a', 'b' * 10 ** 6) }}",
    "depth": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
}

NEVER_COMPILES = ("a power", "depth")  # constants are computed, and text is parsed, whatever the messages are


def with_template(source: str) -> Tokenizer:
    tokenizer = small_tokenizer()
    tokenizer.chat_template = ChatTemplate({"default": source}, {})
    return tokenizer


def only_when_asked(source: str) -> str:
    return "{% if messages[0].content == 'attack' %}" + source + "{% else %}fine{% endif %}"


async def rendered(renderer: TemplateRenderer, content: str) -> str:
    messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
    return await renderer.render(renderer.question(messages, None, True, {}), "client")


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_costs_little_and_is_named(name: str) -> None:
    """Before, it ran in the front, as long and with as much memory as it liked."""
    tokenizer = with_template(only_when_asked(HOSTILE[name]))

    async def main() -> None:
        renderer = TemplateRenderer(tokenizer, max_cpu_s=0.2)
        try:
            with pytest.raises(InvalidRequest, match="the model's chat template"):
                await rendered(renderer, "attack")
            if name not in NEVER_COMPILES:
                assert await rendered(renderer, "hello") == "fine"
        finally:
            await renderer.close()

    asyncio.run(main())


@pytest.mark.slow
def test_others_are_served_while_a_template_runs_for_ever() -> None:
    with running_server(scripted_engine, slow_template_tokenizer) as server:

        def chat(content: str) -> int:
            body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
            return server.post("/v1/chat/completions", body).status_code

        assert chat("hello") == 200
        assert chat("attack") == 400
        assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200
        assert chat("hello") == 200
        assert server.post("/tokenize", {"messages": [{"role": "user", "content": "hello"}]}).json()["count"] > 0


def slow_template_tokenizer() -> Tokenizer:
    return with_template(only_when_asked(LONG))


@pytest.mark.slow
def test_numbers_that_no_message_between_processes_holds() -> None:
    with running_server(scripted_engine, small_tokenizer) as server:
        body = {"messages": [{"role": "user", "content": "a", "extra": 2**70}], "max_tokens": 1}
        assert server.post("/v1/chat/completions", body).status_code == 200
        body = {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"x": 10**4000}}
        assert server.post("/tokenize", body).status_code == 200


def test_a_renderer_may_be_closed_while_its_process_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a signal to a server that is loading. Before, it failed at the process that was not there yet."""
    begun, released = threading.Event(), threading.Event()

    def start(process: SpawnProcess) -> None:
        begun.set()
        assert released.wait(20)

    async def main() -> None:
        monkeypatch.setattr(helper_process, "start_shielded", start)
        renderer = TemplateRenderer(small_tokenizer())
        starting = asyncio.create_task(renderer.start())
        await asyncio.to_thread(begun.wait, 20)
        starting.cancel()
        await asyncio.wait([starting])
        try:
            await renderer.close()
        finally:
            released.set()

    asyncio.run(main())
