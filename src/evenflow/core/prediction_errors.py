"""Errors of recent predictions, and the margin that follows from them.

An error is log(actual / predicted) of a mixed step.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

_NUM_ERRORS = 128
_QUANTILE = 0.98
# In bursts, when something else disturbs the machine, no margin helps. They hardly move a lower quantile, which bounds
# the margin. Of normal noise the upper quantile is twice the lower one; with bursts it is far more.
_LOWER_QUANTILE = 0.84
_MAX_TAIL = 2.2  # margin / lower quantile
_UNTRIED_MARGIN = 0.25
# A captured graph, or the kernels for one number of rows, may be slower than those for a few more. Costs do not show
# that, and a policy that fills steps up to a limit returns to the same size. So errors are also kept by size.
_ERRORS_PER_SIZE = 3
_MAX_SIZES = 256


class PredictionError(NamedTuple):
    error: float
    unexplained: float  # by a change of the machine's speed; divided by the spread of the prediction
    is_fresh: bool  # one of the first steps of a prefill


class PredictionErrors:
    """The errors of recent steps. Fresh steps have their own margin."""

    def __init__(self, errors: Iterable[PredictionError] = ()) -> None:
        self.recent = deque(errors, maxlen=_NUM_ERRORS)
        self._by_size: dict[int, deque[float]] = {}  # least recently seen first
        self._margins = {is_fresh: self._margin(is_fresh) for is_fresh in (False, True)}

    def add(self, error: PredictionError) -> None:
        self.recent.append(error)
        self._margins[error.is_fresh] = self._margin(error.is_fresh)

    def add_to_size(self, size: int, error: float) -> None:
        errors = self._by_size.pop(size, None) or deque(maxlen=_ERRORS_PER_SIZE)
        self._by_size[size] = errors
        errors.append(error)
        if len(self._by_size) > _MAX_SIZES:
            del self._by_size[next(iter(self._by_size))]

    def margin(self, is_fresh: bool) -> float:
        """98 of 100 errors are below this."""
        return self._margins[is_fresh]

    def least_of_size(self, size: int) -> float:
        """The smallest error of the last few steps of this size."""
        errors = self._by_size.get(size, ())
        return min(errors) if len(errors) == _ERRORS_PER_SIZE else 0.0

    @property
    def mean(self) -> float:
        """Mean of |predicted - actual| / actual."""
        return sum(abs(math.exp(-error) - 1) for error, *_ in self.recent) / max(1, len(self.recent))

    def _margin(self, of_fresh: bool) -> float:
        errors = sorted(unexplained for _, unexplained, is_fresh in self.recent if is_fresh == of_fresh)
        last = len(errors) - 1
        largest = min(errors[int(_QUANTILE * last)], _MAX_TAIL * errors[int(_LOWER_QUANTILE * last)]) if errors else 0.0
        return max(largest, _UNTRIED_MARGIN / math.sqrt(1 + len(errors)))
