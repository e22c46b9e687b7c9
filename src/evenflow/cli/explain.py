"""`evenflow explain`: what a server's log says, what it means, and what to do. Loads no model and uses no network."""

from __future__ import annotations

import sys
from typing import Annotated

from rich.console import Console
from rich.markup import escape
from typer import Argument, Option

from evenflow.advisor.explanation import Explanation, Statement
from evenflow.advisor.explanation import explain as explain_facts
from evenflow.advisor.vllm_logs import Fact, LogFacts, read_facts
from evenflow.cli.options import JsonTarget
from evenflow.cli.output import progress, table_console, write_json
from evenflow.errors import InvalidInput

_SHOWN = 240  # characters of a line


def explain(
    log: Annotated[str, Argument(metavar="LOG", help="A log of vLLM 0.10 to 0.32 or evenflow; - for standard input.")],
    *,
    all_rules: Annotated[
        bool, Option("--all-rules", help="Judge every rule that goes round, not only those that this log brings up.")
    ] = False,
    json: JsonTarget = None,
) -> None:
    """Say what a server's log means, and which common advice about it holds today."""
    explanation = explain_facts(read_log(log), all_rules=all_rules)
    _print(table_console(json), explanation)
    write_json(json, explanation.as_json())


def read_log(log: str) -> LogFacts:
    """The facts in a log, of which there must be some; - stands for standard input."""
    with progress("Reading"):
        found = read_facts(sys.stdin.buffer if log == "-" else log)
    if not found:
        raise InvalidInput(f"Got the log {log!r} but no line in it is one that vLLM or evenflow writes.")
    return found


def _print(console: Console, explanation: Explanation) -> None:
    console.print("Facts")
    _print_facts(console, explanation.facts)
    for title, statements in (("Meaning", explanation.meaning), ("Advice", explanation.advice)):
        if statements:
            console.print(f"\n{title}")
        for statement in statements:
            console.print(f"  {statement.text}{_source(statement)}", soft_wrap=True, markup=False)
    if explanation.rules:
        console.print("\nOften said")
    for rule in explanation.rules:
        console.print(f"  {rule.rule} {rule.verdict.capitalize()}. {rule.truth}", soft_wrap=True, markup=False)


def _print_facts(console: Console, facts: list[Fact]) -> None:
    """Line by line, with all that was read from it."""
    by_line: dict[int, list[Fact]] = {}
    for fact in sorted(facts, key=lambda fact: fact.line_number):
        by_line.setdefault(fact.line_number, []).append(fact)
    for number, read in by_line.items():
        line = read[0].line
        shown = line if len(line) <= _SHOWN else f"{line[:_SHOWN]} ..."
        console.print(f"  [dim]line {number}: {escape(shown)}[/dim]", soft_wrap=True)
        console.print(f"    {'; '.join(map(_words, read))}", soft_wrap=True, markup=False)


def _source(statement: Statement) -> str:
    numbers = statement.line_numbers
    return f" ({'line' if len(numbers) == 1 else 'lines'} {', '.join(map(str, numbers))})" if numbers else ""


def _words(fact: Fact) -> str:
    name, value = fact.name.replace("_", " "), fact.value
    if isinstance(value, dict):
        return ", ".join(f"{part.replace('_', ' ')} {number}" for part, number in value.items())
    if isinstance(value, bool):
        return f"{name} {'on' if value else 'off'}"
    if isinstance(value, float) and fact.name.endswith(("usage", "hit_rate")):
        return f"{name} {value:.1%}"
    if isinstance(value, int | float):
        return f"{name} {value:,.6g}"
    return name if value is None else f"{name} {value}"
