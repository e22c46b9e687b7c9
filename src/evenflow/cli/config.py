"""`evenflow config`: the settings that `evenflow serve` would run with, and where each comes from."""

from __future__ import annotations

import typer

from evenflow.cli.options import ModelOptions, SchedulingOptions, engine_settings, takes_options
from evenflow.cli.output import engine_imports
from evenflow.cli.serve_options import EngineFlags, ServeOptions
from evenflow.cli.settings import settings_as_toml
from evenflow.config import EngineConfig


@takes_options
def config(
    context: typer.Context,
    *,
    engine_flags: EngineFlags = None,
    options: ServeOptions,
    model: ModelOptions,
    scheduling: SchedulingOptions,
) -> None:
    """Check and print the settings of `evenflow serve`.

    Takes the options of `evenflow serve`, and prints a file for its --config. The command line comes first, then
    variables such as EVENFLOW_MAX_NUM_SEQS, the file of --config, and the defaults, which are printed as comments.
    """
    shares = options.read_shares()
    settings = EngineConfig(**engine_settings(model, scheduling), **shares.engine_settings)
    if options.engine == "evenflow":
        options.check_own_engine(engine_flags or ())
    with engine_imports("the server"):
        options.server_settings(settings, shares)
    for line in settings_as_toml(context):
        typer.echo(line)
