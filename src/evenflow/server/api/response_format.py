"""Fields of a request that constrain its output, and the grammar they ask for.

OpenAI's `response_format`, and vLLM's `structured_outputs` and `guided_*`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from evenflow.core.grammar import Grammar
from evenflow.errors import InvalidRequest

MAX_CHOICES = 4096
_MAX_QUOTED = 100  # characters of a type

Choice = Annotated[
    list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)
]

_GRAMMARS: dict[str, Callable[[Any], Grammar]] = {
    "json": Grammar.json_schema,
    "regex": Grammar.regex,
    "choice": Grammar.choice,
    "grammar": Grammar.lark,
    "json_object": lambda is_wanted: Grammar.json_object(),
}


class StrictModel(BaseModel):
    """Takes JSON types as they are ("1" is not a number, 1 is not a boolean) and no unknown fields."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


def of_types(*known: str, hint: str = "", default: str | None = None) -> BeforeValidator:
    """Names an object's unknown type; a union's own error would list types of Python. `default`: without a type."""

    def check(value: object) -> object:
        if not isinstance(value, dict):
            raise ValueError("expected an object")
        kind = default if value.get("type") is None else value["type"]
        if kind not in known:
            raise ValueError(f"got type {repr(kind)[:_MAX_QUOTED]} but expected {', '.join(map(repr, known))}{hint}")
        return value

    return BeforeValidator(check)


class TextFormat(StrictModel):
    type: Literal["text"]


class JsonObjectFormat(StrictModel):
    """Any JSON object."""

    type: Literal["json_object"]


class NamedSchema(StrictModel):
    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: str | None = Field(None, description="Has no effect: tell the model in a message.")
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = Field(None, description="Has no effect: the output always matches the schema.")


class JsonSchemaFormat(StrictModel):
    """JSON that is valid under a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class StructuredOutputs(StrictModel):
    """vLLM's field: exactly one of these."""

    json_: dict[str, Any] | str | None = Field(None, alias="json", description="A JSON schema, or its text.")
    regex: str | None = None
    choice: Choice | None = None
    grammar: str | None = Field(None, description="A context-free grammar in Lark's notation or GBNF.")
    json_object: bool | None = None


class GrammarFields(BaseModel):
    """For chats and completions. At most one of them may be given."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = Field(None, description="A JSON schema, or its text.")
    guided_regex: str | None = None
    guided_choice: Choice | None = None
    guided_grammar: str | None = Field(None, description="A context-free grammar in Lark's notation or GBNF.")

    @property
    def grammar(self) -> Grammar | None:
        """For `SamplingParams.grammar`; None allows any output."""
        structured = self.structured_outputs.model_dump(by_alias=True) if self.structured_outputs else {}
        guided = {
            "json": self.guided_json,
            "regex": self.guided_regex,
            "choice": self.guided_choice,
            "grammar": self.guided_grammar,
        }
        grammars = {
            "response_format": _format_grammar(self.response_format),
            **{f"structured_outputs.{kind}": _grammar(kind, value) for kind, value in structured.items()},
            **{f"guided_{kind}": _grammar(kind, value) for kind, value in guided.items()},
        }
        given = {name: grammar for name, grammar in grammars.items() if grammar is not None}
        if len(given) > 1:
            raise InvalidRequest(f"Got {' and '.join(given)} but the output can match only one of them.")
        return next(iter(given.values()), None)


def _format_grammar(given: TextFormat | JsonObjectFormat | JsonSchemaFormat | None) -> Grammar | None:
    if isinstance(given, JsonObjectFormat):
        return Grammar.json_object()
    if isinstance(given, JsonSchemaFormat):
        return Grammar.json_schema(given.json_schema.schema_ or {})
    return None


def _grammar(kind: str, value: Any) -> Grammar | None:
    return None if value is None or value is False else _GRAMMARS[kind](value)
