"""The configuration that a load and its targets call for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from evenflow.core.policies import PolicySpec
from evenflow.simulation.cluster import Setup
from evenflow.simulation.load import Load, LoadRequest
from evenflow.simulation.observing import Targets
from evenflow.simulation.tuning import Candidate, Tuner
from tests.simulation.test_fast_forward import step_times


def prompts_and_chats(count: int, rate: float) -> Load:
    """Every other one is a prompt of 900 tokens: 22 ms in one step."""
    sizes = [(900, 4) if n % 2 else (30, 120) for n in range(count)]
    return Load(
        "test",
        [LoadRequest(f"r{n}", ((n + 2, prompt),), answer, n / rate) for n, (prompt, answer) in enumerate(sizes)],
    )


def candidate(policy: str, max_num_seqs: int = 64) -> Candidate:
    return Candidate(policy=PolicySpec.parse(policy), max_num_seqs=max_num_seqs, command=f"serve {policy}")


CANDIDATES = [candidate("fixed:2048"), candidate("fixed:128"), candidate("fixed:128", max_num_seqs=1)]


def tuner_of(load: Load, targets: Targets, max_replicas: int, num_blocks: int = 1000) -> Tuner:
    setup = Setup(step_times=step_times(1), policy=PolicySpec.parse("fixed:64"), num_blocks=num_blocks, targets=targets)

    def say(text: str, done: int, total: int) -> None:
        assert text
        assert 0 <= done < total

    return Tuner(
        load_of=lambda seed: load,
        setup=setup,
        share=0.99,
        max_replicas=max_replicas,
        num_runs=2,
        seed=0,
        say=say,
    )


def test_the_budget_that_keeps_gaps_short_wins() -> None:
    found = tuner_of(prompts_and_chats(80, rate=8.0), Targets(0.012, 1.0), max_replicas=4).choose(CANDIDATES)
    assert (str(found.candidate.policy), found.candidate.max_num_seqs) == ("fixed:128", 64)
    assert found.is_met
    assert [share for _, share in found.tried] == sorted((share for _, share in found.tried), reverse=True)
    assert len(found.tried) == 3
    gap = found.forecast.percentiles["gap"]["p99"]
    assert (gap.value or 1.0) < 0.012


@pytest.mark.slow
def test_replicas_are_as_few_as_meet_the_goal() -> None:
    load, targets = prompts_and_chats(100, rate=60.0), Targets(0.012, 0.5)
    tuner = tuner_of(load, targets, max_replicas=8)
    found = tuner.choose(CANDIDATES)
    assert found.is_met
    assert found.num_replicas > 1
    assert tuner._share(tuner._run(found.candidate, found.num_replicas - 1, 1.0, 900)) < 0.99
    assert found.replicas_for_twice is None or found.replicas_for_twice >= found.num_replicas


def test_replicas_do_not_help_against_slow_steps() -> None:
    found = tuner_of(prompts_and_chats(40, rate=8.0), Targets(0.001, 1.0), max_replicas=4).choose(CANDIDATES)
    assert not found.is_met
    assert found.num_replicas == 1
    assert found.replicas_for_twice is None
    assert found.limit.startswith("gaps: p99 is")


def test_more_load_breaks_something() -> None:
    ladder = tuner_of(prompts_and_chats(80, rate=30.0), Targets(0.015, 0.8), 1).choose(CANDIDATES[1:2]).ladder
    assert "first tokens: late for " in (ladder[-1].breaks or "")
    assert all(rung.factor <= 2.0 or rung.breaks is None for rung in ladder[:-1])
    assert (ladder[-1].forecast.good_share.value or 0.0) < 0.99


def test_preemptions_are_named_first() -> None:
    chats = Load("chats", [LoadRequest(f"r{n}", ((n + 2, 30),), 200, 0.01 * n) for n in range(20)])
    found = tuner_of(chats, Targets(0.006, 0.2), 1, num_blocks=60).choose([candidate("fixed:128")])
    assert found.forecast.num_preemptions > 0
    assert found.limit.startswith("the KV cache: ")


def test_the_first_requests_of_a_faster_load() -> None:
    first = LoadRequest("a", ((2, 5),), 5, 0.0, session="s")
    follows = replace(first, id="b", arrival_s=None, delay_s=1.0)
    last = LoadRequest("c", ((3, 5),), 5, 8.0)
    load = Load("test", [follows, first, last])
    assert load.first(1).requests == [follows, first]
    assert [one.arrival_s for one in load.faster(4.0).requests] == [None, 0.0, 2.0]
