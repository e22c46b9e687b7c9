"""Which CUDA graphs evenflow asks vLLM to capture: enough for the steps that a latency target allows.

Imports no vLLM.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from evenflow.hosts.launch import flag_name

# vLLM captures up to 512 rows and launches the operations of larger steps one by one, which takes 31 ms beside an H200.
# Beyond 512 rows a step is long, so padding it to a multiple of 64 costs little.
CAPTURE_SIZES = (1, 2, 4, *range(8, 256, 8), *range(256, 512, 16), *range(512, 2049, 64))
MOST_ROWS = CAPTURE_SIZES[-1]
_ROWS_APART, _MOST_UNCAPTURED_ROWS = 8, 4096  # an H200 computes that many in 100 ms
_ENDS_OF_KERNELS = (80, 112, 192, 384, 768, 1280, 1792, 2560, 3584)  # rows; vLLM's tables choose experts' kernels so

# vLLM's flags that set graphs, or may set them: then evenflow asks for none.
_GRAPH_FLAGS = (
    *("--compilation-config", "-cc", "-O", "--optimization-level", "--performance-mode", "--enforce-eager"),
    *("--cudagraph-capture-sizes", "--max-cudagraph-capture-size", "--cuda-graph-sizes", "--config"),
)


def graph_flags(flags: Sequence[str]) -> list[str]:
    """Flags for vLLM on a GPU that capture more graphs; none if `flags` decide on them."""
    names = {flag_name(flag).partition(".")[0] for flag in flags}
    if any(name in _GRAPH_FLAGS or name.startswith("-O") for name in names):
        return []
    return ["--compilation-config", json.dumps({"cudagraph_capture_sizes": CAPTURE_SIZES})]


def uncaptured_rows(capture_sizes: Sequence[int], budget: int) -> range:
    """Numbers of rows of steps without a graph, so close that a library hardly has another kernel in between."""
    largest = max(capture_sizes, default=0)
    return range(largest + _ROWS_APART, min(budget, _MOST_UNCAPTURED_ROWS) + 1, _ROWS_APART)


def uncaptured_steps(capture_sizes: Sequence[int], budget: int) -> list[int]:
    """Numbers of rows of a few steps without a graph, to compile kernels by.

    Triton compiles a kernel twice: for counts divisible by 16, and for others, which graphs hardly ever have.
    """
    largest = max(capture_sizes, default=0)
    ends = [rows for rows in (*_ENDS_OF_KERNELS, budget) if largest < rows <= budget]
    return [size for rows in ends for size in (rows - 1, rows) if size > largest]


def advice_on_graphs(capture_sizes: Sequence[int], budget: int) -> str | None:
    """For the log, if vLLM captures graphs, but not for all steps that a target may use."""
    largest = max(capture_sizes, default=0)
    if not 0 < largest < min(budget, MOST_ROWS):
        return None
    return (
        f"evenflow: vLLM launches the operations of a step of more than {largest} rows one by one, and sends no tokens "
        f"meanwhile. With --max-cudagraph-capture-size {MOST_ROWS} it need not, and keeps a target more closely."
    )
