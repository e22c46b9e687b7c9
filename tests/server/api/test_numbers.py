"""Numbers of all sizes in every numeric field, found in the schema: an answer or a refusal, and nothing is left."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from evenflow import SamplingParams
from evenflow.engine.client import EngineClient
from evenflow.engine.messages import Command
from evenflow.errors import InvalidRequest
from tests.engine.fakes import fake_engine, prepare
from tests.server.serving import RunningServer, scripted_server

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": [5, 6], "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [5]},
}
_POWERS = (7, 15, 31, 32, 53, 63, 64, 127, 1000)
VALUES = [
    *(sign * 2**power + offset for power in _POWERS for sign in (1, -1) for offset in (-1, 0)),
    *(0, 1, -1, 10**4000, 0.5, 1e-320, 1e308, -1e308, 1e15),
]


def numeric_fields(
    schema: dict[str, Any], found: dict[str, Any], path: tuple[str, ...] = ()
) -> Iterator[tuple[str, ...]]:
    """The paths to all numbers in a body's schema; "*" is an item of a list."""
    if "$ref" in found:
        if len(path) < 6:
            yield from numeric_fields(schema, schema["components"]["schemas"][found["$ref"].rpartition("/")[2]], path)
        return
    if found.get("type") in ("integer", "number"):
        yield path
    for one in (*found.get("anyOf", ()), *found.get("oneOf", ())):
        yield from numeric_fields(schema, one, path)
    if found.get("type") == "array":
        yield from numeric_fields(schema, found["items"], (*path, "*"))
    for name, one in found.get("properties", {}).items():
        yield from numeric_fields(schema, one, (*path, name))


def with_value(path: tuple[str, ...], value: object) -> object:
    for name in reversed(path):
        value = [value] if name == "*" else {name: value}
    return value


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with scripted_server() as running:
        yield running


@pytest.mark.slow
def test_numbers_of_all_sizes_in_all_fields(server: RunningServer) -> None:
    """top_k of 2**64 was a 500 before, and its request stayed open for ever."""
    schema = server.get("/openapi.json").json()
    num_tried = 0
    with httpx.Client(base_url=server.url, timeout=30) as client:
        for path, body in BODIES.items():
            content = schema["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
            fields = set(numeric_fields(schema, content))
            assert fields or path == "/tokenize"
            for field in fields:
                for value in VALUES:
                    tried = {**body, field[0]: with_value(field[1:], value)}
                    response = client.post(path, json=tried)
                    too_late = (429, 504) if field == ("deadline",) else ()
                    assert response.status_code in (200, 400, *too_late), (path, field, value, response.text)
                    assert response.status_code == 200 or response.json()["error"]["message"]
                    num_tried += 1
    assert num_tried > 1000
    assert server.client.num_open == 0
    assert not server.client._observer.requests
    assert server.server.service.gate.num_inside == 0


@pytest.mark.parametrize("top_k", [2**31, 2**63 - 1])
def test_a_large_top_k_keeps_all_tokens(server: RunningServer, top_k: int) -> None:
    body = {"prompt": [5, 6], "max_tokens": 1, "top_k": top_k}
    assert server.post("/v1/completions", body).status_code == 200


def test_a_request_that_cannot_be_sent_is_not_registered() -> None:
    def refuse(command: Command) -> None:
        raise OverflowError("no such number in a frame")

    client = EngineClient(None, refuse)
    for _ in range(2):
        with pytest.raises(OverflowError):
            client.submit(prepare(fake_engine(), [5, 6], SamplingParams()))
    assert client.num_open == 0


def test_the_python_api_names_the_bound() -> None:
    with pytest.raises(InvalidRequest, match=r"top_k=\d+ but expected a whole number in \[0, 2147483647\]"):
        SamplingParams(top_k=2**31)
