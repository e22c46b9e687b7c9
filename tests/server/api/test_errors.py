"""Everything that is refused: with the right status, in OpenAI's shape, and without harm to the server."""

from __future__ import annotations

import json
import logging
import random
import re
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from evenflow.errors import InvalidRequest
from evenflow.model.text.chat_template import ChatTemplate
from evenflow.model.text.tokenizer import Tokenizer
from tests.server.engines import scripted_engine
from tests.server.serving import MODEL, RunningServer, running_server, scripted_server, small_tokenizer

CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with scripted_server(settings={"limits": {"max_body_size": 100_000, "max_n": 8}}) as running:
        yield running


REFUSED: list[tuple[str, dict[str, Any], int, str]] = [
    (CHAT, {"messages": MESSAGES, "model": "no-such-model"}, 404, "no-such-model"),
    (CHAT, {"messages": []}, 400, "messages"),
    (CHAT, {}, 400, "messages"),
    (CHAT, {"messages": [{"role": "user"}]}, 400, "needs content"),
    (CHAT, {"messages": [{"content": "hi"}]}, 400, "messages[0].role"),
    (CHAT, {"messages": [{"role": "", "content": "hi"}]}, 400, "messages[0].role: got '' but expected 'system'"),
    (CHAT, {"messages": [{"role": 1, "content": "hi"}]}, 400, "messages[0].role: got 1 but expected 'system'"),
    ("/tokenize", {"messages": [{"role": "User", "content": "hi"}]}, 400, "got 'User' but expected"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}, 400, "content"),
    (CHAT, {"messages": MESSAGES, "temperature": 2.1}, 400, "temperature"),
    (CHAT, {"messages": MESSAGES, "temperature": -0.1}, 400, "temperature"),
    (CHAT, {"messages": MESSAGES, "temperature": "1"}, 400, "temperature"),
    (CHAT, {"messages": MESSAGES, "n": 0}, 400, "n:"),
    (CHAT, {"messages": MESSAGES, "n": 9}, 400, "9 choices"),
    (CHAT, {"messages": MESSAGES, "n": 10**12}, 400, "1000000000000 choices"),
    (COMPLETION, {"prompt": ["a", "b"], "n": 10**12}, 400, "2000000000000 choices"),
    (CHAT, {"messages": MESSAGES, "top_p": 0}, 400, "top_p"),
    (CHAT, {"messages": MESSAGES, "max_tokens": 0}, 400, "max_tokens"),
    (CHAT, {"messages": MESSAGES, "max_tokens": 5000}, 400, "maximum context length is 1000 tokens"),
    (CHAT, {"messages": MESSAGES, "priority": "high"}, 400, "priority"),
    (CHAT, {"messages": MESSAGES, "logit_bias": {"512": 1}}, 400, "token id 512"),
    (CHAT, {"messages": MESSAGES, "logit_bias": {"5": 100.5}}, 400, "logit_bias.5: Input should be less than"),
    (CHAT, {"messages": MESSAGES, "logit_bias": {"-5": 1}}, 400, "logit_bias"),
    (CHAT, {"messages": MESSAGES, "logit_bias": {"x": 1}}, 400, "logit_bias"),
    (CHAT, {"messages": MESSAGES, "logit_bias": {"9" * 11: 1}}, 400, "logit_bias"),
    (CHAT, {"messages": MESSAGES, "logit_bias": {"5": None}}, 400, "logit_bias"),
    (CHAT, {"messages": MESSAGES, "logit_bias": {str(number): 1 for number in range(1025)}}, 400, "at most 1024 items"),
    (CHAT, {"messages": MESSAGES, "allowed_token_ids": []}, 400, "allowed_token_ids"),
    (CHAT, {"messages": MESSAGES, "allowed_token_ids": [5, 512]}, 400, "token id 512"),
    (CHAT, {"messages": MESSAGES, "bad_words": [""]}, 400, "bad_words[0]"),
    (CHAT, {"messages": MESSAGES, "bad_words": "word"}, 400, "bad_words"),
    (CHAT, {"messages": MESSAGES, "bad_words": ["a"] * 257}, 400, "at most 256 items"),
    (CHAT, {"messages": MESSAGES, "bad_words": ["a" * 1001]}, 400, "at most 1000 characters"),
    (CHAT, {"messages": MESSAGES, "cache_salt": ""}, 400, "cache_salt"),
    (CHAT, {"messages": MESSAGES, "cache_salt": "a" * 257}, 400, "cache_salt"),
    (CHAT, {"messages": MESSAGES, "truncate_prompt_tokens": 0}, 400, "-1 or at least 1"),
    (CHAT, {"messages": MESSAGES, "truncate_prompt_tokens": -2}, 400, "truncate_prompt_tokens"),
    (CHAT, {"messages": MESSAGES, "prompt_logprobs": -2}, 400, "prompt_logprobs"),
    (COMPLETION, {"prompt": [5] * 300, "prompt_logprobs": -1}, 400, "153088 logprobs but expected at most 131072"),
    (COMPLETION, {"prompt": [[5], [6]], "prompt_logprobs": -1}, 400, "prompt_logprobs=-1 with 2 choices"),
    (CHAT, {"messages": MESSAGES, "allowed_token_ids": [5] * 40_000, "n": 8}, 400, "320000 ids and characters"),
    (CHAT, {"messages": MESSAGES, "bad_words": ["ab" * 200] * 100, "n": 8}, 400, "320000 ids and characters"),
    (CHAT, {"messages": MESSAGES, "reasoning_effort": "huge"}, 400, "got 'huge' but expected 'none'"),
    (CHAT, {"messages": MESSAGES, "continue_final_message": True}, 400, "not text of the assistant"),
    (
        CHAT,
        {"messages": MESSAGES, "continue_final_message": True, "add_generation_prompt": True},
        400,
        "continue_final_message is not allowed with add_generation_prompt=true",
    ),
    (CHAT, {"messages": MESSAGES, "guided_grammar": "start: missing"}, 400, "unknown name"),
    (CHAT, {"messages": MESSAGES, "guided_grammar": "root ::= missing"}, 400, "the lark cannot be used"),
    (CHAT, {"messages": MESSAGES, "guided_grammar": 'start: "a"', "guided_regex": "a"}, 400, "only one of them"),
    (CHAT, {"messages": MESSAGES, "modalities": ["text", "audio"]}, 400, "modalities"),
    (CHAT, {"messages": MESSAGES, "top_logprobs": 3}, 400, "logprobs=true"),
    (CHAT, {"messages": MESSAGES, "logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
    (CHAT, {"messages": MESSAGES, "stream_options": {"include_usage": True}}, 400, "stream=true"),
    (CHAT, {"messages": MESSAGES, "stop": ""}, 400, "stop"),
    (CHAT, {"messages": MESSAGES, "stop": ["x"] * 17}, 400, "stop: List should have at most 16 items"),
    (CHAT, {"messages": MESSAGES, "temprature": 1}, 400, "temprature"),
    (CHAT, {"messages": MESSAGES, "tbt_target": 0.05}, 400, "only the policy 'target'"),
    (
        CHAT,
        {"messages": MESSAGES, "tbt_target": "soon"},
        400,
        "Got tbt_target='soon' but expected a duration such as 50ms",
    ),
    (CHAT, {"messages": MESSAGES, "min_tokens": 5, "max_tokens": 4}, 400, "min_tokens"),
    (CHAT, {"messages": MESSAGES, "chat_template_kwargs": {"messages": []}}, 400, "chat_template_kwargs"),
    (CHAT, {"messages": MESSAGES, "tool_choice": "required"}, 400, "no tools"),
    (CHAT, {"messages": MESSAGES, "response_format": {"type": "poem"}}, 400, "response_format"),
    (COMPLETION, {"prompt": ""}, 400, "prompt"),
    (COMPLETION, {"prompt": []}, 400, "prompt"),
    (COMPLETION, {"prompt": [[]]}, 400, "prompt"),
    (COMPLETION, {"prompt": [["a"]]}, 400, "prompt"),
    (COMPLETION, {"prompt": [512]}, 400, "0 to 511"),
    (COMPLETION, {"prompt": [5, -1]}, 400, "prompt[1]: Input should be greater than or equal to 0"),
    (COMPLETION, {"prompt": [True]}, 400, "prompt"),
    (COMPLETION, {"prompt": ["a"] * 9}, 400, "9 choices"),
    (COMPLETION, {"prompt": [5] * 1000}, 400, "1000 tokens"),
    (COMPLETION, {"prompt": "a", "stop_token_ids": [512]}, 400, "512"),
    (COMPLETION, {"prompt": "a", "logprobs": 21}, 400, "logprobs"),
    (COMPLETION, {"prompt": "a", "suffix": "b"}, 400, "suffix"),
    (COMPLETION, {"prompt": "a", "suffix": "b", "echo": True}, 400, "echo"),
    (COMPLETION, {"prompt": "a", "best_of": 0}, 400, "best_of"),
    (COMPLETION, {"prompt": "a", "best_of": 2, "n": 3}, 400, "best_of is 2 but"),
    (COMPLETION, {"prompt": "a", "best_of": 9}, 400, "9 choices"),
    (COMPLETION, {"prompt": "a", "best_of": 2, "stream": True}, 400, "stream=true"),
    (COMPLETION, {"prompt": "a", "seed": 2**63}, 400, "seed"),
    (COMPLETION, {"prompt": "a", "repetition_penalty": 5e-324}, 400, "repetition_penalty"),
    (COMPLETION, {"prompt": "a", "include_stop_str_in_output": 0}, 400, "include_stop_str_in_output"),
    (COMPLETION, {"prompt": "a", "spaces_between_special_tokens": False}, 400, "only true is supported"),
    (COMPLETION, {"prompt": "a", "best_of": True}, 400, "best_of"),
    ("/tokenize", {}, 400, "prompt or messages"),
    ("/tokenize", {"prompt": "a", "model": "other"}, 404, "other"),
    ("/detokenize", {"tokens": [600]}, 400, "600"),
]


@pytest.mark.parametrize(("path", "body", "status", "words"), REFUSED)
def test_it_is_refused_with_a_reason(
    server: RunningServer, path: str, body: dict[str, Any], status: int, words: str
) -> None:
    response = server.post(path, body)
    check_error(response, status)
    assert words in response.json()["error"]["message"]
    if "stream" not in body and path.startswith("/v1") and "stream_options" not in body:
        check_error(server.post(path, {**body, "stream": True}), status)


def check_error(response: httpx.Response, status: int) -> None:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]


def test_a_role_that_openais_api_does_not_have_is_named(server: RunningServer) -> None:
    messages = [*MESSAGES, {"role": "robot", "content": "hi"}]
    response = server.post(CHAT, {"messages": messages})
    check_error(response, 400)
    assert response.json()["error"] == {
        "message": "messages[1].role: got 'robot' but expected "
        "'system', 'developer', 'user', 'assistant', 'tool' or 'function'.",
        "type": "invalid_request_error",
        "param": "messages[1].role",
        "code": None,
    }
    with pytest.raises(InvalidRequest, match=r"'robot' but expected one of system, .*, function\."):
        small_tokenizer().apply_chat_template(messages)


def test_a_role_that_the_template_refuses_is_a_bad_request() -> None:
    with running_server(scripted_engine, picky_tokenizer) as picky:
        assert picky.post(CHAT, {"messages": MESSAGES, "max_tokens": 2}).status_code == 200
        response = picky.post(CHAT, {"messages": [{"role": "system", "content": "hi"}], "max_tokens": 2})
        check_error(response, 400)
        assert "no system messages" in response.json()["error"]["message"]


def picky_tokenizer() -> Tokenizer:
    tokenizer = small_tokenizer()
    refusal = "{% if messages[0].role == 'system' %}{{ raise_exception('no system messages') }}{% endif %}hi"
    tokenizer.chat_template = ChatTemplate({"default": refusal}, {})
    return tokenizer


def test_bodies_that_are_no_json(server: RunningServer) -> None:
    headers = {"content-type": "application/json"}
    contents = (b"", b"{", b"[]", b"null", b'{"messages": [', b"\xff\xfe", b'{"prompt": "\\ud800"}', b"[" * 50_000)
    for content in contents:
        for path in (CHAT, COMPLETION, "/tokenize", "/detokenize"):
            check_error(server.post(path, content=content, headers=headers), 400)


def test_other_types_and_larger_bodies_are_refused_unread(server: RunningServer) -> None:
    check_error(server.post(CHAT, content=b"{}", headers={"content-type": "text/plain"}), 415)
    check_error(server.post(COMPLETION, {"prompt": "a" * 200_000}), 413)

    def parts() -> Iterator[bytes]:
        yield b'{"prompt": "'
        for _ in range(30):
            yield b"a" * 10_000
        yield b'"}'

    check_error(server.post(COMPLETION, content=parts(), headers={"content-type": "application/json"}), 413)


def test_a_client_that_leaves_within_its_body_is_no_defect(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[object] = []
    monkeypatch.setattr(logging.getLogger("uvicorn.error"), "error", lambda message, **_: logged.append(message))
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n")
        connection.sendall(b"Content-Type: application/json\r\n\r\n{")
    server.until(lambda: not server.server.server_state.tasks)
    assert server.get("/health").status_code == 200
    assert not logged


@pytest.mark.parametrize("target", [0, 1e-9, 3601, 1.2e308, "0ms", "9" * 308 + "s", "9" * 400 + "ms"])
def test_targets_that_no_stream_could_mean(server: RunningServer, target: float | str) -> None:
    check_error(server.request("PUT", "/v1/target", {"tbt_target": target}), 400)
    assert server.request("OPTIONS", "/v1/target").headers["allow"] == "GET, PUT"


def test_unknown_paths_and_methods(server: RunningServer) -> None:
    check_error(server.get("/v1/nothing"), 404)
    check_error(server.get(CHAT), 405)
    check_error(server.get("/v1/models/other"), 404)


def test_the_openai_client_raises_its_own_errors(server: RunningServer) -> None:
    client = server.openai()
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model=MODEL, prompt="a", temperature=3)


@pytest.mark.slow
def test_a_thousand_mutated_bodies_harm_nothing(server: RunningServer) -> None:
    """Any body gets a response or a refusal, and the server stays healthy."""
    random_source = random.Random(5)
    seeds: list[dict[str, Any]] = [
        {"messages": MESSAGES, "max_tokens": 2, "temperature": 0.5, "stop": ["a"], "logprobs": True},
        {"prompt": [3, 4, 5], "max_tokens": 2, "n": 2, "echo": True, "logprobs": 1, "seed": 1},
        {"prompt": "text", "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}},
        {"input": [{"role": "user", "content": "Hi"}], "max_output_tokens": 2, "instructions": "a", "text": {}},
    ]
    odd: list[Any] = [
        None, True, -1, 0, 2**70, 1e308, "", "x" * 300, [], {}, [[]], [None], {"a": 1}, "\u0000", -0.0, [1, "a"],
    ]  # fmt: skip
    with httpx.Client(base_url=server.url, timeout=30) as client:
        for number in range(1000):
            body = json.loads(json.dumps(random_source.choice(seeds)))
            for _ in range(random_source.randint(1, 3)):
                key = random_source.choice([*body, "tools", "response_format", "tenant", "tbt_target", "unknown"])
                body[key] = random_source.choice(odd)
            content = json.dumps(body).encode()
            if number % 3 == 0:
                cut = random_source.randrange(len(content))
                content = content[:cut] + bytes([random_source.randrange(256)]) + content[cut + 1 :]
            path = random_source.choice([CHAT, COMPLETION, "/v1/responses", "/tokenize", "/detokenize"])
            response = client.post(path, content=content, headers={"content-type": "application/json"})
            assert response.status_code in (200, 400, 404), (content, response.text)
            if response.status_code != 200:
                check_error(response, response.status_code)
                assert not re.search(r'Traceback|File "|\.py\b|site-packages', response.text), response.text
    server.until(lambda: server.client.num_open == 0 and server.server.service.gate.num_inside == 0)
    assert server.get("/health").status_code == 200
