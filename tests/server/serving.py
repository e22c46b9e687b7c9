"""A real server on a free port, its engine in a real process, over the fake executor or a small model."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import uvloop

from evenflow.config import EngineConfig
from evenflow.engine.engine import Engine
from evenflow.model.text.chat_template import ChatTemplate
from evenflow.model.text.tokenizer import Tokenizer
from evenflow.server.access import Caller
from evenflow.server.engine.process import build_served_engine
from evenflow.server.engine.served_engine import ServedEngine
from evenflow.server.gate import ServerLimits
from evenflow.server.serving import ModelSource, Server, ServerSettings, bind, serve
from tests.models import byte_level_tokenizer
from tests.server.engines import scripted_engine

MODEL = "a-model"
ANYONE = Caller("", "", "127.0.0.1", is_admin=True)
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def small_tokenizer() -> Tokenizer:
    """512 tokens, among them all bytes: the fake executor's answers are full of broken characters."""
    return Tokenizer(
        byte_level_tokenizer(),
        bos_token_id=1,
        eos_token_ids=(2,),
        chat_template=ChatTemplate({"default": _TEMPLATE}, {}),
    )


class RunningServer:
    """What tests do with a server. There is no TLS to verify, and loading certificates takes 40 ms a request."""

    def __init__(self, server: Server, port: int) -> None:
        self.server = server
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self._clients: list[openai.OpenAI] = []

    @property
    def client(self) -> ServedEngine:
        return self.server.service.client

    def request(self, method: str, path: str, body: Any = None) -> httpx.Response:
        return httpx.request(method, self.url + path, json=body, timeout=30, verify=False)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=30, verify=False, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=30, verify=False, **options)

    def openai(self, **options: Any) -> openai.OpenAI:
        http = openai.DefaultHttpxClient(verify=False)
        settings = {"api_key": "none", "max_retries": 0, "http_client": http, **options}
        client = openai.OpenAI(base_url=self.url + "/v1", **settings)
        self._clients.append(client)
        return client

    def stop(self, thread: threading.Thread, listener: socket.socket) -> None:
        """End the server that runs in this thread, and its clients."""
        for client in self._clients:
            client.close()
        self.server.should_exit = True
        thread.join()
        listener.close()

    def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """All events of a stream, the last of which must be the end."""
        with httpx.stream("POST", self.url + path, json={**body, "stream": True}, timeout=30, verify=False) as response:
            assert response.status_code == 200, response.read()
            lines = [line for line in response.iter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

    def until(self, is_so: Callable[[], bool], seconds: float = 20) -> None:
        """Wait for something that must come; the limit is only there to fail instead of hanging."""
        end = time.monotonic() + seconds
        while not is_so():
            assert time.monotonic() < end, "it did not happen"
            time.sleep(0.005)


@contextmanager
def running_server(
    factory: Callable[[], Engine],
    tokenizer: Callable[[], Tokenizer] = small_tokenizer,
    others: Sequence[ModelSource] = (),
    **settings: Any,
) -> Iterator[RunningServer]:
    """Serve in a thread of this process until the context ends."""
    listener = bind("127.0.0.1", 0)
    port = listener.getsockname()[1]
    ready = threading.Event()
    found: list[Server] = []

    def on_ready(server: Server) -> None:
        found.append(server)
        ready.set()

    def run() -> None:
        limits = ServerLimits(**settings.pop("limits", {}))
        chosen = ServerSettings(
            **{"model_names": (MODEL, "another-name"), "drain_s": 0.0, "limits": limits, **settings}
        )
        try:
            asyncio.Runner(loop_factory=uvloop.new_event_loop).run(
                serve(chosen, listener, factory, tokenizer, on_ready, others)
            )
        finally:
            ready.set()

    thread = threading.Thread(target=run)
    thread.start()
    ready.wait()
    assert found, "the server did not start"
    running = RunningServer(found[0], port)
    running.until(lambda: running.server.started)
    try:
        yield running
    finally:
        running.stop(thread, listener)


@contextmanager
def scripted_server(
    *, step_s: float = 0.0, script: str = "", settings: dict[str, Any] | None = None, **engine: Any
) -> Iterator[RunningServer]:
    """A server whose answers repeat the text of a script, or are noise where there is none."""
    token_ids = tuple(small_tokenizer().encode(script, add_special_tokens=False)) if script else ()
    with running_server(partial(scripted_engine, step_s, token_ids, **engine), **(settings or {})) as server:
        yield server


@contextmanager
def model_server(
    folder: str, record: Path | None = None, served: dict[str, Any] | None = None, **settings: Any
) -> Iterator[RunningServer]:
    """A server over a real model; `served` are settings of the server, the others of the engine."""
    from evenflow.model.loader import load_model

    config = EngineConfig(model=folder, kv_cache_memory=64 << 20, threads=1, **settings)
    factory = partial(build_served_engine, config, record)
    with running_server(factory, lambda: load_model(folder).tokenizer, **(served or {})) as server:
        yield server
