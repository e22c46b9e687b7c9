"""A constraint on an answer, as plain text: a JSON schema, a regular expression, a choice or a Lark grammar.

It passes from the caller to the executor unchanged; `model/text/grammar.py` interprets it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from evenflow.errors import InvalidRequest

GrammarKind = Literal["json_schema", "regex", "choice", "lark"]

MAX_CHARACTERS = 100_000


@dataclass(frozen=True, slots=True)
class Grammar:
    """The whole answer matches `text`, which `kind` interprets. The class methods create one.

    SamplingParams(grammar=Grammar.json_schema({"type": "object", "properties": {"age": {"type": "integer"}}}))
    SamplingParams(grammar=Grammar.regex(r"[0-9]{4}-[0-9]{2}-[0-9]{2}"))
    SamplingParams(grammar=Grammar.choice(["yes", "no"]))
    """

    kind: GrammarKind
    text: str  # JSON for a schema or a choice

    def __post_init__(self) -> None:
        kinds = get_args(GrammarKind)
        if self.kind not in kinds:
            raise InvalidRequest(f"Got grammar kind {self.kind!r} but expected one of {', '.join(kinds)}.")
        if not isinstance(self.text, str):
            raise InvalidRequest(f"Got a grammar of type {type(self.text).__name__} but expected text.")
        if not 0 < len(self.text) <= MAX_CHARACTERS:
            raise InvalidRequest(f"Got a grammar of {len(self.text)} characters but expected 1 to {MAX_CHARACTERS}.")
        if any("\ud800" <= character <= "\udfff" for character in self.text):
            raise InvalidRequest("Got a grammar that is not valid Unicode: it contains half of a surrogate pair.")

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str) -> Grammar:
        """JSON that is valid by this schema, an object or its text."""
        return cls("json_schema", schema if isinstance(schema, str) else _to_json(schema))

    @classmethod
    def json_object(cls) -> Grammar:
        """Any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Text that this pattern matches as a whole."""
        return cls("regex", pattern)

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Grammar:
        """One of these texts."""
        if isinstance(texts, str) or not texts or not all(isinstance(text, str) and text for text in texts):
            raise InvalidRequest(f"Got choice={texts!r} but expected a list of texts, none of them empty.")
        return cls("choice", _to_json(list(texts)))

    @classmethod
    def lark(cls, grammar: str) -> Grammar:
        """Text of a context-free grammar, in llguidance's Lark notation or llama.cpp's GBNF."""
        return cls("lark", grammar)


def _to_json(value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"Got a schema or choice that cannot be written as JSON: {error}.") from error
