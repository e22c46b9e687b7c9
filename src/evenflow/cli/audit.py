"""`evenflow audit`: whether a request log accounts for every request. Loads no model and uses no network."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument

from evenflow.cli.options import JsonTarget
from evenflow.cli.output import engine_imports, text_console, write_json


def audit(
    logs: Annotated[
        list[Path], Argument(metavar="LOG", help="Files of `serve --request-log`, from the oldest to the newest.")
    ],
    *,
    json: JsonTarget = None,
) -> None:
    """Check that a request log accounts for every request.

    The exit code is 1 if it does not, and 2 if a file is not a request log.
    """
    with engine_imports("the request log"):
        from evenflow.server.metrics.request_accounts import read_accounts
    accounts = read_accounts(logs)
    console = text_console(json)
    ends = ", ".join(f"{count} {reason}" for reason, count in sorted(accounts.ended.items())) or "none"
    console.print(f"Accepted {accounts.num_accepted}, with a first token {accounts.num_first_tokens}. Ended: {ends}.")
    for text, count in (
        ("computed again after a fault", accounts.num_retries),
        ("accepted before this log begins", accounts.num_ended_only),
        ("servers killed, or ended by a crash or a loss of power", accounts.num_killed),
        ("open when a server died", len(accounts.cut_off)),
        ("still open", len(accounts.still_open)),
        ("torn lines", accounts.num_torn_lines),
    ):
        if count:
            console.print(f"  {text}: {count}")
    if not accounts.is_closed:
        console.print("  the last server has not closed this log: it still runs, was killed, or writes a newer file")
    for problem in accounts.problems:
        console.print(f"  {problem}")
    console.print("The accounts add up." if accounts.adds_up else "The accounts do not add up.")
    write_json(json, accounts.as_json())
    if not accounts.adds_up:
        raise typer.Exit(1)
