"""Lines of the log: time and level on each, as text or as JSON."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from datetime import datetime

import pytest

from evenflow.advisor.server_logs import find_facts
from evenflow.errors import InvalidInput
from evenflow.log_output import JsonFormatter, TextFormatter, log_as_server, with_fields

PERIODIC = (
    "Avg prompt throughput: 10.0 tokens/s, Avg generation throughput: 20.0 tokens/s, Running: 3 reqs, "
    "Waiting: 1 reqs, KV cache usage: 12.5%, Prefix cache hit rate: 50.0%"
)


def record(message: str, name: str = "evenflow.server", error: bool = False, **extra: object) -> logging.LogRecord:
    exc_info = None
    if error:
        try:
            raise ValueError("broken")
        except ValueError:
            exc_info = sys.exc_info()
    found = logging.LogRecord(name, logging.WARNING, "file.py", 1, message, (), exc_info)
    found.__dict__ |= extra
    return found


def test_every_line_of_text_has_time_level_and_logger() -> None:
    lines = TextFormatter().format(record("two\nlines", error=True)).splitlines()
    assert len(lines) > 4  # with a traceback
    for line in lines:
        time, level, logger, _ = line.split(" ", 3)
        assert datetime.fromisoformat(time).tzinfo is not None
        assert (level, logger) == ("WARNING", "evenflow:")
    assert " uvicorn.error: " in TextFormatter().format(record("", name="uvicorn.error"))


def test_a_json_line_is_one_object_with_the_fields_of_its_record() -> None:
    [line] = JsonFormatter().format(record("two\nlines", error=True, **with_fields(status=429))).splitlines()
    found = json.loads(line)
    assert (found["level"], found["logger"], found["message"]) == ("WARNING", "evenflow", "two\nlines")
    assert found["status"] == 429
    assert "ValueError: broken" in found["exception"]
    assert datetime.fromisoformat(found["time"]).tzinfo is not None


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()])
def test_the_lines_can_be_explained(formatter: logging.Formatter) -> None:
    messages = ("Chunked prefill is enabled with tbt_target=120ms.", PERIODIC, "The policy is now target:50ms.")
    facts = find_facts(formatter.format(record(message, name="evenflow")) for message in messages)
    assert facts.value("written_by") == "evenflow"
    assert facts.value("latency_target") == "50ms"
    assert facts.peak("running") == 3
    assert facts.hit_rate == 0.5


@pytest.mark.parametrize("line", ['{"message": 5}', '{"message"', '["message"]', '{"message": "' + "[" * 5000])
def test_lines_that_only_look_like_json_are_read_as_text(line: str) -> None:
    assert not find_facts([line])


def test_other_processes_of_the_server_log_in_the_same_form() -> None:
    """Also the warnings of libraries."""
    code = (
        "import logging, subprocess, sys\n"
        "from evenflow.log_output import ensure_logging, log_as_server\n"
        "ensure_logging() if sys.argv[1:] else log_as_server('json')\n"
        "logging.getLogger('evenflow').info('said')\n"
        "if not sys.argv[1:]:\n"
        "    logging.getLogger('a.library').warning('careful')\n"
        "    subprocess.run([sys.executable, '-c', sys.orig_argv[2], 'child'], check=True)\n"
    )
    written = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stderr
    found = [json.loads(line) for line in written.splitlines()]
    assert [(one["logger"], one["message"]) for one in found] == [
        ("evenflow", "said"),
        ("a.library", "careful"),
        ("evenflow", "said"),
    ]


def test_a_level_that_does_not_exist_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENFLOW_LOG_LEVEL", "loud")
    monkeypatch.setenv("EVENFLOW_LOG_FORMAT", "text")
    with pytest.raises(InvalidInput, match="EVENFLOW_LOG_LEVEL='loud'"):
        log_as_server("text")
