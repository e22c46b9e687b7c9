"""`evenflow doctor`: what is installed, what works on this machine, and what to do about the rest."""

from __future__ import annotations

import typer
from rich.table import Table

from evenflow import __version__
from evenflow.cli.doctor_checks import run_checks
from evenflow.cli.options import JsonTarget
from evenflow.cli.output import text_console, write_json


def doctor(*, json: JsonTarget = None) -> None:
    """Show what works on this machine, and what to do about the rest.

    Packages, kernels, memory, the cache, other engines, models. Loads no model and uses no network. The exit code is 1
    if there is a problem; what evenflow can do without is a note.
    """
    checks = run_checks()
    console = text_console(json)
    table = Table("", "what", "found", show_header=False)
    for check in checks:
        table.add_row(check.state, check.name, check.found)
    console.print(table)
    for check in checks:
        if check.advice is not None:
            console.print(f"{check.name}: {check.advice}")
    works = all(check.state != "problem" for check in checks)
    write_json(json, {"evenflow": __version__, "works": works, "checks": checks})
    if not works:
        raise typer.Exit(1)
