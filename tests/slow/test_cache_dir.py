"""The prefix cache of a server whose engine is killed, and of the next server."""

from __future__ import annotations

import multiprocessing
from functools import partial
from pathlib import Path

import pytest

from evenflow.config import EngineConfig
from evenflow.model.loader import load_model
from tests.models import tiny_llama
from tests.server.engines import always_moving_engine
from tests.server.serving import RunningServer, running_server

pytestmark = pytest.mark.slow

BODY = {"prompt": [7, *range(100)], "max_tokens": 8, "temperature": 0, "ignore_eos": True}


def answer(server: RunningServer) -> tuple[str, int]:
    """Its text, and how many tokens of the prompt were cached."""
    response = server.post("/v1/completions", BODY)
    assert response.status_code == 200, response.text
    found = response.json()
    return found["choices"][0]["text"], (found["usage"]["prompt_tokens_details"] or {}).get("cached_tokens", 0)


def test_cached_prefixes_survive_a_killed_engine(tmp_path: Path) -> None:
    folder, settings = str(tiny_llama()), {"kv_cache_memory": 1 << 22, "threads": 1, "policy": "fixed:64"}
    config = EngineConfig(model=folder, device="cpu", cache_dir=str(tmp_path), **settings)  # type: ignore[arg-type]
    with running_server(partial(always_moving_engine, config), lambda: load_model(folder).tokenizer) as server:
        text, num_cached = answer(server)
        assert num_cached == 0
        server.until(lambda: len(list(tmp_path.glob("*.kv"))) == 6)  # written although no request follows
        [process] = [child for child in multiprocessing.active_children() if child.name == "evenflow-engine"]
        process.kill()
        server.until(lambda: not server.client.is_up)
        server.until(lambda: server.client.is_up)
        assert answer(server) == (text, 96)
