"""CUDA graphs of whole steps, launched at once and padded to fixed row counts.

A step of decodes alone is one graph. A step with chunks is a graph for each layer, with attention launched between
them, because the division of attention depends on the chunks. On a device without graphs the same functions run again
over the same memory: that is how this module is tested.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

import torch

KeyT = TypeVar("KeyT", bound=Hashable)
OutputsT = TypeVar("OutputsT")

_FEWEST, _STEP = (1, 2, 4, 8), 16  # rows of the smallest graphs of decodes; from there on, multiples of half the step
# Rows of steps with chunks. A larger step runs for so long that its kernels can be launched one by one meanwhile.
_MIXED = (*range(64, 1025, 64), *range(1152, 2049, 128))


def graph_sizes(most: int) -> tuple[int, ...]:
    """Of decodes alone: 1, 2, 4, 8, 16, 24, 32 and so on, up to the first that holds `most` rows."""
    sizes = [*_FEWEST, *range(_STEP, most + _STEP, _STEP // 2)]
    last = next(index for index, size in enumerate(sizes) if size >= most)
    return tuple(sizes[: last + 1])


def mixed_graph_sizes(most: int) -> tuple[int, ...]:
    """Of steps with chunks, where a step has at most `most` rows."""
    return tuple(size for size in _MIXED if size <= most)


def size_for(num_rows: int, sizes: tuple[int, ...]) -> int | None:
    """The rows that a step is padded to; None if it is too large for a graph."""
    return next((size for size in sizes if size >= num_rows), None)


def capture(
    run: Callable[[], OutputsT], stream: torch.cuda.Stream | None, pool: Any = None
) -> tuple[torch.cuda.CUDAGraph, OutputsT]:
    """What `run` launches, on a stream of its own, as a graph. Does not wait for the device.

    `torch.cuda.graph` does, and gives memory back, which hundreds of graphs cannot afford.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            outputs = run()
        finally:
            graph.capture_end()
    return graph, outputs


class Graphs(Generic[KeyT, OutputsT]):
    """Graphs by key. `run(key)` computes from memory that stays where it is, to outputs that are the same each time."""

    def __init__(self, run: Callable[[KeyT], OutputsT], device: torch.device) -> None:
        self._run, self._device = run, device
        self._replays: dict[KeyT, Callable[[], OutputsT]] = {}
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def capture(self, key: KeyT) -> None:
        """Largest first: the smaller ones then fit into the memory of the larger."""
        self._replays[key] = self._captured(key)

    def replay(self, key: KeyT) -> OutputsT:
        """Run the step whose inputs are in place. The next replay overwrites the outputs."""
        return self._replays[key]()

    def _captured(self, key: KeyT) -> Callable[[], OutputsT]:
        if self._device.type != "cuda":
            return lambda: self._run(key)
        self._run(key)  # kernels are compiled and libraries take their memory outside the graph
        graph, outputs = capture(lambda: self._run(key), self._stream, self._pool)

        def replay() -> OutputsT:
            graph.replay()
            return outputs

        return replay
