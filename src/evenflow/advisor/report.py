"""Everything `evenflow analyze` reports, as one object that can be written as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from evenflow.advisor.analysis import LONG_CHARACTERS, THRESHOLDS, Analysis, DatasetAnalysis
from evenflow.advisor.decision import Decision, Trigger
from evenflow.advisor.memory import LLAMA_3_1_8B, WHAT_CHUNKS_BOUND, MemoryRow, ModelShape
from evenflow.advisor.recommendation import Recommendation


@dataclass(frozen=True, slots=True)
class VllmAdvice:
    """Settings for one vLLM. `accepted` is its own verdict, or None if only the table of versions was asked."""

    version: str
    source: str
    command: str
    target: str  # how to get a latency target there
    engine_args: dict[str, Any]
    notes: list[str]
    accepted: bool | None = None
    refusal: str | None = None
    scheduler: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class SglangAdvice:
    """Settings for SGLang, from its source: they are not checked with it."""

    version: str
    command: str
    target: str  # how to get a latency target there
    notes: list[str]


@dataclass(frozen=True, slots=True)
class Advice:
    """The whole report."""

    analysis: Analysis
    decision: Decision
    triggers: list[Trigger]
    recommendation: Recommendation
    shape: ModelShape
    memory: list[MemoryRow]
    vllm: VllmAdvice
    sglang: SglangAdvice

    def as_json(self) -> dict[str, Any]:
        analysis = self.analysis
        return asdict(self.decision) | {
            "datasets": [_dataset(dataset, self.shape) for dataset in analysis.datasets],
            "lengths": {
                "num_datasets": len(analysis.datasets),
                "num_sequences": analysis.tokens.count,
                "tokens": asdict(analysis.tokens),
                "characters": None if analysis.characters is None else asdict(analysis.characters),
                "mean_of_maxima": analysis.mean_of_maxima,
                "mean_of_maxima_characters": analysis.mean_of_maxima_characters,
                f"num_datasets_over_{LONG_CHARACTERS}_characters": analysis.num_with_long_characters,
                "histogram": [asdict(bucket) for bucket in analysis.lengths.buckets()],
                **_shares(analysis, self.shape),
            },
            "triggers": [asdict(trigger) for trigger in self.triggers],
            "recommendation": asdict(self.recommendation),
            "memory": {
                "model": self.shape.name,
                "is_default_shape": self.shape is LLAMA_3_1_8B,
                "chunk": self.recommendation.max_per_prompt,
                "modelled_bytes": [asdict(row) for row in self.memory],
                "note": WHAT_CHUNKS_BOUND,
            },
            "vllm": asdict(self.vllm),
            "sglang": asdict(self.sglang),
        }


def _dataset(dataset: DatasetAnalysis, shape: ModelShape) -> dict[str, Any]:
    groups = ("tokens", "characters", "output_tokens", "prefixes", "arrivals")
    return {
        "name": dataset.name,
        "num_sequences": dataset.tokens.count,
        "tokens_from": dataset.tokens_from,
        "fields": dict(dataset.fields),
        "unused_fields": list(dataset.unused_fields),
        **{name: None if (figures := getattr(dataset, name)) is None else asdict(figures) for name in groups},
        f"has_over_{LONG_CHARACTERS}_characters": dataset.has_long_characters,
        **_shares(dataset, shape),
        "unusable": dict(dataset.unusable),
        "first_inputs_only": dataset.is_cut_short,
    }


def _shares(analysis: Analysis | DatasetAnalysis, shape: ModelShape) -> dict[str, Any]:
    """The share of inputs over each threshold, and the share of the model's context that they use."""
    return {
        "share_over": {str(threshold): analysis.lengths.share_over(threshold) for threshold in THRESHOLDS},
        "context_tokens": shape.max_position,
        "context_used_mean": analysis.tokens.mean / shape.max_position,
        "context_used_max": analysis.tokens.max / shape.max_position,
        "share_over_context": analysis.lengths.share_over(shape.max_position),
    }
