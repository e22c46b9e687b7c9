"""`evenflow explain`: what a server's log says, what it means and what to do. Loads no model and uses no network."""

from __future__ import annotations

import sys
from itertools import groupby
from typing import Annotated

from rich.console import Console
from typer import Argument, Option

from evenflow.advisor.explanation import Explanation, Statement
from evenflow.advisor.explanation import explain as explain_facts
from evenflow.advisor.server_logs import Fact, LogFacts, read_facts
from evenflow.cli.options import JsonTarget
from evenflow.cli.output import progress, text_console, write_json
from evenflow.errors import InvalidInput

_MAX_LINE_CHARACTERS = 240  # shown of a log line


def explain(
    log: Annotated[
        str,
        Argument(metavar="LOG", help="A log of vLLM 0.10 to 0.32, SGLang 0.5 or evenflow; - for standard input."),
    ],
    *,
    all_rules: Annotated[
        bool, Option("--all-rules", help="Judge every common rule of thumb, not only those this log brings up.")
    ] = False,
    json: JsonTarget = None,
) -> None:
    """Explain what a server's log means.

    Says what to do about it, and which common advice is right today.
    """
    explanation = explain_facts(read_log(log), all_rules=all_rules)
    _print(text_console(json), explanation)
    write_json(json, explanation.as_json())


def read_log(log: str) -> LogFacts:
    """The facts in a log, of which there must be at least one; - stands for standard input."""
    with progress("Reading"):
        found = read_facts(sys.stdin.buffer if log == "-" else log)
    if not found:
        raise InvalidInput(f"Got the log {log!r} but no line in it is one that vLLM, SGLang or evenflow writes.")
    return found


def _print(console: Console, explanation: Explanation) -> None:
    for title, statements in (("Advice", explanation.advice), ("Meaning", explanation.meaning)):
        if statements:
            console.print(title)
            for statement in statements:
                console.print(f"  {statement.text}{_source(statement)}")
            console.print()
    console.print("Facts")
    facts = sorted(explanation.facts, key=lambda fact: fact.line_number)
    for number, group in groupby(facts, key=lambda fact: fact.line_number):
        found = list(group)
        line = found[0].line
        shown = line if len(line) <= _MAX_LINE_CHARACTERS else f"{line[:_MAX_LINE_CHARACTERS]} ..."
        console.print(f"  line {number}: {shown}", style="dim")
        console.print(f"    {'; '.join(map(_fact_text, found))}")
    if explanation.rules:
        console.print("\nRules of thumb")
    for rule in explanation.rules:
        console.print(f"  {rule.rule} {rule.verdict.capitalize()}. {rule.truth}")


def _source(statement: Statement) -> str:
    numbers = statement.line_numbers
    return f" ({'line' if len(numbers) == 1 else 'lines'} {', '.join(map(str, numbers))})" if numbers else ""


def _fact_text(fact: Fact) -> str:
    name, value = fact.name.replace("_", " "), fact.value
    if isinstance(value, dict):
        return ", ".join(f"{part.replace('_', ' ')} {number}" for part, number in value.items())
    if isinstance(value, bool):
        return f"{name} {'on' if value else 'off'}"
    if isinstance(value, float) and fact.name.endswith(("usage", "hit_rate")):
        return f"{name} {value:.1%}"
    if isinstance(value, int | float):
        return f"{name} {value:,.1f}" if "tokens_per_s" in fact.name else f"{name} {value:,.6g}"
    return name if value is None else f"{name} {value}"
