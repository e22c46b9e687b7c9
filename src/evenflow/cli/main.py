"""The `evenflow` command: its subcommands and exit codes.

0    success
1    failed while running
2    bad input: one line on standard error says what is wrong, standard output is empty
130  interrupted
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Annotated, Any, cast

import typer

from evenflow import __version__
from evenflow.cli.ab import ab
from evenflow.cli.analyze import analyze
from evenflow.cli.audit import audit
from evenflow.cli.bench import bench
from evenflow.cli.chat import chat
from evenflow.cli.config import config
from evenflow.cli.demo import demo
from evenflow.cli.doctor import doctor
from evenflow.cli.eval import evaluate
from evenflow.cli.explain import explain
from evenflow.cli.generate import generate
from evenflow.cli.help import PanelCommand
from evenflow.cli.interrupts import INTERRUPTED
from evenflow.cli.models import models
from evenflow.cli.output import log_warnings_only
from evenflow.cli.pull import pull
from evenflow.cli.serve import serve
from evenflow.cli.settings import add_variables, source_of
from evenflow.cli.simulate import simulate
from evenflow.cli.tune import tune
from evenflow.errors import EvenflowError, InvalidInput

app = typer.Typer(name="evenflow", pretty_exceptions_enable=False, rich_markup_mode=None)
for command in (generate, chat, demo, serve, config, audit, analyze, explain, pull, doctor):
    app.command(cls=PanelCommand)(command)
app.command(cls=PanelCommand, epilog="Example: evenflow ab fixed:512 target:200ms")(ab)
app.command(cls=PanelCommand, epilog="Example: evenflow simulate trace.csv --device x86-smollm2 --kv-tokens 60000")(
    simulate
)
app.command(
    cls=PanelCommand,
    epilog="Example: evenflow tune trace.csv --device H100 --ttft-target 2s",
)(tune)
app.command("eval", cls=PanelCommand)(evaluate)
app.add_typer(bench)
app.add_typer(models)

# The base class of typer's errors about a command line. It has no public name, and its module differs by version.
_UsageError = cast("type[Exception]", typer.BadParameter.__base__)


def _print_version(is_given: bool) -> None:
    if is_given:
        typer.echo(f"evenflow {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def evenflow(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
) -> None:
    """Serve language models so that no stream stalls."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def make_command() -> Any:
    command: Any = typer.main.get_command(app)
    for name in ("serve", "config"):
        add_variables(command.commands[name])
    return command


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code."""
    log_warnings_only()
    try:
        code = make_command().main(arguments, prog_name="evenflow", standalone_mode=False)
    except (_UsageError, InvalidInput) as error:
        return _fail(error, 2)
    except EvenflowError as error:
        return _fail(error, 1)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    return code or 0


def _fail(error: Exception, code: int) -> int:
    message = _usage_message(error) if isinstance(error, _UsageError) else str(error)
    print("evenflow:", " ".join(message.split()), file=sys.stderr)
    return code


def _usage_message(error: Any) -> str:
    """What is wrong with a command line. If an argument is missing: also what it is, and how to write the command."""
    message = str(error.format_message()).replace("Value error, ", "")  # what pydantic puts before its own
    message = re.sub(r" \(env var: '\w+'\)", "", message)  # which click names, wherever the value comes from
    parameter = getattr(error, "param", None)
    source = source_of(error.ctx, parameter) if parameter is not None and error.ctx is not None else None
    if source not in (None, "command line"):
        message = f"{message.rstrip('.')} (from {source})."
    if not message.startswith("Missing argument") or parameter is None:
        return message
    help, usage, example = parameter.help or "", error.ctx.command.get_usage(error.ctx), error.ctx.command.epilog or ""
    return f"{message.removesuffix('.')}: {help} {usage}. {example}"
