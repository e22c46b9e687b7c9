"""Two API keys in front of a real vLLM: limits, methods, prefix caches, chunk times and stored responses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import httpx
import pytest

from tests.vllm.fronts import START_S, Front, needs_vllm, prompt_of, small_model

pytestmark = [pytest.mark.vllm, needs_vllm]

BLOCKS = 640  # tokens of a prompt: several whole blocks of the prefix cache


class Keys:
    def __init__(self, front: Front, http: httpx.Client) -> None:
        self._front = front
        self.http = http

    def ask(self, key: str, path: str, body: Any = None, method: str = "POST") -> httpx.Response:
        return self.http.request(method, path, json=body, headers={"authorization": f"Bearer {key}"})

    def complete(self, key: str, first_token: int, **fields: Any) -> str:
        """The id of a new response."""
        body = {
            "model": "tiny",
            "prompt": prompt_of(BLOCKS, first_token),
            "max_tokens": 2,
            "ignore_eos": True,
            **fields,
        }
        answer = self.ask(key, "/v1/completions", body)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["id"])

    def num_cached(self, response_id: str) -> int:
        """Of its prompt, as the scheduler inside vLLM reported."""
        path = f"/v1/requests/{response_id}/chunks"
        self._front.until(lambda: self.ask("root", path, method="GET").status_code == 200)
        (request,) = self.ask("root", path, method="GET").json()["requests"]
        return int(request["cached_tokens"])


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keys]:
    model = small_model(tmp_path_factory.mktemp("model"))
    options = ["--api-key", "a", "--api-key", "b", "--admin-api-key", "root", "--max-tenant-requests", "1"]
    store = {"VLLM_ENABLE_RESPONSES_API_STORE": "1"}
    with (
        closing(Front(model, *options, "--no-warm-up", environment=store)) as front,
        httpx.Client(base_url=front.url, timeout=START_S) as http,
        front.openai,
    ):
        yield Keys(front, http)


def test_each_key_has_its_own_prefixes(keys: Keys) -> None:
    assert keys.num_cached(keys.complete("a", first_token=5)) == 0
    own = keys.num_cached(keys.complete("a", first_token=5))
    assert own > BLOCKS // 2
    assert keys.num_cached(keys.complete("b", first_token=5)) == 0
    assert keys.num_cached(keys.complete("a", first_token=5, cache_salt="mine")) == 0
    assert keys.num_cached(keys.complete("b", first_token=5, cache_salt="mine")) == 0
    assert keys.num_cached(keys.complete("a", first_token=5, cache_salt="mine")) == own


def test_chunk_times_are_the_owners(keys: Keys) -> None:
    response_id = keys.complete("a", first_token=9, request_id="chosen")
    assert response_id == "cmpl-~key-1~chosen"
    keys.num_cached(response_id)  # it is known by now
    path = f"/v1/requests/{response_id}/chunks"
    assert [keys.ask(key, path, method="GET").status_code for key in ("a", "b")] == [200, 404]


def test_stored_responses_are_the_owners(keys: Keys) -> None:
    body = {"model": "tiny", "input": "5 6 7", "max_output_tokens": 2, "store": True}
    made = keys.ask("a", "/v1/responses", body)
    assert made.status_code == 200, made.text
    response_id = made.json()["id"]
    assert response_id.startswith("resp_~key-1~")
    path = f"/v1/responses/{response_id}"
    assert [keys.ask(key, path, method="GET").status_code for key in ("a", "b", "root")] == [200, 404, 200]
    assert keys.ask("b", path + "/cancel").status_code == 404
    follow = {**body, "previous_response_id": response_id}
    assert [keys.ask(key, "/v1/responses", follow).status_code for key in ("b", "a")] == [404, 200]


def test_routes_and_limits(keys: Keys) -> None:
    for method, path in (("POST", "/sleep"), ("GET", "/server_info"), ("PUT", "/v1/completions"), ("POST", "/pause")):
        assert keys.ask("a", path, method=method).status_code == 403, path
    assert keys.ask("wrong", "/v1/models", method="GET").status_code == 401
    batch = {"model": "tiny", "prompt": [1], "max_tokens": 60_000 - 8, "stream": True, "ignore_eos": True}
    with keys.http.stream("POST", "/v1/completions", json=batch, headers={"authorization": "Bearer a"}) as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith("data: ")
        short = {"model": "tiny", "prompt": [1], "max_tokens": 1}
        assert [keys.ask(key, "/v1/completions", short).status_code for key in ("a", "b")] == [429, 200]
        assert next(lines) == ""
