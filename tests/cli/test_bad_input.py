"""Every kind of bad input: exit code 2, one line that names it, nothing on standard output, no file written."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.running import run_cli, run_process
from tests.gguf_files import write_gguf
from tests.models import byte_level_tokenizer, reference_model, tiny_llama

BAD_GENERATE = {
    "no prompt": ([], "--prompt-file"),
    "two prompts": (["Hi", "--prompt-file", "-"], "not both"),
    "empty prompt": ([""], "empty prompt"),
    "empty chat prompt": (["", "--chat"], "empty prompt"),
    "prompt over the context": (["word " * 400], "context length is 256 tokens"),
    "prompt over max_model_len": (["word " * 40, "--max-model-len", 30], "context length is 30 tokens"),
    "max_tokens over the context": (["Hi", "--max-tokens", 300], "lower max_tokens to"),
    "missing prompt file": (["--prompt-file", "/no/such/prompt"], "'/no/such/prompt'"),
    "negative temperature": (["Hi", "--temperature", -1], "temperature=-1.0"),
    "no temperature": (["Hi", "--temperature", "nan"], "temperature=nan"),
    "max_tokens 0": (["Hi", "--max-tokens", 0], "max_tokens=0"),
    "negative max_tokens": (["Hi", "--max-tokens", -5], "max_tokens=-5"),
    "top_p over 1": (["Hi", "--top-p", 1.5], "top_p=1.5"),
    "empty stop": (["Hi", "--stop", ""], "stop="),
    "unknown policy": (["Hi", "--policy", "fastest"], "policy='fastest'"),
    "policy without a budget": (["Hi", "--policy", "fixed:0"], "policy='fixed:0'"),
    "budget 0": (["Hi", "--max-num-batched-tokens", 0], "max_num_batched_tokens=0"),
    "negative budget": (["Hi", "--max-num-batched-tokens", -1], "max_num_batched_tokens=-1"),
    "two budgets": (["Hi", "--policy", "fixed:64", "--max-num-batched-tokens", 128], "two different budgets"),
    "budget under an uncut prompt": (
        ["Hi", "--enable-chunked-prefill", "false", "--max-num-batched-tokens", 64],
        "max_num_batched_tokens=64",
    ),
    "neither true nor false": (["Hi", "--enable-chunked-prefill", "maybe"], "'maybe'"),
    "no size": (["Hi", "--kv-cache-memory", "4 apples"], "'4 apples'"),
    "too little memory": (["Hi", "--kv-cache-memory", "1KiB"], "1024 bytes"),
    "no cache folder": (["Hi", "--cache-dir", "/dev/null"], "cache_dir='/dev/null'"),
    "too little memory for one block": (["Hi", "--kv-offload-memory", "1KiB"], "kv_offload_memory=1024"),
    "unknown weights": (["Hi", "--weights", "int3"], "'int3'"),
    "unknown device": (["Hi", "--device", "tpu"], "'tpu'"),
    "unknown load format": (["Hi", "--load-format", "pickle"], "'pickle'"),
    "max_model_len over the model's": (["Hi", "--max-model-len", 1000], "max_model_len=1000"),
    "json in no folder": (["Hi", "--json", "/no/such/folder/x.json"], "'/no/such/folder/x.json'"),
    "record in no folder": (["Hi", "--record", "/no/such/folder/x.jsonl"], "'/no/such/folder/x.jsonl'"),
}


@pytest.mark.parametrize(("arguments", "named"), BAD_GENERATE.values(), ids=BAD_GENERATE)
def test_generate(arguments: list[object], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "figures.json"
    json_options = [] if "--json" in arguments else ["--json", report]
    finished = run_cli(capsys, "generate", "--model", tiny_llama(), *json_options, *arguments)
    assert (finished.code, finished.out) == (2, "")
    assert finished.err.startswith("evenflow: ")
    assert named in finished.err
    assert finished.err.count("\n") == 1
    assert not report.exists()


@pytest.mark.parametrize("command", [["generate", "Hi"], ["demo"], ["bench", "mixed"]], ids=" ".join)
def test_a_model_that_is_not_there(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    finished = run_cli(capsys, *command, "--model", "/no/such/model")
    assert (finished.code, finished.out) == (2, "")
    assert "/no/such/model" in finished.err
    assert finished.err.count("\n") == 1


def test_a_truncated_gguf_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_gguf(tmp_path / "model.gguf", reference_model("LlamaForCausalLM"), byte_level_tokenizer())
    whole = path.read_bytes()
    for size in (0, 3, 20, len(whole) // 4, len(whole) - 1):
        path.write_bytes(whole[:size])
        finished = run_cli(capsys, "generate", "Hi", "--model", path)
        assert (finished.code, finished.out) == (2, "")
        assert str(path) in finished.err
        assert finished.err.count("\n") == 1


def test_a_prompt_file_that_is_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "image").write_bytes(b"\x89PNG\xff\x00")
    finished = run_cli(capsys, "generate", "--model", tiny_llama(), "--prompt-file", tmp_path / "image")
    assert (finished.code, finished.out, finished.err.count("\n")) == (2, "", 1)
    assert "UTF-8" in finished.err


@pytest.mark.slow
def test_the_engine_adds_no_lines_of_its_own() -> None:
    """The engine is already loaded when the prompt turns out to be too long."""
    finished = run_process("generate", "word " * 400, "--model", tiny_llama())
    assert (finished.code, finished.out, finished.err.count("\n")) == (2, "", 1)
    assert "context length is 256" in finished.err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["demo", "--policy", "unchunked"], "compares"),
        (["demo", "--enable-chunked-prefill", "false"], "compares"),
        (["demo", "--policy", "fixed:none"], "'fixed:none'"),
        (["demo", "async"], "context length is 256 tokens"),
        (["bench", "mixed", "--policies", "unchunked"], "'unchunked'"),
        (["bench", "mixed", "--policies", "unchunked,unchunked"], "'unchunked,unchunked'"),
        (["bench", "mixed", "--policies", "unchunked,fastest"], "'fastest'"),
        (["bench", "mixed"], "context length is 256 tokens"),
    ],
)
def test_demo_and_bench(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    finished = run_cli(capsys, *arguments, "--model", tiny_llama())
    assert (finished.code, finished.out) == (2, "")
    assert named in finished.err
    assert finished.err.count("\n") == 1
