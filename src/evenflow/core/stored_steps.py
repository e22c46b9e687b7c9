"""Checks the numbers of a stored StepTimeModel: a file may hold anything, and the scheduler relies on these numbers."""

from __future__ import annotations

import math
from typing import Any

from evenflow.core.step_costs import NUM_FIGURES, Sample, StepCosts
from evenflow.errors import InvalidInput

_MAX_STEPS = 64  # that one sample took together
_MAX_FIGURE = 1 << 62


def checked_count(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _MAX_FIGURE:
        raise _invalid(value, "a whole number")
    return value


def checked_samples(value: Any, most: int) -> list[Sample]:
    return [_sample(one) for one in _list(value, most)]


def checked_costs(value: Any) -> StepCosts:
    *costs, knee, launch = _list(value, NUM_FIGURES + 2, NUM_FIGURES + 2)
    return StepCosts._make([*map(_seconds, costs), checked_count(knee), _seconds(launch)])


def checked_errors(value: Any, most: int) -> list[tuple[float, float]]:
    """Predicted seconds, and the logarithm of actual over predicted."""
    pairs = [_list(one, 2, 2) for one in _list(value, most)]
    return [(_seconds(predicted), _number(error, -100.0, 100.0)) for predicted, error in pairs]


def _sample(value: Any) -> Sample:
    steps, seconds = _list(value, 2, 2)
    figures = [_list(one, NUM_FIGURES, NUM_FIGURES) for one in _list(steps, _MAX_STEPS, 1)]
    if not _seconds(seconds) > 0:
        raise _invalid(seconds, "more than 0 seconds")
    return Sample(tuple(tuple(map(checked_count, one)) for one in figures), seconds)


def _seconds(value: Any) -> float:
    return _number(value, 0.0, 1e6)


def _number(value: Any, low: float, high: float) -> float:
    if type(value) not in (int, float) or not low <= value <= high or math.isnan(value):
        raise _invalid(value, f"a number from {low} to {high}")
    return float(value)


def _list(value: Any, most: int, least: int = 0) -> list[Any]:
    if not isinstance(value, list | tuple) or not least <= len(value) <= most:
        raise _invalid(value, f"a list of {least} to {most}")
    return list(value)


def _invalid(value: Any, expected: str) -> InvalidInput:
    return InvalidInput(f"Got {value!r:.40} in stored step times but expected {expected}.")
