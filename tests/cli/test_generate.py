"""`evenflow generate` on a tiny model: the text, the figures, the files it reads and writes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from evenflow import LLM, SamplingParams
from evenflow.cli.generate import _summary
from evenflow.core import tier
from evenflow.core.plan import ChunkReason
from evenflow.core.report import ChunkReport
from evenflow.engine.outputs import RequestOutput
from evenflow.executors.kv_tier import KvTier
from evenflow.executors.recorded import replay
from tests.cli.running import run_cli, run_process
from tests.models import tiny_llama

PROMPT = "In 1234567 years they'll say we've done it, the then there these. " * 3
FIELDS = {
    "model",
    "device",
    "weights",
    "policy",
    "prompt_tokens",
    "cached_tokens",
    "token_ids",
    "text",
    "finish_reason",
    "ttft_s",
    "total_s",
    "prefill_tokens_per_s",
    "decode_tokens_per_s",
    "chunks",
}


def generate(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    finished = run_cli(capsys, "generate", "--model", tiny_llama(), "--max-tokens", 8, "--json", "-", *arguments)
    assert finished.code == 0, finished.err
    figures: dict[str, Any] = json.loads(finished.out)
    assert figures["text"] in finished.err
    return figures


@pytest.mark.parametrize(
    "policy", ["unchunked", "alternate:7", "fixed:1", "fixed:16", "fixed:50", "load", "adaptive:20ms", "prompt-length"]
)
def test_the_chunks_cover_the_prompt_and_the_tokens_do_not_depend_on_them(
    policy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = generate(capsys, PROMPT, "--policy", policy)
    with LLM(tiny_llama()) as llm:
        [expected] = llm.generate([PROMPT], SamplingParams(temperature=0.0, max_tokens=8))
    assert set(figures) == FIELDS
    assert figures["policy"] == policy
    assert figures["prompt_tokens"] == len(expected.prompt_token_ids)
    assert figures["token_ids"] == expected.token_ids
    assert figures["text"] == expected.text
    assert figures["finish_reason"] == expected.finish_reason
    assert 0 < figures["ttft_s"] <= figures["total_s"]
    assert figures["prefill_tokens_per_s"] * figures["ttft_s"] == pytest.approx(len(expected.prompt_token_ids))
    decode_s = figures["total_s"] - figures["ttft_s"]
    assert figures["decode_tokens_per_s"] * decode_s == pytest.approx(len(expected.token_ids) - 1)
    end = figures["cached_tokens"]
    for chunk in figures["chunks"]:
        assert chunk["start"] == end
        assert chunk["reason"]
        end += chunk["length"]
    assert end == figures["prompt_tokens"]


@pytest.mark.parametrize(
    ("arguments", "policy", "longest_chunk"),
    [
        (["--policy", "prompt-length"], "prompt-length", 113),
        (["--max-num-batched-tokens", 48], "fixed:48", 48),
        (["--enable-chunked-prefill", "false"], "unchunked", 113),
        (["--enable-chunked-prefill", "true", "--policy", "fixed:30"], "fixed:30", 30),
        (["--long-prefill-token-threshold", 20, "--policy", "fixed:99"], "fixed:99", 20),
    ],
)
def test_engine_settings_reach_the_engine(
    arguments: list[object], policy: str, longest_chunk: int, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = generate(capsys, "x" * 112, *arguments)
    assert figures["prompt_tokens"] == 113  # with the begin-of-text token
    assert figures["policy"] == policy
    assert max(chunk["length"] for chunk in figures["chunks"]) == longest_chunk


def test_without_settings_a_target_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    figures = generate(capsys, "x" * 112)
    assert figures["policy"].startswith("target:")


def test_text_alone_is_on_standard_output_and_a_line_of_figures_on_standard_error(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    finished = run_process("generate", PROMPT, "--model", tiny_llama(), "--max-tokens", 8, "--json", path)
    assert finished.code == 0
    text = path.read_text()
    assert finished.out == json.loads(text)["text"] + "\n"
    [ids] = [line for line in text.splitlines() if '"token_ids"' in line]
    assert re.fullmatch(r'  "token_ids": \[\d+(, \d+)*\],', ids)
    assert finished.err.count("\n") == 1
    assert "TTFT" in finished.err
    assert "1 chunk (target:" in finished.err


@pytest.mark.slow
def test_a_file_is_one_prompt_unchanged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = " leading space,\r\nthree\nlines\n"
    file = tmp_path / "prompt.txt"
    file.write_bytes(text.encode())
    from_file = generate(capsys, "--prompt-file", file)
    as_argument = generate(capsys, text)
    assert from_file["token_ids"] == as_argument["token_ids"]
    assert from_file["prompt_tokens"] == as_argument["prompt_tokens"]
    finished = run_process(
        "generate", "--prompt-file", "-", "--model", tiny_llama(), "--max-tokens", 8, stdin=text.encode()
    )
    assert (finished.code, finished.out) == (0, from_file["text"] + "\n")


@pytest.mark.slow
def test_a_dash_reads_the_prompt_from_standard_input() -> None:
    command = ["generate", "-", "--model", tiny_llama(), "--max-tokens", 8]
    finished = run_process(*command, stdin=PROMPT.encode())
    assert (finished.code, finished.out) == (0, run_process("generate", PROMPT, *command[2:]).out)
    empty = run_process(*command)
    assert (empty.code, empty.out) == (2, "")
    assert empty.err == "evenflow: Got an empty prompt but expected at least one character.\n"


def test_one_token_is_one() -> None:
    chunk = ChunkReport("a", 0, 1, ChunkReason.END_OF_PROMPT, 0.25, gave_token=True)
    output = RequestOutput("a", [5], token_ids=[6], finish_reason="length", chunks=[chunk], token_times_s=[0.25])
    line = _summary(output, "fixed:16")
    assert line.startswith("1 prompt token in 1 chunk (fixed:16), TTFT 0.25 s, prefill 4 tokens/s; 1 token in 0.25 s;")


def test_chat_applies_the_template(capsys: pytest.CaptureFixture[str]) -> None:
    figures = generate(capsys, "Hello", "--chat")
    with LLM(tiny_llama()) as llm:
        message = {"role": "user", "content": "Hello"}
        [expected] = llm.chat([[message]], SamplingParams(temperature=0.0, max_tokens=8))
    assert figures["prompt_tokens"] == len(expected.prompt_token_ids)
    assert figures["token_ids"] == expected.token_ids


def test_sampling_options_reach_the_sampler(capsys: pytest.CaptureFixture[str]) -> None:
    greedy = generate(capsys, PROMPT)
    sampled = [generate(capsys, PROMPT, "--temperature", 2, "--seed", seed) for seed in (1, 1, 2)]
    assert sampled[0]["token_ids"] == sampled[1]["token_ids"] != sampled[2]["token_ids"]
    for narrow in (["--top-k", 1], ["--top-p", 1e-6], ["--min-p", 1]):
        narrowed = generate(capsys, PROMPT, "--temperature", 2, "--seed", 1, *narrow)
        assert narrowed["token_ids"] == greedy["token_ids"]


def test_stop_strings_end_the_text_before_them(capsys: pytest.CaptureFixture[str]) -> None:
    text = generate(capsys, PROMPT)["text"]
    stop = text[len(text) // 2 :]
    figures = generate(capsys, PROMPT, "--stop", "never to be seen", "--stop", stop)
    assert figures["text"] == text[: text.find(stop)]
    assert figures["finish_reason"] == "stop"


def test_a_recording_can_be_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "steps.jsonl"
    figures = generate(capsys, PROMPT, "--policy", "fixed:16", "--record", path)
    chunks = [(chunk.start, chunk.length) for plan in replay(path) for chunk in plan.chunks]
    assert chunks == [(chunk["start"], chunk["length"]) for chunk in figures["chunks"]]
    steps = [line for line in map(json.loads, path.read_text().splitlines()) if line.get("event") == "step"]
    assert all(step["seconds"] > 0 for step in steps)
    assert len(steps) == len(chunks) + len(figures["token_ids"]) - 1


def test_rates_are_printed_apart(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", PROMPT, "--model", tiny_llama(), "--policy", "unchunked", "--ignore-eos"]
    line = run_cli(capsys, *arguments, "--max-tokens", 8).err
    assert re.search(r"\d+ prompt tokens .* prefill \d+ tokens/s; 8 tokens in .* s, decode [\d.]+ tokens/s;", line)
    line = run_cli(capsys, *arguments, "--max-tokens", 1).err
    assert re.search(r"; 1 token in [\d.]+ s; finish reason: length", line)


def test_a_second_run_with_the_same_cache_folder_computes_less(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KvTier, "measure", lambda self: (0.0, 0.0))  # else computing may be quicker for a tiny model
    monkeypatch.setattr(tier, "_KEPT", 1.0)
    first, second = (generate(capsys, PROMPT, "--cache-dir", tmp_path / "cache") for _ in range(2))
    assert first["cached_tokens"] == 0
    assert second["cached_tokens"] > 0
    assert first["token_ids"] == second["token_ids"]


@pytest.mark.parametrize("name", ["--kv-cache-memory", "--kv-offload-memory"])
def test_memory_that_the_machine_does_not_have_is_one_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    finished = run_cli(capsys, "generate", "--model", tiny_llama(), "Hi", name, "900TB")
    assert (finished.code, finished.out, finished.err.count("\n")) == (2, "", 1)
    setting = name.strip("-").replace("-", "_")
    assert re.search(
        rf"Got {setting}=9\d*, which is [\d,.]+ GiB, but this machine has [\d,.]+ GiB: lower it", finished.err
    )


def test_an_allocation_that_fails_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.\nframe #0")

    monkeypatch.setattr("evenflow.model.cpu.kv_cache.torch.empty", fail)
    finished = run_cli(capsys, "generate", "--model", tiny_llama(), "Hi")
    assert (finished.code, finished.err.count("\n")) == (1, 1)
    assert "do not fit in memory: lower kv_cache_memory" in finished.err
