"""No alarm goes off because there is much to do: not in the log, not at /ready, and none of the documented alerts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path

import pytest
import yaml

from evenflow.core.plan import StepShape
from tests.server.stepping import ObservedEngine, step_seconds

RULES = Path(__file__).parents[3] / "dashboards" / "alerts.yaml"
POLICIES = (
    "target:40ms",
    "fixed:64",
    *(pytest.param(one, marks=pytest.mark.slow) for one in ("target:40ms,paced", "unchunked", "alternate:32")),
)


def figure(observed: ObservedEngine, name: str) -> float:
    families = observed.observer.collectors.collect()
    return sum(sample.value for family in families for sample in family.samples if sample.name == name)


# What each alert says, over a whole run instead of its last minutes.
ALERTS: dict[str, Callable[[ObservedEngine], bool]] = {
    "evenflow:up == 0": lambda observed: figure(observed, "evenflow:up") == 0,
    "evenflow:stuck == 1": lambda observed: figure(observed, "evenflow:stuck") == 1,
    "rate(evenflow:retries_total[5m]) > 0": lambda observed: figure(observed, "evenflow:retries_total") > 0,
    "rate(evenflow:late_tokens_total[5m]) > 0.05 * rate(vllm:generation_tokens_total[5m])": lambda observed: (
        figure(observed, "evenflow:late_tokens_total") > 0.05 * figure(observed, "vllm:generation_tokens_total")
    ),
    "evenflow:tbt_feasible_target_seconds > 0": lambda observed: (
        figure(observed, "evenflow:tbt_feasible_target_seconds") > 0
    ),
}


def documented(group: str) -> list[str]:
    [rules] = [one["rules"] for one in yaml.safe_load(RULES.read_text())["groups"] if one["name"] == group]
    return [rule["expr"] for rule in rules]


def test_every_alert_about_a_fault_is_among_these() -> None:
    assert documented("evenflow") == list(ALERTS)
    assert documented("evenflow-capacity")  # load does set these off: that is what they are for


def choices(observed: ObservedEngine) -> Iterator[None]:
    """One request with n=128: all share their prompt, and most wait for a slot."""
    for number in range(128):
        observed.add(f"choice-{number}", 200, 30)
    yield from steps(observed)


def flood(observed: ObservedEngine) -> Iterator[None]:
    """Twice as many requests as can be served, for a while."""
    sizes = cycle([(30, 40), (300, 5), (90, 20), (16, 60)])
    for number in range(60):
        observed.add(f"flood-{number}", *next(sizes), token=number % 400)
        yield from steps(observed, 6)
    yield from steps(observed)


def too_little_memory(observed: ObservedEngine) -> Iterator[None]:
    """Long answers that together need far more than the KV cache: they are preempted again and again."""
    for number in range(40):
        observed.add(f"long-{number}", 40, 150, token=number)
    yield from steps(observed)


def patient_streams(observed: ObservedEngine) -> Iterator[None]:
    """Streams that may take their time, beside prompts."""
    has_target = observed.engine.policy.target is not None
    for number in range(60):
        observed.add(f"patient-{number}", 100, 40, token=number, tbt_target="2s" if has_target else None)
        yield from steps(observed, 10)
    yield from steps(observed)


def aborts(observed: ObservedEngine) -> Iterator[None]:
    """Half of all clients leave early."""
    for number in range(50):
        observed.add(f"left-{number}", 120, 30, token=number % 400)
        yield from steps(observed, 5)
        if number % 2 and f"left-{number - 1}" in observed.observer.requests:
            observed.abort(f"left-{number - 1}")
    yield from steps(observed)


def steps(observed: ObservedEngine, num_steps: int = 20_000) -> Iterator[None]:
    for _ in range(num_steps):
        if not observed.engine.has_work:
            return
        observed.step()
        yield
    assert num_steps < 20_000, "no end in sight"


def watch_the_watchdog(observed: ObservedEngine) -> None:
    """The engine counts as hung at the end of no step."""
    engine, wait = observed.engine, observed.engine.executor.wait

    def watched() -> object:
        result = wait()
        assert not engine.pulse.is_overdue(engine.clock())
        return result

    engine.executor.wait = watched  # type: ignore[method-assign, assignment]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("load", [choices, flood, too_little_memory, patient_streams, aborts])
def test_load_alone_sets_off_no_alarm(
    load: Callable[[ObservedEngine], Iterator[None]], policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    observed = ObservedEngine(policy, num_blocks=60 if load is too_little_memory else 200)
    watch_the_watchdog(observed)
    with caplog.at_level(logging.WARNING):
        for _ in load(observed):
            assert observed.observer.admission_failure is None  # /ready is 200
            assert observed.observer.feasible_target_s is None
    assert caplog.messages == []
    assert [alert for alert, fires in ALERTS.items() if fires(observed)] == []


@pytest.mark.parametrize("policy", ["target:40ms", "fixed:64", "unchunked"])
@pytest.mark.parametrize("slowness", [1, 100, 10_000])  # a step of a minute and more is a slow one, not a hung one
def test_a_slow_machine_does_not_count_as_hung(policy: str, slowness: float) -> None:
    factors = cycle([1.0] * 40 + [10.0])  # and one that is disturbed

    def cost(shape: StepShape) -> float:
        return slowness * next(factors) * step_seconds(shape)

    observed = ObservedEngine(policy, cost=cost)
    watch_the_watchdog(observed)
    for _ in flood(observed):
        assert observed.observer.admission_failure is None
