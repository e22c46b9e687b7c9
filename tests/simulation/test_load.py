"""Loads: what a trace shares, when its requests arrive, and what is drawn."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pytest

from evenflow.core.policies import PolicySpec
from evenflow.errors import InvalidInput
from evenflow.simulation.cluster import Cluster, Setup
from evenflow.simulation.load import ANSWER_TOKEN, Lengths, LoadSettings, Synthetic, read_load
from tests.shared_data import shared_path
from tests.simulation.test_fast_forward import step_times

ANY = LoadSettings()


def written(path: Path, *records: Any) -> Path:
    path.write_text("\n".join(map(json.dumps, records)))
    return path


def test_equal_blocks_are_equal_tokens(tmp_path: Path) -> None:
    path = written(
        tmp_path / "trace.jsonl",
        {"timestamp": 500, "input_length": 1200, "output_length": 3, "hash_ids": [7, 8, 9]},
        {"timestamp": 1500, "input_length": 1100, "output_length": 3, "hash_ids": [7, 8, 10]},
        {"timestamp": 2500, "input_length": 600, "output_length": 3},
    )
    load = read_load(path, ANY)
    first, second, third = (one.token_ids() for one in load.requests)
    assert [len(first), len(second), len(third)] == [1200, 1100, 600]
    assert first[:1024] == second[:1024]
    assert first[1024] != second[1024]
    assert not set(third) & {*first, *second}
    assert [one.arrival_s for one in load.requests] == [0.0, 1.0, 2.0]


def test_unlimited_memory_finds_what_the_trace_shares(tmp_path: Path) -> None:
    """Counted here by sets of sixteenths of the trace's blocks; there by the real prefix cache."""
    source = shared_path("traces/mooncake_conversation_4000.jsonl").read_text().splitlines()
    records = [json.loads(line) | {"output_length": 4} for line in source[:60]]
    path = written(tmp_path / "trace.jsonl", *records)
    load = read_load(path, LoadSettings(speed=0.01))  # one at a time
    setup = Setup(step_times=step_times(1), policy=PolicySpec.parse("unchunked"), num_blocks=200_000)
    seen = Cluster(load, setup, 0).run()
    assert seen.num_done == 60
    published: set[tuple[int, int]] = set()
    expected = 0
    for record in records:
        length = record["input_length"]
        blocks = [(record["hash_ids"][at // 512], at % 512) for at in range(0, length - length % 16, 16)]
        usable = blocks[: (length - 1) // 16]
        hits = next((n for n, block in enumerate(usable) if block not in published), len(usable))
        expected += 16 * hits
        published.update(blocks)
    assert expected > 0
    assert seen.cached_tokens == expected


def test_a_conversation_is_a_session_that_starts_with_what_was_said(tmp_path: Path) -> None:
    turns = [("human", "a" * 400), ("gpt", "b" * 80), ("human", "c" * 40), ("gpt", "d" * 12)]
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps([{"id": "x", "conversations": [{"from": w, "value": t} for w, t in turns]}] * 2))
    load = read_load(path, LoadSettings(rate=2.0))
    first, second = load.requests[:2]
    assert (first.num_prompt_tokens, first.num_output_tokens) == (100, 20)
    assert (second.num_prompt_tokens, second.num_output_tokens) == (130, 3)
    assert second.token_ids()[:120] == [*first.token_ids(), *[ANSWER_TOKEN] * 20]
    assert (first.arrival_s, second.arrival_s) == (0.0, None)
    assert load.requests[2].arrival_s is not None
    with pytest.raises(InvalidInput, match="--rate"):
        read_load(path, ANY)


def test_a_session_waits_for_its_answers(tmp_path: Path) -> None:
    path = written(
        tmp_path / "trace.jsonl",
        {"session_id": "s", "timestamp": 0, "input_length": 100, "output_length": 50},
        {"session_id": "s", "delay": 2000, "input_length": 100, "output_length": 1},
    )
    setup = Setup(step_times=step_times(1), policy=PolicySpec.parse("unchunked"), num_blocks=1000)
    seen = Cluster(read_load(path, ANY), setup, 0).run()
    assert seen.num_done == 2
    assert seen.seconds == pytest.approx(2 + 50 * 0.006, rel=0.2)


def test_what_cannot_be_simulated_is_said(tmp_path: Path) -> None:
    path = written(tmp_path / "empty.jsonl")
    with pytest.raises(InvalidInput, match=r"empty\.jsonl.*it is empty"):
        read_load(path, ANY)
    path = written(tmp_path / "a.jsonl", {"timestamp": 1, "input_length": 5})
    with pytest.raises(InvalidInput, match="--output-tokens"):
        read_load(path, ANY)
    path = written(tmp_path / "b.jsonl", {"timestamp": 1, "input_length": 5, "output_length": 0}, {"other": 1})
    with pytest.raises(InvalidInput, match="0 tokens"):
        read_load(path, ANY)
    path = written(tmp_path / "d.jsonl", {"timestamp": 1, "input_length": 10**12, "output_length": 2})
    with pytest.raises(InvalidInput, match="more than 4,194,304 tokens"):
        read_load(path, ANY)
    path = written(tmp_path / "c.jsonl", {"prompt_tokens": 5, "output_tokens": 2})
    with pytest.raises(InvalidInput, match="--rate"):
        read_load(path, ANY)


@pytest.mark.parametrize("burstiness", [0.2, 1.0, 4.0])
def test_drawn_arrivals_have_their_rate_and_burstiness(burstiness: float) -> None:
    drawn = Synthetic(
        name="",
        num_requests=4000,
        rate=5.0,
        burstiness=burstiness,
        lengths=lambda rng: (Lengths(median=800, spread=1.0).draw(rng), Lengths(median=100).draw(rng)),
    )
    load = drawn.draw(1)
    times = [one.arrival_s or 0.0 for one in load.requests]
    pauses = [after - before for before, after in pairwise(times)]
    mean = fmean(pauses)
    assert mean == pytest.approx(0.2, rel=0.1)
    assert fmean((pause - mean) ** 2 for pause in pauses) / mean**2 == pytest.approx(burstiness, rel=0.25)
    assert median(one.num_prompt_tokens for one in load.requests) == pytest.approx(800, rel=0.1)
    assert {one.num_output_tokens for one in load.requests} == {100}
    assert drawn.draw(1) == load
    assert drawn.draw(2) != load
    fitted = Synthetic.fitted(load)
    assert fitted.burstiness == pytest.approx(burstiness, rel=0.25)
    pairs = {(one.num_prompt_tokens, one.num_output_tokens) for one in load.requests}
    assert {(one.num_prompt_tokens, one.num_output_tokens) for one in fitted.draw(3).requests} <= pairs


@pytest.mark.parametrize("text", ["", "x", "0", "100:-1", "nan", "1e9"])
def test_lengths_that_mean_nothing_are_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match=r"--prompt-tokens.*expected a median"):
        Lengths.parse(text, "--prompt-tokens")
