"""Requests whose fields are at their bounds, as few as there can be with every pair of values in one of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any

Part = dict[str, Any]  # of a body: one field or a few that need each other, at a bound; empty if they are left out
Parts = Mapping[str, Sequence[Part]]
Choice = tuple[str, int]  # which of a part's values

_TEXT = "a\\\x01é😀" * 30
_STOPS = [f"{number:02}" + "x" * 998 for number in range(16)]
_SCHEMA = {"type": "object"}
_FUNCTION = {"type": "function", "function": {"name": "f", "description": "d" * 60, "parameters": _SCHEMA}}
_FLAT_FUNCTION = {"type": "function", "name": "f", "description": "d" * 60, "parameters": _SCHEMA}
_ANTHROPIC_TOOL = {"name": "f", "description": "d" * 60, "input_schema": _SCHEMA}


def _field(name: str, *values: Any) -> Sequence[Part]:
    return ({}, *({name: value} for value in values))


def _message(text: str) -> Part:
    return {"role": "user", "content": text}


_STREAMS: Sequence[Part] = (
    {},
    {"stream": True},
    {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
)
_GENERATION: Parts = {
    "streams": _STREAMS,
    "n": _field("n", 2, 8),
    "prompt_logprobs": _field("prompt_logprobs", 0, 20),
    "token_ids": _field("return_token_ids", True),
    "stop": _field("stop", _STOPS),
    "logit_bias": _field("logit_bias", {str(token): -1.5 for token in range(300)}),
    "bad_words": _field("bad_words", ["b" * 99] * 40),
    "metadata": _field("metadata", {"a": "b" * 50_000}),
}
_OLLAMA: Parts = {
    "model": [{"model": "a-model"}, {"model": "a-model:latest"}],
    "streams": ({}, {"stream": False}),
    "options": _field("options", {"num_predict": 1}, {"num_predict": 90}, {"num_predict": -1, "stop": _STOPS}),
    "think": _field("think", True),
}
PARTS: Mapping[str, Parts] = {
    "/v1/completions": {
        "prompt": [{"prompt": one} for one in ("a", _TEXT, [494] * 900, [[494] * 300] * 3, ["a"] * 3)],
        "max_tokens": [{"max_tokens": one} for one in (0, 1, 90)],
        "logprobs": _field("logprobs", 0, 20),
        "echo": _field("echo", True),
        "best_of": _field("best_of", 9),
        "truncated": _field("truncate_prompt_tokens", -1),
        **_GENERATION,
    },
    "/v1/chat/completions": {
        "messages": [{"messages": [_message(one)] * number} for one, number in (("a", 1), (_TEXT, 1), ("a" * 90, 9))],
        "max_tokens": _field("max_tokens", 1, 90),
        "logprobs": ({}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 20}),
        "tools": _field("tools", [_FUNCTION]),
        **_GENERATION,
    },
    "/v1/responses": {
        "input": [{"input": one} for one in ("a", [_message(_TEXT)])],
        "max_tokens": _field("max_output_tokens", 16, 90),
        "logprobs": ({}, {"include": ["message.output_text.logprobs"], "top_logprobs": 20}),
        "streams": ({}, {"stream": True}),
        "store": _field("store", False),
        "instructions": _field("instructions", "\x01" * 90),
        "user": _field("user", "\x01" * 1024),
        "tools": ({}, {"tools": [_FLAT_FUNCTION], "tool_choice": "none"}),
        "metadata": _field("metadata", {str(number): "é" * 500 for number in range(16)}),
    },
    "/v1/messages": {
        "messages": [{"model": "a-model", "messages": [_message(one)]} for one in ("a", _TEXT)],
        "max_tokens": [{"max_tokens": one} for one in (1, 90, 5000)],
        "streams": ({}, {"stream": True}),
        "system": _field("system", "\x01" * 90),
        "stop": _field("stop_sequences", _STOPS[:4]),
        "tools": _field("tools", [_ANTHROPIC_TOOL]),
    },
    "/api/chat": {
        "messages": [{"messages": [_message(one)] * number} for one, number in (("a", 1), (_TEXT, 1), ("a" * 90, 9))],
        "tools": _field("tools", [_FUNCTION]),
        **_OLLAMA,
    },
    "/api/generate": {
        "prompt": [{"prompt": one} for one in ("a", _TEXT, "a " * 400)],
        "raw": _field("raw", True),
        "system": _field("system", "\x01" * 90),
        **_OLLAMA,
    },
}
_EXCLUDED = ({"streams", "prompt_logprobs"}, {"streams", "best_of"})  # refused, whatever their sizes


def worst_cases(parts: Parts) -> list[Part]:
    """Bodies in which every pair of values occurs that may."""
    left = {
        pair
        for one, other in combinations(parts, 2)
        for pair in product(_choices(parts, one), _choices(parts, other))
        if _may_meet(parts, *pair)
    }
    cases = []
    while left:
        chosen = list(min(left))
        for name in parts:
            if name not in dict(chosen):
                allowed = [
                    one for one in _choices(parts, name) if all(_may_meet(parts, one, other) for other in chosen)
                ]
                chosen.append(max(allowed, key=lambda one: sum(pair in left for pair in _pairs(parts, chosen, one))))
        for choice in chosen:
            left -= set(_pairs(parts, chosen, choice))
        cases.append({name: value for part, place in chosen for name, value in parts[part][place].items()})
    return cases


def _choices(parts: Parts, name: str) -> list[Choice]:
    return [(name, place) for place in range(len(parts[name]))]


def _may_meet(parts: Parts, one: Choice, other: Choice) -> bool:
    is_given = bool(parts[one[0]][one[1]]) and bool(parts[other[0]][other[1]])
    return not (is_given and {one[0], other[0]} in _EXCLUDED)


def _pairs(parts: Parts, chosen: Sequence[Choice], choice: Choice) -> list[tuple[Choice, Choice]]:
    """With each of the others, in the order of the parts."""
    order = list(parts)
    others = [one for one in chosen if one[0] != choice[0]]
    return [tuple(sorted((one, choice), key=lambda two: order.index(two[0]))) for one in others]
