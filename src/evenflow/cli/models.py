"""`evenflow models`: lists the models on this machine that `--model` finds by name, and removes one."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from typer import Argument, Option

from evenflow.cli.options import JsonTarget
from evenflow.cli.output import make_table, text_console, write_json
from evenflow.errors import InvalidInput
from evenflow.model.formats.inspection import ModelFacts, describe_model, num_bytes_of
from evenflow.model.hub.cached_models import CachedModel, cached_model, cached_models, remove_model
from evenflow.model.hub.progress_bar import format_bytes

models = typer.Typer(name="models", help="List the models that --model finds by name.")

_SHARED = ", in Hugging Face's cache, which other programs use too"


@models.callback(invoke_without_command=True)
def list_models(context: typer.Context, *, json: JsonTarget = None) -> None:
    """List the models that --model finds by name.

    They were pulled, or downloaded by Hugging Face's tools. A path that was given a name counts with its size.
    """
    if context.invoked_subcommand is not None:
        return
    found = [(model, describe_model(model.path)) for model in cached_models()]
    console = text_console(json)
    if found:
        table = make_table("", "name", "size", "format", "architecture", "last used", "runs")
        for model, facts in found:
            size, runs = format_bytes(facts.num_bytes), "yes" if facts.why_not is None else "no"
            table.add_row(model.name, size, facts.format, facts.architecture or "?", _day(model.last_used), runs)
        console.print(table)
        for model, facts in found:
            if facts.why_not is not None:
                console.print(f"{model.name}: {facts.why_not}")
    else:
        console.print("No model is cached. evenflow pull default, or evenflow pull ORG/NAME, fetches one.")
    write_json(json, {"models": [model_figures(model, facts) for model, facts in found]})


@models.command()
def rm(
    names: Annotated[list[str], Argument(metavar="NAME", help="Names of `evenflow models`.")],
    *,
    yes: Annotated[bool, Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove models. Of a folder or file that was given a name, only the name."""
    for model in [cached_model(name) for name in names]:
        if not yes and not _is_confirmed(model):
            continue
        remove_model(model)
        typer.echo(f"Removed {model.name}.", err=True)


def _is_confirmed(model: CachedModel) -> bool:
    if not sys.stdin.isatty():
        raise InvalidInput(f"Got no terminal to ask whether to remove {model.name}: give --yes.")
    what = "the name" if model.source == "link" else format_bytes(num_bytes_of(model.path))
    return typer.confirm(f"Remove {model.name} ({what}{_SHARED * (model.source == 'hub')})?", err=True)


def _day(seconds: float | None) -> str:
    return "never" if seconds is None else f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M}"


def model_figures(model: CachedModel, facts: ModelFacts) -> dict[str, Any]:
    """A model, as `--json` has it."""
    used = model.last_used
    return {
        "name": model.name,
        "path": str(model.path),
        "source": model.source,
        "bytes": facts.num_bytes,
        "format": facts.format,
        "architecture": facts.architecture,
        "last_used": None if used is None else datetime.fromtimestamp(used, UTC).isoformat(timespec="seconds"),
        "runs": facts.why_not is None,
        "why_not": facts.why_not,
    }
