"""Renders a conversation with the model's own Jinja template.

A template is untrusted code: it runs sandboxed, and its errors are errors of the request.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from functools import cache, cached_property, lru_cache
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from evenflow.errors import InvalidRequest, printable
from evenflow.model.text.special_tokens import END_OF_MESSAGE, Change, SpecialTokens, with_strings
from evenflow.model.text.tool_messages import Message, plain_message, write_out_tools


class ToolStyle(StrEnum):
    """How a model writes a function call."""

    HERMES = "hermes"  # <tool_call>{"name": ..., "arguments": ...}</tool_call>, also Qwen's
    LLAMA = "llama"  # {"name": ..., "parameters": ...}
    MISTRAL = "mistral"  # [TOOL_CALLS][{"name": ..., "arguments": ...}]


class ChatTemplate:
    """The templates of one model, by name: `default`, and sometimes `tool_use` for conversations with tools."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self._sources = sources
        self._special_tokens = special_tokens

    @cached_property
    def knows_tools(self) -> bool:
        """Whether the template takes tools; if not, the system message describes them."""
        return any("tools" in _variables(source) for source in self._sources.values())

    @cached_property
    def tool_style(self) -> ToolStyle:
        """How this model calls functions, judging by its template."""
        source = self._sources.get("tool_use", self._sources["default"])
        if "[TOOL_CALLS]" in source:
            return ToolStyle.MISTRAL
        if "<tool_call>" not in source and ("<|python_tag|>" in source or '"parameters"' in source):
            return ToolStyle.LLAMA
        return ToolStyle.HERMES

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        protected: SpecialTokens | None = None,
        **variables: Any,
    ) -> str:
        """The prompt for these messages; `variables` are other variables of this model's template.

        Messages may have any form of the OpenAI API: content as text parts, tool calls, tool results. With `protected`,
        special tokens that they spell are broken, as `SpecialTokens.protect` says. With `continue_final_message` the
        prompt ends with the content of the last message, the assistant's.
        """
        messages = [plain_message(message) for message in messages]
        if continue_final_message:
            messages[-1] = _marked(messages[-1])
            add_generation_prompt = False
        given: list[Any] = [messages, tools, variables]

        def render(change: Change | None) -> str:
            changed = given if change is None else [with_strings(one, change) for one in given]
            return self._render(changed[0], changed[1], {**changed[2], "add_generation_prompt": add_generation_prompt})

        text = render(None) if protected is None else protected.protect(render, given)
        if not continue_final_message:
            return text
        text, mark, _ = text.rpartition(END_OF_MESSAGE)
        if not mark:
            raise InvalidRequest("the model's chat template leaves out the final message: it cannot be continued")
        return text

    def _render(
        self, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]] | None, variables: dict[str, Any]
    ) -> str:
        if not self.knows_tools:
            messages, tools = write_out_tools(messages, tools), None
        name = "tool_use" if tools and "tool_use" in self._sources else "default"
        known = {
            **self._special_tokens,
            **variables,
            "messages": messages,
            "tools": tools,
        }
        try:
            return _compile(self._sources[name]).render(known)
        except jinja2.TemplateSyntaxError as error:
            raise InvalidRequest(
                f"the model's chat template is broken at line {error.lineno}: {printable(str(error))}"
            ) from error
        except MemoryError:
            raise InvalidRequest("the model's chat template takes too much memory for these messages") from None
        except Exception as error:  # a template can raise anything that an expression can
            raise InvalidRequest(
                f"the model's chat template refused these messages: {printable(str(error))}"
            ) from error


def _marked(message: Message) -> dict[str, Any]:
    """A message whose end can be found in the rendered text, even if the template strips it."""
    content = message.get("content")
    if message.get("role") != "assistant" or not isinstance(content, str) or message.get("tool_calls"):
        raise InvalidRequest("Got a last message to continue that is not text of the assistant.")
    return {**message, "content": content + END_OF_MESSAGE}


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training; here it just renders its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=16)
def _compile(source: str) -> jinja2.Template:
    return _environment().from_string(source)


def _variables(source: str) -> set[str]:
    """The variables that a template takes."""
    try:
        return jinja2.meta.find_undeclared_variables(_environment().parse(source))
    except (jinja2.TemplateSyntaxError, RecursionError):  # rendering reports it
        return set()


@cache
def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationBlock]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda time_format: datetime.now().strftime(time_format)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes <, > and & for HTML, which no model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
