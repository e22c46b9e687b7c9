"""Options that several commands share, in groups that a command takes as one parameter.

`EngineConfig` checks the values of the engine's settings.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer
from typer import Option

from evenflow import duration
from evenflow.cli.completion import complete_model, complete_policy
from evenflow.config import EngineConfig
from evenflow.core.policies import PolicySpec, parse_policies, policy_forms
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


def _parse_duration(text: str) -> float:
    try:
        return duration.parse_duration(text)
    except InvalidInput as error:  # typer hides the message of any other error
        raise typer.BadParameter(str(error)) from error


def _parse_target(text: str) -> str:
    try:
        return duration.format_duration(duration.parse_target(text, got=f"Got {text!r}"))
    except InvalidInput as error:
        raise typer.BadParameter(str(error)) from error


def _parse_new_file(text: str) -> Path:
    """Checks that the file can be written before anything is computed for it."""
    path = Path(text)
    if path.is_dir() or not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise typer.BadParameter(f"Got {text!r} but no file can be written there.")
    return path


def _parse_json_target(text: str) -> str:
    return text if text == "-" else str(_parse_new_file(text))


def option(help: str, *names: str, default: Any = None, **settings: Any) -> Any:
    """A field of a group of options. Takes the settings of `typer.Option`; a default in words is part of the help."""
    if isinstance(settings.get("show_default"), str):  # typer puts it in brackets of its own: [default: (128)]
        help, settings["show_default"] = f"{help}  [default: {settings['show_default']}]", False
    return dataclasses.field(default=default, metadata={"option": Option(*names, help=help, **settings)})


def duration_option(help: str, *names: str, **settings: Any) -> Any:
    """An option whose value is seconds, written as 50ms or 2s."""
    return option(help, *names, parser=_parse_duration, metavar="DURATION", **settings)


def target_option(help: str, **settings: Any) -> Any:
    """A time between tokens, written as 50ms or 0.05."""
    return option(help, parser=_parse_target, metavar="DURATION", **settings)


def file_option(help: str) -> Any:
    """An option that names a file to write."""
    return option(help, parser=_parse_new_file, metavar="PATH")


def read_policies(text: str, at_least: int) -> list[PolicySpec]:
    """The policies of a list such as `unchunked,fixed:256`."""
    policies = parse_policies(text)
    if len(policies) < at_least or len(set(policies)) < len(policies):
        raise InvalidConfig(f"Got --policies {text!r} but expected {at_least} or more, each once.")
    return policies


Switch = Literal["true", "false"]
_JSON_HELP = "Write one JSON object to this file. With -, to standard output; text then goes to standard error."
JsonTarget = Annotated[str | None, Option(parser=_parse_json_target, metavar="PATH|-", help=_JSON_HELP)]
_RECORD_HELP = "Write every step's plan and seconds to this file, as JSON lines."
RecordTarget = Annotated[Path | None, Option(parser=_parse_new_file, metavar="PATH", help=_RECORD_HELP)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """What runs, and in how much memory. None stands for EngineConfig's default."""

    model: str = option(
        "default, a pulled name, a Hugging Face folder, or a .gguf file.",
        default="default",
        metavar="MODEL",
        autocompletion=complete_model,
    )
    device: str | None = option("cpu or cuda.", metavar="cpu|cuda", show_default="a GPU if there is one")
    weights: str | None = option(
        "On a CPU float32 is exact, int4 is fast.",
        metavar="float32|int4|bfloat16|float16",
        show_default="float32, on a GPU bfloat16",
    )
    load_format: str | None = option("dummy: random weights, from config.json alone.", metavar="auto|dummy")
    deterministic: bool | None = option(
        "The same bits of an answer for any chunks and batch; slower.", "--deterministic", show_default=False
    )
    threads: int | None = option("Compute threads.", show_default="torch's choice")
    max_model_len: int | None = option("Maximum tokens of a prompt and its output.", show_default="the model's context")
    gpu_memory_utilization: float | None = option("Share of available memory for the KV cache.", show_default="0.9")
    kv_cache_memory: int | None = option("KV cache size, instead of a share: 4GiB.", parser=parse_size, metavar="SIZE")
    kv_offload_memory: int | None = option(
        "Memory for prefixes that leave the KV cache: 8GiB; docs/kv_tier.md.",
        parser=parse_size,
        metavar="SIZE",
        show_default="none",
    )
    kv_offload_format: str | None = option(
        "How they are kept.", metavar="plain|lossless|int8", show_default="lossless, on a GPU plain"
    )
    cache_dir: str | None = option("Folder in which the prefix cache survives a restart.", metavar="DIR")
    cache_dir_size: int | None = option(
        "Most that it may take.", parser=parse_size, metavar="SIZE", show_default="4GiB"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingOptions:
    """How prompts are cut and what shares a step. None stands for EngineConfig's default."""

    policy: str | None = option(
        f"One of: {policy_forms()}.",
        metavar="POLICY",
        show_default="a target that this machine keeps",
        autocompletion=complete_policy,
    )
    tbt_target: str | None = target_option("Target time between a stream's tokens (50ms), as --policy target:50ms.")
    max_num_batched_tokens: int | None = option("Maximum tokens in a step; on its own, fixed:N.")
    enable_chunked_prefill: Switch | None = option("false means --policy unchunked.", show_default="the engine decides")
    enable_prefix_caching: Switch | None = option("Reuse the KV of prompts that start alike.", show_default="true")
    max_num_seqs: int | None = option("Maximum requests that run at a time.", show_default="256")
    long_prefill_token_threshold: int | None = option("Cap on one prompt's tokens per step; 0: none.", show_default="0")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportOptions:
    """Where figures and steps are written."""

    json: JsonTarget = None
    record: RecordTarget = None


def engine_settings(*groups: ModelOptions | SchedulingOptions) -> dict[str, Any]:
    """The engine settings that were given. Checked here, before anything is loaded."""
    given = {name: value for group in groups for name, value in dataclasses.asdict(group).items() if value is not None}
    settings = {name: value == "true" if name.startswith("enable_") else value for name, value in given.items()}
    EngineConfig(**settings)
    return settings


def engine_facts(config: EngineConfig) -> dict[str, Any]:
    """What ran, for a report."""
    return {"model": config.model, "device": config.device, "weights": config.weights}


def takes_options(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command take a group of options as one parameter. typer sees the group's fields instead."""
    parameters: list[inspect.Parameter] = []
    groups: dict[str, Any] = {}
    for name, parameter in inspect.signature(command, eval_str=True).parameters.items():
        if dataclasses.is_dataclass(parameter.annotation):
            groups[name] = parameter.annotation
            parameters += _parameters_of(groups[name])
        else:
            parameters.append(parameter)

    @functools.wraps(command)
    def run(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in dataclasses.fields(group)})
        command(**values)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    del run.__wrapped__  # typer would read the command's own parameters through it
    return run


def _parameters_of(group: Any) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    for field in dataclasses.fields(group):
        hint = hints[field.name]
        annotation = Annotated[hint, field.metadata["option"]] if field.metadata else hint
        yield inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=annotation
        )
