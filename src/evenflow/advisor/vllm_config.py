"""Settings of vLLM's chunked prefill under the names its users know, and a choice of them from a dataset's figures.

Must not know: files; which version takes which setting is for `evenflow.advisor.vllm_flags` to say.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from evenflow.advisor.analysis import Analysis, DatasetAnalysis
from evenflow.advisor.decision import DEFAULT_THRESHOLD, Decision, decide
from evenflow.advisor.recommendation import decide_for
from evenflow.advisor.vllm_flags import EngineArgs, accepted_by, installed_version, newest_version
from evenflow.errors import InvalidConfig

DatasetStats = Mapping[str, float] | Analysis | DatasetAnalysis


@dataclass(frozen=True, slots=True)
class VLLMChunkedPrefillConfig:
    """What to ask of vLLM; None leaves a setting to it.

    Two of these are often misread. `long_prefill_token_threshold` is the most tokens that one prompt gets of a step
    (0: no such limit), not the length from which on prompts are cut. `disable_chunked_mm_input` keeps an image's tokens
    in one step; text is not concerned.
    """

    enable_chunked_prefill: bool | None = True
    long_prefill_token_threshold: int | None = DEFAULT_THRESHOLD
    max_num_partial_prefills: int | None = 4
    max_long_partial_prefills: int | None = 2
    disable_chunked_mm_input: bool | None = False
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_num_partial_prefills", "max_long_partial_prefills", "max_num_batched_tokens", "max_num_seqs"):
            self._require_at_least(name, 1)
        self._require_at_least("long_prefill_token_threshold", 0)

    def _require_at_least(self, name: str, low: int) -> None:
        value = getattr(self, name)
        if value is not None and (type(value) is not int or value < low):
            raise InvalidConfig(f"Got {name}={value!r} but expected a whole number >= {low}, or None.")

    def to_engine_args(self, version: str | None = None) -> EngineArgs:
        """Keyword arguments that this version of vLLM takes, with a note in `.notes` for each field left out.

        None stands for the version that is installed, or where there is none for the newest that is known.
        """
        asked = {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
        return accepted_by(asked, version or installed_version() or newest_version())


class VLLMChunkedPrefillOptimizer:
    """Decides by the lengths of a dataset's sequences."""

    def analyze_dataset_for_optimal_threshold(self, dataset_stats: DatasetStats) -> Decision:
        """The threshold, the decision and its reason.

        `dataset_stats` is an analysis, or a mapping with `max_sequence_length` and `percentile_95` in tokens. Only with
        `min_sequence_length` in it too can all sequences be known to be long, and the decision be `always`.
        """
        if not isinstance(dataset_stats, Mapping):
            return decide_for(dataset_stats)
        longest, p95 = (_stat(dataset_stats, name) for name in ("max_sequence_length", "percentile_95"))
        if p95 > longest:
            raise InvalidConfig(f"Got percentile_95={p95} but the longest sequence has {longest} tokens.")
        shortest = _stat(dataset_stats, "min_sequence_length") if "min_sequence_length" in dataset_stats else None
        return decide(longest, p95, shortest)


def _stat(stats: Mapping[str, float], name: str) -> int:
    value = stats.get(name)
    if not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise InvalidConfig(f"Got dataset_stats with {name}={value!r} but expected a number of tokens.")
    return int(value)
