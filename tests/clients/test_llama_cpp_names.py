"""The translation between llama.cpp's names and OpenAI's, and the table of tests that are not run."""

from __future__ import annotations

import pytest

from tests.clients.llama_cpp_groups import LLAMA_SPECIFIC, group_of
from tests.clients.llama_cpp_names import Body, Defaults, error_of, path_of, request_of, response_of

DEFAULTS = Defaults("m", temperature=0.8, seed=42, max_tokens=64, is_verbose=False, thinks=True)
COMMON = {"model": "m", "temperature": 0.8, "seed": 42}


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/completion", {"prompt": "a", "n_predict": 4, "id_slot": 0}, {**COMMON, "prompt": "a", "max_tokens": 4}),
        ("/v1/completions", {"prompt": "a", "seed": 1}, {**COMMON, "prompt": "a", "seed": 1, "max_tokens": 64}),
        ("/completion", {"logit_bias": [[5, -100]]}, {**COMMON, "max_tokens": 64, "logit_bias": {"5": -100}}),
        ("/tokenize", {"content": "a"}, {"prompt": "a", "add_special_tokens": False}),
        ("/embeddings", {"input": "a", "model": "other"}, {"model": "m", "input": "a"}),
    ],
)
def test_requests_get_openais_names(path: str, body: Body, expected: Body) -> None:
    assert request_of(path, body, DEFAULTS) == expected
    assert path_of(path) in ("/v1/completions", "/tokenize", "/v1/embeddings")


def test_a_schema_beside_json_object_is_a_json_schema() -> None:
    body = {"response_format": {"type": "json_object", "schema": {"const": 1}}}
    asked = request_of("/chat/completions", body, DEFAULTS)
    named = {"name": "unnamed", "schema": {"const": 1}}
    assert asked["response_format"] == {"type": "json_schema", "json_schema": named}
    assert asked["chat_template_kwargs"] == {"enable_thinking": True}


def test_responses_get_llamas_names() -> None:
    usage = {"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 3}}
    choice = {"index": 0, "text": "a\n", "finish_reason": "length", "token_ids": [7, 8]}
    native = response_of("/completion", {"choices": [choice], "usage": usage})
    assert (native["content"], native["tokens"], native["stop_type"]) == ("a\n", [7, 8], "limit")
    assert native["timings"] == {"prompt_n": 2, "cache_n": 3, "predicted_n": 2}
    assert response_of("/tokenize", {"tokens": [1], "token_strs": ["a"]}) == {"tokens": [{"id": 1, "piece": "a"}]}
    assert response_of("/detokenize", {"prompt": "a"}) == {"content": "a"}
    refused = error_of({"error": {"message": "Too long.", "type": "x", "code": "context_length_exceeded"}})
    assert refused["error"]["type"] == "exceed_context_size_error"


def test_every_group_has_a_reason_and_tests_go_by_their_case() -> None:
    assert all(group.reason and group.patterns for group in LLAMA_SPECIFIC.values())
    assert group_of("test_completion.py::test_logit_bias[False-True]") == "own fields"
    assert group_of("test_completion.py::test_logit_bias[True-True]") is None
    assert group_of("test_router.py::test_router_props") == "router"
