"""The pool's four states, its eviction order, and the check that finds its mistakes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenflow.core.blocks import BlockPool
from evenflow.core.eviction import KEEP_S


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


def fill(pool: BlockPool, tenant: str, names: range) -> None:
    """Compute and publish these blocks for a tenant, and leave them idle."""
    for name in names:
        blocks = pool.allocate(1)
        pool.publish(blocks[0], f"{tenant}{name}".encode(), tenant)
        pool.release(blocks, None)


def cached(pool: BlockPool, tenant: str, names: range) -> int:
    return sum(pool.is_published(f"{tenant}{name}".encode()) for name in names)


def test_a_flood_of_one_tenant_evicts_its_own_prefixes_and_not_anothers_share() -> None:
    pool = BlockPool(100)
    pool.saw("modest", 0.0)
    fill(pool, "modest", range(40))
    pool.saw("greedy", 1.0)
    fill(pool, "greedy", range(1000))
    assert cached(pool, "modest", range(40)) == 40
    fill(pool, "modest", range(40, 80))
    fill(pool, "greedy", range(1000, 2000))
    assert cached(pool, "modest", range(80)) == 50  # its share, the last used
    assert cached(pool, "modest", range(30, 80)) == 50
    pool.check_invariants()


def test_shares_of_the_cache_follow_weights() -> None:
    pool = BlockPool(90, {"heavy": 2.0})
    for tenant in ("heavy", "light"):
        fill(pool, tenant, range(200))
    fill(pool, "heavy", range(200, 400))
    assert cached(pool, "heavy", range(400)) == 60
    assert cached(pool, "light", range(400)) == 30


def test_a_tenant_that_stays_away_loses_its_share_of_the_cache() -> None:
    pool = BlockPool(20)
    pool.saw("away", 0.0)
    fill(pool, "away", range(10))
    pool.saw("here", KEEP_S)
    fill(pool, "here", range(50))
    assert cached(pool, "away", range(10)) == 10
    pool.saw("here", KEEP_S + 1)
    fill(pool, "here", range(50, 100))
    assert cached(pool, "away", range(10)) == 0
    pool.check_invariants()


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 30)), max_size=40),
    st.tuples(*[st.sampled_from((0.5, 1.0, 3.0))] * 3),
)
def test_no_flood_evicts_what_is_within_a_tenants_share(
    floods: list[tuple[str, int]], weights: tuple[float, ...]
) -> None:
    of_tenant = dict(zip("abc", weights, strict=True))
    pool = BlockPool(60, of_tenant)
    names: dict[str, int] = {"a": 0, "b": 0, "c": 0}
    for tenant, count in floods:
        before = {other: cached(pool, other, range(names[other])) for other in names}
        fill(pool, tenant, range(names[tenant], names[tenant] + count))
        names[tenant] += count
        for other in names:
            share = int(60 * of_tenant[other] / sum(weights)) - 1  # but for the block in the flood's hand
            assert cached(pool, other, range(names[other])) >= min(before[other], share), "a share was evicted"
        pool.check_invariants()


def test_one_alone_may_fill_the_cache_and_makes_room_for_others() -> None:
    pool = BlockPool(8)
    fill(pool, "first", range(8))
    fill(pool, "second", range(3))
    assert cached(pool, "first", range(3)) == 0
    assert cached(pool, "first", range(3, 8)) == 5
    assert cached(pool, "second", range(3)) == 3
    pool.check_invariants()
