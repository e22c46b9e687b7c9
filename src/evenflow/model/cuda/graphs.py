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

_FEWEST, _STEP = (1, 2, 4, 8), 16  # rows of the smallest decode graphs; then multiples of half the step
# Rows of steps with chunks. A larger step takes longer than launching its kernels one by one.
_MIXED = (*range(64, 1025, 64), *range(1152, 2049, 128))


def graph_sizes(max_rows: int) -> tuple[int, ...]:
    """Sizes of decode graphs: 1, 2, 4, 8, 16, 24, 32 and so on, up to the first of at least `max_rows`."""
    sizes = [*_FEWEST, *range(_STEP, max_rows + _STEP, _STEP // 2)]
    last = next(index for index, size in enumerate(sizes) if size >= max_rows)
    return tuple(sizes[: last + 1])


def mixed_graph_sizes(max_rows: int) -> tuple[int, ...]:
    """Sizes of graphs for steps with chunks, which have at most `max_rows` rows."""
    return tuple(size for size in _MIXED if size <= max_rows)


def size_for(num_rows: int, sizes: tuple[int, ...]) -> int | None:
    """The padded number of rows of a step; None if it is too large for a graph."""
    return next((size for size in sizes if size >= num_rows), None)


def capture(
    run: Callable[[], OutputsT], stream: torch.cuda.Stream | None, pool: Any = None
) -> tuple[torch.cuda.CUDAGraph, OutputsT]:
    """Capture the launches of `run` as a graph, on a separate stream. Does not wait for the device.

    `torch.cuda.graph` waits and frees memory, too slow for hundreds of graphs.
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
    """Graphs by key. `run(key)` reads fixed memory and returns the same output tensors each time."""

    def __init__(self, run: Callable[[KeyT], OutputsT], device: torch.device) -> None:
        self._run, self._device = run, device
        self._replays: dict[KeyT, Callable[[], OutputsT]] = {}
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def capture(self, key: KeyT) -> None:
        """Capture largest first: smaller graphs then reuse the memory of larger ones."""
        self._replays[key] = self._captured(key)

    def replay(self, key: KeyT) -> OutputsT:
        """Run the step with the inputs in place. The next replay overwrites the outputs."""
        return self._replays[key]()

    def _captured(self, key: KeyT) -> Callable[[], OutputsT]:
        if self._device.type != "cuda":
            return lambda: self._run(key)
        self._run(key)  # outside the graph: kernels are compiled, libraries allocate
        graph, outputs = capture(lambda: self._run(key), self._stream, self._pool)

        def replay() -> OutputsT:
            graph.replay()
            return outputs

        return replay
