"""Random loads of classes and tenants with too little memory: every output is right, every request ends, no block is
lost. Longer runs than the state machine's, in which all ways to yield occur together."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from evenflow.core.plan import ExecutorCaps
from evenflow.core.service_classes import DEFAULT_CLASSES
from tests.core.driving import Driver

URGENT, *OTHERS = DEFAULT_CLASSES
POLICIES = ("fixed:64", "target:20", "target:50,paced", "alternate:32", "unchunked", "load")
BLOCK_SIZE = 4


def random_driver(rng: random.Random) -> Driver:
    return Driver(
        rng.choice(POLICIES),
        num_blocks=rng.choice((16, 40, 100)),
        block_size=BLOCK_SIZE,
        max_num_seqs=rng.choice((2, 5, 12)),
        classes=(replace(URGENT, ttft_target=rng.choice((None, 0.1, 1.0))), *OTHERS),
        tenant_weights={"a": 2.0},
        caps=ExecutorCaps(max_steps_in_flight=rng.choice((1, 2))),
        cost=lambda shape: 0.001 * shape.total_rows,
        enable_prefix_caching=rng.random() < 0.7,
    )


def add_randomly(driver: Driver, rng: random.Random) -> None:
    capacity = driver.scheduler.pool.num_blocks * BLOCK_SIZE
    while rng.random() < 0.3:
        length = rng.choice((rng.randint(1, capacity - 2), rng.randint(1, 20)))
        driver.add(
            [rng.randint(0, 2)] * length if rng.random() < 0.5 else length,
            max_tokens=rng.randint(1, min(40, capacity - length)),
            tenant=rng.choice("aabcd"),
            service_class=rng.choice(("", "interactive", "batch")),
            ignore_eos=True,
        )


@pytest.mark.parametrize("seed", range(5))
def test_a_random_load_ends_well(seed: int) -> None:
    rng = random.Random(seed)
    driver = random_driver(rng)
    for _ in range(120):
        add_randomly(driver, rng)
        if driver.scheduler.requests and rng.random() < 0.05:
            driver.abort(rng.choice(list(driver.scheduler.requests)))
        driver.step()
        driver.scheduler.pool.check_invariants()
    driver.run(max_steps=30_000)
    for request in driver.requests.values():
        assert request.is_finished
        driver.check_output(request)
    assert driver.scheduler.pool.num_held == 0
    assert not len(driver.scheduler.order)
