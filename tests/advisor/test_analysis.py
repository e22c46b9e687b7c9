"""Figures of datasets, and what is recommended by them."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from evenflow.advisor import PRESET_TOKENS, Chunking, preset_dataset
from evenflow.advisor.analysis import Analysis, DatasetAnalysis, DatasetTally, PrefixTally
from evenflow.advisor.decision import Trigger
from evenflow.advisor.recommendation import decide_for, find_triggers, recommend
from evenflow.advisor.token_counts import EstimatedTokens
from evenflow.errors import InvalidInput
from evenflow.workload.inputs import ChatInput, Input, TextInput, TraceRequest


def dataset(name: str, inputs: Iterable[Input]) -> DatasetAnalysis:
    tally = DatasetTally(name, EstimatedTokens())
    for item in inputs:
        tally.add(item)
    return tally.analysis({})


def traced(*lengths: int) -> Analysis:
    return Analysis.of([dataset("trace", map(TraceRequest, lengths))])


def test_texts_are_estimated_and_said_to_be() -> None:
    found = dataset(
        "texts", [TextInput("x" * 8001), TextInput("abcd"), ChatInput([{"role": "user", "content": "abcde"}])]
    )
    assert found.tokens_from.startswith("estimated: characters / 4")
    assert (found.tokens.max, found.tokens.min, found.tokens.total) == (2001, 1, 2004)
    assert found.characters is not None
    assert (found.characters.total, found.characters.max) == (8010, 8001)
    assert found.has_long_characters
    assert found.lengths.share_over(2048) == 0
    assert found.lengths.share_over(1000) == pytest.approx(1 / 3)


def test_a_trace_is_taken_at_its_word() -> None:
    requests = [TraceRequest(100, 5, 10.0), TraceRequest(3000, 7, 10.9), TraceRequest(200, None, 14.0)]
    found = dataset("trace", requests)
    assert found.tokens_from == "given with the data"
    assert found.characters is None
    assert found.has_long_characters is None
    assert Analysis.of([found]).num_with_long_characters is None
    assert found.output_tokens is not None
    assert found.output_tokens.total == 12
    assert found.arrivals is not None
    assert (found.arrivals.seconds, found.arrivals.requests_per_s, found.arrivals.most_in_a_second) == (4.0, 0.75, 2)


def test_all_together() -> None:
    long = dataset("long", [TextInput("x" * 40_000)])
    short = dataset("short", [TextInput("x" * 400)] * 3)
    whole = Analysis.of([long, short])
    assert (whole.tokens.count, whole.tokens.max, whole.tokens.p50) == (4, 10_000, 100)
    assert whole.mean_of_maxima == (10_000 + 100) / 2
    assert whole.num_with_long_characters == 1
    assert whole.characters is not None
    assert (whole.characters.total, whole.characters.max, whole.characters.p50) == (41_200, 40_000, 400)
    assert (whole.characters.mean, whole.characters.p95) == (10_300, 40_000)
    assert whole.mean_of_maxima_characters == (40_000 + 400) / 2
    assert whole.lengths.share_over(8192) == 0.25


def test_characters_are_those_of_the_datasets_with_texts() -> None:
    texts, trace = dataset("texts", [TextInput("x" * 400)] * 2), dataset("trace", [TraceRequest(5)])
    mixed = Analysis.of([texts, trace])
    assert mixed.characters == texts.characters
    assert mixed.mean_of_maxima_characters == 400
    assert Analysis.of([trace]).characters is None
    assert Analysis.of([trace]).mean_of_maxima_characters is None


def test_prefixes_are_found_only_where_they_lead() -> None:
    tally = PrefixTally()
    tally.add((0, 1, 2), 1500)
    tally.add((0, 1, 3), 1400)  # two blocks of it are known
    tally.add((9, 1, 2), 1500)  # the first one is not, so that none is
    tally.add((0, 1, 2), 1500)  # all of it is, but its last token is computed again
    found = tally.figures()
    assert found is not None
    assert found.num_distinct_blocks == 5
    assert found.hit_rate == (1024 + 1499) / 5900
    assert (found.uncached.min, found.uncached.max) == (1, 1500)


def test_blocks_of_agents_are_shorter() -> None:
    tally = PrefixTally()
    tally.add((1, 2), 120, 64)
    tally.add((1, 2, 3), 180, 64)
    figures = tally.figures()
    assert figures is not None
    assert figures.block_tokens == 64
    assert figures.hit_rate == pytest.approx(128 / 300)


def test_without_block_ids_nothing_is_said_of_prefixes() -> None:
    assert traced(1000).datasets[0].prefixes is None


@pytest.mark.parametrize(
    ("lengths", "settings"),
    [
        ([47], {"max_num_batched_tokens": 2048}),
        ([100] * 10 + [8000] * 10, {"budget": 1024 + 64, "cap": 768}),
        ([24_000] * 20, {"budget": 2048 + 64}),
        ([3000] * 20, {"budget": 512 + 64}),
    ],
)
def test_recommended_settings(lengths: list[int], settings: dict[str, int]) -> None:
    analysis = traced(*lengths)
    found = recommend(analysis, decide_for(analysis))
    expected = dict(settings)
    if "budget" in settings:
        expected = {"enable_chunked_prefill": True, "max_num_batched_tokens": settings["budget"]}
    if "cap" in settings:
        expected["long_prefill_token_threshold"] = settings["cap"]
    assert found.settings == expected
    assert found.reasons.keys() == found.settings.keys()


def test_a_cap_per_prompt_is_only_for_prompts_beside_others() -> None:
    analysis = traced(*[100] * 10, *[8000] * 10)

    def reason(version: str) -> str:
        return recommend(analysis, decide_for(analysis), None, version).reasons["long_prefill_token_threshold"]

    assert reason("0.30.0").endswith("a prompt that is alone is capped too")
    assert reason("0.31.0").endswith("alone, it is not capped")
    one_at_a_time = recommend(analysis, decide_for(analysis), streams=1)
    assert "long_prefill_token_threshold" not in one_at_a_time.settings


def test_a_budget_holds_the_streams_too() -> None:
    analysis = traced(*[24_000] * 20)
    found = recommend(analysis, decide_for(analysis), streams=300)
    assert found.settings["max_num_batched_tokens"] == 2368  # 2,048 + 300, in multiples of 64


def triggers(analysis: Analysis, streams: int | None = None, pressure: str | None = None) -> dict[str, Trigger]:
    found = find_triggers(analysis, decide_for(analysis), streams=streams, memory_pressure=pressure)
    return {trigger.name: trigger for trigger in found}


def test_each_trigger_alone() -> None:
    short = traced(47)
    assert [name for name, trigger in triggers(short).items() if trigger.active] == []
    assert len(triggers(short)) == 4
    assert all(trigger.reason for trigger in triggers(short).values())
    seen = triggers(short, pressure="9 preemptions in the log")["memory pressure"]
    assert (seen.active, seen.reason) == (True, "9 preemptions in the log")
    assert triggers(short, streams=8)["parallel processing"].active
    assert not triggers(short, streams=1)["parallel processing"].active
    assert triggers(traced(*[8000] * 20))["long-context tasks"].active
    assert not triggers(traced(*[7999] * 20))["long-context tasks"].active
    assert triggers(traced(100, 3000))["input over the threshold"].active
    burst = Analysis.of([dataset("burst", [TraceRequest(5, None, 0.1), TraceRequest(5, None, 0.9)])])
    assert triggers(burst)["parallel processing"].active


@pytest.mark.parametrize(
    ("preset", "chunking"),
    [
        ("code", Chunking.ALWAYS),
        ("document", Chunking.ALWAYS),
        ("retrieval", Chunking.ALWAYS),
        ("evaluation", Chunking.DISABLED),
    ],
)
def test_presets(preset: str, chunking: Chunking) -> None:
    found = preset_dataset(preset)
    assert found.tokens.max == PRESET_TOKENS[preset]
    assert decide_for(found).decision is chunking


def test_an_unknown_preset() -> None:
    with pytest.raises(InvalidInput, match="'poems'"):
        preset_dataset("poems")
