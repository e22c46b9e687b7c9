"""Where commands write, and how."""

from __future__ import annotations

import io
import logging
import os
import pty
import subprocess
import sys
from contextlib import suppress

import pytest
from rich.console import Console
from rich.live import Live

from evenflow.cli.output import log_warnings_only, make_table, text_console
from tests.models import tiny_llama


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


def in_a_terminal(code: str) -> str:
    """What Python code writes to a terminal."""
    ours, theirs = pty.openpty()
    with subprocess.Popen([sys.executable, "-c", code], stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        written = b""
        with suppress(OSError):  # at its end
            while part := os.read(ours, 4096):
                written += part
        assert process.wait() == 0
    os.close(ours)
    return written.decode()


def test_a_status_line_is_cleared_before_text_and_warnings() -> None:
    written = in_a_terminal(
        "import logging\n"
        "from evenflow.cli.output import log_warnings_only, progress, text_console\n"
        "log_warnings_only()\n"
        "console = text_console(None)\n"
        "with progress('Working'):\n"
        "    console.print('Some text')\n"
        "    logging.getLogger('evenflow').warning('some warning')\n"
    )
    for text in ("Some text", "evenflow: some warning"):
        status, _, between = written.partition(text)[0].rpartition("Working")
        assert status
        assert "\x1b[2K" in between  # clears the line


def test_loading_shows_the_stages_that_are_logged() -> None:
    written = in_a_terminal(
        "import logging, time\n"
        "from evenflow.cli.output import loading, log_warnings_only\n"
        "from evenflow.log_output import STAGE\n"
        "log_warnings_only()\n"
        f"with loading({str(tiny_llama())!r}):\n"
        "    logging.getLogger('evenflow').info('Compiling the kernels.', extra=STAGE)\n"
        "    logging.getLogger('evenflow').info('Something else.')\n"
        "    time.sleep(0.3)\n"
    )
    assert "Compiling the kernels." in written
    assert "evenflow: Compiling" not in written
    assert "Something else." not in written
