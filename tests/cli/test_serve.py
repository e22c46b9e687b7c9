"""`evenflow serve` as users run it: a process, a port, signals."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import socket
import subprocess
import time
from pathlib import Path

import httpx
import pytest

from evenflow.advisor.server_logs import find_facts
from evenflow.errors import EngineFailed
from evenflow.server.serving import _ONE_SIGNAL_S, bind, listen
from tests.cli.running import command_line, long_context_llama, run_cli, serving
from tests.models import tiny_llama

BAD_SERVE = {
    "unknown policy": (["--policy", "fastest"], "policy='fastest'"),
    "no port": (["--port", 70000], "--port 70000"),
    "no address": (["--host", "no.such.host.invalid"], "no.such.host.invalid"),
    "empty key": (["--api-key", " "], "empty API key"),
    "missing key file": (["--api-key-file", "/no/such/keys"], "/no/such/keys"),
    "no answers": (["--max-n", 0], "max_n=0"),
    "no size": (["--max-body-size", "much"], "'much'"),
    "no duration": (["--drain-time", "soon"], "'soon'"),
    "other model without a name": (["--other-model", "=x"], "'=x'"),
    "other model with the name of the first": (["--served-model-name", "a", "--other-model", "a=x"], "'a=x'"),
    "two others of one name": (["--other-model", "a=x", "--other-model", "a=y"], "'a=y'"),
    "missing other model": (["--other-model", "a=/no/such/model"], "/no/such/model"),
    "empty name": (["--served-model-name", ""], "--served-model-name"),
    "missing model": (["--model", "/no/such/model"], "/no/such/model"),
    "too little memory, said by the engine": (["--kv-cache-memory", "1KiB"], "1024 bytes"),
}


@pytest.mark.parametrize(("arguments", "named"), BAD_SERVE.values(), ids=BAD_SERVE)
def test_bad_input(arguments: list[object], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = [] if "--model" in arguments else ["--model", tiny_llama()]
    finished = run_cli(capsys, "serve", "--port", 0, *model, *arguments)
    assert (finished.code, finished.out) == (2, "")
    assert named in finished.err
    assert finished.err.splitlines()[-1].startswith("evenflow: ")
    assert "Traceback" not in finished.err


def test_a_port_in_use_gives_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        finished = run_cli(capsys, "serve", "--port", taken.getsockname()[1], "--model", tiny_llama())
    assert finished.code == 1
    assert re.fullmatch(
        r"evenflow: cannot serve on 127.0.0.1 port \d+: .*in use; --port gives another, 0 a free one\n", finished.err
    )


def test_of_two_servers_that_start_at_once_on_a_port_one_says_that_it_is_taken() -> None:
    """Both may bind it: only one can listen."""
    with bind("127.0.0.1", 0) as first, bind("127.0.0.1", first.getsockname()[1]) as second:
        listen(first)
        with pytest.raises(EngineFailed, match=r"cannot serve on 127.0.0.1 port \d+: .*in use; --port"):
            listen(second)


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_it_answers_and_shuts_down_cleanly_at_a_signal(number: signal.Signals, tmp_path: Path) -> None:
    record = tmp_path / "steps.jsonl"
    with serving("--served-model-name", "tiny", "--record", record) as (process, url):
        assert httpx.get(url + "/v1/models", verify=False).json()["data"][0]["id"] == "tiny"
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "ignore_eos": True}
        answer = httpx.post(url + "/v1/chat/completions", json=body, timeout=30, verify=False).json()
        assert answer["usage"]["completion_tokens"] == 5
        process.send_signal(number)
        assert process.wait(30) == 0
    assert record.read_text().count('"event":"step"') == 5


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_to_the_whole_process_group_lets_open_streams_end(number: signal.Signals) -> None:
    """`timeout`, supervisors and terminals send it to all: the front alone decides when the others end."""
    sampling = {"max_tokens": 300, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
    messages = [{"role": "user", "content": "hi"}]
    with serving("--model", long_context_llama(), "--served-model-name", "tiny") as (process, url):
        body = {"model": "tiny", "messages": messages, **sampling}
        with httpx.stream("POST", url + "/v1/chat/completions", json=body, timeout=60, verify=False) as answer:
            lines = filter(None, answer.iter_lines())
            next(lines)
            os.killpg(process.pid, number)
            *_, usage, end = lines
        assert end == "data: [DONE]"
        assert json.loads(usage.removeprefix("data: "))["usage"]["completion_tokens"] == 300
        assert process.wait(60) == 0
        wait_for_all(process)


@pytest.mark.slow
def test_when_the_front_is_killed_its_other_processes_end() -> None:
    with serving() as (process, _):
        process.kill()
        wait_for_all(process)


def wait_for_all(process: subprocess.Popen[str]) -> None:
    """Each process of a server has its standard error open."""
    assert process.stderr is not None
    process.stderr.read()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_quits_at_once(number: signal.Signals) -> None:
    with serving("--model", long_context_llama(), "--drain-time", "600s") as (process, url):
        body = {"prompt": "hi", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", url + "/v1/completions", json=body, timeout=60, verify=False) as answer:
            lines = answer.iter_lines()
            next(lines)
            os.killpg(process.pid, number)
            os.killpg(process.pid, number)  # `timeout` sends it twice and means one
            assert process.stderr is not None
            assert "Press Ctrl-C again to quit at once" in process.stderr.readline()
            time.sleep(_ONE_SIGNAL_S)
            os.killpg(process.pid, number)
            assert process.wait(60) == 0
            assert "shutting down" in "".join(lines)
        wait_for_all(process)


@pytest.mark.slow
def test_keys_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENFLOW_API_KEY", "from-the-environment")
    keys = tmp_path / "keys"
    keys.write_text("from-the-file\n")
    with serving("--api-key-file", keys, "--api-key", "from-the-line") as (_, url):
        assert httpx.get(url + "/v1/models", verify=False).status_code == 401
        for key in ("from-the-environment", "from-the-file", "from-the-line"):
            headers = {"Authorization": f"Bearer {key}"}
            assert httpx.get(url + "/v1/models", headers=headers, verify=False).status_code == 200


def test_another_model_is_loaded_when_a_request_names_it() -> None:
    with serving("--served-model-name", "small", "--other-model", f"long={long_context_llama()}") as (process, url):
        for name, context in (("small", 256), ("long", 4096), ("small", 256)):
            asked = {"model": name, "prompt": "hi", "max_tokens": 3, "temperature": 0}
            answer = httpx.post(url + "/v1/completions", json=asked, timeout=60, verify=False).json()
            assert (answer["model"], answer["usage"]["completion_tokens"]) == (name, 3)
            models = httpx.get(url + "/v1/models", verify=False).json()["data"]
            assert [one["id"] for one in models] == ["small", "long"]
            assert {one["id"]: one["max_model_len"] for one in models}[name] == context
        process.terminate()
        assert process.wait(30) == 0


def read_until(process: subprocess.Popen[str], text: str) -> str:
    """The line of standard error that has this text."""
    assert process.stderr is not None
    while text not in (line := process.stderr.readline()):
        assert line, "it ended"
    return line


@pytest.mark.slow
def test_a_hangup_reads_keys_and_shares_again(tmp_path: Path) -> None:
    keys, admins, shares = tmp_path / "keys", tmp_path / "admins", tmp_path / "shares.toml"
    keys.write_text("old name=acme\n")
    admins.write_text("boss\n")
    shares.write_text("[tenants.acme]\nmax_requests = 9\n")
    files = ("--api-key-file", keys, "--admin-api-key-file", admins, "--shares", shares, "--api-key", "stays")
    with serving(*files, "--log-format", "json") as (process, url):

        def hangup(said: str) -> dict[str, str]:
            os.killpg(process.pid, signal.SIGHUP)  # the other processes of the server ignore it
            found: dict[str, str] = json.loads(read_until(process, said))
            return found

        def status(key: str, path: str = "/v1/models") -> int:
            return httpx.get(url + path, headers={"Authorization": f"Bearer {key}"}, verify=False).status_code

        keys.write_text("new name=acme\nmore\n")
        shares.write_text("[tenants.acme]\nmax_requests = 1\nweight = 3\n")
        assert (
            hangup("Reloaded")["message"]
            == "Reloaded. API keys: admin-1, key-1, acme, key-3. Tenants with settings: 1."
        )
        assert [status(key) for key in ("old", "new", "more", "boss", "stays")] == [401, 200, 200, 200, 200]
        body = {"prompt": "hi", "n": 2, "max_tokens": 1}
        refused = httpx.post(
            url + "/v1/completions", json=body, headers={"Authorization": "Bearer new"}, timeout=30, verify=False
        )
        assert refused.status_code == 429
        for path, content, said in (
            (keys, "new nam=acme\n", "nam=... behind it"),
            (keys, "", "holds no key"),
            (shares, "[tenants.nobody]\nweight = 2\n", "nobody"),
            (shares, "[classes.a]\nrank = 0\nshare = 1\n", "other classes of service"),
        ):
            before = path.read_text()
            path.write_text(content)
            line = hangup("Nothing is reloaded")
            assert (line["level"], said in line["message"]) == ("ERROR", True)
            path.write_text(before)
            assert [status(key) for key in ("old", "new")] == [401, 200]
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


@pytest.mark.slow
def test_a_terminal_that_closes_ends_the_server(tmp_path: Path) -> None:
    log = tmp_path / "log"
    line = command_line(["serve", "--port", 0, "--model", tiny_llama(), "--threads", 1])
    pid, terminal = pty.fork()
    if not pid:
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)
        os.execv(line[0], line)
    while b"Serving" not in (log.read_bytes() if log.exists() else b""):
        time.sleep(0.05)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.slow
def test_each_line_of_a_servers_log_has_its_time(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("w") as file:
        line = command_line(["serve", "--port", 0, "--model", tiny_llama(), "--threads", 1, "--policy", "fixed:64"])
        with subprocess.Popen(line, stderr=file) as process:
            while "Serving" not in log.read_text():
                time.sleep(0.05)
            process.terminate()
    lines = log.read_text().splitlines()
    assert len(lines) >= 3
    for line in lines:
        assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d (INFO|WARNING) evenflow: \S", line), line
    assert find_facts(lines).budget == 64
