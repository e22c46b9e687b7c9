"""Drops a step's last prefill rows while it runs, if it is slower than planned.

A row depends on no later row, so the last rows can be dropped after any layer without changing the others. They are
recomputed in a later step. Must not know about models and tensors.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from evenflow.core.plan import Shed
from evenflow.core.policy import FLOOR_TOKENS

# Remaining layers are predicted from the last few: most disturbances last longer than a layer.
_LAST_LAYERS = 4
_MIN_LAYERS = 2  # measured before any row is dropped


class Shedder:
    """Tracks one step's layers, and the prefill rows that still fit before its deadline."""

    def __init__(
        self, num_decodes: int, lengths: Sequence[int], num_layers: int, end: float, clock: Callable[[], float]
    ) -> None:
        """`end`: the latest end of the last layer, on the clock."""
        self._num_decodes = num_decodes
        self._planned, self.lengths = list(lengths), list(lengths)
        self._num_layers = num_layers
        self._end = end
        self._clock = clock
        self._row_layers = list(lengths)  # rows times layers for each chunk, the current layer included
        # Rows computed, and the time. The first layer is not measured: it is often slower.
        self._layers: deque[tuple[int, float]] = deque(maxlen=_LAST_LAYERS + 1)

    def after_layer(self, done: int) -> bool:
        """Call after each layer but the last. True: rows were dropped, `lengths` has each chunk's remaining rows."""
        has_shed = self._keep(self._fitting(done))
        for number, length in enumerate(self.lengths):
            self._row_layers[number] += length
        return has_shed

    def _fitting(self, done: int) -> int:
        """Prefill rows that the remaining layers can compute in time."""
        now, num_prefill_rows = self._clock(), sum(self.lengths)
        num_rows = self._num_decodes + num_prefill_rows
        rows_before = self._layers[-1][0] if self._layers else 0
        self._layers.append((rows_before + num_rows, now))
        if len(self._layers) <= _MIN_LAYERS:
            return num_prefill_rows
        (first_rows, since), (rows, _) = self._layers[0], self._layers[-1]
        row_seconds = (now - since) / (rows - first_rows) * (self._num_layers - done)
        left = self._end - now
        if row_seconds * num_rows <= max(0.0, left):
            return num_prefill_rows
        return max(int(left / row_seconds) - self._num_decodes, FLOOR_TOKENS)

    def _keep(self, num_rows: int) -> bool:
        """Keep the first rows, at least one of each chunk."""
        kept, spare = [], max(0, num_rows - len(self.lengths))
        for length in self.lengths:
            kept.append(1 + min(length - 1, spare))
            spare -= kept[-1] - 1
        has_shed, self.lengths = kept != self.lengths, kept
        return has_shed

    def shed(self) -> dict[int, Shed]:
        """The shortened chunks, by their indices in the step's result."""
        return {
            self._num_decodes + number: Shed(length, round(self._row_layers[number] / self._num_layers))
            for number, (length, planned) in enumerate(zip(self.lengths, self._planned, strict=True))
            if length < planned
        }


class TailTime:
    """Learns the seconds after a step's layers, which grow with the prompt rows that need logprobs."""

    def __init__(self) -> None:
        self._plain = 0.0
        self._of_row = 0.0

    def predict(self, num_logprob_rows: int) -> float:
        return self._plain + self._of_row * num_logprob_rows

    def observe(self, num_logprob_rows: int, seconds: float) -> None:
        if num_logprob_rows:
            self._of_row = max(0.0, seconds - self._plain) / num_logprob_rows
        else:
            self._plain = seconds
