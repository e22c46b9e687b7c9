"""What callers may give as prompts, and what is wrong with anything else. The shapes are vLLM's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypedDict, cast

from evenflow.errors import InvalidRequest

_SHAPES = "a text, token ids, {'prompt': TEXT} or {'prompt_token_ids': IDS}"


class TextPrompt(TypedDict):
    """A text, by the name that vLLM has for it."""

    prompt: str


class TokensPrompt(TypedDict):
    """Token ids; `prompt` is their text, only to be shown."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt
# One or several. Written without a union of sequences: type checkers then infer the type of a literal list.
Prompts = str | TextPrompt | TokensPrompt | Sequence[int | Prompt]
Message = Mapping[str, Any]
Conversation = Sequence[Message]


def as_batch(prompts: Prompts) -> list[Prompt]:
    """One prompt is a text, a list of token ids or a mapping; several are a list of them."""
    if isinstance(prompts, str | Mapping):
        return [cast("Prompt", prompts)]
    items = _items("prompts", prompts, f"{_SHAPES}, or a list of them")
    return cast("list[Prompt]", [items] if items and isinstance(items[0], int) else items)


def read_prompt(prompt: Prompt) -> tuple[str | list[int], str | None]:
    """What to compute, a text or token ids, and the text to show with it."""
    if isinstance(prompt, str):
        return prompt, prompt
    if not isinstance(prompt, Mapping):
        return _items("a prompt", prompt, _SHAPES), None
    if unknown := [name for name in prompt if name not in ("prompt", "prompt_token_ids")]:
        raise InvalidRequest(f"Got a prompt with {unknown[0]!r} but expected {_SHAPES}.")
    text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if not (text is None or isinstance(text, str)) or (text is None and token_ids is None):
        raise InvalidRequest(f"Got the prompt {repr(prompt)[:100]} but expected {_SHAPES}.")
    return (cast("str", text) if token_ids is None else _items("prompt_token_ids", token_ids, "token ids")), text


def as_conversations(conversations: Conversation | Sequence[Conversation]) -> list[Conversation]:
    """One conversation is a list of messages; several are a list of them."""
    if isinstance(conversations, str | Mapping):
        return [check_conversation(cast("Conversation", conversations))]
    items = _items("conversations", conversations, "a list of messages, or a list of conversations")
    batch = [items] if items and isinstance(items[0], Mapping) else items
    return [check_conversation(one) for one in batch]


def check_conversation(messages: Conversation) -> Conversation:
    """The messages, or an InvalidRequest that says how to write them."""
    example = messages if isinstance(messages, str) and len(messages) < 100 else "..."
    expected = f"a list of messages, such as [{{'role': 'user', 'content': {example!r}}}]"
    if isinstance(messages, str | Mapping):
        raise InvalidRequest(f"Got {repr(messages)[:100]} as a conversation but expected {expected}.")
    items = _items("a conversation", messages, expected)
    if not items:
        raise InvalidRequest("Got an empty conversation but expected at least one message.")
    for one in items:
        if not isinstance(one, Mapping) or not isinstance(one.get("role"), str):
            raise InvalidRequest(f"Got the message {repr(one)[:100]} but expected {expected}.")
    return items


def _items(what: str, given: object, expected: str) -> list[Any]:
    """A list of what may be a tuple, an array or a tensor as well."""
    listed = given.tolist() if hasattr(given, "tolist") else given
    if isinstance(listed, bytes) or not isinstance(listed, Sequence):
        raise InvalidRequest(f"Got {repr(given)[:100]} for {what} but expected {expected}.")
    return list(listed)
