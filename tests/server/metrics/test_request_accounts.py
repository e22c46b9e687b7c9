"""Request logs that are read back: what adds up, what does not, and lines that a machine's death tore."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from evenflow.errors import InvalidInput
from evenflow.line_file import LineFile
from evenflow.server.metrics.request_accounts import read_accounts
from evenflow.server.metrics.request_log import RequestLog
from tests.cli.running import run_cli
from tests.server.stepping import ObservedEngine


def write(path: Path, *events: str | dict[str, Any]) -> Path:
    """A log of such events: `accepted a` is of the request a, `ended a` by length."""
    file = LineFile(path, "ab")
    for event in events:
        if isinstance(event, str):
            kind, _, name = event.partition(" ")
            event = {"event": kind, **({"id": name} if name else {}), "finish_reason": "length"}
        file.write(json.dumps(event).encode())
    file.close()
    return path


WHOLE = ("opened", "accepted a", "accepted b", "first_token a", "ended a", "retried b", "first_token b", "ended b")


@pytest.mark.parametrize(
    ("events", "problem"),
    [
        ((*WHOLE, "closed"), None),
        (("opened", "accepted a"), None),  # the server runs
        (("opened", "accepted a", "opened"), None),  # it died, and another runs
        (("ended a", "accepted b", "ended b", "closed"), None),  # an older file has the rest
        (("opened", "accepted a", "closed"), "request a had not"),
        (("opened", "ended a"), "a has the event ended but is not open"),
        ((*WHOLE, "ended b"), "b has the event ended but is not open"),
        (("opened", "accepted a", "accepted a"), "a was accepted twice"),
        (("opened", {"event": "lost", "lines": 3}), "3 lines are missing"),
    ],
)
def test_each_accepted_request_has_one_end(tmp_path: Path, events: tuple[Any, ...], problem: str | None) -> None:
    accounts = read_accounts([write(tmp_path / "log", *events)])
    assert accounts.adds_up == (problem is None)
    assert not accounts.problems if problem is None else problem in accounts.problems[0]


@pytest.mark.parametrize(
    ("events", "killed", "closed", "said"),
    [
        ((*WHOLE, "closed"), 0, True, ""),
        (("opened", "closed", "opened", "closed"), 0, True, ""),
        (("opened", "accepted a", "opened", "closed"), 1, True, "killed, or ended by a crash or a loss of power: 1"),
        (("opened", "opened", "opened"), 2, False, "still runs, was killed"),
        (("ended a", "opened", "closed"), 1, True, "killed"),
    ],
)
def test_a_killed_server_is_said(
    tmp_path: Path, events: tuple[str, ...], killed: int, closed: bool, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "log", *events)
    accounts = read_accounts([path])
    assert (accounts.num_killed, accounts.is_closed) == (killed, closed)
    out = run_cli(capsys, "audit", path).out
    assert said in out
    assert said or "killed" not in out


def test_a_torn_line_is_counted_and_the_next_one_is_whole(tmp_path: Path) -> None:
    path = write(tmp_path / "log", "opened", "accepted a")
    with path.open("ab") as file:
        file.write(b'{"event":"ended","id":"a","fini')  # the machine lost power here
    torn = read_accounts([path])
    assert (torn.num_torn_lines, torn.still_open, torn.adds_up) == (1, ["a"], True)
    write(path, "opened", "accepted b", "ended b", "closed")
    accounts = read_accounts([path])
    assert (accounts.num_torn_lines, accounts.cut_off, accounts.still_open) == (1, ["a"], [])
    assert (accounts.num_accepted, dict(accounts.ended), accounts.adds_up) == (2, {"length": 1}, True)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "it is empty"),
        (b"\n\n", "it is empty"),
        (b'{"event": "opened"\n', "none of its lines is an entry"),
        (random.Random(1).randbytes(2000), "none of its lines is an entry"),
        (b'{"event": "\xff"}\n', "none of its lines is an entry"),
        (b'"text"\n[1]\n', "none of its lines is an entry"),
    ],
    ids=["empty", "blank lines", "broken JSON", "random bytes", "not UTF-8", "other JSON"],
)
def test_a_file_without_an_entry_is_refused(
    content: bytes, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "log").write_bytes(content)
    found = run_cli(capsys, "audit", tmp_path / "log")
    assert (found.code, found.out) == (2, "")
    assert found.err == f"evenflow: Got '{tmp_path / 'log'}' but it is not a request log: {why}.\n"
    # Beside a log it is refused as well, unless it is empty because the log was rotated a moment ago.
    beside = run_cli(capsys, "audit", write(tmp_path / "good", *WHOLE, "closed"), tmp_path / "log")
    assert beside.code == (0 if why == "it is empty" else 2)


def test_retries_and_ends_of_a_run_are_told(tmp_path: Path) -> None:
    run = ObservedEngine()
    log = RequestLog(tmp_path / "log", run.observer)
    for name in "abc":
        run.add(name, 4, max_tokens=6)
    for _ in range(3):
        run.step()
    run.abort("a")
    run.observer.on_request_retried("b")
    run.run()
    log.close()
    accounts = read_accounts([tmp_path / "log"])
    assert accounts.adds_up
    assert (accounts.num_accepted, accounts.num_first_tokens, accounts.num_retries) == (3, 3, 1)
    assert accounts.ended == {"abort": 1, "length": 2}
    assert run.figure("evenflow:retries_total", fault="engine") == 1


def test_the_command_says_whether_it_adds_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = write(tmp_path / "good", *WHOLE, "closed")
    found = run_cli(capsys, "audit", good, "--json", tmp_path / "json")
    assert found.code == 0
    assert found.out.splitlines()[0] == "Accepted 2, with a first token 2. Ended: 2 length."
    assert found.out.endswith("The accounts add up.\n")
    told = json.loads((tmp_path / "json").read_text())
    assert (told["adds_up"], told["num_accepted"], told["ended"]) == (True, 2, {"length": 2})
    bad = run_cli(capsys, "audit", write(tmp_path / "bad", "opened", "accepted a", "closed"))
    assert bad.code == 1
    assert "The accounts do not add up." in bad.out
    other = run_cli(capsys, "audit", write(tmp_path / "other", {"event": "step"}))
    assert other.code == 2
    assert "it is not a request log: a line has the event 'step'" in other.err
    (tmp_path / "nameless").write_text('{"event": "accepted"}\n')
    nameless = run_cli(capsys, "audit", tmp_path / "nameless")
    assert nameless.code == 2
    assert "it is not a request log: a line with the event 'accepted' has no 'id'" in nameless.err
    assert run_cli(capsys, "audit", tmp_path / "missing").code == 2
    with pytest.raises(InvalidInput, match="No such file"):
        read_accounts([tmp_path / "missing"])
