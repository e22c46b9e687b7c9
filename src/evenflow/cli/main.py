"""The `evenflow` command: its commands, and how each kind of error ends it.

0    done
1    failed while running
2    bad input: one line on standard error says what is wrong, and nothing is on standard output
130  interrupted
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, cast

import typer

from evenflow import __version__
from evenflow.cli.ab import ab
from evenflow.cli.analyze import analyze
from evenflow.cli.bench import bench
from evenflow.cli.demo import demo
from evenflow.cli.doctor import doctor
from evenflow.cli.explain import explain
from evenflow.cli.generate import generate
from evenflow.cli.output import show_warnings_only
from evenflow.cli.serve import serve
from evenflow.errors import EvenflowError, InvalidInput

app = typer.Typer(name="evenflow", add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
app.command()(generate)
app.command()(demo)
app.command()(serve)
app.add_typer(bench)
app.command()(ab)
app.command()(analyze)
app.command()(explain)
app.command()(doctor)

# The base of typer's complaints about a command line. It has a different home in each version, and no public name.
_UsageError = cast("type[Exception]", typer.BadParameter.__base__)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"evenflow {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def evenflow(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version.")
    ] = False,
) -> None:
    """Serve language models so that no stream stalls."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; returns its exit code."""
    show_warnings_only()
    try:
        code = typer.main.get_command(app).main(arguments, prog_name="evenflow", standalone_mode=False)
    except (_UsageError, InvalidInput) as error:
        return _fail(error, 2)
    except EvenflowError as error:
        return _fail(error, 1)
    except (KeyboardInterrupt, typer.Abort):
        return 130
    return code or 0


def _fail(error: Exception, code: int) -> int:
    message = error.format_message() if isinstance(error, _UsageError) else str(error)  # type: ignore[attr-defined]
    print("evenflow:", " ".join(message.split()), file=sys.stderr)
    return code
