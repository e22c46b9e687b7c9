"""The pool's four states, its eviction order, and the check that finds its mistakes."""

from __future__ import annotations

import pytest

from evenflow.core.blocks import BlockPool


def test_clean_blocks_go_first_then_the_longest_idle_prefix_end_before_start() -> None:
    pool = BlockPool(4)
    old = pool.allocate(2)
    for block, name in zip(old, (b"a", b"b"), strict=True):
        pool.publish(block, name)
    pool.release(old, None)
    assert pool.num_free == 4
    assert pool.allocate(2) == [2, 3]
    assert pool.allocate(1) == [old[1]]  # the end of the prefix
    assert pool.find([b"a", b"b"]) == [old[0]]
    pool.check_invariants()


def test_a_found_block_can_be_held_and_is_then_not_evicted() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.publish(block, b"a")
    pool.release([block], None)
    pool.hold(pool.find([b"a"]))
    assert (pool.num_free, pool.num_held) == (1, 1)
    with pytest.raises(ValueError, match="2 blocks with 1 free"):
        pool.allocate(2)


def test_shared_blocks_are_free_after_the_last_release() -> None:
    pool = BlockPool(1)
    blocks = pool.allocate(1)
    pool.publish(blocks[0], b"a")
    pool.hold(blocks)
    pool.release(blocks, None)
    assert pool.num_free == 0
    pool.release(blocks, None)
    assert pool.num_free == 1


def test_released_blocks_settle_when_their_last_step_is_committed() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(2)
    pool.publish(blocks[0], b"a")
    pool.release(blocks, 7)
    assert (pool.num_free, pool.num_settling) == (0, 2)
    assert pool.find([b"a"]) == []  # not before it settles
    pool.settle(6)
    assert pool.num_free == 0
    pool.settle(7)
    assert (pool.num_free, pool.num_settling) == (2, 0)
    assert pool.find([b"a"]) == [blocks[0]]
    pool.check_invariants()


def test_equal_content_is_published_once() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.publish(first, b"a")
    pool.publish(second, b"a")
    assert pool.find([b"a"]) == [first]
    pool.release([first, second], None)
    pool.check_invariants()


def test_the_check_sees_a_block_released_twice() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.release(blocks, None)
    pool.release(blocks, None)
    with pytest.raises(AssertionError):
        pool.check_invariants()


def test_a_flood_of_prefixes_displaces_its_own() -> None:
    """Before, everybody's: the least recently used prefix was evicted, no matter who filled the cache."""
    pool = BlockPool(8)
    for number in range(4):
        (block,) = pool.allocate(1, b"quiet")
        pool.publish(block, b"quiet %d" % number, b"quiet")
        pool.release([block], None)
    for number in range(100):
        (block,) = pool.allocate(1, b"flood")
        pool.publish(block, b"flood %d" % number, b"flood")
        pool.release([block], None)
        pool.check_invariants()
    assert all(pool.is_published(b"quiet %d" % number) for number in range(4))
    assert [number for number in range(100) if pool.is_published(b"flood %d" % number)] == [96, 97, 98, 99]


def test_one_alone_may_fill_the_cache_and_makes_room_for_others() -> None:
    pool = BlockPool(8)
    for owner, count in ((b"first", 8), (b"second", 3)):
        for number in range(count):
            (block,) = pool.allocate(1, owner)
            pool.publish(block, owner + b" %d" % number, owner)
            pool.release([block], None)
    assert [number for number in range(8) if pool.is_published(b"first %d" % number)] == [3, 4, 5, 6, 7]
    assert all(pool.is_published(b"second %d" % number) for number in range(3))
    pool.check_invariants()
