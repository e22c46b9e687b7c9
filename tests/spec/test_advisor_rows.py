"""Analysis, decisions and vLLM's settings, called as users of an evaluation system call them: by position and by name,
with plain figures, with files and with analyses. A test stands for each row of the table of the advisor.
"""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from evenflow.advisor import (
    PRESET_TOKENS,
    Chunking,
    VLLMChunkedPrefillConfig,
    VLLMChunkedPrefillOptimizer,
    analyze,
    preset_dataset,
    should_enable_chunked_prefill,
)
from evenflow.advisor.analysis import THRESHOLDS
from evenflow.advisor.decision import band_of
from evenflow.advisor.recommendation import decide_for, find_triggers
from tests.cli.running import run_cli

OPTIMIZER = VLLMChunkedPrefillOptimizer()

# ---- 3.1 analysis


@pytest.fixture
def datasets(tmp_path: Path) -> dict[str, Path]:
    """Texts of these numbers of characters."""
    lengths = {"short": [40, 80, 120], "long": [4000, 36_000]}
    for name, characters in lengths.items():
        lines = [json.dumps({"prompt": "x" * number}) for number in characters]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    return {name: tmp_path / f"{name}.jsonl" for name in lengths}


def test_analysis_in_one_call(datasets: dict[str, Path]) -> None:
    found = analyze(datasets)
    assert (len(found.datasets), found.tokens.count) == (2, 5)
    assert found.characters is not None
    for figures, unit in ((found.tokens, 4), (found.characters, 1)):
        assert figures.total == 40_240 / unit
        assert (figures.mean, figures.p50, figures.p95, figures.max) == (8048 / unit, 120 / unit, *[36_000 / unit] * 2)
    assert found.mean_of_maxima == (30 + 9000) / 2
    assert found.mean_of_maxima_characters == (120 + 36_000) / 2
    assert found.num_with_long_characters == 1
    assert [found.lengths.share_over(threshold) for threshold in THRESHOLDS] == [0.2, 0.2, 0.2, 0.2, 0, 0]
    short, long = found.datasets
    assert short.characters is not None
    assert (short.tokens.max, short.characters.max, short.tokens.count) == (30, 120, 3)
    assert (long.tokens.mean, long.tokens.p50) == (5000, 1000)
    assert all(dataset.tokens_from.startswith("estimated: characters / 4") for dataset in found.datasets)


def test_analysis_by_the_command(datasets: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    finished = run_cli(capsys, "analyze", *datasets.values(), "--vllm-version", "0.32", "--json", "-")
    report = json.loads(finished.out)
    lengths = report["lengths"]
    assert (lengths["num_datasets"], lengths["num_sequences"]) == (2, 5)
    assert (lengths["tokens"]["mean"], lengths["characters"]["mean"]) == (2012, 8048)
    assert (lengths["mean_of_maxima"], lengths["mean_of_maxima_characters"]) == (4515, 18_060)
    assert lengths["num_datasets_over_8000_characters"] == 1
    assert lengths["share_over"]["2048"] == 0.2
    assert lengths["context_used_max"] == 9000 / lengths["context_tokens"]
    assert [dataset["characters"]["p95"] for dataset in report["datasets"]] == [120, 36_000]
    for title in ("Input tokens", "Input characters"):
        assert title in finished.err


def test_analysis_with_a_tokenizer() -> None:
    class Words:
        def encode(self, text: str) -> list[str]:
            return text.split()

    found = analyze(["one two three", "four"], Words())
    assert (found.tokens.max, found.tokens.total) == (3, 4)
    assert found.datasets[0].tokens_from.startswith("counted")


# ---- 3.2 decisions


def test_should_enable_chunked_prefill() -> None:
    assert [should_enable_chunked_prefill(length) for length in (47, 2048, 2049, 8000)] == [False, False, True, True]
    assert should_enable_chunked_prefill(600, 512)
    assert should_enable_chunked_prefill(input_length=600, threshold=512)
    assert not should_enable_chunked_prefill(input_length=600)


@pytest.mark.parametrize(
    ("longest", "p95", "threshold"),
    [(999, 900, None), (1000, 900, 2048), (9000, 2047, 2048), (9000, 2500, 2000), (24_000, 20_000, 16_000)],
)
def test_the_automatic_threshold(longest: int, p95: int, threshold: int | None) -> None:
    stats = {"max_sequence_length": longest, "percentile_95": p95}
    assert OPTIMIZER.analyze_dataset_for_optimal_threshold(stats).threshold == threshold


@pytest.mark.parametrize(
    ("inputs", "stats", "decision"),
    [
        ([47] * 20, {"max_sequence_length": 47, "percentile_95": 47}, "disabled"),
        ([47] * 10 + [8000] * 10, {"max_sequence_length": 8000, "percentile_95": 8000}, "selective"),
        ([4000] * 19 + [8000], {"max_sequence_length": 8000, "percentile_95": 4000, "min_sequence_length": 40},
         "selective"),
        ([24_000] * 20, {"max_sequence_length": 24_000, "percentile_95": 24_000}, "always"),
    ],
)  # fmt: skip
def test_the_examples_by_inputs_and_by_two_figures(inputs: list[int], stats: dict[str, float], decision: str) -> None:
    if "min_sequence_length" not in stats:
        analysis = analyze([[1] * length for length in inputs])
        found = OPTIMIZER.analyze_dataset_for_optimal_threshold(analysis)
        assert found.decision == decision
        assert OPTIMIZER.analyze_dataset_for_optimal_threshold(analysis.datasets[0]) == found
    found = OPTIMIZER.analyze_dataset_for_optimal_threshold(dataset_stats=stats)
    assert found.decision == decision
    assert found.reason


def test_an_assumption_is_called_one() -> None:
    stats = {"max_sequence_length": 24_000, "percentile_95": 24_000}
    assert "assumed" in OPTIMIZER.analyze_dataset_for_optimal_threshold(stats).reason
    known = OPTIMIZER.analyze_dataset_for_optimal_threshold({**stats, "min_sequence_length": 24_000})
    assert known.decision is Chunking.ALWAYS
    assert "assumed" not in known.reason
    mixed = OPTIMIZER.analyze_dataset_for_optimal_threshold({**stats, "min_sequence_length": 47})
    assert mixed.decision is Chunking.SELECTIVE


def test_bands() -> None:
    bands = [band_of(longest) for longest in (999, 1000, 2000, 4000, 7999, 8000)]
    assert bands == ["skip", "optional", "consider", "recommended", "recommended", "required"]


# ---- 3.3 vLLM's settings

DEFAULTS: dict[str, Any] = {
    "enable_chunked_prefill": True,
    "long_prefill_token_threshold": 2048,
    "max_num_partial_prefills": 4,
    "max_long_partial_prefills": 2,
    "disable_chunked_mm_input": False,
}


def test_the_configuration_by_position_and_by_name() -> None:
    config = VLLMChunkedPrefillConfig()
    assert {name: getattr(config, name) for name in DEFAULTS} == DEFAULTS
    assert [each.name for each in fields(VLLMChunkedPrefillConfig)][: len(DEFAULTS)] == list(DEFAULTS)
    assert VLLMChunkedPrefillConfig(*DEFAULTS.values()) == VLLMChunkedPrefillConfig(**DEFAULTS) == config


@pytest.mark.parametrize(("version", "why"), [("0.32", "removed in 0.27"), ("0.10", "takes no value but 1")])
def test_engine_args_are_what_a_version_takes(version: str, why: str) -> None:
    config = VLLMChunkedPrefillConfig(long_prefill_token_threshold=1024)
    args = config.to_engine_args(version)
    assert args == {
        "enable_chunked_prefill": True,
        "long_prefill_token_threshold": 1024,
        "disable_chunked_mm_input": False,
    }
    assert args.notes.keys() == {"max_num_partial_prefills", "max_long_partial_prefills"}
    assert all(f"vLLM {version}" in note and why in note for note in args.notes.values())
    assert config.to_engine_args(version=version) == args
    assert config.to_engine_args()["enable_chunked_prefill"] is True


# ---- 3.7 triggers


def active(inputs: list[int], **seen: Any) -> dict[str, str]:
    analysis = analyze([[1] * length for length in inputs])
    found = find_triggers(analysis, decide_for(analysis), **seen)
    assert len(found) == 4
    assert all(trigger.reason for trigger in found)
    return {trigger.name: trigger.reason for trigger in found if trigger.active}


def test_each_trigger_with_its_reason() -> None:
    assert active([47]) == {}
    assert active([47, 3000]) == {"input over the threshold": "50.0% of the inputs are over 2,400 tokens"}
    assert active([47], memory_pressure="out of memory in line 9") == {"memory pressure": "out of memory in line 9"}
    assert active([47], streams=8) == {"parallel processing": "concurrent requests: 8"}
    assert active([8000]) == {
        "input over the threshold": "100.0% of the inputs are over 6,400 tokens",
        "long-context tasks": "inputs (p95 8,000 tokens)",
    }


# ---- 3.10 presets


def test_presets() -> None:
    assert PRESET_TOKENS == {"code": 4000, "document": 12_000, "retrieval": 24_000, "evaluation": 47}
    decisions = {name: decide_for(preset_dataset(name)).decision for name in PRESET_TOKENS}
    assert decisions == {"code": "always", "document": "always", "retrieval": "always", "evaluation": "disabled"}
    assert preset_dataset("retrieval").tokens.max == 24_000
