"""The options that commands share, each defined once, in groups that a command takes as a whole.

Must not know: torch, engines; what an option means is for `EngineConfig` to check.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from typer import Option

from evenflow import duration
from evenflow.config import EngineConfig
from evenflow.core.policies import POLICY_FORMS, make_policy, split_policies
from evenflow.errors import InvalidConfig, InvalidInput

_UNIT_BYTES = {"": 1, "b": 1} | {
    prefix + unit: base**power
    for power, prefix in enumerate("kmgt", start=1)
    for unit, base in (("ib", 1024), ("b", 1000))
}


def parse_size(text: str) -> int:
    """Bytes, from text such as 4GiB."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([a-z]*)", text.strip().lower())
    if match is None or match[2] not in _UNIT_BYTES:
        raise typer.BadParameter(f"Got {text!r} but expected a size such as 512MiB or 4GiB.")
    return int(float(match[1]) * _UNIT_BYTES[match[2]])


def parse_duration(text: str) -> float:
    """Seconds, from text such as 50ms."""
    try:
        return duration.parse_duration(text)
    except InvalidInput as error:  # what typer makes of other errors does not say what is wrong
        raise typer.BadParameter(str(error)) from error


def read_policies(text: str, at_least: int) -> list[str]:
    """Policies to compare, each one checked."""
    names = split_policies(text)
    if len(names) < at_least or len(set(names)) < len(names):
        raise InvalidConfig(f"Got --policies {text!r} but expected {at_least} or more, each once.")
    for name in names:
        make_policy(name, 1)
    return names


class Switch(StrEnum):
    """Said in words, because not saying it leaves the choice to the engine."""

    TRUE = "true"
    FALSE = "false"


def parse_new_file(text: str) -> Path:
    """A path that can be written: an answer must not be computed first and lost then."""
    path = Path(text)
    if path.is_dir() or not os.access(path.absolute().parent, os.W_OK):
        raise typer.BadParameter(f"Got {text!r} but no file can be written there.")
    return path


def _parse_json_target(text: str) -> str:
    return text if text == "-" else str(parse_new_file(text))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """What runs, and in how much memory. None stands for EngineConfig's default."""

    model: Annotated[str, Option(metavar="NAME|PATH", help="'default', a Hugging Face folder, or a .gguf file.")] = (
        "default"
    )
    weights: Annotated[
        str | None, Option(metavar="float32|int4", help="float32 is exact, int4 is fast.", show_default="float32")
    ] = None
    threads: Annotated[int | None, Option(help="Threads for computing.", show_default="torch's choice")] = None
    max_model_len: Annotated[
        int | None, Option(help="Most tokens of a prompt and its answer.", show_default="the model's context")
    ] = None
    gpu_memory_utilization: Annotated[
        float | None, Option(help="Share of the available memory for the KV cache.", show_default="0.9")
    ] = None
    kv_cache_memory: Annotated[
        int | None,
        Option(parser=parse_size, metavar="SIZE", help="Memory for the KV cache, such as 4GiB, instead of a share."),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingOptions:
    """How prompts are cut and what shares a step. None stands for EngineConfig's default."""

    policy: Annotated[str | None, Option(metavar="POLICY", help=f"One of: {', '.join(POLICY_FORMS)}.")] = None
    tbt_target: Annotated[
        float | None,
        Option(
            parser=parse_duration,
            metavar="DURATION",
            help="Time between a stream's tokens to keep, such as 50ms; alone it means the policy target.",
        ),
    ] = None
    max_num_batched_tokens: Annotated[
        int | None, Option(help="Most tokens of one step; alone it means the policy fixed:N.", show_default="2048")
    ] = None
    enable_chunked_prefill: Annotated[
        Switch | None, Option(help="false means the policy unchunked.", show_default="decided")
    ] = None
    enable_prefix_caching: Annotated[
        Switch | None, Option(help="Keep the KV of prompts for others that begin alike.", show_default="true")
    ] = None
    max_num_seqs: Annotated[int | None, Option(help="Most requests that run at a time.", show_default="256")] = None
    long_prefill_token_threshold: Annotated[
        int | None, Option(help="Most tokens of one prompt in a step; 0: no such limit.", show_default="0")
    ] = None


JsonTarget = Annotated[
    str | None,
    Option(
        parser=_parse_json_target,
        metavar="PATH|-",
        help="Write one JSON object there; with -, to standard output, and all else to standard error.",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportOptions:
    """Where figures and steps are written."""

    json: JsonTarget = None
    record: Annotated[
        Path | None, Option(metavar="PATH", help="Write every step's plan and seconds there, as JSON lines.")
    ] = None


def knobs(*groups: ModelOptions | SchedulingOptions) -> dict[str, Any]:
    """The engine's settings that were given; those that cannot be are refused here, before anything is loaded."""
    given = {name: value for group in groups for name, value in dataclasses.asdict(group).items() if value is not None}
    settings: dict[str, Any] = {
        name: value is Switch.TRUE if isinstance(value, Switch) else value for name, value in given.items()
    }
    EngineConfig(**settings)
    return settings


def takes_options(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command declare a group of options as one parameter: the command line shows the group's fields instead."""
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, Any] = {
        name: p.annotation for name, p in signature.parameters.items() if dataclasses.is_dataclass(p.annotation)
    }

    @functools.wraps(command)
    def run(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in dataclasses.fields(group)})
        command(**values)

    parameters: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        if parameter.name not in groups:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        hints = get_type_hints(parameter.annotation, include_extras=True)
        parameters += [
            inspect.Parameter(
                field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
            )
            for field in dataclasses.fields(parameter.annotation)
        ]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    del run.__wrapped__  # typer would read the command's own parameters through it
    return run
