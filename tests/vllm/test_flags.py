"""Which settings each vLLM takes: by the table, and by a real one where there is one to ask."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from evenflow.advisor.memory import LLAMA_3_1_8B
from evenflow.advisor.vllm_flags import (
    NEWEST,
    OLDEST,
    EngineArgs,
    accepted_by,
    command_flags,
    command_line,
    parse_version,
)
from evenflow.errors import InvalidInput
from evenflow.hosts import launch
from evenflow.vllm import checking
from evenflow.vllm.launch import VLLM, VllmLaunch

VERSIONS = [f"0.{minor}" for minor in range(OLDEST[1], NEWEST[1] + 1)]
ASKED = {
    "enable_chunked_prefill": True,
    "max_num_batched_tokens": 1088,
    "long_prefill_token_threshold": 768,
    "max_num_partial_prefills": 4,
    "max_long_partial_prefills": 2,
    "disable_chunked_mm_input": False,
}


@pytest.mark.parametrize("version", VERSIONS)
def test_partial_prefills_are_never_asked_for(version: str) -> None:
    """No version of the V1 engine took them, and 0.27 removed them."""
    args = accepted_by(ASKED, version)
    assert args.keys() == ASKED.keys() - {"max_num_partial_prefills", "max_long_partial_prefills"}
    assert args.notes.keys() == ASKED.keys() - args.keys()
    assert not any("partial" in flag for flag in command_flags(args))


def test_a_removed_setting_is_left_out_even_with_its_old_default() -> None:
    assert accepted_by({"max_num_partial_prefills": 1}, "0.26.0") == {"max_num_partial_prefills": 1}
    assert accepted_by({"max_num_partial_prefills": 1}, "0.27.0") == {}
    assert "removed in 0.27" in accepted_by({"max_num_partial_prefills": 1}, "0.27").notes["max_num_partial_prefills"]


def test_switching_chunking_off_where_it_has_no_effect() -> None:
    off = {"enable_chunked_prefill": False}
    assert accepted_by(off, "0.11.0") == {}
    assert "ignores False" in accepted_by(off, "0.11.0").notes["enable_chunked_prefill"]
    assert accepted_by(off, "0.11.1") == off
    assert accepted_by({"enable_chunked_prefill": True}, "0.10") == {"enable_chunked_prefill": True}


def test_what_came_later() -> None:
    adaptive = {"long_prefill_token_threshold_adaptive": True}
    assert accepted_by(adaptive, "0.30.0") == {}
    assert accepted_by(adaptive, "0.31.0") == adaptive
    assert accepted_by(adaptive, "0.40") == adaptive


@pytest.mark.parametrize(
    ("text", "version"),
    [("0.32", (0, 32, 0)), ("0.26.1+cpu", (0, 26, 1)), ("v0.10.0rc1", (0, 10, 0)), (" 1.2.3 ", (1, 2, 3))],
)
def test_versions(text: str, version: tuple[int, int, int]) -> None:
    assert parse_version(text) == version


@pytest.mark.parametrize("text", ["", "newest", "32", "0.9.2"])
def test_versions_that_are_none_or_too_old(text: str) -> None:
    with pytest.raises(InvalidInput, match=repr(text)):
        parse_version(text)


def test_an_unknown_setting_is_refused() -> None:
    with pytest.raises(InvalidInput, match="'max_tokens'"):
        accepted_by({"max_tokens": 3}, "0.32")


def test_the_command_line() -> None:
    line = command_line("my models/llama", {"enable_chunked_prefill": False, "max_num_batched_tokens": 2048})
    assert line == "vllm serve 'my models/llama' --no-enable-chunked-prefill --max-num-batched-tokens 2048"


def test_an_interpreter_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="cannot be run"):
        VLLM.version_in(str(tmp_path / "python"))


def test_an_interpreter_without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_FIND_VERSION", "")  # whether or not this environment has one
    with pytest.raises(InvalidInput, match="no vLLM"):
        VLLM.version_in(sys.executable)


def test_a_vllm_that_cannot_be_asked_refuses(tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho 0.32.0\necho 'ImportError: libcuda' >&2\n")
    broken.chmod(0o755)
    answer = checking.check(str(broken), tmp_path, EngineArgs({"max_num_seqs": 3}, {}))
    assert not answer.accepted
    assert answer.refusal == "it could not be asked: ImportError: libcuda"


def fake_python(folder: Path, *answers: str) -> str:
    """An interpreter whose vLLM gives these answers in turn."""
    lines = [f"[ $n = {n} ] && echo 'evenflow-checked:{answer}'" for n, answer in enumerate(answers, 1)]
    count = folder / "count"
    script = folder / "python"
    script.write_text("\n".join(["#!/bin/sh", f"echo x >> {count}", f"n=$(wc -l < {count})", *lines, "exit 0"]))
    script.chmod(0o755)
    return str(script)


def test_what_a_newer_vllm_does_not_have_is_left_out(tmp_path: Path) -> None:
    unknown = '{"version": "0.99.0", "unknown": ["max_num_seqs"]}'
    taken = '{"version": "0.99.0", "scheduler": {"max_num_batched_tokens": 512}}'
    asked = EngineArgs({"max_num_seqs": 3, "max_num_batched_tokens": 512}, {})
    answer = checking.check(fake_python(tmp_path, unknown, taken), tmp_path, asked)
    assert answer.accepted
    assert answer.args == {"max_num_batched_tokens": 512}
    assert answer.args.notes == {"max_num_seqs": "left out: vLLM 0.99.0 does not have it"}
    assert answer.scheduler == {"max_num_batched_tokens": 512}


@pytest.fixture
def vllm_python() -> str:
    if python := os.environ.get("EVENFLOW_VLLM_PYTHON"):
        return python
    pytest.skip("EVENFLOW_VLLM_PYTHON names no Python that has vLLM")


@pytest.mark.slow
def test_a_real_vllm_takes_what_the_table_says(vllm_python: str, tmp_path: Path) -> None:
    checking.write_model_config(tmp_path, LLAMA_3_1_8B)
    version = VLLM.version_in(vllm_python)
    args = accepted_by(ASKED, version)
    answer = checking.check(vllm_python, tmp_path, args)
    assert answer.refusal is None
    assert answer.version.split("+")[0] == version.split("+")[0]
    assert answer.args == args
    assert answer.scheduler is not None
    assert answer.scheduler["max_num_batched_tokens"] == 1088
    assert answer.scheduler["long_prefill_token_threshold"] == 768


@pytest.mark.slow
def test_a_real_vllm_says_why_it_refuses(vllm_python: str, tmp_path: Path) -> None:
    checking.write_model_config(tmp_path, LLAMA_3_1_8B)
    too_long = EngineArgs({"long_prefill_token_threshold": 200_000}, {})
    answer = checking.check(vllm_python, tmp_path, too_long)
    assert answer.refusal is not None
    assert "long_prefill_token_threshold" in answer.refusal


def test_a_target_refuses_tokens_that_are_delivered_several_at_a_time() -> None:
    with pytest.raises(InvalidInput, match=r"Got '--stream-interval=8' after the -- but no gap keeps a target"):
        VllmLaunch.target_flags(sys.executable, ["--stream-interval=8"])
