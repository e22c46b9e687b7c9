"""From one record of a data file to the input in it: which field holds the prompt, and how traces name their counts.

Must not know: file formats.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from evenflow.workload.inputs import ChatInput, Input, TextInput, TraceRequest

PROMPT_FIELDS = ("prompt", "text", "input", "question", "messages")
_PROMPT_TOKENS = ("ContextTokens", "input_length", "num_prompt_tokens", "prompt_tokens", "input_tokens")
_OUTPUT_TOKENS = ("GeneratedTokens", "output_length", "num_output_tokens", "completion_tokens", "output_tokens")
_ARRIVAL = ("TIMESTAMP", "timestamp", "arrival_s")
_BLOCK_IDS = "hash_ids"  # Mooncake's; its timestamps are milliseconds
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
KNOWN_FIELDS = frozenset((*PROMPT_FIELDS, *_PROMPT_TOKENS, *_OUTPUT_TOKENS, *_ARRIVAL, _BLOCK_IDS))


class UnusableRecordError(ValueError):
    """A record without an input; the message says what is missing, without naming the record."""


def input_of(record: Any, field: str | None) -> Input:
    """The input that a record holds: in `field` where one is named (dots lead inwards), else where it usually is."""
    if field is not None:
        return _prompt(_at(record, field), field)
    if isinstance(record, str):
        return _prompt(record, "text")
    if not isinstance(record, Mapping):
        raise UnusableRecordError("not an object or a text")
    counted = next((name for name in _PROMPT_TOKENS if record.get(name) not in (None, "")), None)
    if counted is not None:
        return _traced(record, counted)
    for name in PROMPT_FIELDS:
        if record.get(name) is not None:
            return _prompt(record[name], name)
    raise UnusableRecordError(f"no field {', '.join(PROMPT_FIELDS)}")


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
        return TextInput(value)
    if isinstance(value, list) and value and all(type(item) is int for item in value):
        return TraceRequest(len(value))
    if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        return ChatInput([_message(item) for item in value])
    raise UnusableRecordError(f"{field} is neither a text, token ids nor messages")


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message with its text in one piece; only text is counted of one that also holds images."""
    content = message.get("content", message.get("value"))
    if isinstance(content, list):
        parts = (part.get("text") for part in content if isinstance(part, Mapping))
        content = "".join(part for part in parts if isinstance(part, str))
    role = str(message.get("role", message.get("from", "user")))
    return {"role": _SHAREGPT_ROLES.get(role, role), "content": content if isinstance(content, str) else ""}


def _traced(record: Mapping[str, Any], counted: str) -> TraceRequest:
    block_ids = record.get(_BLOCK_IDS)
    if not isinstance(block_ids, list) or not all(type(block_id) is int for block_id in block_ids):
        block_ids = []
    output = next((record[name] for name in _OUTPUT_TOKENS if record.get(name) not in (None, "")), None)
    return TraceRequest(
        num_prompt_tokens=_count(record[counted], counted),
        num_output_tokens=None if output is None else _count(output, "the output's tokens", at_least=0),
        arrival_s=_arrival(record),
        block_ids=tuple(block_ids),
    )


def _count(value: Any, name: str, at_least: int = 1) -> int:
    try:
        count = int(value)
    except (TypeError, ValueError, OverflowError):
        raise UnusableRecordError(f"{name} is not a number") from None
    if count < at_least:
        raise UnusableRecordError(f"{name} is under {at_least}")
    return count


def _arrival(record: Mapping[str, Any]) -> float | None:
    stamp = next((record[name] for name in _ARRIVAL if record.get(name) is not None), None)
    if isinstance(stamp, int | float):
        seconds = stamp / 1000 if _BLOCK_IDS in record else float(stamp)
        return seconds if math.isfinite(seconds) else None
    try:
        # Azure writes seven digits of a second; six are what Python reads.
        return datetime.fromisoformat(str(stamp)[:26]).timestamp()
    except ValueError:
        return None
