"""Decode steps as captured graphs: one launch for all layers, for a number of rows that steps are padded to.

On a device without graphs the same function runs again instead, over the same memory: that is how it is tested.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch

OutputsT = TypeVar("OutputsT")

_FEWEST, _STEP = (1, 2, 4, 8), 16  # rows of the smallest graphs; from there on, multiples of half the step


def graph_sizes(most: int) -> tuple[int, ...]:
    """1, 2, 4, 8, 16, 24, 32 and so on, up to the first that holds `most` rows."""
    sizes = [*_FEWEST, *range(_STEP, most + _STEP, _STEP // 2)]
    last = next(index for index, size in enumerate(sizes) if size >= most)
    return tuple(sizes[: last + 1])


class DecodeGraphs(Generic[OutputsT]):
    """Graphs by their number of rows. `run(rows)` computes a step from memory that stays where it is."""

    def __init__(self, run: Callable[[int], OutputsT], sizes: tuple[int, ...], device: torch.device) -> None:
        self._run, self.sizes, self._device = run, sizes, device
        self._replays: dict[int, Callable[[], OutputsT]] = {}
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def size_for(self, num_rows: int) -> int | None:
        """The rows that a step is padded to; None if it is too large for a graph."""
        return next((size for size in self.sizes if size >= num_rows), None)

    def capture_all(self, prepare: Callable[[int], None]) -> None:
        """Largest first: the smaller ones then fit into the memory of the larger."""
        for size in reversed(self.sizes):
            prepare(size)
            self._replays[size] = self._captured(size)

    def replay(self, num_rows: int) -> OutputsT:
        """Run the step whose inputs are in place. The next replay overwrites the outputs."""
        return self._replays[num_rows]()

    def _captured(self, num_rows: int) -> Callable[[], OutputsT]:
        if self._device.type != "cuda":
            return lambda: self._run(num_rows)
        self._run(num_rows)  # kernels are compiled and libraries take their memory outside the graph
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            outputs = self._run(num_rows)

        def replay() -> OutputsT:
            graph.replay()
            return outputs

        return replay
