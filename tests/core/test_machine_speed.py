"""What the last few steps say of the machine's speed, in exact figures."""

from __future__ import annotations

import pytest

from evenflow.core.machine_speed import MachineSpeed, RecentStep, Sample
from evenflow.core.plan import ExecutorCaps
from evenflow.core.step_costs import features_of


def step(ratio: float, *, spread: float = 1.0) -> RecentStep:
    """A step that took `ratio` times what the costs say."""
    shape = ExecutorCaps().step_shape(num_decodes=1, decode_context=1)
    return RecentStep(Sample(features_of(shape), ratio, 1.0), shape, ratio, 1.0, 1.0, spread, is_fresh=False)


def speed_after(*ratios: float) -> MachineSpeed:
    speed = MachineSpeed()
    for ratio in ratios:
        speed.take(step(ratio))
    return speed


def test_without_steps_the_speed_is_its_level() -> None:
    speed = MachineSpeed()
    assert (speed.level, speed.now, speed.last) == (1.0, 1.0, 1.0)
    assert speed.suspected_level() is None
    assert speed.settled() is None


def test_one_slow_step_is_only_the_last_and_three_move_the_speed() -> None:
    one = speed_after(1, 1, 1, 1, 5)
    assert (one.now, one.last) == (1.0, 5.0)
    assert speed_after(1, 1, 1, 1, 2, 2).now < 1.5
    assert speed_after(1, 1, 1, 1, 2, 2, 2).now == pytest.approx(2, rel=0.01)
    assert speed_after(2, 2, 2, 2, 1, 1, 1).now == 1.0


def test_small_deviations_are_taken_for_noise_and_large_ones_at_face_value() -> None:
    assert abs(speed_after(*[1.01] * 4).now - 1) < 0.001
    assert speed_after(*[3.0] * 4).now == pytest.approx(3, rel=0.01)
    speeds = [speed_after(*[1 + percent / 100] * 4).now for percent in range(100)]
    assert speeds == sorted(speeds)


def test_five_steps_that_stray_alike_make_another_level_suspect() -> None:
    assert speed_after(*[1.3] * 4).suspected_level() is None
    assert speed_after(*[1.3] * 5).suspected_level() == 1.3
    assert speed_after(1.3, 1.4, 1.5, 1.6, 1.7).suspected_level() == 1.5
    assert speed_after(*[0.5] * 5).suspected_level() == 0.5
    assert speed_after(*[1.19] * 5).suspected_level() is None
    assert speed_after(1.3, 1.3, 1.1, 1.3, 1.3).suspected_level() is None
    assert speed_after(1.3, 1.3, 0.5, 1.3, 1.3).suspected_level() is None


def test_steps_of_uncertain_cost_accuse_no_machine() -> None:
    speed = speed_after(*[2.0] * 4)
    speed.take(step(2.0, spread=1.5))
    assert speed.suspected_level() is None
    assert not speed.recent[-1].is_familiar


def test_a_change_of_level_relabels_the_steps_since_and_none_before() -> None:
    speed = speed_after(1, 1, 1, 2, 2, 2, 2, 2)
    speed.change_level(2.0)
    assert [recent.sample.level for recent in speed.recent] == [1.0] * 3 + [2.0] * 5
    assert [recent.sample.normal_seconds for recent in speed.recent] == [1.0] * 8
    speed.update()
    assert (speed.level, speed.now) == (2.0, 2.0)
    assert speed.suspected_level() is None


def test_a_change_to_a_lower_level_relabels_alike() -> None:
    speed = speed_after(1, 1, 0.5, 0.5, 0.5, 0.5, 0.5)
    speed.change_level(0.5)
    assert [recent.sample.level for recent in speed.recent] == [1.0] * 2 + [0.5] * 5


def test_a_step_is_settled_once_five_followed_it() -> None:
    speed = speed_after(1, 2, 3, 4, 5)
    assert speed.settled() is None
    speed.take(step(6))
    settled = speed.settled()
    assert settled is not None
    assert settled.ratio == 1
