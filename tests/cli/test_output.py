"""Where commands write, and how."""

from __future__ import annotations

import io
import logging

import pytest
from rich.console import Console
from rich.live import Live

from evenflow.cli.output import log_warnings_only, make_table, text_console


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


def test_a_warning_does_not_break_a_live_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger("evenflow")
    monkeypatch.delenv("EVENFLOW_LOG_LEVEL", raising=False)
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "level", logger.level)
    monkeypatch.setattr(logging.root, "handlers", [])
    log_warnings_only()
    written = io.StringIO()
    with Live("the picture", console=Console(file=written, force_terminal=True), auto_refresh=False):
        logger.warning("the target is infeasible")
    assert "evenflow: the target is infeasible\n" in written.getvalue()
