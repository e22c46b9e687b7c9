"""Least squares with non-negative coefficients, for about ten columns of a hundred rows.

The base package does not depend on numpy, and at this size a fit in plain Python takes about a millisecond.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import mul

Vector = Sequence[float]
Matrix = list[list[float]]


def fit_nonnegative(
    columns: Sequence[Vector], targets: Vector, prior: Vector, weight: float, least_sizes: Vector | None = None
) -> list[float]:
    """The x >= 0 for which columns.x is nearest to the targets.

    `prior` is what x would be without any rows. It pulls with the weight of that many rows, in which a column has its
    root mean square, or its least size. The weight must be positive, because columns may be equal.
    """
    sizes = [
        max(math.sqrt(_dot(column, column) / len(column)), least) or 1.0
        for column, least in zip(columns, least_sizes or [0.0] * len(columns), strict=True)
    ]
    gram = [[0.0] * len(columns) for _ in columns]
    for i, column in enumerate(columns):
        for j in range(i + 1):
            gram[i][j] = gram[j][i] = _dot(column, columns[j]) / (sizes[i] * sizes[j])
        gram[i][i] += weight
    right = [
        _dot(column, targets) / size + weight * size * before
        for column, size, before in zip(columns, sizes, prior, strict=True)
    ]
    return [value / size for value, size in zip(_minimise(gram, right), sizes, strict=True)]


def _minimise(gram: Matrix, right: Vector) -> list[float]:
    """The x >= 0 that minimises x.gram.x / 2 - right.x: Lawson and Hanson's active sets, with all free at first."""
    x = [0.0] * len(right)
    free = list(range(len(right)))
    for _ in range(10 * len(right)):  # an upper bound, in case rounding errors make it cycle
        solved = _solve([[gram[i][j] for j in free] for i in free], [right[i] for i in free])
        solution = dict(zip(free, solved, strict=True))
        negative = [i for i in free if solution[i] <= 0]
        if negative:
            reach = {i: x[i] / (x[i] - solution[i]) if x[i] else 0.0 for i in negative}
            first = min(negative, key=reach.__getitem__)
            for i in free:
                x[i] += reach[first] * (solution[i] - x[i])
            x[first] = 0.0
            free = [i for i in free if solution[i] > 0 or x[i] > 0]
            continue
        for i in free:
            x[i] = solution[i]
        pull = {i: right[i] - _dot(gram[i], x) for i in range(len(x)) if i not in solution}
        strongest = max(pull, key=pull.__getitem__, default=None)
        if strongest is None or pull[strongest] <= 1e-9 * abs(right[strongest]):
            break
        free.append(strongest)
    return x


def _solve(matrix: Matrix, right: Vector) -> list[float]:
    """Gauss-Jordan elimination, dropping each eliminated column. A positive definite matrix needs no pivoting."""
    rows = [[*line, value] for line, value in zip(matrix, right, strict=True)]
    for i in range(len(rows)):
        first, *rest = rows[i]
        pivot = [value / first for value in rest]
        rows = [[value - row[0] * above for value, above in zip(row[1:], pivot, strict=True)] for row in rows]
        rows[i] = pivot
    return [value for (value,) in rows]


def _dot(left: Vector, right: Vector) -> float:
    total: float = sum(map(mul, left, right))
    return total
