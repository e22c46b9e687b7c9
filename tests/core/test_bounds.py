"""What a scheduler remembers is bounded, whatever comes: each test feeds it far more than the bound."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress

import pytest

from evenflow.core.blocks import Content
from evenflow.core.eviction import EvictionOrder
from evenflow.core.plan import ExecutorCaps, TierResult
from evenflow.core.service_classes import DEFAULT_CLASSES
from evenflow.core.step_time import StepTimeModel
from evenflow.core.tenant_shares import TenantShares
from evenflow.core.tier import Tier, TierConfig
from evenflow.errors import LateRequest
from tests.core.driving import Driver

EVENTS = 100_000


def test_counters_of_tenants_that_no_step_charges() -> None:
    shares = TenantShares({})
    shares.enter("busy", [])
    for number in range(EVENTS):
        shares.enter(f"t{number}", ["busy"])
    assert len(shares._counters) <= 1024
    assert "busy" in shares._counters


def test_counters_of_tenants_above_the_floor() -> None:
    shares = TenantShares({})
    shares.enter("busy", [])
    for number in range(EVENTS):
        shares.enter(f"t{number}", ["busy"])
        shares.charge({f"t{number}": 10.0}, ["busy"], number)
    assert max(len(shares._counters), len(shares._served_at)) <= 1024
    assert shares.standing(f"t{EVENTS - 1}")[0] >= 10.0  # the last ones are remembered


def test_tenants_that_owe_most_are_remembered() -> None:
    shares = TenantShares({})
    shares.enter("heavy", [])
    shares.charge({"heavy": 100.0}, ["heavy", "other"], 0)
    for number in range(5000):
        shares.enter(f"t{number}", ["other"])
        shares.charge({f"t{number}": 0.01}, ["other"], number)
    assert shares.standing("heavy")[0] >= 100.0


def test_tenants_whose_prefixes_are_evicted() -> None:
    order: EvictionOrder[int] = EvictionOrder()
    order.saw("first", 0.0)
    order.add(-1, "first", 1e9)
    for number in range(EVENTS):
        order.saw(f"t{number}", float(number))
        if number % 3 == 0:
            order.add(number, f"t{number}", 1.0)
        if len(order) > 100:
            order.pop(50)
    assert len(order._queues) <= 100
    order.check_invariants()


def test_tenants_of_a_scheduler_with_a_request_that_never_ends() -> None:
    driver = Driver("fixed:256", num_blocks=400, remembers=False)
    driver.add(40, max_tokens=5000, tenant="stays")
    for number in range(2000):
        driver.add(10, max_tokens=1, tenant=f"t{number}")
        driver.step()
    shares, idle = driver.scheduler.order._classes["standard"].tenants, driver.scheduler.pool._idle
    assert len(shares._counters) <= 1024 + 1
    assert len(idle._queues) <= 400


def test_samples_of_a_step_time_model() -> None:
    rng, caps, model = random.Random(0), ExecutorCaps(), StepTimeModel()
    for _ in range(EVENTS // 50):
        shape = caps.step_shape(
            num_decodes=rng.randrange(1 << rng.randrange(12)),
            decode_context=rng.randrange(1 << rng.randrange(30)),
            chunks=[(rng.randrange(1 << rng.randrange(20)), rng.randint(1, 4096)) for _ in range(rng.randrange(3))],
            prefill_logit_rows=rng.randrange(3),
        )
        model.observe(shape, rng.lognormvariate(-4, 3))
        assert sum(map(len, model._kinds.values())) <= 128
    assert len(model._kinds) <= 128
    assert len(model._errors) <= 128


def tier_sizes(tier: Tier) -> Iterator[int]:
    yield len(tier._stored) - tier.num_returning
    yield len(tier._offered)
    yield sum(len(queue._heap) for queue in tier._order._queues.values()) // 2 - 64 * len(tier._order._queues)


def test_blocks_of_a_tier_whose_moves_take_any_time() -> None:
    rng, tier = random.Random(0), Tier(TierConfig(num_blocks=200, save_seconds=0.0, restore_seconds=0.0))
    returning: list[bytes] = []
    for number in range(EVENTS):
        block_hash = b"%d" % rng.randrange(2000)
        match rng.randrange(8):
            case 0 if tier.holds(block_hash) and not tier.is_returning(block_hash):
                tier.restore([block_hash], lambda count: [0] * count)
                returning.append(block_hash)
            case 1:
                tier.forget([block_hash])
            case 2:
                tier.take_moves()
                done = [returning.pop() for _ in range(rng.randint(0, len(returning)))]
                cut = rng.randint(0, len(done))
                seconds = rng.lognormvariate(-6, 3)
                tier.commit(TierResult(tuple(done[:cut]), tuple(done[cut:]), rng.randrange(9), seconds, seconds))
            case _:
                tier.take(number % 64, Content(block_hash, f"t{rng.randrange(300)}"), rng.lognormvariate(-6, 3))
        assert len(tier._stored) - tier.num_returning <= 200
        assert number % 50 or max(tier_sizes(tier)) <= 200
    tier.check_invariants()


@pytest.mark.slow
def test_everything_that_a_scheduler_remembers() -> None:
    """Prompts of many tenants come, share prefixes, are preempted, refused, aborted and late; blocks move and fail."""
    rng = random.Random(0)
    driver = Driver(
        "fixed:32",
        num_blocks=40,
        block_size=4,
        max_num_seqs=6,
        remembers=False,
        caps=ExecutorCaps(max_steps_in_flight=2),
        cost=lambda shape: 0.001 * shape.total_rows,
        classes=DEFAULT_CLASSES,
        tier=TierConfig(num_blocks=60, save_seconds=0.0, restore_seconds=0.002, keeps_all=True),
        loses=lambda block_hash: block_hash[0] < 20,
    )
    scheduler = driver.scheduler
    tier, idle, shares = (
        scheduler.tier,
        scheduler.pool._idle,
        [one.tenants for one in scheduler.order._classes.values()],
    )
    assert tier is not None
    most_open = 0
    for _ in range(EVENTS // 25):
        if len(scheduler.requests) < 12 and rng.random() < 0.5:
            prompt = [rng.randrange(3)] * rng.randint(1, 100)
            sampling = {"deadline": rng.choice((0.01, 0.3, 5.0))} if rng.random() < 0.2 else {}
            with suppress(LateRequest):
                driver.add(
                    prompt,
                    rng.randint(1, 20),
                    tenant=f"t{rng.randrange(5000)}",
                    salt=rng.choice((None, "team")),
                    service_class=rng.choice(DEFAULT_CLASSES).name,
                    **sampling,
                )
        elif scheduler.requests and rng.random() < 0.05:
            driver.abort(rng.choice(list(scheduler.requests)))
        else:
            driver.expire()
            if scheduler.num_in_flight and rng.random() < 0.02:
                driver.lost_rows = {0}
            driver.step()
        most_open = max(most_open, len(scheduler.requests))
        assert len(scheduler.pool._content) <= 40
        assert max(len(tier._stored) - tier.num_returning, len(driver.executor._tier) - tier.num_returning - 40) <= 60
        assert len(tier._offered) <= 40
        assert sum(len(queue._heap) for queue in idle._queues.values()) <= 40 * 66
        assert max(len(one._counters) for one in shares) <= 1024 + 12
        assert len(scheduler.prefix_cache._being_computed) <= 40
        assert len(scheduler.seats._table_changes) <= 2 * 40
    assert most_open == 12
    for name in list(scheduler.requests):
        driver.abort(name)
    driver.run()
    assert not scheduler._expiring
    assert not scheduler._recovery.suspects
    assert not scheduler.prefix_cache._being_computed
    assert not scheduler.order._lines
    assert not tier._returning
    scheduler.pool.check_invariants()
    tier.check_invariants()
