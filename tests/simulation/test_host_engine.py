"""A host engine in virtual time: vLLM's own rule step by step, and our steering in its place."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from evenflow.core.plan import ExecutorCaps
from evenflow.core.policies import PolicySpec
from evenflow.hosts.settings import Settings
from evenflow.hosts.steering import Host, HostRequest
from evenflow.simulation.devices import ModelDevice, StepWork
from evenflow.simulation.host_engine import HostEngine, HostOutcome, SteeredHostEngine
from evenflow.simulation.loop import Loop, Timed
from evenflow.simulation.replica import Replica

Requests = Iterable[tuple[float, str, int, int]]  # arrival, name, tokens of the prompt and of the answer


class Simulation:
    def __init__(self, engine: HostEngine, requests: Requests) -> None:
        self.steps: list[tuple[set[str], list[tuple[str, int, int]]]] = []
        self.times: dict[str, list[float]] = {}
        self.ended: list[str] = []
        self.launches: list[float] = []  # seconds from planning a step to its launch
        self._engine = engine
        self._replica = Replica(engine, ModelDevice(seconds), self._commit, schedule_s=0.0004, output_s=0.0006)
        Loop((at, partial(self._arrive, HostRequest(name, at, *sizes(*two)))) for at, name, *two in requests).run()

    def _arrive(self, request: HostRequest, now: float) -> Iterable[Timed]:
        return self._replica.receive(partial(self._engine.add, request), now)

    def _commit(self, outcome: HostOutcome, now: float) -> list[Timed]:
        self.steps.append((outcome.step.decode_ids, outcome.step.chunks))
        self.ended += outcome.ended
        self.launches.append(outcome.step.launched_at - outcome.step.planned_at)
        for name in outcome.ids:
            self.times.setdefault(name, []).append(now)
        return []


def sizes(prompt: int, max_tokens: int) -> tuple[int, int, int, int]:
    return prompt, prompt, 0, max_tokens


def seconds(work: StepWork) -> float:
    return 0.005 + 2e-5 * work.num_rows + 1e-8 * work.decode_context


def steered(max_num_seqs: int = 64, path: Path | None = None) -> SteeredHostEngine:
    host = Host(ExecutorCaps(), 8192, max_num_seqs, path, logging.getLogger("simulated"))
    return SteeredHostEngine(host, Settings(PolicySpec.parse("target:50ms"), None, None))


def test_decodes_go_first_and_prompts_share_what_the_budget_leaves() -> None:
    found = Simulation(
        HostEngine(100, 8, steps_in_flight=1), [(0.0, "a", 60, 3), (0.0, "b", 120, 2), (0.0, "c", 30, 1)]
    )
    assert found.steps == [
        (set(), [("a", 0, 60), ("b", 0, 40)]),
        ({"a"}, [("b", 40, 80), ("c", 0, 19)]),
        ({"a", "b"}, [("c", 19, 11)]),
    ]
    assert found.ended == ["a", "b", "c"]


def test_two_steps_are_in_flight() -> None:
    found = Simulation(HostEngine(100, 8), [(0.0, "a", 150, 3)])
    assert found.steps == [(set(), [("a", 0, 100)]), (set(), [("a", 100, 50)]), ({"a"}, []), ({"a"}, [])]
    assert found.times["a"] == sorted(found.times["a"])


def test_steering_knows_when_a_step_was_launched() -> None:
    found = Simulation(steered(), [(0.0, "a", 150, 3)])
    assert found.launches == pytest.approx([0.0004] * len(found.steps))


@pytest.mark.parametrize("engine", [HostEngine(512, 2), steered(max_num_seqs=2)])
def test_no_more_than_max_num_seqs_run(engine: HostEngine) -> None:
    found = Simulation(engine, [(0.0, f"r{n}", 100, 4) for n in range(6)])
    assert all(len(decodes | {name for name, _, _ in chunks}) <= 2 for decodes, chunks in found.steps)
    assert {name: len(times) for name, times in found.times.items()} == {f"r{n}": 4 for n in range(6)}


@pytest.mark.parametrize("engine", [HostEngine(2048, 64), steered()])
def test_every_prompt_is_computed_once_and_every_request_answered(engine: HostEngine) -> None:
    requests = [(0.05 * n, f"r{n}", 37 * n % 3000 + 1, 1 + n % 30) for n in range(60)]
    found = Simulation(engine, requests)
    done: dict[str, int] = {}
    for _, chunks in found.steps:
        for name, start, length in chunks:
            assert start == done.get(name, 0)
            done[name] = start + length
    assert done == {name: prompt for _, name, prompt, _ in requests}
    assert {name: len(times) for name, times in found.times.items()} == {name: n for _, name, _, n in requests}


def test_steering_keeps_the_target_that_the_budget_breaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evenflow.hosts.steering._STEPS_BETWEEN_SAVES", 10)
    chats = [(0.0, f"chat{n}", 50, 600) for n in range(8)]
    prompts = [(1.0 + 0.5 * n, f"long{n}", 12_000, 1) for n in range(4)]

    def p99(found: Simulation) -> float:
        gaps = sorted(b - a for name, times in found.times.items() if len(times) > 1 for a, b in pairwise(times))
        return gaps[int(0.99 * len(gaps))]

    path = tmp_path / "step-times"
    assert (
        p99(Simulation(steered(path=path), [*chats, *prompts]))
        < 0.055
        < p99(Simulation(HostEngine(8192, 64), [*chats, *prompts]))
    )
    assert not path.exists(), "what a simulation learns is not kept"
