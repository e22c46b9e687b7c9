"""The fields of a chat that offer tools to the model, and the grammar and parser they need.

Used in this order:

    use = body.tool_use(tokenizer.chat_template.tool_style, body.grammar)
    prompt = tokenizer.apply_chat_template(messages, tools=use.tools)
    sampling = SamplingParams(grammar=use.grammar)
    stream = use.new_stream()               one per choice; None if all text is content
    delta = stream.push(text)               for a whole response, whole_message(stream.push(text, is_last=True))
    finish_reason = "tool_calls"            instead of "stop" if stream.num_calls is not 0
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from evenflow.core.grammar import Grammar
from evenflow.errors import InvalidRequest
from evenflow.model.text.chat_template import ToolStyle
from evenflow.model.text.grammar import BLANKS_IN_JSON
from evenflow.server.api.response_format import StrictModel
from evenflow.server.api.tool_stream import ToolStream

MAX_TOOLS = 128
CLIENTS_TOOLS = "; this server has only the client's own tools"
_MAX_PARALLEL_CALLS = 16  # without a limit, some models never stop

_AROUND_CALLS = {  # before the first call, between two, after the last; Llama's models make one call at a time
    ToolStyle.HERMES: ("<tool_call>\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>"),
    ToolStyle.LLAMA: ("", "", ""),
    ToolStyle.MISTRAL: ("[", ", ", "]"),
}

FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class FunctionDefinition(StrictModel):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="A JSON schema; without it, no parameters.")
    strict: bool | None = Field(None, description="Has no effect: required calls always match the schema.")


class Tool(StrictModel):
    type: Literal["function"]
    function: FunctionDefinition

    def for_template(self) -> dict[str, Any]:
        """Without fields that models were not trained on."""
        return {"type": self.type, "function": self.function.model_dump(exclude_none=True, exclude={"strict"})}


class NamedFunction(StrictModel):
    name: FunctionName


class NamedToolChoice(StrictModel):
    type: Literal["function"]
    function: NamedFunction


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How one chat uses tools."""

    tools: list[dict[str, Any]] | None  # for the chat template
    grammar: Grammar | None  # for the whole output
    style: ToolStyle
    parallel: bool

    def new_stream(self) -> ToolStream | None:
        """Parses one choice; None if no tool may be called."""
        if self.tools is None:
            return None
        names = {tool["function"]["name"] for tool in self.tools}
        return ToolStream(self.style, names, parallel=self.parallel)


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]


class TemplateFields(BaseModel):
    """How a conversation becomes a prompt."""

    tools: Tools | None = Field(None, description="That the conversation offers to the model.")
    add_generation_prompt: bool | None = Field(None, description="Let the template start the assistant's turn.")
    continue_final_message: bool | None = Field(None, description="Continue the last message, the assistant's.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="For the model's chat template.")

    @property
    def template_variables(self) -> dict[str, Any]:
        variables = self.chat_template_kwargs or {}
        for name in ("self", "messages", "tools", "add_generation_prompt", "continue_final_message", "protected"):
            if name in variables:
                raise InvalidRequest(f"Got {name!r} in chat_template_kwargs but it has a field of its own.")
        return variables


class ToolFields(TemplateFields):
    """For chats."""

    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = Field(
        None, description="By default 'auto' if there are tools: the model decides."
    )
    parallel_tool_calls: bool | None = Field(
        None, description="False allows one call. Required calls are several only if this is true."
    )

    def tool_use(self, style: ToolStyle, content: Grammar | None) -> ToolUse:
        """`content` is the grammar of an output without tool calls."""
        parallel = self.parallel_tool_calls is not False
        functions = self._functions()
        if not functions or self.tool_choice == "none":
            return ToolUse(None, content, style, parallel)
        tools = [tool.for_template() for tool in self.tools or ()]
        return ToolUse(tools, self._grammar(functions, style, content), style, parallel)

    def _grammar(
        self, functions: dict[str, FunctionDefinition], style: ToolStyle, content: Grammar | None
    ) -> Grammar | None:
        if isinstance(self.tool_choice, NamedToolChoice):
            return call_grammar([functions[self.tool_choice.function.name]], style, parallel=False)
        if self.tool_choice != "required" and content is None:
            return None
        either = None if self.tool_choice == "required" else content
        # Only on request: a small model that may call again does so until it hits the limit.
        parallel = self.parallel_tool_calls is True
        return call_grammar(list(functions.values()), style, parallel=parallel, content=either)

    def _functions(self) -> dict[str, FunctionDefinition]:
        """By name, after checking that names are unique and the choice is one of them."""
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
    functions: Sequence[FunctionDefinition], style: ToolStyle, *, parallel: bool, content: Grammar | None = None
) -> Grammar:
    """Calls of these functions in the model's own style, or JSON that matches `content`."""
    key = "parameters" if style is ToolStyle.LLAMA else "arguments"
    heads = [json.dumps(f'{{"name": "{function.name}", "{key}": ') for function in functions]
    body = " | ".join(f'{head} arguments_{number} "}}"' for number, head in enumerate(heads))
    first, between, last = _AROUND_CALLS[style]
    more = f"({json.dumps(between)} body){{0,{_MAX_PARALLEL_CALLS - 1}}}" if parallel and between else ""
    lines = [
        f"start: {'calls' if content is None else 'calls | content'}",
        f"calls: {json.dumps(first)} body {more} {json.dumps(last)}",
        f"body: {body}",
    ]
    lines += [f"arguments_{number}: %json {_arguments(function)}" for number, function in enumerate(functions)]
    if content is not None:
        lines.append(f"content: %json {_content_schema(content)}")
    return Grammar.lark("\n".join(lines))


def _content_schema(content: Grammar) -> str:
    """The schema of an output that may be a call instead."""
    if content.kind != "json_schema":
        raise InvalidRequest(f"Got tools and a {content.kind}, which can be combined only with tool_choice='none'.")
    try:
        schema = json.loads(content.text)
    except ValueError as error:
        raise InvalidRequest(f"the json_schema cannot be used: {error}") from error
    spacing = {"whitespace_pattern": BLANKS_IN_JSON}
    return json.dumps({"x-guidance": spacing, **schema} if isinstance(schema, dict) else schema, ensure_ascii=False)


def _arguments(function: FunctionDefinition) -> str:
    """The parameters' schema. One that only lists properties allows no others: small models would ramble."""
    schema = {"type": "object", **(function.parameters or {"properties": {}})}
    if "properties" in schema and not schema.keys() & {"$ref", "allOf", "anyOf", "oneOf", "patternProperties"}:
        schema = {"additionalProperties": False, **schema}
    spacing = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    return json.dumps({**schema, "x-guidance": spacing}, ensure_ascii=False)
