"""What an answer must look like: a JSON schema, a regular expression, a choice, or a grammar, as plain text.

Crosses from the caller to the executor unchanged. Must not know: how text is matched, tokens (`model/grammar.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from evenflow.errors import InvalidRequest

GrammarKind = Literal["json_schema", "regex", "choice", "lark"]

MOST_CHARACTERS = 100_000


@dataclass(frozen=True, slots=True)
class Grammar:
    """The whole answer matches `text`, read as `kind` says. Best made by one of the functions below.

    SamplingParams(grammar=Grammar.json_schema({"type": "object", "properties": {"age": {"type": "integer"}}}))
    SamplingParams(grammar=Grammar.regex(r"[0-9]{4}-[0-9]{2}-[0-9]{2}"))
    SamplingParams(grammar=Grammar.choice(["yes", "no"]))
    """

    kind: GrammarKind
    text: str  # a schema and the list of a choice are written in JSON

    def __post_init__(self) -> None:
        kinds = get_args(GrammarKind)
        if self.kind not in kinds:
            raise InvalidRequest(f"Got grammar kind {self.kind!r} but expected one of {', '.join(kinds)}.")
        if not isinstance(self.text, str):
            raise InvalidRequest(f"Got a grammar of type {type(self.text).__name__} but expected text.")
        if not 0 < len(self.text) <= MOST_CHARACTERS:
            raise InvalidRequest(f"Got a grammar of {len(self.text)} characters but expected 1 to {MOST_CHARACTERS}.")
        if any("\ud800" <= character <= "\udfff" for character in self.text):
            raise InvalidRequest("the grammar is not valid Unicode: it holds half of a surrogate pair")

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str) -> Grammar:
        """JSON that is valid by this schema, which may be given as an object or as its text."""
        return cls("json_schema", schema if isinstance(schema, str) else _to_json(schema))

    @classmethod
    def json_object(cls) -> Grammar:
        """Any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Text that this pattern matches from its first to its last character."""
        return cls("regex", pattern)

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Grammar:
        """One of these texts."""
        is_list = not isinstance(texts, str) and all(isinstance(text, str) and text for text in texts)
        if not is_list or not texts:
            raise InvalidRequest(f"Got choice={texts!r} but expected a list of texts, none of them empty.")
        return cls("choice", _to_json(list(texts)))

    @classmethod
    def lark(cls, grammar: str) -> Grammar:
        """Text of a context-free grammar in llguidance's Lark notation."""
        return cls("lark", grammar)


def _to_json(value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"the schema or choice cannot be written as JSON: {error}") from error
