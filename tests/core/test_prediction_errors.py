"""Margins from known errors, in exact figures."""

from __future__ import annotations

import math

import pytest

from evenflow.core.prediction_errors import PredictionError, PredictionErrors


def errors_of(*unexplained: float, is_fresh: bool = False) -> PredictionErrors:
    errors = PredictionErrors()
    for error in unexplained:
        errors.add(PredictionError(error, error, is_fresh))
    return errors


def test_untried_the_margin_is_a_quarter_and_shrinks_with_the_root_of_the_steps() -> None:
    assert errors_of().margin(is_fresh=False) == 0.25
    assert errors_of(*[0.0] * 3).margin(is_fresh=False) == 0.125
    assert errors_of(*[-1.0] * 99).margin(is_fresh=False) == 0.025


def test_the_margin_is_what_98_of_100_errors_stay_below() -> None:
    errors = errors_of(*(number / 100 for number in range(101)))
    assert errors.margin(is_fresh=False) == 0.98
    assert sum(error.error <= errors.margin(is_fresh=False) for error in errors.recent) == 99


def test_bursts_do_not_widen_the_margin_beyond_2_2_times_the_usual_errors() -> None:
    errors = errors_of(*[0.1] * 90, *[5.0] * 10)
    assert errors.margin(is_fresh=False) == pytest.approx(2.2 * 0.1)


def test_fresh_steps_have_a_margin_of_their_own() -> None:
    errors = errors_of(*[0.5] * 40, is_fresh=True)
    assert errors.margin(is_fresh=True) == 0.5
    assert errors.margin(is_fresh=False) == 0.25
    errors.add(PredictionError(0.0, 0.0, is_fresh=False))
    assert errors.margin(is_fresh=True) == 0.5


def test_only_the_last_128_errors_count() -> None:
    errors = errors_of(*[1.0] * 200, *[0.1] * 128)
    assert errors.margin(is_fresh=False) == 0.1
    assert len(errors.recent) == 128


def test_the_margin_goes_by_what_no_change_of_the_machine_explains() -> None:
    errors = PredictionErrors()
    for _ in range(40):
        errors.add(PredictionError(error=1.0, unexplained=0.2, is_fresh=False))
    assert errors.margin(is_fresh=False) == 0.2
    assert errors.mean == pytest.approx(1 - math.exp(-1))  # but the mean of all that was off


def test_errors_can_be_given_at_once() -> None:
    errors = errors_of(0.1, 0.2, 0.3)
    again = PredictionErrors(errors.recent)
    assert again.margin(is_fresh=False) == errors.margin(is_fresh=False)
    assert again.mean == errors.mean


def test_the_mean_is_relative_to_what_steps_took() -> None:
    assert PredictionErrors().mean == 0
    assert errors_of(math.log(2), -math.log(2)).mean == pytest.approx((0.5 + 1) / 2)


def test_a_size_counts_as_slow_once_it_was_three_times_in_a_row() -> None:
    errors = PredictionErrors()
    errors.add_to_size(448, 0.3)
    errors.add_to_size(448, 0.2)
    assert errors.least_of_size(448) == 0
    errors.add_to_size(448, 0.25)
    assert errors.least_of_size(448) == 0.2
    assert errors.least_of_size(440) == 0
    for _ in range(3):
        errors.add_to_size(448, -0.1)
    assert errors.least_of_size(448) == -0.1


def test_the_sizes_not_seen_for_longest_are_forgotten() -> None:
    errors = PredictionErrors()
    for size in (1, 2):
        for _ in range(3):
            errors.add_to_size(size, 0.5)
    errors.add_to_size(1, 0.5)
    for size in range(1000, 1255):
        errors.add_to_size(size, 0.0)
    assert (errors.least_of_size(1), errors.least_of_size(2)) == (0.5, 0.0)
