"""Block hashes: what they cover, and that they chain."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from evenflow.core.prefix_cache import hash_blocks

TOKENS = st.lists(st.integers(0, 200_000), max_size=100)


@given(TOKENS, TOKENS, st.integers(1, 20))
def test_equal_hashes_mean_equal_prefixes(a: list[int], b: list[int], block_size: int) -> None:
    shared = sum(x == y for x, y in zip(hash_blocks(a, block_size), hash_blocks(b, block_size), strict=False))
    end = shared * block_size
    assert a[:end] == b[:end]
    full = min(len(a), len(b)) // block_size
    if shared < full:
        assert a[: end + block_size] != b[: end + block_size]


@given(TOKENS, st.integers(1, 20), st.data())
def test_hashes_can_be_continued(tokens: list[int], block_size: int, data: st.DataObject) -> None:
    whole = hash_blocks(tokens, block_size, b"salt")
    cut = data.draw(st.integers(0, len(whole)))
    assert whole[:cut] + hash_blocks(tokens, block_size, b"salt", whole[:cut]) == whole
    assert len(whole) == len(tokens) // block_size
