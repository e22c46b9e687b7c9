"""Which seconds are a step's own, and which steps are known only together."""

from __future__ import annotations

import pytest

from evenflow.core.plan import ExecutorCaps
from evenflow.hosts.in_flight import InFlightStep, InFlightSteps

CAPS = ExecutorCaps()
MS = 0.001


def step(number: int, planned_at: float, *, is_empty: bool = False) -> InFlightStep:
    shape = None if is_empty else CAPS.step_shape(num_decodes=number, decode_context=100 * number)
    return InFlightStep(planned_at, key=number, shape=shape)


class Host:
    """Adds steps of 1, 2, 3... decodes; times are milliseconds."""

    def __init__(self) -> None:
        self.steps = InFlightSteps()
        self._num_added = 0

    def add(self, planned_at: float, launched_at: float, *, is_empty: bool = False) -> None:
        self._num_added += 1
        self.steps.add(step(self._num_added, planned_at * MS, is_empty=is_empty))
        self.steps.launched(self._num_added, launched_at * MS)

    def end(self, number: int, now: float) -> InFlightStep:
        return self.steps.end(number, now * MS)

    @property
    def observed(self) -> tuple[list[int], float] | None:
        """The number of decodes of each step observed, and the milliseconds that they took together."""
        if (observation := self.steps.observation) is None:
            return None
        return [shape.decode_sequences for shape in observation.shapes], pytest.approx(observation.seconds / MS)


def test_a_step_alone_is_timed_from_its_plan_to_its_end() -> None:
    host = Host()
    host.add(100, 101)
    ended = host.end(1, 120)
    assert ended.is_own_time
    assert ended.seconds == pytest.approx(20 * MS)
    assert host.observed == ([1], 20)


def test_the_devices_clock_is_believed_but_for_idle_time() -> None:
    host = Host()
    host.add(100, 130)
    assert host.steps.end(1, 131 * MS, 500 * MS).seconds == pytest.approx(31 * MS)  # it was idle before
    host.add(132, 150)
    host.add(151, 170)
    ended = host.steps.end(2, 170.5 * MS, 12 * MS)  # the host did not have to wait
    assert ended.is_own_time
    assert host.observed == ([2], 12)


def test_steps_behind_each_other_are_timed_from_end_to_end_while_the_host_waits() -> None:
    host = Host()
    host.add(100, 101)
    host.add(102, 103)
    host.end(1, 120)
    assert host.observed == ([1], 20)
    host.add(121, 122)
    assert host.end(2, 145).is_own_time
    assert host.observed == ([2], 25)


def test_a_step_whose_end_was_seen_late_is_learned_together_with_the_next() -> None:
    host = Host()
    host.add(100, 101)
    host.add(102, 130)  # launching took long: the first step may have ended at any time since
    first = host.end(1, 131)
    assert not first.is_own_time
    assert host.observed is None
    host.add(132, 133)
    second = host.end(2, 150)
    assert not second.is_own_time  # its beginning is not known
    assert host.observed == ([1, 2], 50)
    assert host.end(3, 170).is_own_time
    assert host.observed == ([3], 20)


def test_at_most_four_steps_are_learned_together() -> None:
    host = Host()
    host.add(100, 101)
    observed = []
    for number in range(1, 10):
        end = 100 + 30 * number
        host.add(end - 28, end - 1)  # launched just before the end of the one before is seen
        host.end(number, end)
        observed.append(host.observed)
    assert [one for one in observed if one] == [([1, 2, 3, 4], 120), ([5, 6, 7, 8], 120)]


def test_empty_steps_are_neither_counted_nor_learned() -> None:
    host = Host()
    host.add(100, 101, is_empty=True)
    host.add(102, 103)
    assert host.steps.num_steps == 1
    host.end(1, 110)
    assert host.observed is None
    host.end(2, 130)
    assert host.observed == ([2], 20)
    assert host.steps.num_steps == 0


def test_a_step_that_never_ended_is_passed_over() -> None:
    host = Host()
    host.add(100, 101)
    host.add(102, 103)
    assert host.end(2, 130).key == 2
    assert host.observed == ([2], 28)


def test_a_launch_counts_only_where_another_steps_output_waits_for_it() -> None:
    """On a CPU, a step is done when its launch returns; with a grammar, it may be sampled after the next output."""
    steps = InFlightSteps()
    steps.add(step(1, 0.100))
    assert steps.launched(1, 0.140) is None  # nothing else is in flight
    steps.add(step(2, 0.141))
    launched = steps.launched(2, 0.153)
    assert launched is not None
    assert launched.launch_seconds == pytest.approx(0.012)
    steps.add(step(3, 0.154))
    steps.end(1, 0.160)
    assert steps.launched(3, 0.161) is None  # the output did not wait
    assert steps.launched(4, 0.162) is None  # unknown
    observed = []
    for number, ended_at in ((2, 0.170), (3, 0.180)):
        steps.end(number, ended_at)
        assert steps.observation is not None
        observed += steps.observation.launches
    assert observed == [pytest.approx(0.012), 0.0]
