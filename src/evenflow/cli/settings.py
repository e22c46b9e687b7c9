"""Settings of `evenflow serve` from a TOML file and the environment, by the names of its options.

The command line comes first, then the environment, the file, and the default.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from evenflow.errors import InvalidInput, printable

_PREFIX = "EVENFLOW_"
_NOT_IN_FILE = ("config", "help")
SECRETS = ("api_key", "admin_api_key", "metrics_api_key")  # keys of all sources are accepted together


def add_variables(command: Any) -> None:
    """Let the options of a command be set by variables too. Those of keys are read elsewhere."""
    for parameter in command.params:
        if parameter.param_type_name == "option" and parameter.name not in SECRETS:
            parameter.envvar, parameter.show_envvar = variable_of(parameter), False


def variable_of(parameter: Any) -> str:
    return _PREFIX + setting_name(parameter).replace("-", "_").upper()


def setting_name(parameter: Any) -> str:
    """The option without dashes in front; of an argument, its name."""
    option = parameter.opts[0] if parameter.param_type_name == "option" else parameter.name
    return str(option).lstrip("-").replace("_", "-")


def read_settings(context: typer.Context, path: Path | None) -> Path | None:
    """The callback of --config: what the file sets becomes the default of the other options."""
    if path is not None:
        known = {setting_name(one): one for one in context.command.params if one.name not in _NOT_IN_FILE}
        shown = printable(repr(str(path)))
        found: dict[str, Any] = {}
        for name, value in _read(path, shown).items():
            option = name.replace("_", "-")
            if option not in known:
                close = difflib.get_close_matches(option, known, 1)
                hint = f"did you mean {close[0]!r}?" if close else "`evenflow config` lists the settings."
                raise InvalidInput(f"Got the setting {printable(name)!r} in {shown} but there is none: {hint}")
            parameter = known[option]
            if parameter.name in found:
                raise InvalidInput(f"Got the setting {option!r} in {shown} twice, with - and with _.")
            found[str(parameter.name)] = _as_given(option, value, parameter.multiple or parameter.nargs == -1, shown)
        context.default_map = {**(context.default_map or {}), **found}
    return path


def _read(path: Path, shown: str) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise InvalidInput(f"Got --config {shown} but it is not TOML: {printable(str(error))}.") from error
    except (OSError, UnicodeError) as error:
        raise InvalidInput(f"Got --config {shown} but it cannot be read: {error}.") from error
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, values nested too deeply
        raise InvalidInput(f"Got --config {shown} but a value in it is too large.") from error


def _as_given(name: str, value: object, takes_list: bool, shown: str) -> str | list[str]:
    """As on the command line, where each value is a text and is checked."""
    if takes_list:
        return [_text(name, one, shown) for one in (value if isinstance(value, list) else [value])]
    return _text(name, value, shown)


def _text(name: str, value: object, shown: str) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | int | float):
        return str(value)
    raise InvalidInput(f"Got {name} with {type(value).__name__} in {shown} but expected one text, number or boolean.")


def source_of(context: Any, parameter: Any) -> str | None:
    """Where a setting comes from, for a reader; None: the default."""
    source = context.get_parameter_source(parameter.name)
    match getattr(source, "name", ""):
        case "COMMANDLINE":
            return "command line"
        case "ENVIRONMENT":
            return variable_of(parameter)
        case "DEFAULT_MAP":
            return str(context.params.get("config") or "the file of --config")
    return None


def settings_as_toml(context: Any) -> Iterator[str]:
    """The settings in force as lines of a file for --config: each with its source; defaults are comments."""
    for parameter in context.command.params:
        name, value = setting_name(parameter), context.params.get(parameter.name)
        if parameter.name in _NOT_IN_FILE:
            continue
        source = source_of(context, parameter)
        if parameter.name in SECRETS:
            given = f"{len(value)} given ({source})" if value and source else "none"
            yield f"# {name}: {given}; keys are not printed"
        elif source is None:
            default = getattr(parameter, "show_default", None)
            shown = default if value is None and isinstance(default, str) else _toml(parameter, value)
            yield f"# {name}: {shown}"
        else:
            yield f"{name} = {_toml(parameter, value)}  # {source}"


def _toml(parameter: Any, value: object) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(_toml(parameter, one) for one in value)}]" if value else "none"
    if isinstance(value, float) and parameter.metavar == "DURATION":
        return f'"{value:g}s"'
    if value is None or isinstance(value, bool):
        return {None: "none", True: "true", False: "false"}[value]
    return str(value) if isinstance(value, int | float) else json.dumps(str(value), ensure_ascii=False)
