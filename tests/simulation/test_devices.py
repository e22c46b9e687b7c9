"""How long steps take: by a model, by moments of noise, and with rows shed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenflow.core.plan import ExecutorCaps
from evenflow.simulation.devices import BlockNoise, ModelDevice, Ran, StepWork

NOISE = BlockNoise([1.0, 2.0, 0.5], [1.0, 3.0, 1.5])  # 0 to 3.5
WORK = StepWork(4, 400, ((0, 100), (50, 60)))


@pytest.mark.parametrize(
    ("seconds", "at", "taken"),
    [
        (0.5, 0.25, 0.5),
        (0.5, 1.0, 1.5),
        (1.0, 0.5, 0.5 + 1.5),  # half at full speed, half three times as slow
        (0.5, 3.4, 0.1 + (0.5 - 0.1 / 1.5)),  # the blocks repeat
        (0.5, 3.5 + 1.0, 1.5),
        (2.0 * (1 + 2 / 3 + 1 / 3), 0.0, 7.0),  # two periods
    ],
)
def test_a_step_is_as_slow_as_the_blocks_that_it_runs_in(seconds: float, at: float, taken: float) -> None:
    assert NOISE(seconds, at) == pytest.approx(taken)


def test_noise_may_begin_at_any_of_its_moments() -> None:
    assert BlockNoise(NOISE.block_seconds, NOISE.slowness, start=1.0)(0.5, 0.0) == NOISE(0.5, 1.0)


@given(st.floats(0.0, 20.0), st.floats(0.0, 5.0), st.floats(0.0, 5.0))
def test_two_steps_in_a_row_take_as_long_as_one(at: float, first: float, second: float) -> None:
    middle = at + NOISE(first, at)
    assert NOISE(first, at) + NOISE(second, middle) == pytest.approx(NOISE(first + second, at), abs=1e-9)


def rows(work: StepWork) -> float:
    return 0.001 * work.num_rows


def test_a_step_takes_what_the_model_says() -> None:
    assert ModelDevice(rows).run(WORK, 3.0) == Ran(0.164, {})
    assert ModelDevice(rows).launch_seconds(WORK, 0.0) == 0.0


def test_a_step_in_time_sheds_nothing() -> None:
    limited = StepWork(4, 400, WORK.chunks, most_seconds=0.2)
    ran = ModelDevice(rows, num_layers=10).run(limited, 3.0)
    assert ran.seconds == pytest.approx(0.164)
    assert not ran.shed


def test_a_slower_step_sheds_the_rows_that_would_be_late() -> None:
    limited = StepWork(4, 400, WORK.chunks, most_seconds=0.2)
    slow = BlockNoise([100.0], [2.0])
    ran = ModelDevice(rows, slow, num_layers=10).run(limited, 3.0)
    assert ran.seconds == pytest.approx(0.2, rel=0.05)
    assert set(ran.shed) == {4, 5}
    assert all(
        1 <= one.length <= one.mean_length < planned for one, planned in zip(ran.shed.values(), (100, 60), strict=True)
    )
    assert not ModelDevice(rows, slow, num_layers=10).run(WORK, 3.0).shed, "without a limit"


def test_work_has_the_figures_of_a_step() -> None:
    shape = StepWork(3, 300, ((10, 5),), prefill_logit_rows=1).shape(ExecutorCaps(row_buckets=(4, 16)))
    assert (shape.total_rows, shape.padded_rows, shape.prefill_rows, shape.logit_rows) == (8, 16, 5, 4)
    assert (shape.decode_context, shape.prefill_attention) == (300, sum(range(11, 16)))
