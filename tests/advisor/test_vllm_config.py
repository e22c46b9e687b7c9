"""The settings under the names that vLLM's users know."""

from __future__ import annotations

from typing import Any

import pytest

from evenflow.advisor import Chunking, VLLMChunkedPrefillConfig, VLLMChunkedPrefillOptimizer, preset_dataset
from evenflow.advisor import vllm_config as module
from evenflow.errors import InvalidConfig

OPTIMIZER = VLLMChunkedPrefillOptimizer()


def test_only_what_a_version_takes_and_a_note_for_the_rest() -> None:
    args = VLLMChunkedPrefillConfig().to_engine_args("0.32")
    assert args == {
        "enable_chunked_prefill": True,
        "long_prefill_token_threshold": 2048,
        "disable_chunked_mm_input": False,
    }
    assert args.notes.keys() == {"max_num_partial_prefills", "max_long_partial_prefills"}
    assert all("0.32" in note and "0.27" in note for note in args.notes.values())


def test_by_default_the_installed_version_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "installed_version", lambda: "0.26.0")
    assert "vLLM 0.26.0" in VLLMChunkedPrefillConfig().to_engine_args().notes["max_num_partial_prefills"]
    monkeypatch.setattr(module, "installed_version", lambda: None)
    assert "vLLM 0.33" in VLLMChunkedPrefillConfig().to_engine_args().notes["max_num_partial_prefills"]


def test_none_leaves_a_setting_to_vllm() -> None:
    config = VLLMChunkedPrefillConfig(None, None, None, None, None, max_num_batched_tokens=512)
    args = config.to_engine_args("0.32")
    assert (args, args.notes) == ({"max_num_batched_tokens": 512}, {})


@pytest.mark.parametrize(
    "wrong",
    [
        {"long_prefill_token_threshold": -1},
        {"max_num_partial_prefills": 0},
        {"max_num_batched_tokens": 2.5},
        {"max_num_seqs": True},
    ],
)
def test_wrong_values_are_named(wrong: dict[str, Any]) -> None:
    [(name, value)] = wrong.items()
    with pytest.raises(InvalidConfig, match=f"{name}={value}"):
        VLLMChunkedPrefillConfig(**wrong)


@pytest.mark.parametrize(
    ("stats", "chunking", "threshold"),
    [
        ({"max_sequence_length": 47, "percentile_95": 45}, Chunking.DISABLED, None),
        ({"max_sequence_length": 8000, "percentile_95": 8000}, Chunking.SELECTIVE, 6400),
        ({"max_sequence_length": 9000, "percentile_95": 1500.0}, Chunking.SELECTIVE, 2048),
        ({"max_sequence_length": 24000, "percentile_95": 24000}, Chunking.ALWAYS, 19200),
        ({"max_sequence_length": 24000, "percentile_95": 24000, "min_sequence_length": 47}, Chunking.SELECTIVE, 19200),
        ({"max_sequence_length": 4000, "percentile_95": 3900, "min_sequence_length": 2049}, Chunking.ALWAYS, 3120),
    ],
)
def test_a_threshold_from_figures(stats: dict[str, float], chunking: Chunking, threshold: int | None) -> None:
    found = OPTIMIZER.analyze_dataset_for_optimal_threshold(stats)
    assert (found.decision, found.threshold) == (chunking, threshold)
    assert found.reason


def test_a_threshold_from_an_analysis() -> None:
    assert OPTIMIZER.analyze_dataset_for_optimal_threshold(preset_dataset("retrieval")).decision is Chunking.ALWAYS


@pytest.mark.parametrize(
    ("stats", "named"),
    [
        ({}, "max_sequence_length=None"),
        ({"max_sequence_length": 10}, "percentile_95=None"),
        ({"max_sequence_length": -10, "percentile_95": 1}, "max_sequence_length=-10"),
        ({"max_sequence_length": float("nan"), "percentile_95": 1}, "max_sequence_length=nan"),
        ({"max_sequence_length": 10, "percentile_95": 11}, "percentile_95=11"),
    ],
)
def test_figures_that_cannot_be(stats: dict[str, float], named: str) -> None:
    with pytest.raises(InvalidConfig, match=named):
        OPTIMIZER.analyze_dataset_for_optimal_threshold(stats)
