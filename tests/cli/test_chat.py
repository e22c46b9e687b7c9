"""`evenflow chat` on a tiny model: turns, commands, a server, errors, an interrupt."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from evenflow import LLM, SamplingParams
from tests.cli.running import (
    Finished,
    command_line,
    long_context_llama,
    restore_interrupts,
    run_cli,
    serving,
)
from tests.models import tiny_llama

SYSTEM = {"role": "system", "content": "Be brief."}
SAMPLED = ["--max-tokens", 5, "--temperature", 0.9, "--seed", 3, "--system", SYSTEM["content"]]


class Typing:
    """Runs the command with these lines as its input."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def __call__(self, lines: list[str], *arguments: object) -> Finished:
        self._monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        return run_cli(self._capsys, "chat", *arguments)


@pytest.fixture
def chat(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Typing:
    return Typing(monkeypatch, capsys)


def expected_answers(*questions: str) -> list[str]:
    """The answers of one conversation."""
    messages, answers = [SYSTEM], []
    with LLM(tiny_llama(), policy="unchunked") as llm:
        for question in questions:
            messages.append({"role": "user", "content": question})
            [output] = llm.chat(messages, SamplingParams(temperature=0.9, seed=3, max_tokens=5))
            answers.append(output.text)
            messages.append({"role": "assistant", "content": output.text})
    return answers


def test_a_conversation_goes_on_until_it_is_reset(chat: Typing) -> None:
    lines = ["Hi", "", "And then?", "/reset", "And then?", "/exit", "not read"]
    finished = chat(lines, "--model", tiny_llama(), "--policy", "unchunked", *SAMPLED)
    first, second, again = *expected_answers("Hi", "And then?"), *expected_answers("And then?")
    assert (finished.code, finished.out) == (0, f"{first}\n{second}\n{again}\n")
    assert second != again
    assert finished.err == "A new conversation.\n"


@pytest.mark.slow
def test_a_server_answers_the_same(chat: Typing) -> None:
    with serving("--policy", "unchunked") as (_, url):
        finished = chat(["Hi", "And then?"], "--url", f"{url}/v1/", *SAMPLED)
        assert (finished.code, finished.err) == (0, "")
        assert finished.out == "".join(f"{answer}\n" for answer in expected_answers("Hi", "And then?"))
        refused = chat(["Hi " * 500, "/exit"], "--url", url)
        assert (refused.code, refused.out) == (0, "")
        assert "status 400" in refused.err
        assert "Your message was dropped" in refused.err
        unknown = chat([], "--url", url, "--model", "nonsense")
        assert (unknown.code, unknown.out) == (1, "")
        assert "no model 'nonsense'" in unknown.err


def test_a_server_says_itself_what_is_wrong_with_a_key(chat: Typing, monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"error": {"message": "The API key is wrong."}}).encode()
            self.send_response(401)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None: ...

    monkeypatch.setenv("EVENFLOW_API_KEY", "sk-other")
    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        refused = chat(["Hi"], "--url", f"http://127.0.0.1:{server.server_port}")
        server.shutdown()
    assert (refused.code, refused.out) == (1, "")
    assert "status 401: The API key is wrong. A key goes into $EVENFLOW_API_KEY." in refused.err


def test_a_message_over_the_context_is_dropped_and_the_chat_goes_on(chat: Typing) -> None:
    finished = chat(["Hi " * 500, "/nonsense", "Hi"], "--model", tiny_llama(), "--policy", "unchunked", *SAMPLED)
    assert finished.code == 0
    assert finished.out == f"{expected_answers('Hi')[0]}\n"
    too_long, no_command = finished.err.splitlines()
    assert "Your message was dropped; /reset begins a new conversation." in too_long
    assert no_command.startswith("There is no /nonsense. /reset ")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--temperature", -1], "temperature=-1"),
        (["--max-tokens", 0], "max_tokens=0"),
        (["--url", "http://127.0.0.1:1", "--policy", "load"], "--policy with --url"),
        (["--url", "nonsense"], "--url 'nonsense' but expected an address"),
        (["--model", "/no/such/model"], "/no/such/model"),
    ],
)
def test_bad_input_is_one_line(arguments: list[object], named: str, chat: Typing) -> None:
    finished = chat(["Hi"], *arguments)
    assert (finished.code, finished.out) == (2, "")
    assert named in finished.err
    assert finished.err.count("\n") == 1


@pytest.mark.slow
def test_an_interrupt_stops_the_answer_and_not_the_chat() -> None:
    line = command_line(["chat", "--model", long_context_llama(), "--policy", "unchunked", "--threads", 1])
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(line, **pipes, preexec_fn=restore_interrupts) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"Hi\n")
        process.stdin.flush()
        process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(b"/exit\n")
    assert (process.returncode, errors) == (0, b"")
    assert rest.endswith(b" [stopped]\n")
