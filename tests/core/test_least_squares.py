"""The fit is the constrained minimum: checked by the conditions that only the minimum meets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenflow.core.least_squares import fit_nonnegative

values = st.floats(-10, 10).map(lambda value: round(value, 3))


def columns_and_targets() -> st.SearchStrategy[tuple[list[list[float]], list[float]]]:
    def draw(size: tuple[int, int]) -> st.SearchStrategy[tuple[list[list[float]], list[float]]]:
        num_columns, num_rows = size
        column = st.lists(values, min_size=num_rows, max_size=num_rows)
        return st.tuples(st.lists(column, min_size=num_columns, max_size=num_columns), column)

    return st.tuples(st.integers(1, 6), st.integers(1, 12)).flatmap(draw)


def test_exact_coefficients_are_found() -> None:
    columns = [[1.0, 1.0, 1.0, 1.0], [1.0, 2.0, 3.0, 5.0], [0.0, 1.0, 0.0, 1.0]]
    targets = [2 + 3 * b for b in columns[1]]
    coefficients, _ = fit_nonnegative(columns, targets, ridge=1e-9)
    assert coefficients == pytest.approx([2, 3, 0], abs=1e-6)


def test_a_coefficient_that_wants_to_be_negative_is_zero_and_the_others_make_up_for_it() -> None:
    coefficients, _ = fit_nonnegative([[1.0, 1.0, 1.0], [0.0, 1.0, 2.0]], [3.0, 2.0, 1.0], ridge=1e-9)
    assert coefficients == pytest.approx([2, 0], abs=1e-6)


def test_columns_that_are_alike_share_and_unused_ones_cost_nothing() -> None:
    coefficients, covariance = fit_nonnegative([[1.0, 2.0], [1.0, 2.0], [0.0, 0.0]], [2.0, 4.0], ridge=0.001)
    assert coefficients == pytest.approx([1, 1, 0], rel=0.01)
    assert covariance[2][2] > 100 * covariance[0][0] / 1000


def test_covariance_shrinks_with_samples() -> None:
    few = fit_nonnegative([[1.0] * 4], [1.0] * 4, ridge=0.03)[1]
    many = fit_nonnegative([[1.0] * 16], [1.0] * 16, ridge=0.03)[1]
    assert many[0][0] == pytest.approx(few[0][0] / 4, rel=0.05)


@given(columns_and_targets())
def test_no_small_move_that_is_allowed_comes_closer(data: tuple[list[list[float]], list[float]]) -> None:
    columns, targets = data
    ridge = 0.05
    coefficients, _ = fit_nonnegative(columns, targets, ridge)
    fitted = [
        sum(c * column[row] for c, column in zip(coefficients, columns, strict=True)) for row in range(len(targets))
    ]
    for coefficient, column in zip(coefficients, columns, strict=True):
        size_squared = sum(value * value for value in column) / len(column) or 1.0
        gradient = ridge * size_squared * coefficient + sum(
            value * (f - t) for value, f, t in zip(column, fitted, targets, strict=True)
        )
        scale = 1 + sum(abs(value * t) for value, t in zip(column, targets, strict=True))
        assert coefficient >= 0
        assert gradient >= -1e-6 * scale  # growing does not help
        assert coefficient == 0 or gradient <= 1e-6 * scale  # nor does shrinking
