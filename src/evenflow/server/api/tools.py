"""The fields of a chat that offer functions to the model, and what they ask for: a prompt, a grammar, a parser.

Used in this order for each chat:

    use = body.tool_use(tokenizer.chat_template.tool_style, body.grammar)
    prompt = tokenizer.apply_chat_template(messages, tools=use.tools)
    sampling = SamplingParams(grammar=use.grammar)
    stream = use.new_stream()               one for each answer; None: all of its text is content
    delta = as_delta(stream.push(text))     and of stream.finish(); for a whole answer, whole_message(events)
    finish_reason = "tool_calls"            where it would be "stop" and stream.num_calls is not 0

Must not know: engines, HTTP.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from evenflow.core.grammar import Grammar
from evenflow.errors import InvalidRequest
from evenflow.model.chat_template import ToolStyle
from evenflow.model.grammar import BLANKS_IN_JSON
from evenflow.server.api.tool_stream import ToolStream

MOST_TOOLS = 128
_MOST_PARALLEL_CALLS = 16  # a model that may go on for ever sometimes does

_AROUND_CALLS = {  # before the first, between two, behind the last; Llama's models make one call at a time
    ToolStyle.HERMES: ("<tool_call>\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>"),
    ToolStyle.LLAMA: ("", "", ""),
    ToolStyle.MISTRAL: ("[", ", ", "]"),
}

FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class _Fields(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class FunctionDefinition(_Fields):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="A JSON schema; without it, there are no parameters.")
    strict: bool | None = Field(None, description="Has no effect: calls that are required always match the schema.")


class Tool(_Fields):
    type: Literal["function"]
    function: FunctionDefinition

    def for_template(self) -> dict[str, Any]:
        """Without what models have not been trained on."""
        return {"type": self.type, "function": self.function.model_dump(exclude_none=True, exclude={"strict"})}


class NamedFunction(_Fields):
    name: FunctionName


class NamedToolChoice(_Fields):
    type: Literal["function"]
    function: NamedFunction


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What one chat does with tools."""

    tools: list[dict[str, Any]] | None  # for the chat template
    grammar: Grammar | None  # what the whole answer must match
    style: ToolStyle
    parallel: bool

    def new_stream(self) -> ToolStream | None:
        """Takes one answer apart; None where no function may be called."""
        if self.tools is None:
            return None
        names = {tool["function"]["name"] for tool in self.tools}
        return ToolStream(self.style, names, parallel=self.parallel)


class ToolFields(BaseModel):
    """For the body of a chat."""

    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = Field(
        None, description="'auto' where tools are given: the model decides."
    )
    parallel_tool_calls: bool | None = Field(
        None,
        description="False: one call in an answer. Where calls are required, several are made only if this is true.",
    )

    def tool_use(self, style: ToolStyle, answer: Grammar | None) -> ToolUse:
        """`answer` is what text must match where the model does not call a function."""
        parallel = self.parallel_tool_calls is not False
        functions = self._functions()
        if not functions or self.tool_choice == "none":
            return ToolUse(None, answer, style, parallel)
        tools = [tool.for_template() for tool in self.tools or ()]
        return ToolUse(tools, self._grammar(functions, style, answer), style, parallel)

    def _grammar(
        self, functions: dict[str, FunctionDefinition], style: ToolStyle, answer: Grammar | None
    ) -> Grammar | None:
        if isinstance(self.tool_choice, NamedToolChoice):
            return call_grammar([functions[self.tool_choice.function.name]], style, parallel=False)
        if self.tool_choice != "required" and answer is None:
            return None
        either = None if self.tool_choice == "required" else answer
        # Only where it is asked for: a small model that may call again does so, until it may not.
        parallel = self.parallel_tool_calls is True
        return call_grammar(list(functions.values()), style, parallel=parallel, answer=either)

    def _functions(self) -> dict[str, FunctionDefinition]:
        """By name, each once; the choice is one of them."""
        given = [tool.function for tool in self.tools or ()]
        functions = {function.name: function for function in given}
        if len(functions) < len(given):
            twice = next(name for name in functions if sum(name == function.name for function in given) > 1)
            raise InvalidRequest(f"Got two tools with the name {twice!r} but names must differ.")
        if isinstance(self.tool_choice, NamedToolChoice) and self.tool_choice.function.name not in functions:
            known = ", ".join(functions) or "none"
            raise InvalidRequest(f"Got tool_choice={self.tool_choice.function.name!r} but the tools are: {known}.")
        if self.tool_choice == "required" and not functions:
            raise InvalidRequest("Got tool_choice='required' but no tools.")
        return functions


def call_grammar(
    functions: Sequence[FunctionDefinition], style: ToolStyle, *, parallel: bool, answer: Grammar | None = None
) -> Grammar:
    """Calls of these functions in the model's own way of writing them, or JSON as `answer` says."""
    key = "parameters" if style is ToolStyle.LLAMA else "arguments"
    heads = [json.dumps(f'{{"name": "{function.name}", "{key}": ') for function in functions]
    body = " | ".join(f'{head} arguments_{number} "}}"' for number, head in enumerate(heads))
    first, between, last = _AROUND_CALLS[style]
    more = f"({json.dumps(between)} body){{0,{_MOST_PARALLEL_CALLS - 1}}}" if parallel and between else ""
    lines = [
        f"start: {'calls' if answer is None else 'calls | answer'}",
        f"calls: {json.dumps(first)} body {more} {json.dumps(last)}",
        f"body: {body}",
    ]
    lines += [f"arguments_{number}: %json {_arguments(function)}" for number, function in enumerate(functions)]
    if answer is not None:
        lines.append(f"answer: %json {_answer(answer)}")
    return Grammar.lark("\n".join(lines))


def _answer(answer: Grammar) -> str:
    """The schema of an answer that may also be a call."""
    if answer.kind != "json_schema":
        raise InvalidRequest(f"Got tools and a {answer.kind} but they go together only with tool_choice='none'.")
    try:
        schema = json.loads(answer.text)
    except ValueError as error:
        raise InvalidRequest(f"the json_schema cannot be used: {error}") from error
    spacing = {"whitespace_pattern": BLANKS_IN_JSON}
    return json.dumps({"x-guidance": spacing, **schema} if isinstance(schema, dict) else schema, ensure_ascii=False)


def _arguments(function: FunctionDefinition) -> str:
    """The parameters' schema. Where it lists them and says no more, it allows no others: small models would ramble."""
    schema = {"type": "object", **(function.parameters or {"properties": {}})}
    if "properties" in schema and not schema.keys() & {"$ref", "allOf", "anyOf", "oneOf", "patternProperties"}:
        schema = {"additionalProperties": False, **schema}
    spacing = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    return json.dumps({**schema, "x-guidance": spacing}, ensure_ascii=False)
