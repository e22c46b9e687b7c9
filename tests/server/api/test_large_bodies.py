"""Bodies that are made to be expensive: refused before they cost anything, and nobody else waits for them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenflow.model.text import tokenizer
from evenflow.model.text.tokenizer import Tokenizer
from evenflow.server.api import json_size, service
from evenflow.server.api.json_size import count_values
from evenflow.server.api.large_work import LargeWork
from tests.server.engines import MAX_MODEL_LEN
from tests.server.serving import RunningServer, scripted_server, small_tokenizer

CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"
RESPONSES = "/v1/responses"
_EIGHT_MB = 8_000_000


def repeated(before: str, item: str, after: str) -> bytes:
    """A body just under 8 MB."""
    count = (_EIGHT_MB - len(before) - len(after)) // (len(item) + 1)
    return f"{before}{','.join([item] * count)}{after}".encode()


ATTACKS = {
    "empty messages": (CHAT, repeated('{"messages":[', "{}", "]}")),
    "good messages": (CHAT, repeated('{"messages":[', '{"role":"user","content":""}', "]}")),
    "parts": (CHAT, repeated('{"messages":[{"role":"user","content":[', '{"type":"text","text":""}', "]}]}")),
    "empty items": (RESPONSES, repeated('{"input":[', "{}", "]}")),
    "good items": (RESPONSES, repeated('{"input":[', '{"role":"user","content":""}', "]}")),
    "parts of an item": (
        RESPONSES, repeated('{"input":[{"role":"user","content":[', '{"type":"input_text","text":""}', "]}]}")
    ),
    "choices": (COMPLETION, repeated('{"prompt":"a","guided_choice":[', '"a"', "]}")),
    "unknown fields": (COMPLETION, b'{"prompt":"a"%s}' % b"".join(b',"x%d":1' % number for number in range(700_000))),
    "fields of a part": (CHAT, b'{"messages":[{"role":"user","content":[{%s}]}]}' % b",".join(
        b'"x%d":1' % number for number in range(120_000)
    )),
    "token ids": (COMPLETION, repeated('{"prompt":[', "1", "]}")),
    "prompts": (COMPLETION, repeated('{"prompt":[', '"a"', "]}")),
    "schema": (COMPLETION, repeated('{"prompt":"a","guided_json":{"enum":[', "1", "]}}")),
    "biases": (COMPLETION, b'{"prompt":"a","logit_bias":{%s}}' % b",".join(
        b'"%d":""' % number for number in range(120_000)
    )),
    "text": (COMPLETION, b'{"prompt":"%s"}' % (b"a b " * 1_900_000)),
    "text to tokenize": ("/tokenize", b'{"prompt":"%s"}' % (b"a b " * 1_900_000)),
    "chat to tokenize": ("/tokenize", repeated('{"messages":[', '{"role":"user","content":"a"}', "]}")),
    "ids to detokenize": ("/detokenize", repeated('{"tokens":[', "1", "]}")),
    "depth": (COMPLETION, b'{"metadata":%s}' % (b"[" * 7_000_000)),
    "backslashes": (COMPLETION, b'{"prompt":"%s"}' % (b"\\\\" * 3_900_000)),
}  # fmt: skip


@pytest.mark.slow
def test_a_text_is_not_tokenized_far_beyond_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, 8 MB of short words took 2 GB and 20 s where the context has room for as many bytes."""
    monkeypatch.setattr(service, "_ENCODED_AT_ONCE", 2000)
    monkeypatch.setattr(tokenizer, "_PIECE_CHARACTERS", 500)
    encoded: list[int] = []
    encode = Tokenizer.encode
    monkeypatch.setattr(
        Tokenizer, "encode", lambda self, text, **options: encoded.append(len(text)) or encode(self, text, **options)
    )
    text = "a b " * 2900
    with scripted_server() as server:
        assert len(text) < MAX_MODEL_LEN * small_tokenizer().longest_token_bytes
        chat = {"messages": [{"role": "user", "content": text}]}
        truncated = {"prompt": text, "truncate_prompt_tokens": 10, "max_tokens": 1}
        for path, body in ((COMPLETION, {"prompt": text}), (CHAT, chat), ("/tokenize", chat), (COMPLETION, truncated)):
            encoded.clear()
            error = server.post(path, body).json()["error"]
            assert "more than 2000 tokens" in error["message"]
            assert error["code"] == "context_length_exceeded"
            assert max(encoded) == 500
            assert sum(encoded) < 3000
        kept = server.post(COMPLETION, truncated | {"prompt": "a b " * 450}).json()
        assert kept["usage"]["prompt_tokens"] == 10


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with scripted_server() as running:
        yield running


def test_a_large_body_is_handed_to_threads_twice(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the queue and behind it. Four times took a second more where others kept the front busy."""
    jobs = []
    in_turn = LargeWork._in_turn

    async def count(self: LargeWork, client: str, function: Any, *args: Any, **options: Any) -> Any:
        jobs.append(function)
        return await in_turn(self, client, function, *args, **options)

    monkeypatch.setattr(LargeWork, "_in_turn", count)
    messages = {"messages": [{"role": "user", "content": "a"}]}
    for path, body in ((COMPLETION, {"prompt": "a"}), (CHAT, messages)):
        jobs.clear()
        response = server.post(path, {**body, "max_tokens": 1, "user": "b" * 70_000})
        assert response.status_code == 200, response.text
        assert len(jobs) == 2, path


@pytest.mark.slow
def test_bodies_that_are_made_to_be_expensive_are_refused(server: RunningServer) -> None:
    """They took 5 to 47 s each; `benchmarks/attacks.py` measures what they take."""
    for name, (path, content) in ATTACKS.items():
        response = httpx.post(
            server.url + path, content=content, headers={"content-type": "application/json"}, timeout=60, verify=False
        )
        assert response.status_code in (400, 413), name
        assert response.json()["error"]["message"]
    assert server.server.service.gate.num_inside == 0


def test_a_long_text_is_refused_before_it_is_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, the length was checked on its tokens."""
    encoded: list[int] = []
    encode = Tokenizer.encode

    def noted(self: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        encoded.append(len(text))
        return encode(self, text, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", noted)
    longest = MAX_MODEL_LEN * small_tokenizer().longest_token_bytes
    messages = [{"role": "user", "content": "a" * (longest // 2 + 1)}] * 2
    with scripted_server() as server:
        for path, body in (
            (COMPLETION, {"prompt": "a" * (longest + 1)}),
            (CHAT, {"messages": messages}),
            ("/tokenize", {"prompt": "é" * (longest // 2 + 1)}),
            ("/tokenize", {"messages": messages}),
        ):
            error = server.post(path, body).json()["error"]
            assert error["code"] == "context_length_exceeded"
            assert f"{longest} bytes" in error["message"]
            assert not encoded
        assert server.post("/tokenize", {"prompt": "€" * 5000}).json()["count"] > MAX_MODEL_LEN, "only counted"
        assert encoded == [5000]


def test_tokenizing_passes_the_gate_too(server: RunningServer) -> None:
    server.server.service.gate.is_draining = True
    try:
        assert server.post("/tokenize", {"prompt": "a"}).status_code == 503
        assert server.post("/detokenize", {"tokens": [5]}).status_code == 503
    finally:
        server.server.service.gate.is_draining = False


def test_no_text_of_more_bytes_has_fewer_tokens() -> None:
    tokenizer = small_tokenizer()
    for text in ("a", " " * 500, "the " * 300, "é€😀" * 200):
        assert len(text.encode()) <= len(tokenizer.encode(text)) * tokenizer.longest_token_bytes


def count(value: object) -> int:
    if isinstance(value, dict):
        return 1 + (sum(1 + count(one) for one in value.values()) if value else 1)
    if isinstance(value, list):
        return 1 + (sum(map(count, value)) if value else 1)
    return 1


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('ab,:[{"\\', max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('a"\\', max_size=4), inner, max_size=4),
)


@given(value=_JSON, piece_bytes=st.integers(1, 40))
def test_values_are_counted_without_building_them(value: object, piece_bytes: int) -> None:
    before, json_size._PIECE_BYTES = json_size._PIECE_BYTES, piece_bytes
    try:
        assert count_values(json.dumps(value).encode()) == count(value)
    finally:
        json_size._PIECE_BYTES = before
