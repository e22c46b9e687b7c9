"""The order of eviction: by age, by cost, by tenant."""

from __future__ import annotations

from collections import Counter

from evenflow.core.blocks import BlockPool
from evenflow.core.eviction import EvictionOrder
from tests.core.driving import Driver


def drain(order: EvictionOrder[str]) -> str:
    return "".join(order.pop(len(order)))


def test_equal_costs_go_by_age_and_use_makes_young() -> None:
    order: EvictionOrder[str] = EvictionOrder()
    for key in "abcd":
        order.add(key, "", 1.0)
    order.remove("b")
    order.add("b", "", 1.0)
    assert drain(order) == "acdb"


def test_of_the_same_age_the_cheapest_to_compute_again_goes_first() -> None:
    order: EvictionOrder[str] = EvictionOrder()
    for key, cost in zip("abc", (3.0, 1.0, 2.0), strict=True):
        order.add(key, "", cost)
    assert drain(order) == "bca"


def test_what_costs_twice_as_much_stays_twice_as_long_and_not_for_good() -> None:
    order: EvictionOrder[str] = EvictionOrder()
    for key in range(10):
        order.add(f"dear{key}", "", 2.0)
    cheap_before_the_first_dear = 0
    for key in range(1000):
        order.add(f"cheap{key}", "", 1.0)
        if len(order) > 20:
            (evicted,) = order.pop(1)
            if evicted.startswith("dear"):
                break
            cheap_before_the_first_dear += 1
    assert 10 <= cheap_before_the_first_dear <= 20  # the room of ten was used up once or twice


def test_an_entry_that_is_used_again_and_again_leaves_no_garbage() -> None:
    order: EvictionOrder[str] = EvictionOrder()
    for _ in range(10_000):
        order.add("a", "", 1.0)
        order.remove("a")
        order.add("b", "", 1.0)
        order.remove("b")
        order.add("c", "", 0.0)  # keeps the queue alive
        order.remove("c")
        order.add("d", "", 9.0)
    (queue,) = order._queues.values()
    assert len(queue._heap) < 100
    assert drain(order) == "d"


def test_a_block_goes_after_those_that_are_useless_without_it() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    for block, name in zip(blocks, (b"a", b"ab", b"abc"), strict=True):
        pool.publish(block, name)
    pool.hold(blocks[:1])
    pool.release(blocks, None, cost=5.0)
    pool.release(blocks[:1], None, cost=1.0)  # a short prompt used the first one last
    pool.allocate(3)
    assert pool.find([b"a", b"ab", b"abc"]) == blocks[:1]
    pool.check_invariants()


def test_the_scheduler_evicts_the_short_prefix_before_an_older_long_one() -> None:
    """Attention makes each block of the long one take longer; the step-time model has learned so."""
    driver = Driver(
        num_blocks=64, block_size=4, cost=lambda shape: 0.001 * shape.total_rows + 1e-3 * shape.prefill_attention
    )
    for _ in range(6):
        for length in (8, 24, 60):
            driver.add(length, max_tokens=1)
            driver.run()
    long, short = [1] * 100, [2] * 9
    for prompt in (long, short):
        driver.add(prompt, max_tokens=1)
        driver.run()
    found: Counter[str] = Counter()
    driver.add(140, max_tokens=1)  # evicts all but 29 blocks
    driver.run()
    for name, prompt in (("long", long), ("short", short)):
        found[name] = driver.scheduler.prefix_cache.count_published(driver.add(prompt, max_tokens=1))
    assert found["long"] > 0
    assert found["short"] == 0
