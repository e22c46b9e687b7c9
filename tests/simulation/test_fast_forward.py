"""Steps that only decode are not planned one by one, and nothing that anyone sees differs."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from evenflow.core.outcome import Committed, Repeat
from evenflow.core.plan import ExecutorCaps
from evenflow.core.policies import PolicySpec
from evenflow.simulation.cluster import Cluster, Setup, _Node, taught
from evenflow.simulation.devices import Ran, StepWork
from evenflow.simulation.load import Load, LoadRequest
from evenflow.simulation.observing import Observed, Targets
from evenflow.simulation.own_engine import OwnEngine
from evenflow.simulation.step_times import NO_LAUNCHES, HostTimes, Launches, Slowness, StepTimes

TARGETS = Targets(0.02, 0.5)
Plan = tuple[float, int, tuple[tuple[str, int, int], ...]]


def step_times(depth: int, *, has_pauses: bool = False) -> StepTimes:
    """Steps of some milliseconds, with a pause now and then if it has them."""
    caps = ExecutorCaps(max_steps_in_flight=depth)

    def seconds(work: StepWork) -> float:
        return 0.004 + 2e-5 * work.num_rows + 1e-8 * work.decode_context

    host = HostTimes(0.0003, 0.0006, (Launches(0.001, 0.0), Launches(0.002, 0.0), NO_LAUNCHES))
    times = StepTimes(name="test", about="", caps=caps, host=host, estimate=seconds)
    if has_pauses:
        pauses = Slowness([0.3, 0.02, 0.4, 0.05], [1.0, 8.0, 1.1, 1.6])
        times = replace(times, noise=(pauses, Slowness([0.3, 0.1], [1.0, 2.0])))
    return times


def load(num_requests: int, seed: int = 0, rate: float = 4.0) -> Load:
    rng = random.Random(seed)
    return Load(
        "test",
        [
            LoadRequest(f"r{n}", ((n + 2, rng.randrange(20, 900)),), rng.randrange(2, 300), n / rate)
            for n in range(num_requests)
        ],
    )


def run(what: Load, setup: Setup, monkeypatch: pytest.MonkeyPatch, *, fast: bool) -> tuple[Observed, list[Plan], int]:
    """What clients saw, every plan with prefill, and how many steps were planned."""
    plans: list[Plan] = []
    num_planned = 0
    committed: Callable[[_Node, Committed, float], list[object]] = _Node._committed

    def spy(node: _Node, outcome: Committed, now: float) -> list[object]:
        nonlocal num_planned
        num_planned += 1
        if outcome.plan.chunks:
            chunks = tuple((one.request_id, one.start, one.length) for one in outcome.plan.chunks)
            plans.append((now, len(outcome.plan.decodes), chunks))
        return committed(node, outcome, now)

    with monkeypatch.context() as patched:
        patched.setattr(_Node, "_committed", spy)
        return Cluster(what, setup, 1, fast_forward=fast).run(), plans, num_planned


@pytest.mark.parametrize("depth", [1, pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("policy", ["fixed:256", "target:20ms", "alternate:128", "adaptive", "unchunked"])
def test_results_are_the_same(policy: str, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Setup(
        step_times=step_times(depth, has_pauses=True),
        policy=PolicySpec.parse(policy).bounded(512),
        num_blocks=400,
        targets=TARGETS,
    )
    what = load(25)
    seen, plans, num_planned = run(what, setup, monkeypatch, fast=True)
    expected, expected_plans, num_steps = run(what, setup, monkeypatch, fast=False)
    assert num_planned < num_steps / 2
    assert plans == expected_plans
    for name in ("ttft", "gaps", "latency"):
        assert getattr(seen, name).cells == getattr(expected, name).cells
    for name in ("num_steps", "num_tokens", "num_good", "num_late", "causes", "missed", "seconds"):
        assert getattr(seen, name) == getattr(expected, name)


def test_few_steps_are_planned_for_each_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two when it comes, and one or two when it ends."""
    setup = Setup(step_times=step_times(2), policy=PolicySpec.parse("fixed:1024"), num_blocks=400)
    _, _, num_planned = run(load(20), setup, monkeypatch, fast=True)
    assert num_planned <= 4 * 20


@pytest.mark.parametrize(("policy", "learns"), [("fixed:256", False), ("adaptive", False), ("target:20ms", True)])
def test_only_policies_with_a_target_go_on_learning_step_times(policy: str, learns: bool) -> None:
    setup = Setup(step_times=step_times(2), policy=PolicySpec.parse(policy), num_blocks=400)
    cluster = Cluster(load(5), setup, 0)
    [scheduler] = cluster._schedulers
    before = scheduler.step_time.to_record()
    assert before["samples"]
    cluster.run()
    assert (scheduler.step_time.to_record() != before) == learns


@pytest.mark.slow
def test_full_memory_is_no_different(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Setup(step_times=step_times(2), policy=PolicySpec.parse("fixed:256"), num_blocks=120, targets=TARGETS)
    what = load(30, rate=20.0)
    seen, plans, _ = run(what, setup, monkeypatch, fast=True)
    expected, expected_plans, _ = run(what, setup, monkeypatch, fast=False)
    assert expected.num_preemptions or expected.kv_peak > 0.9
    assert plans == expected_plans
    assert (seen.num_preemptions, seen.gaps.cells) == (expected.num_preemptions, expected.gaps.cells)


@pytest.mark.parametrize("router", ["round-robin", "least-loaded", "prefix"])
def test_replicas_are_no_different(router: str, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Setup(
        step_times=step_times(2),
        policy=PolicySpec.parse("fixed:256"),
        num_blocks=400,
        num_replicas=3,
        router=router,
        targets=TARGETS,
    )
    what = load(30, rate=9.0)
    seen, _, num_planned = run(what, setup, monkeypatch, fast=True)
    expected, _, num_steps = run(what, setup, monkeypatch, fast=False)
    assert num_planned < num_steps
    assert (seen.gaps.cells, seen.ttft.cells) == (expected.gaps.cells, expected.ttft.cells)


def test_sessions_are_no_different(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Setup(step_times=step_times(2), policy=PolicySpec.parse("fixed:256"), num_blocks=400, targets=TARGETS)
    first = load(12)
    turns = [replace(one, session=one.id) for one in first.requests]
    later = [
        replace(one, id=f"{one.id}.2", session=one.id, arrival_s=None, delay_s=0.1 * n)
        for n, one in enumerate(first.requests)
    ]
    what = Load("test", [*turns, *later])
    seen, plans, _ = run(what, setup, monkeypatch, fast=True)
    expected, expected_plans, _ = run(what, setup, monkeypatch, fast=False)
    assert (seen.num_done, seen.gaps.cells) == (24, expected.gaps.cells)
    assert plans == expected_plans


def test_a_scheduler_repeats_what_it_would_have_planned() -> None:
    """Blocks, tokens and published prefixes are those of steps that were planned."""
    setup = Setup(step_times=step_times(1), policy=PolicySpec.parse("fixed:256"), num_blocks=100)
    known = [taught(setup.step_times.device(0), setup.step_times.caps, 256) for _ in range(2)]
    engines = [OwnEngine(setup.scheduler(one)) for one in known]
    for engine in engines:
        for one in load(3).requests:
            engine.scheduler.add(Cluster(load(0), setup, 0)._request(replace(one, num_output_tokens=200), 0.0))
        now = 0.0
        while engine.scheduler.seats.prefilling or engine.scheduler.order or not engine.scheduler.num_repeats():
            now = _step(engine, now)
    fast, slow = engines
    count = min(150, fast.scheduler.num_repeats())
    assert count > 100
    fast.repeat([Repeat(now + 0.01 * n, 0.01, now + 0.01 * (n + 1)) for n in range(count)])
    for _ in range(count):
        now = _step(slow, now)
    for mine, theirs in zip(fast.scheduler.requests.values(), slow.scheduler.requests.values(), strict=True):
        assert mine.tokens == theirs.tokens
        assert mine.block_hashes == theirs.block_hashes
        assert len(mine.block_ids) == len(theirs.block_ids)
        assert (mine.num_scheduled, mine.num_committed) == (theirs.num_scheduled, theirs.num_committed)
    assert fast.scheduler.step_time.to_record()["largest_rows_known"] > 0
    fast.scheduler.pool.check_invariants()


def _step(engine: OwnEngine, now: float) -> float:
    work = engine.schedule(now)
    assert work is not None
    engine.commit(Ran(0.02 if work.chunks else 0.01), now + 0.01)
    return now + 0.01
