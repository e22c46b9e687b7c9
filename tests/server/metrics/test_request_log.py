"""The request log of a real server: what a line holds, rotation, and disks that are full."""

from __future__ import annotations

import json
import stat
import time
from collections.abc import Iterator
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from evenflow.errors import InvalidInput
from evenflow.line_file import LineFile
from evenflow.server.metrics.observer import Observer
from evenflow.server.metrics.request_accounts import read_accounts
from evenflow.server.metrics.request_log import RequestLog
from tests.server.serving import RunningServer, scripted_server
from tests.server.stepping import ObservedEngine

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
SECRET = "the secret words"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log") / "requests.jsonl"


@pytest.fixture(scope="module")
def server(path: Path) -> Iterator[RunningServer]:
    with scripted_server(script=SECRET * 50, step_s=0.001, settings={"request_log": path}) as running:
        yield running


def lines(server: RunningServer, path: Path, count: int) -> list[dict[str, Any]]:
    """The ends of requests, once there are that many: a thread writes them."""
    server.until(lambda: path.exists() and path.read_bytes().count(b'"event":"ended"') >= count)
    server.until(lambda: path.read_bytes().endswith(b"\n"))
    found = events(path, "ended")
    assert len(found) == count
    return found


def events(path: Path, *kinds: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in found if line["event"] in kinds]


def start_over(path: Path) -> None:
    path.unlink(missing_ok=True)


def test_each_choice_has_a_line_without_text(server: RunningServer, path: Path) -> None:
    start_over(path)
    prompt = list(range(100, 180))
    body = {"prompt": prompt, "max_tokens": 5, "tenant": "docs", "n": 2, "user": SECRET}
    answer = server.post(COMPLETION, body).json()
    first, second = sorted(lines(server, path, 2), key=lambda line: line["id"])
    assert [first["id"], second["id"]] == [f"{answer['id']}-0", f"{answer['id']}-1"]
    assert first["endpoint"] == COMPLETION
    assert (first["model"], first["tenant"], first["key"]) == ("a-model", "docs", "")
    assert (first["prompt_tokens"], first["output_tokens"], first["finish_reason"]) == (80, 5, "length")
    assert {first["cached_tokens"], second["cached_tokens"]} == {0, 64}
    assert 0 < first["longest_gap_s"] < first["duration_s"]
    assert 0 < first["ttft_s"] < first["duration_s"]
    assert abs(datetime.fromisoformat(first["time"]).timestamp() - time.time()) < 60
    assert "secret" not in path.read_text()
    told = [(line["event"], line["id"]) for line in events(path, "accepted", "first_token", "ended")]
    for name in (first["id"], second["id"]):
        assert [event for event, one in told if one == name] == ["accepted", "first_token", "ended"]
    [accepted, _] = events(path, "accepted")
    assert (accepted["prompt_tokens"], accepted["max_tokens"], accepted["time"]) == (80, 5, first["time"])
    assert events(path, "first_token")[0]["ttft_s"] in (first["ttft_s"], second["ttft_s"])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_aborts_are_logged_and_refusals_are_not(server: RunningServer, path: Path) -> None:
    start_over(path)
    assert server.post(COMPLETION, {"prompt": ""}).status_code == 400
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 900, "stream": True, "model": "another-name"}
    with httpx.stream("POST", server.url + CHAT, json=body, timeout=30, verify=False) as response:
        next(response.iter_lines())
    [line] = lines(server, path, 1)
    assert (line["endpoint"], line["model"], line["finish_reason"]) == (CHAT, "another-name", "abort")
    assert line["output_tokens"] < 900


def test_a_renamed_log_is_followed_by_a_new_one(server: RunningServer, path: Path) -> None:
    start_over(path)
    server.post(COMPLETION, {"prompt": [5], "max_tokens": 1})
    [line] = lines(server, path, 1)
    assert line["longest_gap_s"] is None
    path.rename(path.with_suffix(".1"))
    server.post(COMPLETION, {"prompt": [5], "max_tokens": 2})
    [after] = lines(server, path, 1)
    assert after["output_tokens"] == 2
    assert len(events(path.with_suffix(".1"), "ended")) == 1
    accounts = read_accounts([path.with_suffix(".1"), path])
    assert (accounts.num_accepted, accounts.ended["length"], accounts.adds_up) == (2, 2, True)


def test_a_full_disk_loses_lines_and_no_request(
    server: RunningServer, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start_over(path)
    path.symlink_to("/dev/full")
    for _ in range(3):
        assert server.post(COMPLETION, {"prompt": [5], "max_tokens": 2}).status_code == 200
    server.until(lambda: "are lost: No space left on device" in caplog.text)
    start_over(path)
    server.post(COMPLETION, {"prompt": [5], "max_tokens": 3})
    server.until(lambda: path.exists() and '"output_tokens":3' in path.read_text())
    [lost] = events(path, "lost")
    written = events(path, "accepted", "first_token", "ended")  # the thread may have been late
    assert lost["lines"] + len(written) == 4 * 3
    server.until(lambda: f"{lost['lines']} lines were lost" in caplog.text)
    assert caplog.text.count("No space left") == 1
    assert not read_accounts([path]).adds_up


def test_a_file_keeps_only_whole_lines(tmp_path: Path) -> None:
    """A limit on the size of files fails a write in its middle, as a full disk does."""
    import resource
    import signal

    path = tmp_path / "log"
    path.write_bytes(b"before\n")
    file = LineFile(path, "ab")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20, before[1]))
        file.write(b"short")
        with pytest.raises(OSError, match="too large"):
            file.write(b"a line that is too long")
        file.write(b"more")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
        file.close()
    assert path.read_bytes() == b"before\nshort\nmore\n"


def test_a_path_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"--request-log '.*missing/log' but it cannot be written: No such file"):
        RequestLog(tmp_path / "missing" / "log", Observer("a-model"))


def test_a_log_that_another_server_writes_is_refused_and_kept(tmp_path: Path) -> None:
    """Before, the accounts took the requests of the one for ended when the other started."""
    path = tmp_path / "log"
    first = RequestLog(path, Observer("a-model"))
    with pytest.raises(InvalidInput, match="another server or engine is writing to it"):
        RequestLog(path, Observer("a-model"))
    first.close()
    RequestLog(path, Observer("a-model")).close()
    assert len(events(path, "opened")) == len(events(path, "closed")) == 2


def test_the_longest_gap_is_the_one_beside_a_long_prompt(tmp_path: Path) -> None:
    run = ObservedEngine("unchunked")
    log = RequestLog(tmp_path / "log", run.observer)
    run.add("a", 4, max_tokens=6)
    reports = [run.step() for _ in range(3)]
    run.add("b", 300, max_tokens=1)
    reports += run.run()
    log.close()
    of_a, of_b = sorted(events(tmp_path / "log", "ended"), key=lambda line: line["id"])
    times = [report.at for report in reports if "a" in report.ids]
    assert of_a["longest_gap_s"] == pytest.approx(max(after - before for before, after in pairwise(times)))
    assert of_a["longest_gap_s"] > 0.3
    assert of_b["longest_gap_s"] is None
