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


def fit(columns: list[list[float]], targets: list[float], weight: float = 1e-9) -> list[float]:
    return fit_nonnegative(columns, targets, [0.0] * len(columns), weight)


def test_exact_coefficients_are_found() -> None:
    columns = [[1.0, 1.0, 1.0, 1.0], [1.0, 2.0, 3.0, 5.0], [0.0, 1.0, 0.0, 1.0]]
    assert fit(columns, [2 + 3 * b for b in columns[1]]) == pytest.approx([2, 3, 0], abs=1e-6)


def test_a_coefficient_that_wants_to_be_negative_is_zero_and_the_others_make_up_for_it() -> None:
    assert fit([[1.0, 1.0, 1.0], [0.0, 1.0, 2.0]], [3.0, 2.0, 1.0]) == pytest.approx([2, 0], abs=1e-6)


def test_columns_that_are_alike_share_and_unused_ones_cost_nothing() -> None:
    columns = [[1.0, 2.0], [1.0, 2.0], [0.0, 0.0]]
    assert fit(columns, [2.0, 4.0], weight=0.001) == pytest.approx([1, 1, 0], rel=0.01)


def test_a_prior_counts_as_rows_and_stands_where_no_row_says_otherwise() -> None:
    assert fit_nonnegative([[1.0], [0.0]], [3.0], [1.0, 5.0], 1.0) == pytest.approx([2, 5])
    assert fit_nonnegative([[10.0]], [30.0], [1.0], 1.0) == pytest.approx([2])  # whatever the column's unit
    assert fit_nonnegative([[1.0] * 4], [3.0] * 4, [1.0], 1.0) == pytest.approx([2.6])
    assert fit_nonnegative([[1.0] * 4], [3.0] * 4, [1.0], 1.0, [4.0]) == pytest.approx([1.4])  # as rows of this size


@given(columns_and_targets())
def test_no_small_move_that_is_allowed_comes_closer(data: tuple[list[list[float]], list[float]]) -> None:
    columns, targets = data
    weight = 0.05
    prior = [float(place) for place in range(len(columns))]
    coefficients = fit_nonnegative(columns, targets, prior, weight)
    fitted = [
        sum(c * column[row] for c, column in zip(coefficients, columns, strict=True)) for row in range(len(targets))
    ]
    for coefficient, column, before in zip(coefficients, columns, prior, strict=True):
        size_squared = sum(value * value for value in column) / len(column) or 1.0
        gradient = weight * size_squared * (coefficient - before) + sum(
            value * (f - t) for value, f, t in zip(column, fitted, targets, strict=True)
        )
        scale = (
            1 + weight * size_squared * before + sum(abs(value * t) for value, t in zip(column, targets, strict=True))
        )
        assert coefficient >= 0
        assert gradient >= -1e-6 * scale  # growing does not help
        assert coefficient == 0 or gradient <= 1e-6 * scale  # nor does shrinking
