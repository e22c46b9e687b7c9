"""Translates between llama.cpp's own paths and fields and those of OpenAI's API, one request at a time.

Only names change, and values that have another spelling. A field that only chooses one of llama.cpp's cache slots is
left out; the server's defaults of a llama-server (temperature, seed, output length) become fields of the request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Body = dict[str, Any]
Send = Callable[[str, Body], Body]

_PATHS = {
    **{path: f"/v1{path}" for path in ("/models", "/chat/completions", "/responses", "/embeddings", "/rerank")},
    "/completion": "/v1/completions",
    "/completions": "/v1/completions",
}
_NATIVE = ("/completion", "/completions")  # answered in llama.cpp's own shape
_CACHE_FIELDS = ("cache_prompt", "id_slot")
_REQUEST_NAMES = {
    "n_predict": "max_tokens",
    "return_tokens": "return_token_ids",
    "json_schema": "guided_json",
    "grammar": "guided_grammar",
}
_GENERATING = ("/v1/completions", "/v1/chat/completions")


@dataclass(frozen=True)
class Defaults:
    """What a llama-server was started with and applies to every request."""

    model: str
    temperature: float
    seed: int
    max_tokens: int | None
    is_verbose: bool  # each response has the prompt as the model got it
    thinks: bool  # what templates get as `enable_thinking`


def path_of(path: str) -> str:
    return _PATHS.get(path, path)


def request_of(path: str, body: Body, defaults: Defaults) -> Body:
    """The body for `path_of(path)`."""
    if path in ("/tokenize", "/detokenize"):
        return _tokenize_request(body)
    target = path_of(path)
    asked = {_REQUEST_NAMES.get(name, name): value for name, value in body.items() if name not in _CACHE_FIELDS}
    if target.startswith("/v1/"):
        asked["model"] = defaults.model  # llama-server serves one model, whatever name is asked for
    if target in _GENERATING:
        asked.setdefault("temperature", defaults.temperature)
        asked.setdefault("seed", defaults.seed)
        if defaults.max_tokens is not None:
            asked.setdefault("max_tokens", defaults.max_tokens)
        if defaults.is_verbose:
            asked["return_token_ids"] = True
    if isinstance(biases := asked.get("logit_bias"), list):
        asked["logit_bias"] = {str(token): bias for token, bias in biases}
    if path in COMBINED or target == "/v1/chat/completions":
        asked["chat_template_kwargs"] = {"enable_thinking": defaults.thinks}
    if isinstance(wanted := asked.get("response_format"), dict):
        asked["response_format"] = _response_format(wanted)
    return asked


def _tokenize_request(body: Body) -> Body:
    if "tokens" in body:
        return body
    asked: Body = {"prompt": body["content"], "add_special_tokens": body.get("add_special", False)}
    return {**asked, "return_token_strs": True} if body.get("with_pieces") else asked


def _response_format(wanted: Body) -> Body:
    """llama.cpp puts a schema beside `json_object`, and needs no name for one."""
    if "schema" in wanted:
        return {"type": "json_schema", "json_schema": {"name": "unnamed", "schema": wanted["schema"]}}
    if isinstance(named := wanted.get("json_schema"), dict):
        return {**wanted, "json_schema": {"name": "unnamed", **named}}
    return wanted


def response_of(path: str, answer: Any) -> Any:
    """A successful response, or one event of a stream, as llama-server writes it."""
    if isinstance(fingerprint := answer.get("system_fingerprint"), str):
        answer["system_fingerprint"] = f"b{fingerprint}"  # llama.cpp's builds are numbered b1, b2, ...
    if path == "/tokenize" and "token_strs" in answer:
        pieces = zip(answer["tokens"], answer["token_strs"], strict=True)
        return {"tokens": [{"id": token, "piece": piece} for token, piece in pieces]}
    if path == "/detokenize":
        return {"content": answer["prompt"]}
    if path in _NATIVE:
        choices = [_native_completion(choice, answer.get("usage")) for choice in answer["choices"]]
        return choices[0] if len(choices) == 1 else choices
    for choice in answer.get("choices", ()):
        # OpenAI starts a stream with an empty text, llama.cpp with none.
        if (delta := choice.get("delta", {})).get("role") == "assistant":
            delta["content"] = delta.get("content") or None
    return answer


def _native_completion(choice: Body, usage: Body | None) -> Body:
    text: str = choice["text"]
    token_ids = choice.get("token_ids") or []
    answer: Body = {"content": text, "tokens": token_ids, "stop": choice["finish_reason"] is not None}
    if choice["finish_reason"] is not None:
        answer["stop_type"] = "limit" if choice["finish_reason"] == "length" else "eos"
        answer["truncated"] = False  # evenflow refuses what does not fit
        answer["has_new_line"] = "\n" in text
    if usage:
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        answer["timings"] = {
            "prompt_n": usage["prompt_tokens"] - cached,
            "cache_n": cached,
            "predicted_n": usage["completion_tokens"],
        }
    return answer


def error_of(answer: Body) -> Body:
    """A failed response: what OpenAI calls a code, llama.cpp calls a type and says in its own words."""
    error = answer["error"]
    if error.get("code") == "context_length_exceeded":
        words = "too large: the request exceeds the available context size"
        return {"error": {**error, "type": "exceed_context_size_error", "message": f"{words}. {error['message']}"}}
    if error.get("code") == "invalid_api_key":
        return {"error": {**error, "type": "authentication_error"}}
    return answer


def rendered_prompt(send: Send, body: Body) -> Body:
    """llama.cpp's /apply-template: the chat template's text, by way of its tokens."""
    tokens = send("/tokenize", body)["tokens"]
    return {"prompt": send("/detokenize", {"tokens": tokens})["prompt"]}


def counted_tokens(send: Send, body: Body) -> Body:
    """llama.cpp's /chat/completions/input_tokens."""
    return {"input_tokens": send("/tokenize", body)["count"]}


COMBINED: dict[str, Callable[[Send, Body], Body]] = {
    "/apply-template": rendered_prompt,
    "/chat/completions/input_tokens": counted_tokens,
}
