"""One request's input, found in a record of a data file under any usual field name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

# A prompt of its own, first; else a conversation; else all of these that a record has, in this order; else a text.
_PARTS = ("system_prompt", "system", "instruction", "context", "passage", "document", "article", "input", "question")
_CHATS = ("messages", "conversations", "conversation")
_SYSTEM = ("system_prompt", "system")
PROMPT_FIELDS = ("prompt", *_CHATS, *_PARTS, "query", "text")
USUAL_FIELDS = "prompt, messages, conversations, instruction, context, input, question or text"
_PROMPT_TOKENS = (
    *("ContextTokens", "input_length", "Request tokens"),  # Azure, Mooncake, BurstGPT
    *("num_prompt_tokens", "prompt_tokens", "input_tokens"),
)
_OUTPUT_TOKENS = (
    *("GeneratedTokens", "output_length", "Response tokens"),
    *("num_output_tokens", "completion_tokens", "output_tokens"),
)
# The last two: guidellm's, and that of our own request log.
_ARRIVAL = ("TIMESTAMP", "timestamp", "Timestamp", "arrival_s", "request_start_time", "time")
_BLOCK_IDS = "hash_ids"  # Mooncake's field
_SESSION, _DELAY = "session_id", "delay"  # of a conversation in aiperf's form of Mooncake's format
_MILLISECONDS = ("input_length", "session_id", _BLOCK_IDS)  # records with these have times in milliseconds
BLOCK_TOKENS = 512  # of a Mooncake block, unless a record says otherwise
_SEPARATOR = "\n\n"  # between the fields of one prompt
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant"}
KNOWN_FIELDS = frozenset((*PROMPT_FIELDS, *_PROMPT_TOKENS, *_OUTPUT_TOKENS, *_ARRIVAL, _BLOCK_IDS, _SESSION, _DELAY))


@dataclass(frozen=True, slots=True)
class TextInput:
    text: str
    fields: tuple[str, ...] = field(default=(), compare=False)  # of the record


@dataclass(frozen=True, slots=True)
class ChatInput:
    """A conversation, to be rendered by a chat template."""

    messages: Sequence[Mapping[str, Any]]
    fields: tuple[str, ...] = field(default=(), compare=False)
    answer: str = field(default="", compare=False)  # as recorded

    @property
    def text(self) -> str:
        """The messages' contents, without a template's markers."""
        return "\n".join(message["content"] for message in self.messages)


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """A request of a trace, with its token counts. Prompts with equal leading `block_ids` share a prefix."""

    num_prompt_tokens: int
    num_output_tokens: int | None = None
    arrival_s: float | None = None
    block_ids: tuple[int, ...] = ()
    block_tokens: int = BLOCK_TOKENS
    session: str = ""  # requests of one session follow each other; "": it has none
    delay_s: float | None = None  # from the answer to the session's last request until this one; None: it has a time
    tenant: str = ""
    service_class: str = ""
    fields: tuple[str, ...] = field(default=(), compare=False)


Input = TextInput | ChatInput | TraceRequest


class UnusableRecordError(ValueError):
    """A record without an input. The message names the missing field, not the record."""


def input_of(record: Any, field: str | None) -> Input:
    """The input of a record: in `field` if given (dots separate nested names), else in one of the usual fields."""
    if field is not None:
        return _prompt(_at(record, field), field)
    if isinstance(record, str):
        return replace(_prompt(record, "text"), fields=())
    if not isinstance(record, Mapping):
        raise UnusableRecordError("not an object or a text")
    if (num_tokens := _count(record, _PROMPT_TOKENS, at_least=1)) is not None:
        return _traced(record, num_tokens)
    if record.get("prompt") is not None:
        return _prompt(record["prompt"], "prompt")
    for name in _CHATS:
        if record.get(name):
            return _chat(record, name)
    given = [name for name in (*_PARTS, "query") if record.get(name) not in (None, "")]
    texts = [name for name in given if isinstance(record[name], str)]
    if len(texts) > 1:
        return TextInput(_SEPARATOR.join(record[name] for name in texts), tuple(texts))
    for name in (*texts, *given, *PROMPT_FIELDS):
        if record.get(name) is not None:
            return _prompt(record[name], name)
    raise UnusableRecordError(f"no field such as {USUAL_FIELDS}")


def _chat(record: Mapping[str, Any], field: str) -> Input:
    """A conversation, with a system prompt that lies beside it."""
    found = _prompt(record[field], field)
    if not isinstance(found, ChatInput):
        return found
    messages, fields = list(found.messages), [field]
    for name in _SYSTEM:
        if isinstance(text := record.get(name), str) and text and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": text})
            fields.insert(0, name)
    return replace(found, messages=messages, fields=tuple(fields))


def _at(record: Any, field: str) -> Any:
    value = record
    for name in field.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    if value is None:
        raise UnusableRecordError(f"no field {field}")
    return value


def _prompt(value: Any, field: str) -> Input:
    if isinstance(value, str):
        if not value:
            raise UnusableRecordError(f"an empty {field}")
        return TextInput(value, (field,))
    if isinstance(value, list) and value and all(type(item) is int for item in value):
        return TraceRequest(len(value), fields=(field,))
    if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        messages = [_message(item) for item in value]
        answer: list[str] = []
        while len(messages) > 1 and messages[-1]["role"] == "assistant":
            answer.insert(0, messages.pop()["content"])
        return ChatInput(messages, (field,), "\n".join(answer))
    raise UnusableRecordError(f"{field} is neither a text, token ids nor messages")


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message with its text joined; other parts, such as images, are dropped."""
    content = message.get("content", message.get("value"))
    if isinstance(content, list):
        parts = (part.get("text") for part in content if isinstance(part, Mapping))
        content = "".join(part for part in parts if isinstance(part, str))
    role = str(message.get("role", message.get("from", "user")))
    return {"role": _SHAREGPT_ROLES.get(role, role), "content": content if isinstance(content, str) else ""}


def _traced(record: Mapping[str, Any], num_tokens: int) -> TraceRequest:
    block_ids = record.get(_BLOCK_IDS)
    if not isinstance(block_ids, list) or not all(type(block_id) is int for block_id in block_ids):
        block_ids = []
    delay = record.get(_DELAY)
    return TraceRequest(
        num_tokens,
        _count(record, _OUTPUT_TOKENS, at_least=0),
        _arrival(record),
        tuple(block_ids),
        block_tokens=_count(record, ("block_tokens",), at_least=1) or BLOCK_TOKENS,
        session=str(record.get(_SESSION) or ""),
        delay_s=max(0.0, delay / 1000) if isinstance(delay, int | float) and math.isfinite(delay) else None,
        tenant=str(record.get("tenant") or ""),
        service_class=str(record.get("service_class") or ""),
    )


def _count(record: Mapping[str, Any], names: Sequence[str], at_least: int) -> int | None:
    """The number in the first of these fields with a value."""
    name = next((name for name in names if record.get(name) not in (None, "")), None)
    if name is None:
        return None
    try:
        count = int(record[name])
    except (TypeError, ValueError, OverflowError):
        raise UnusableRecordError(f"{name} is not a number") from None
    if count < at_least:
        raise UnusableRecordError(f"{name} is under {at_least}")
    return count


def _arrival(record: Mapping[str, Any]) -> float | None:
    stamp = next((record[name] for name in _ARRIVAL if record.get(name) is not None), None)
    try:
        seconds = float(stamp) if isinstance(stamp, int | float | str) else math.nan
    except ValueError:
        return _seconds_of_date(str(stamp))
    if not math.isfinite(seconds):
        return None
    return seconds / 1000 if any(name in record for name in _MILLISECONDS) else seconds


def _seconds_of_date(stamp: str) -> float | None:
    try:
        # Azure writes seven decimals of a second; Python reads six.
        return datetime.fromisoformat(stamp[:26]).timestamp()
    except ValueError:
        return None
