"""By how much predictions of steps were off, and what is to be allowed for that: the margin.

Errors are logarithms of actual / predicted, of mixed steps. Must not know: what a step costs, speeds, clocks.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

_NUM_ERRORS = 128  # that margins are taken over
_QUANTILE = 0.98
_BURST_QUANTILE = 0.84  # hardly moved by bursts, in which the machine is disturbed and against which no margin helps
_MAX_TAIL = 2.2  # times that lesser quantile are as much as the margin allows for
_UNTRIED_MARGIN = 0.25
# A captured graph, or the kernels chosen for one number of rows, may be worse than those for a few more. No cost shows
# that, and a policy that fills steps up to a limit comes there again and again. So errors are kept by size, too.
_ERRORS_PER_SIZE = 3
_MAX_SIZES = 256


class PredictionError(NamedTuple):
    error: float
    unexplained: float  # by a lasting change of the machine, and in units of how sure the prediction was
    is_fresh: bool  # among the first steps of a prefill


class PredictionErrors:
    """Those of the last steps. Fresh steps have a margin of their own."""

    def __init__(self, errors: Iterable[PredictionError] = ()) -> None:
        self.recent = deque(errors, maxlen=_NUM_ERRORS)
        self._by_size: dict[int, deque[float]] = {}  # the size not seen for longest first
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
        """The logarithm that 98 of 100 errors stay below."""
        return self._margins[is_fresh]

    def least_of_size(self, size: int) -> float:
        """By how much steps of a size took longer than predicted, each of the last few times."""
        errors = self._by_size.get(size, ())
        return min(errors) if len(errors) == _ERRORS_PER_SIZE else 0.0

    @property
    def mean(self) -> float:
        """Mean of |predicted - actual| / actual."""
        return sum(abs(math.exp(-error) - 1) for error, *_ in self.recent) / max(1, len(self.recent))

    def _margin(self, of_fresh: bool) -> float:
        """The greater quantile of noise is twice the lesser one; where there are bursts, it lies far beyond."""
        errors = sorted(unexplained for _, unexplained, is_fresh in self.recent if is_fresh == of_fresh)
        last = len(errors) - 1
        largest = min(errors[int(_QUANTILE * last)], _MAX_TAIL * errors[int(_BURST_QUANTILE * last)]) if errors else 0.0
        return max(largest, _UNTRIED_MARGIN / math.sqrt(1 + len(errors)))
