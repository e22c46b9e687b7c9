"""Reference pages as Markdown, from the code itself: commands from the typer app, the API from docstrings.

A small script instead of mkdocstrings, because the settings are documented by comments behind their fields.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

from typer.main import get_command

from evenflow.cli.main import app

_LINE = 78
_LONG_DEFAULT = 40  # characters; such a default is an object with many fields


def commands() -> str:
    """Every command with its arguments and options, as its --help has them."""
    return "\n".join(_command_lines(get_command(app), "evenflow", None))


def _command_lines(command: Any, name: str, parent: Any) -> Iterator[str]:
    context = command.make_context(name, [], parent=parent, resilient_parsing=True)
    yield f"\n## {context.command_path}\n"
    yield f"```text\n{command.get_usage(context).removeprefix('Usage: ')}\n```\n"
    yield inspect.cleandoc(command.help or "") + "\n"
    records = [record for parameter in command.get_params(context) if (record := parameter.get_help_record(context))]
    yield "| argument or option | meaning |\n|---|---|"
    for names, meaning in records:
        yield f"| `{names}` | {_cell(meaning.replace('<', '&lt;'))} |"
    for subcommand in getattr(command, "commands", {}).values():
        yield from _command_lines(subcommand, subcommand.name, context)


def fields(name: str) -> str:
    """The fields of a dataclass, with the comments that stand behind them in the source."""
    cls = _find(name)
    lines = ["| setting | type | default | |", "|---|---|---|---|"]
    comments = _field_comments(cls)
    for field in dataclasses.fields(cls):
        default = "" if field.default is dataclasses.MISSING else f"`{field.default!r}`"
        lines.append(f"| `{field.name}` | `{field.type}` | {default} | {_cell(comments[field.name])} |")
    return "\n".join(lines)


def api(name: str) -> str:
    """A public class or function: how it is called, its docstring, its public methods and properties."""
    thing = _find(name)
    parts = [f"## {name}\n", _signature(thing, name.rpartition(".")[2]), _docstring(thing)]
    if not inspect.isclass(thing):
        return "\n".join(parts)
    if dataclasses.is_dataclass(thing):
        parts.append(fields(name) + "\n")
    for member_name, member in inspect.getmembers_static(thing):
        text = _member(member_name, member)
        if text and not member_name.startswith("_"):
            parts.append(text)
    return "\n".join(parts)


def _member(name: str, member: Any) -> str:
    """A method or property that has a docstring; the others say all by their names, or are fields."""
    function = member.fget if isinstance(member, property) else inspect.unwrap(getattr(member, "__func__", member))
    if not inspect.isfunction(function) or not function.__doc__:
        return ""
    if isinstance(member, property):
        return f"### {name}\n\n{_docstring(function)}"
    return f"### {name}()\n\n{_signature(function, name)}{_docstring(function)}"


def _find(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def _signature(thing: Any, name: str) -> str:
    if dataclasses.is_dataclass(thing):
        return ""
    shown = [parameter for parameter in inspect.signature(thing).parameters.values() if parameter.name != "self"]
    texts = [_parameter(parameter) for parameter in shown]
    kinds = [parameter.kind for parameter in shown]
    if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        texts.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    text = ", ".join(texts)
    if len(name + text) > _LINE:
        text = "\n" + "".join(f"    {line},\n" for line in texts)
    return f"```py\n{name}({text})\n```\n"


def _parameter(parameter: inspect.Parameter) -> str:
    stars = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}.get(parameter.kind.name, "")
    hint = parameter.annotation  # a text, or a class where the module does not postpone its annotations
    text = f"{stars}{parameter.name}"
    if hint is not inspect.Parameter.empty:
        text += f": {hint if isinstance(hint, str) else inspect.formatannotation(hint)}"
    if parameter.default is inspect.Parameter.empty:
        return text
    default = repr(parameter.default)
    return f"{text} = {default if len(default) < _LONG_DEFAULT else '...'}"


def _docstring(thing: Any) -> str:
    """The docstring, its indented examples as code."""
    text = inspect.getdoc(thing) or ""
    return re.sub(r"(?:^    .*\n?(?:\n(?=    ))?)+", _as_code, text, flags=re.MULTILINE) + "\n"


def _as_code(found: re.Match[str]) -> str:
    return f"```py\n{textwrap.dedent(found[0]).rstrip()}\n```\n"


def _field_comments(cls: type) -> dict[str, str]:
    lines, _ = inspect.getsourcelines(cls)
    [definition] = ast.parse(textwrap.dedent("".join(lines))).body
    assert isinstance(definition, ast.ClassDef)
    own = {
        node.target.id: lines[(node.end_lineno or node.lineno) - 1].partition("  # ")[2].strip()
        for node in definition.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    inherited: dict[str, str] = {}
    for base in cls.__mro__[1:]:
        if dataclasses.is_dataclass(base):
            inherited |= _field_comments(base)
    return inherited | own


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
