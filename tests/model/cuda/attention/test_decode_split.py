"""After how many pages FlashInfer should divide the contexts of decodes."""

from __future__ import annotations

import numpy as np
import pytest

from evenflow.model.cuda.attention.decode_split import decode_split

PROCESSORS = 132


@pytest.mark.parametrize(
    ("num_pages", "split"),
    [
        ([5000] + [70] * 20, None),  # few: FlashInfer divides by itself
        ([70] * 64, None),  # all alike
        ([2000] + [70] * 63, 125),  # 64 decodes leave room for 15 parts more
        ([2000, 2000] + [70] * 62, 250),
    ],
)
def test_a_long_context_among_many_decodes_is_divided(num_pages: list[int], split: int | None) -> None:
    assert decode_split(np.array(num_pages), 32, 8, PROCESSORS) == split


def test_the_parts_fit_and_no_smaller_ones_do() -> None:
    num_pages = np.array([3000, 900, 400, *range(20, 90)])
    split = decode_split(num_pages, 32, 8, PROCESSORS)
    room = -(-len(num_pages) * 4 // 16) + len(num_pages) - 1

    def num_parts(pages: int) -> int:
        return int((-(-num_pages // pages)).sum())

    assert split is not None
    assert num_parts(split) <= room < num_parts(split - 1)


def test_heads_that_fill_more_than_a_tile_are_not_divided() -> None:
    assert decode_split(np.array([5000] + [70] * 63), 64, 2, PROCESSORS) is None
