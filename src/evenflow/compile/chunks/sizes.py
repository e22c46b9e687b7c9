"""How long each chunk may be: shorter after running out of memory, and where a longer one would miss a time target."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from typing import Any

from evenflow.compile.chunks.memory import SMALLEST_CHUNK
from evenflow.compile.chunks.out_of_memory import RanOut
from evenflow.core.plan import ExecutorCaps
from evenflow.core.step_time import StepTimeModel

logger = logging.getLogger("evenflow")

_FIRST_TIMED_CHUNK = 64  # tokens, before any chunk has been timed
_CAPS = ExecutorCaps()


class ChunkSizes:
    """The limits that one optimizer's calls share; each chunk that runs updates them."""

    def __init__(self, target_seconds: float | None) -> None:
        self.target_seconds = target_seconds
        self.step_times = StepTimeModel()
        self.num_out_of_memory = 0
        self.max_rows = sys.maxsize  # sequences x tokens of one call, once one ran out of memory

    def run_chunks(
        self, num_sequences: int, num_cached: int, total: int, longest: int, run: Callable[[int, int], Any]
    ) -> list[int]:
        """Call `run(start, end)` chunk by chunk over `total` tokens; returns the lengths of the chunks.

        A chunk for which it returns `RanOut` is repeated at half the length.
        """
        lengths: list[int] = []
        while (start := sum(lengths)) < total:
            fitting = max(SMALLEST_CHUNK, self.max_rows // num_sequences)
            length = self.within_target(num_cached + start, min(longest, fitting, total - start))
            started = time.perf_counter()
            result = run(start, start + length)
            if isinstance(result, RanOut):
                self.halve(num_sequences, length, result)
                continue
            self.step_times.observe(_CAPS.prefill_shape(num_cached + start, length), time.perf_counter() - started)
            lengths.append(length)
        return lengths

    def halve(self, num_sequences: int, length: int, ran_out: RanOut) -> None:
        """Limit this call and later ones to half of what did not fit."""
        self.num_out_of_memory += 1
        smaller = max(SMALLEST_CHUNK, length // 2)
        self.max_rows = min(self.max_rows, num_sequences * smaller)
        logger.warning(
            "Memory pressure: %s tokens at a time do not fit, chunks of %s follow: %s", length, smaller, ran_out.message
        )

    def within_target(self, start: int, longest: int) -> int:
        """The longest chunk from `start` predicted to stay within the target; a small one until chunks were timed."""
        if self.target_seconds is None:
            return longest
        # At most twice the longest seen: predictions beyond that are guesses.
        longest = min(longest, 2 * self.step_times.largest_rows_known or _FIRST_TIMED_CHUNK)
        low, high = 1, longest
        while low < high:
            middle = (low + high + 1) // 2
            fits = self.step_times.upper(_CAPS.prefill_shape(start, middle)) <= self.target_seconds
            low, high = (middle, high) if fits else (low, middle - 1)
        return max(low, min(longest, _FIRST_TIMED_CHUNK // 4))
