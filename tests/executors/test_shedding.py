"""Leaving out rows of a step while it runs, on a clock that the layers move."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from evenflow.core.plan import Shed
from evenflow.core.policy import FLOOR_TOKENS
from evenflow.executors.fake import VirtualClock
from evenflow.executors.shedding import Shedder, TailTime

NUM_LAYERS, NUM_DECODES = 30, 4
ROW_SECONDS = 0.0001  # of one row in one layer


def run(
    lengths: Sequence[int], most_seconds: float, slowness: Callable[[int], float] = lambda layer: 1.0
) -> tuple[float, dict[int, Shed]]:
    """Seconds of a step with these chunks, and what it left out."""
    clock = VirtualClock(5.0)
    shedder = Shedder(NUM_DECODES, lengths, NUM_LAYERS, clock.now + most_seconds, clock)
    before = lengths
    for layer in range(1, NUM_LAYERS + 1):
        clock.now += slowness(layer) * ROW_SECONDS * (NUM_DECODES + sum(shedder.lengths))
        if layer < NUM_LAYERS:
            has_shed = shedder.after_layer(layer)
            assert has_shed == (list(before) != shedder.lengths)
            before = list(shedder.lengths)
    return clock.now - 5.0, shedder.shed()


def planned_seconds(*lengths: int) -> float:
    return NUM_LAYERS * ROW_SECONDS * (NUM_DECODES + sum(lengths))


def test_a_step_in_time_is_left_alone() -> None:
    assert run([200], planned_seconds(200) * 1.01) == (pytest.approx(planned_seconds(200)), {})


@pytest.mark.parametrize("slowness", [1.2, 1.7, 3.0])
def test_a_slow_step_ends_in_time_with_fewer_rows(slowness: float) -> None:
    most = planned_seconds(200) * 1.05
    seconds, shed = run([200], most, lambda layer: slowness)
    assert seconds <= most * 1.001
    assert seconds > 0.9 * most, "it left out more than it had to"
    (found,) = shed.values()
    assert FLOOR_TOKENS < found.length < 200 / (slowness - 0.1)


def test_its_seconds_are_those_of_the_rows_that_layers_computed_on_average() -> None:
    seconds, shed = run([200], planned_seconds(200), lambda layer: 1.7)
    (found,) = shed.values()
    assert seconds == pytest.approx(1.7 * planned_seconds(found.mean_length), rel=0.01)


@pytest.mark.parametrize("num_layers", [4, 30])
def test_the_last_layer_counts_as_well(num_layers: int) -> None:
    clock = VirtualClock()
    shedder = Shedder(0, [100], num_layers, end=0.0, clock=clock)
    computed = []
    for layer in range(1, num_layers):
        computed.append(shedder.lengths[0])
        clock.now += 1.0
        shedder.after_layer(layer)
    computed.append(shedder.lengths[0])
    (shed,) = shedder.shed().values()
    assert computed[0] > computed[-1] == shed.length
    assert shed.mean_length == round(sum(computed) / num_layers)


def test_a_first_layer_that_takes_longer_is_no_reason() -> None:
    _, shed = run([200], planned_seconds(200) * 1.1, lambda layer: 3.0 if layer == 1 else 1.0)
    assert not shed


def test_a_clock_that_stands_still_is_no_reason() -> None:
    shedder = Shedder(NUM_DECODES, [200], NUM_LAYERS, end=-1.0, clock=VirtualClock())
    assert not any(shedder.after_layer(layer) for layer in range(1, NUM_LAYERS))


def test_a_machine_that_turns_slow_in_mid_step_costs_rows_then() -> None:
    most = planned_seconds(300) * 1.05
    seconds, shed = run([300], most, lambda layer: 1.0 if layer <= 15 else 2.0)
    assert seconds <= most * 1.05, "four layers pass before all of it is seen"
    (found,) = shed.values()
    assert found.length < 200 < found.mean_length


def test_the_first_chunks_keep_their_rows_and_each_keeps_one() -> None:
    _, shed = run([60, 60, 60], planned_seconds(60, 45, 1), lambda layer: 1.3)
    assert 2 + NUM_DECODES in shed
    assert NUM_DECODES not in shed, "the first chunk is served first"
    assert shed[2 + NUM_DECODES].length == 1


@pytest.mark.parametrize("lengths", [[200], [10] * 30, [1] * 20, [5]])
def test_prefill_does_not_fall_below_its_floor(lengths: list[int]) -> None:
    _, shed = run(lengths, 0.0)
    kept = [shed[NUM_DECODES + n].length if NUM_DECODES + n in shed else length for n, length in enumerate(lengths)]
    assert sum(kept) >= min(FLOOR_TOKENS, sum(lengths))
    assert all(kept)
    assert all(one.length <= one.mean_length for one in shed.values())


def test_one_slow_layer_is_no_reason() -> None:
    seconds, shed = run([200], planned_seconds(200) * 1.45, lambda layer: 3.0 if layer == 10 else 1.0)
    assert not shed
    assert seconds == pytest.approx(planned_seconds(200) * 32 / 30)


def test_logprobs_of_one_step_cost_the_next_one_without_them_nothing() -> None:
    tail = TailTime()
    tail.observe(0, 0.01)
    tail.observe(400, 0.41)
    assert tail.predict(0) == 0.01
    assert tail.predict(100) == pytest.approx(0.11)
    tail.observe(0, 0.02)
    assert tail.predict(100) == pytest.approx(0.12)
