"""Leaves out the last prefill rows of a step that turns out slower than planned, while it runs.

A row depends on no row after it, so the last rows can go after any layer: what the layers have computed for the others
stays right. Rows that went are computed again in a later step. Knows nothing of models and tensors.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from evenflow.core.plan import Shed
from evenflow.core.policy import FLOOR_TOKENS

# The speed of the layers to come is that of the last few: what slows a machine mostly lasts longer than a layer.
_LAST_LAYERS = 4
_LEAST_LAYERS = 2  # to have run, before anything is left out


class Shedder:
    """One step's chunks while its layers run: how many of their rows still end in time."""

    def __init__(
        self, num_decodes: int, lengths: Sequence[int], num_layers: int, end: float, clock: Callable[[], float]
    ) -> None:
        """`end`: on the clock, when the last layer must have ended."""
        self._num_decodes = num_decodes
        self._planned, self.lengths = list(lengths), list(lengths)
        self._num_layers = num_layers
        self._end = end
        self._clock = clock
        self._row_layers = [0] * len(lengths)  # rows times layers computed, of each chunk
        self._layers: deque[tuple[int, float]] = deque([(0, clock())], maxlen=_LAST_LAYERS + 1)  # rows so far, and when

    def after_layer(self, done: int) -> bool:
        """So many layers have run. True: the chunks go on with fewer rows, `lengths` says how many."""
        for number, length in enumerate(self.lengths):
            self._row_layers[number] += length
        now, num_rows = self._clock(), self._num_decodes + sum(self.lengths)
        self._layers.append((self._layers[-1][0] + num_rows, now))
        (rows_before, since), (rows, _) = self._layers[0], self._layers[-1]
        seconds_per_row = (now - since) / (rows - rows_before)
        left = self._num_layers - done
        if done < _LEAST_LAYERS or not left or seconds_per_row * num_rows * left <= self._end - now:
            return False
        fitting = int((self._end - now) / (seconds_per_row * left)) - self._num_decodes
        return self._keep(max(fitting, FLOOR_TOKENS))

    def _keep(self, num_rows: int) -> bool:
        """The first rows, but one of each chunk at least."""
        kept, spare = [], max(0, num_rows - len(self.lengths))
        for length in self.lengths:
            kept.append(1 + min(length - 1, spare))
            spare -= kept[-1] - 1
        has_shed, self.lengths = kept != self.lengths, kept
        return has_shed

    def shed(self) -> dict[int, Shed]:
        """The chunks that lost rows, by their sequence in the step's result."""
        return {
            self._num_decodes + number: Shed(length, max(length, round(self._row_layers[number] / self._num_layers)))
            for number, (length, planned) in enumerate(zip(self.lengths, self._planned, strict=True))
            if length < planned
        }
