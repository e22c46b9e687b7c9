"""`evenflow analyze` as a user runs it: on data, traces and texts, with and without a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.running import Finished, run_cli, run_process
from tests.gguf_files import write_gguf
from tests.models import byte_level_tokenizer, reference_model, tiny_llama
from tests.shared_data import shared_path

VLLM_VERSION = ["--vllm-version", "0.32"]  # so that no vLLM is started


def write_jsonl(path: Path, *lengths: int) -> Path:
    """Texts with these estimated numbers of tokens."""
    path.write_text("".join(json.dumps({"prompt": "abcd" * length}) + "\n" for length in lengths), encoding="utf-8")
    return path


def analyze(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[dict[str, Any], Finished]:
    finished = run_cli(capsys, "analyze", *arguments, *VLLM_VERSION, "--json", "-")
    assert finished.code == 0, finished.err
    return json.loads(finished.out), finished


@pytest.mark.parametrize(
    ("lengths", "decision", "word", "threshold", "band"),
    [
        ([47] * 20, "disabled", "Disabled", None, "skip"),
        ([47] * 10 + [8000] * 10, "selective", "Selective", 6400, "required"),
        ([24_000] * 20, "always", "Always", 19_200, "required"),
    ],
)
def test_decisions(
    lengths: list[int],
    decision: str,
    word: str,
    threshold: int | None,
    band: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    report, finished = analyze(capsys, write_jsonl(tmp_path / "data.jsonl", *lengths))
    assert (report["decision"], report["threshold"], report["band"]) == (decision, threshold, band)
    assert report["reason"] in finished.err
    assert f"Chunked prefill: {word}. Band, by longest input: {band}.\n" in finished.err
    assert "\nTriggers:\n" in finished.err
    assert ("but no minimum length for chunking." in finished.err) == (decision != "disabled")
    assert report["vllm"]["command"] in finished.err
    assert "estimated: characters / 4" in finished.err
    assert "Llama-3.1-8B, assumed" in finished.err


def test_the_report_holds_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short, long = write_jsonl(tmp_path / "short.jsonl", 10, 20, 30), write_jsonl(tmp_path / "long.jsonl", 3000, 9000)
    report, finished = analyze(capsys, short, long, "--concurrency", 100)
    assert {"decision", "threshold", "band", "reason", "datasets", "lengths", "memory", "vllm"} <= report.keys()
    assert [dataset["name"] for dataset in report["datasets"]] == ["short.jsonl", "long.jsonl"]
    assert report["datasets"][0]["characters"]["total"] == 240
    lengths = report["lengths"]
    assert (lengths["num_datasets"], lengths["num_sequences"], lengths["tokens"]["max"]) == (2, 5, 9000)
    assert lengths["mean_of_maxima"] == (30 + 9000) / 2
    assert lengths["mean_of_maxima_characters"] == (120 + 36_000) / 2
    characters = lengths["characters"]
    assert (characters["mean"], characters["p50"], characters["p95"], characters["max"]) == (9648, 120, 36_000, 36_000)
    rows = [line.split() for line in finished.err.partition("Input characters")[2].splitlines()]
    assert ["long.jsonl", "2", "24,000", "12,000", "36,000", "36,000", "48,000"] in rows
    assert ["all", "2", "5", "9,648", "120", "36,000", "36,000", "48,240"] in rows
    assert "datasets' longest inputs: 4,515 tokens, 18,060 characters" in " ".join(finished.err.split())
    assert lengths["num_datasets_over_8000_characters"] == 1
    assert lengths["share_over"]["2048"] == 0.4
    assert lengths["context_used_max"] == 9000 / 131_072
    assert sum(bucket["count"] for bucket in lengths["histogram"]) == 5
    assert {row["num_tokens"] for row in report["memory"]["modelled_bytes"]} >= {47, 2156, 30_000, 9000}
    assert report["memory"]["chunk"] == report["vllm"]["engine_args"]["long_prefill_token_threshold"] == 768
    assert "whole -> in chunks of 768 (" in finished.err
    assert "datasets with one over 8,000 characters: 1." in finished.err
    assert report["memory"]["is_default_shape"]
    assert [trigger["name"] for trigger in report["triggers"] if trigger["active"]] == [
        "input over the threshold",
        "long-context tasks",
        "parallel processing",
    ]
    assert report["vllm"]["engine_args"]["max_num_batched_tokens"] == 1152  # 1,024 + 100, in multiples of 64
    assert report["vllm"]["accepted"] is None


def test_traces_with_their_prefixes(capsys: pytest.CaptureFixture[str]) -> None:
    code = shared_path("traces/azure2023_code.csv")
    mooncake = shared_path("traces/mooncake_conversation_4000.jsonl")
    report, finished = analyze(capsys, code, mooncake)
    azure_report, mooncake_report = report["datasets"]
    assert (azure_report["num_sequences"], mooncake_report["num_sequences"]) == (8819, 4000)
    tokens = azure_report["tokens"]
    assert (tokens["p50"], tokens["p95"], tokens["max"]) == (1469, 7315, 7437)
    assert azure_report["output_tokens"]["p50"] == 13
    assert azure_report["arrivals"]["requests_per_s"] == pytest.approx(2.6, abs=0.05)
    assert azure_report["prefixes"] is None
    assert 0.2 < mooncake_report["prefixes"]["hit_rate"] < 0.5
    assert mooncake_report["prefixes"]["uncached"]["p50"] < mooncake_report["tokens"]["p50"]
    assert report["decision"] == "selective"
    assert "repeat a prefix" in finished.err
    assert report["lengths"]["num_datasets_over_8000_characters"] is None
    assert [dataset["has_over_8000_characters"] for dataset in report["datasets"]] == [None, None]
    assert "Mean of the 2 datasets' longest inputs" in finished.err
    assert "characters" not in finished.err


def test_a_folder_of_texts_counted_by_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.txt").write_text("hello world " * 20, encoding="utf-8")
    (texts / "b.md").write_text("hello", encoding="utf-8")
    (texts / "image.png").write_bytes(b"\xff\xd8")
    report, finished = analyze(capsys, texts, "--model", tiny_llama())
    [dataset] = report["datasets"]
    assert dataset["num_sequences"] == 2
    assert dataset["tokens_from"].startswith("counted by the tokenizer of")
    assert dataset["unusable"] == {"a file that is not UTF-8 text": 1}
    assert report["lengths"]["context_tokens"] == 256
    assert not report["memory"]["is_default_shape"]
    assert f"vllm serve {tiny_llama()}" in report["vllm"]["command"]
    assert "1 left out" in finished.err


def test_every_kind_of_tokenizer_counts_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(
        '{"prompt": "hello world, hello world"}\n'
        '{"messages": [{"role": "user", "content": "hello"}]}\n'
        '{"prompt": "half a character: \\ud800"}\n'
    )
    gguf = write_gguf(tmp_path / "model.gguf", reference_model("LlamaForCausalLM"), byte_level_tokenizer())
    counted = [
        analyze(capsys, data, *options)[0]["datasets"][0]["tokens"]["max"]
        for options in (
            ["--tokenizer", tiny_llama() / "tokenizer.json"],
            ["--tokenizer", tiny_llama()],
            ["--model", tiny_llama()],
            ["--tokenizer", gguf],
        )
    ]
    assert counted[0] == counted[1] == counted[2]
    assert abs(counted[3] - counted[0]) <= 1  # only one of them adds a token before the text


def test_a_name_in_the_hub_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    snapshot = tmp_path / "models--us--Tiny" / "snapshots" / "abc"
    snapshot.parent.mkdir(parents=True)
    snapshot.symlink_to(tiny_llama())
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    report, _ = analyze(capsys, "--preset", "evaluation", "--model", "us/Tiny")
    assert report["vllm"]["command"].startswith("vllm serve us/Tiny ")


def test_presets(capsys: pytest.CaptureFixture[str]) -> None:
    report, _ = analyze(capsys, "--preset", "code", "--preset", "evaluation")
    assert [dataset["tokens"]["max"] for dataset in report["datasets"]] == [4000, 47]
    assert report["decision"] == "selective"


def test_a_limit_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_jsonl(tmp_path / "data.jsonl", *range(1, 11))
    report, finished = analyze(capsys, data, "--limit", 4)
    assert report["datasets"][0]["num_sequences"] == 4
    assert report["datasets"][0]["first_inputs_only"]
    assert "only the first 4 inputs were read" in finished.err
    report, finished = analyze(capsys, data, "--limit", 10)
    assert not report["datasets"][0]["first_inputs_only"]


def test_a_custom_field(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "data.jsonl").write_text('{"body": {"article": "abcdefgh"}}\n')
    report, _ = analyze(capsys, tmp_path / "data.jsonl", "--field", "body.article")
    assert report["lengths"]["tokens"]["max"] == 2


def test_memory_pressure_in_a_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "server.log").write_text("torch.OutOfMemoryError: CUDA out of memory.\n")
    report, _ = analyze(capsys, "--preset", "evaluation", "--log", tmp_path / "server.log")
    active = [trigger for trigger in report["triggers"] if trigger["active"]]
    assert [(trigger["name"], trigger["reason"]) for trigger in active] == [
        ("memory pressure", "out of memory in line 1 of the log")
    ]


def test_a_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    analyze(capsys, "--preset", "code", "--plot", tmp_path / "lengths.png")
    assert (tmp_path / "lengths.png").read_bytes().startswith(b"\x89PNG")


def test_settings_are_checked_with_a_vllm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A stand-in for vLLM's interpreter; tests/vllm uses a real one."""
    python = tmp_path / "python"
    taken = '{"version": "0.31.2", "scheduler": {"max_num_batched_tokens": 2048}}'
    python.write_text(
        f"#!/bin/sh\ncase \"$2\" in *importlib*) echo 0.31.2;; *) echo 'evenflow-checked:{taken}';; esac\n"
    )
    python.chmod(0o755)
    finished = run_cli(capsys, "analyze", "--preset", "evaluation", "--vllm-python", python, "--json", "-")
    vllm = json.loads(finished.out)["vllm"]
    assert (vllm["version"], vllm["accepted"]) == ("0.31.2", True)
    assert vllm["scheduler"] == {"max_num_batched_tokens": 2048}
    assert "it accepts them" in finished.err


def test_nothing_heavy_is_loaded(tmp_path: Path) -> None:
    """Not even to count tokens."""
    data = write_jsonl(tmp_path / "data.jsonl", 10)
    probe = (
        "import atexit\n"
        "atexit.register(lambda: print([name for name in ('torch', 'vllm', 'transformers') if name in sys.modules]))\n"
    )
    finished = run_process("analyze", data, "--model", tiny_llama(), *VLLM_VERSION, before=probe)
    assert finished.code == 0
    assert finished.out.endswith("[]\n")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "--preset"),
        (["/no/such/data"], "'/no/such/data'"),
        (["unusable.jsonl"], "2 x no field such as prompt"),
        (["empty.jsonl"], "it is empty"),
        (["--preset", "poems"], "'poems'"),
        (["data.jsonl", "--model", "/no/such/model"], "/no/such/model"),
        (["data.jsonl", "--tokenizer", "data.jsonl"], "data.jsonl"),
        (["data.jsonl", "--model", "."], "config.json"),
        (["data.jsonl", "--limit", "0"], "--limit"),
        (["data.jsonl", "--vllm-version", "0.9"], "'0.9'"),
        (["data.jsonl", "--vllm-version", "9.9"], "'9.9'"),
        (["data.jsonl", "--vllm-version", "newest"], "'newest'"),
        (["data.jsonl", "--vllm-python", "/no/such/python"], "'/no/such/python'"),
        (["data.jsonl", "--vllm-python", "python", "--vllm-version", "0.32"], "not both"),
        (["data.jsonl", "--plot", "/no/such/folder/x.png"], "'/no/such/folder/x.png'"),
        (["data.jsonl", "--log", "/no/such.log"], "/no/such.log"),
        (["data.jsonl", "--log", "data.jsonl"], "no line in it"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str],
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "data.jsonl", 10)
    (tmp_path / "unusable.jsonl").write_text('{"a": 1}\n{"a": 2}\n')
    (tmp_path / "empty.jsonl").touch()
    finished = run_cli(capsys, "analyze", *arguments)
    assert (finished.code, finished.out) == (2, "")
    assert finished.err.startswith("evenflow: ")
    assert named in finished.err
    assert finished.err.count("\n") == 1


def test_the_commands_with_a_target_can_be_pasted(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, name in (([], "MODEL"), (["--model", tiny_llama()], tiny_llama())):
        report, finished = analyze(capsys, "--preset", "code", *arguments)
        for engine in ("vllm", "sglang"):
            command = f"evenflow serve --engine {engine} --model {name} --tbt-target 50ms"
            assert command in report[engine]["target"]
            assert command in finished.err
