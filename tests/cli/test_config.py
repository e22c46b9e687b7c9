"""Settings of the server from the command line, the environment, a file and the defaults, in this order."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from tests.cli.running import Finished, run_cli


def settings(finished: Finished) -> dict[str, object]:
    assert finished.code == 0, finished.err
    return tomllib.loads(finished.out)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "evenflow.toml"
    path.write_text('max-num-seqs = 8\nport = 8001\nhost = "0.0.0.0"\ntbt_target = "50ms"\n')
    return path


def test_the_command_line_precedes_the_environment_the_file_and_the_default(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVENFLOW_PORT", "8002")
    monkeypatch.setenv("EVENFLOW_HOST", "127.0.0.2")
    finished = run_cli(capsys, "config", "--config", file, "--host", "127.0.0.3")
    expected = {"host": "127.0.0.3", "port": 8002, "max-num-seqs": 8, "tbt-target": "50ms"}
    assert settings(finished) == expected
    lines = finished.out.splitlines()
    assert 'host = "127.0.0.3"  # command line' in lines
    assert "port = 8002  # EVENFLOW_PORT" in lines
    assert f"max-num-seqs = 8  # {file}" in lines
    assert "# max-waiting: 1024" in lines  # a default


def test_the_file_may_be_named_in_the_environment(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVENFLOW_CONFIG", str(file))
    assert settings(run_cli(capsys, "config"))["max-num-seqs"] == 8


def test_what_is_printed_can_be_read_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {
        "--drain-time": "1500ms",
        "--kv-cache-memory": "1GiB",
        "--gpu-memory-utilization": "0.5",
        "--served-model-name": 'a "quoted" näme',
        "--policy": "target:50ms,paced",
        "--enable-prefix-caching": "false",
        "--request-log": tmp_path / "log",
    }
    pairs = [part for pair in options.items() for part in pair]
    printed = run_cli(capsys, "config", "--allow-special-tokens", "--no-warm-up", "--engine", "vllm", *pairs).out
    file = tmp_path / "printed.toml"
    file.write_text(printed, encoding="utf-8")
    again = run_cli(capsys, "config", "--config", file).out
    assert tomllib.loads(again) == tomllib.loads(printed)
    assert len(tomllib.loads(printed)) == len(options) + 3


def test_lists_flags_and_arguments_come_from_each_source(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file.toml"
    file.write_text(
        'served-model-name = ["a", "b"]\nallow-host = "one"\naccess-log = true\n'
        'engine = "vllm"\nengine-flags = ["--seed", "1"]\nwarm-up = false\n'
    )
    monkeypatch.setenv("EVENFLOW_ALLOW_ORIGIN", "https://a.org https://b.org")
    monkeypatch.setenv("EVENFLOW_ALLOW_SPECIAL_TOKENS", "1")
    assert settings(run_cli(capsys, "config", "--config", file)) == {
        "served-model-name": ["a", "b"],
        "allow-host": ["one"],
        "allow-origin": ["https://a.org", "https://b.org"],
        "access-log": True,
        "allow-special-tokens": True,
        "engine": "vllm",
        "engine-flags": ["--seed", "1"],
        "warm-up": False,
    }


def test_keys_are_not_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVENFLOW_ADMIN_API_KEY", "secret-1")
    file = tmp_path / "file.toml"
    file.write_text('metrics-api-key = ["secret-2"]\n')
    finished = run_cli(capsys, "config", "--config", file, "--api-key", "secret-3", "--api-key", "secret-4")
    assert "# api-key: 2 given (command line)" in finished.out
    assert "secret" not in finished.out.replace("not printed", "")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("max-num-seq = 8", "did you mean 'max-num-seqs'?"),
        ("[server]\nport = 1", "setting 'server'"),
        ("port = [1, 2]", "port with list"),
        ("port = 1\nport = 2", "not TOML"),
        ("max-num-seqs = 8\nmax_num_seqs = 9", "twice"),
        ("port = 2020-01-01", "port with date"),
        ('config = "other.toml"', "setting 'config'"),
        ("help = true", "setting 'help'"),
        ('port = "x"', "'--port'"),
        ("port = 99999", "--port 99999"),
        ("max-num-seqs = 0", "max_num_seqs=0"),
        ("max-body-size = 8", "max_body_size=8"),
        ('"\\u001b[31m" = 1', r"\x1b[31m"),
        ('policy = "fastest"', "fastest"),
        ("shares = '/no/such/file'", "/no/such/file"),
        ("x = " + "[" * 10_000, "too large"),
        ("port = " + "9" * 10_000, "too large"),
    ],
)
@pytest.mark.parametrize("command", ["config", "serve"])
def test_a_wrong_file_gives_one_line(
    command: str, content: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file.toml"
    file.write_text(content)
    finished = run_cli(capsys, command, "--config", file)
    assert (finished.code, finished.out) == (2, "")
    assert said in finished.err
    assert finished.err.count("\n") == 1
    assert "\x1b" not in finished.err


def test_a_wrong_value_is_said_with_its_source(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Kubernetes sets it for a service named evenflow."""
    monkeypatch.setenv("EVENFLOW_PORT", "tcp://10.0.0.1:80")
    finished = run_cli(capsys, "config")
    assert finished.code == 2
    assert finished.err.endswith("(from EVENFLOW_PORT).\n")
    file.write_text("threads = 'x'")
    monkeypatch.delenv("EVENFLOW_PORT")
    assert run_cli(capsys, "config", "--config", file).err.endswith(f"(from {file}).\n")
    assert "(from" not in run_cli(capsys, "config", "--port", "x").err
    missing = run_cli(capsys, "serve", "--config", file.parent / "none.toml")
    assert (missing.code, "cannot be read" in missing.err) == (2, True)


def test_other_commands_do_not_read_the_servers_variables(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVENFLOW_MAX_NUM_SEQS", "0")
    assert run_cli(capsys, "generate", "--help").code == 0
    assert "max_num_seqs=0" in run_cli(capsys, "config").err
    assert "max_num_seqs" not in run_cli(capsys, "generate", "--model", "/no/such/model", "a").err
