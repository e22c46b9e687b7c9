"""Reads a tokenizer.json. The library that interprets it trusts it: what could exhaust memory is refused here first."""

from __future__ import annotations

import base64
import math
import re
from typing import Any

import msgspec
import tokenizers

from evenflow.errors import BrokenModel, ModelError
from evenflow.model.config import unsupported

_MAX_GROWTH = 128  # how many times as long a text may become before it is cut into tokens
_BYTE_LEVEL_GROWTH = 4  # bytes of a character, each of which becomes one
_PARTS = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers"}  # what changes a text; and its own parts


class _File(msgspec.Struct, omit_defaults=True):
    """The fields of the file. Those of type Raw are passed on unread."""

    version: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    truncation: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    padding: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    added_tokens: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    normalizer: Any = msgspec.UNSET
    pre_tokenizer: Any = msgspec.UNSET
    post_processor: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    decoder: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    model: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


def read_tokenizer_file(text: str) -> tokenizers.Tokenizer:
    """The tokenizer that this JSON describes; BrokenModel if there is none."""
    try:
        file = msgspec.json.decode(text, type=_File)
        growth = math.prod(_growth(getattr(file, name), parts) for name, parts in _PARTS.items())
        if growth > _MAX_GROWTH:
            raise unsupported(f"a tokenizer that makes a text {growth:.3g} times as long")
        # Written again, so that what was checked is what the library sees: a key may be in the file twice.
        return tokenizers.Tokenizer.from_str(msgspec.json.encode(file).decode())
    except ModelError:
        raise
    except BaseException as error:
        if not is_library_error(error):
            raise
        raise BrokenModel(f"tokenizer.json cannot be read: {error}") from error


def is_library_error(error: BaseException) -> bool:
    """Whether the tokenizers library may have raised it: it has no types of its own; its panics are no Exceptions."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _growth(step: Any, parts: str) -> float:
    """An upper bound of how many times as long a text becomes by a normalizer or pre-tokenizer.

    Its fields say what it does: the library guesses by them if it does not know the type.
    """
    if not isinstance(step, dict):
        return 1.0
    kind, growths = step.get("type"), [1.0]
    if parts in step:
        growths.append(math.prod(_growth(one, parts) for one in _items(step[parts])))
    if "pattern" in step:
        growths.append(_replace_growth(step["pattern"], step.get("content")))
    if kind == "ByteLevel" or ("add_prefix_space" in step and kind != "Metaspace"):
        growths.append(_BYTE_LEVEL_GROWTH)
    if kind == "Precompiled" or "precompiled_charsmap" in step:
        growths.append(_precompiled_growth(step.get("precompiled_charsmap")))
    return max(growths)


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _replace_growth(pattern: Any, content: Any) -> float:
    if not isinstance(pattern, dict) or not isinstance(content, str):
        return 1.0  # which the library refuses
    if isinstance(text := pattern.get("String"), str) and text:
        return max(1.0, len(content) / len(text))
    try:
        matches_nothing = re.search(str(pattern.get("Regex", "")), "") is not None
    except re.error:  # in another dialect
        matches_nothing = False
    return max(1.0, float(len(content) + matches_nothing))


def _precompiled_growth(charsmap: Any) -> float:
    """Of sentencepiece's table: the size of a trie, the trie, and texts that end with a zero byte."""
    if not isinstance(charsmap, str):
        raise BrokenModel("tokenizer.json: a normalizer has no precompiled_charsmap")
    table = base64.b64decode(charsmap, validate=True)
    size = int.from_bytes(table[:4], "little")
    if len(table) < 4 or size % 4 or size > len(table) - 4:
        raise BrokenModel(f"tokenizer.json: a trie of {size} bytes in a precompiled_charsmap of {len(table)}")
    return max(1.0, *map(len, table[4 + size :].decode().split("\0")))
