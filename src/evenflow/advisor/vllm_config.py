"""vLLM's settings for chunked prefill under their own names, and a decision from a dataset's statistics."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from evenflow.advisor.analysis import Analysis, DatasetAnalysis
from evenflow.advisor.decision import DEFAULT_THRESHOLD, Decision, decide
from evenflow.advisor.recommendation import decide_for
from evenflow.advisor.vllm_flags import NEWEST_VERSION, EngineArgs, accepted_by, installed_version
from evenflow.errors import InvalidConfig

DatasetStats = Mapping[str, float] | Analysis | DatasetAnalysis


@dataclass(frozen=True, slots=True)
class VLLMChunkedPrefillConfig:
    """Settings for vLLM; None leaves one at vLLM's default.

    Two of these are often misread. `long_prefill_token_threshold` is the most tokens that one prompt gets in a step
    beside other requests (0: no limit), not the length from which prompts are cut; since 0.31 it does not cap a prompt
    that is alone. `disable_chunked_mm_input` keeps an image's tokens in one step; it does not affect text.
    """

    enable_chunked_prefill: bool | None = True
    long_prefill_token_threshold: int | None = DEFAULT_THRESHOLD
    max_num_partial_prefills: int | None = 4
    max_long_partial_prefills: int | None = 2
    disable_chunked_mm_input: bool | None = False
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None

    def __post_init__(self) -> None:
        at_least_1 = ("max_num_partial_prefills", "max_long_partial_prefills", "max_num_batched_tokens", "max_num_seqs")
        for name, low in {**dict.fromkeys(at_least_1, 1), "long_prefill_token_threshold": 0}.items():
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < low):
                raise InvalidConfig(f"Got {name}={value!r} but expected a whole number >= {low}, or None.")

    def to_engine_args(self, version: str | None = None) -> EngineArgs:
        """Keyword arguments that this version of vLLM takes, with a note in `.notes` for each field left out.

        The default is the installed version or, if there is none, the newest known one.
        """
        settings = {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
        return accepted_by(settings, version or installed_version() or NEWEST_VERSION)


class VLLMChunkedPrefillOptimizer:
    """Decides from the lengths of a dataset's sequences."""

    def analyze_dataset_for_optimal_threshold(self, dataset_stats: DatasetStats) -> Decision:
        """The threshold, the decision and its reason.

        `dataset_stats` is an analysis, or a mapping with `max_sequence_length` and `percentile_95` in tokens. With
        `min_sequence_length` too, `always` is proven; without it, it is assumed if the two are equal and over 8,000.
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
