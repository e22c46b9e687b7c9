"""Where commands write, and how."""

from __future__ import annotations

import pytest

from evenflow.cli.output import make_table, text_console


def test_text_is_printed_verbatim(capsys: pytest.CaptureFixture[str]) -> None:
    """Answers and file names may look like rich's markup, and scripts want unwrapped lines."""
    odd = "[red]an answer[/bold] :smile: " + 20 * "and so on "
    table = make_table("[title]", "name")
    table.add_row("[/row]")
    console = text_console(None)
    console.print(odd)
    console.print(table)
    out = capsys.readouterr().out
    assert odd + "\n" in out
    assert "[title]" in out
    assert "[/row]" in out


def test_text_leaves_standard_output_to_json(capsys: pytest.CaptureFixture[str]) -> None:
    text_console("-").print("text")
    assert capsys.readouterr() == ("", "text\n")
