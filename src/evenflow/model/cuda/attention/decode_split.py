"""Chooses how FlashInfer splits the contexts of decodes."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

_TILE_ROWS = 16  # of a decode's heads, at minimum


def decode_split(num_pages: NDArray[Any], num_heads: int, num_kv_heads: int, num_processors: int) -> int | None:
    """Pages per part of a divided context, if FlashInfer needs to be told.

    FlashInfer divides no context once there is a decode for every two processors, so one long context would delay all
    others. This is the smallest part that still fits a graph's maximum number of parts.
    """
    group = num_heads // num_kv_heads
    if len(num_pages) <= 2 * num_processors // num_kv_heads or group > _TILE_ROWS:
        return None
    room = -(-len(num_pages) * group // _TILE_ROWS) + len(num_pages) - 1
    too_small, enough = 0, int(num_pages.max())
    while enough - too_small > 1:
        middle = (too_small + enough) // 2
        if (-(-num_pages // middle)).sum() <= room:
            enough = middle
        else:
            too_small = middle
    return enough if enough < num_pages.max() else None
