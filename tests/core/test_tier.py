"""Blocks that leave the pool for the tier and come back: which ones, when, and what a request sees of it."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest

from evenflow.core.blocks import Content
from evenflow.core.eviction import KEEP_S
from evenflow.core.plan import NO_MOVES, ExecutorCaps, StepPlan, TierResult
from evenflow.core.tier import Tier, TierConfig
from tests.core.driving import Driver, StepFailed, check_replay

ROW_S = 0.001


def tiered(**settings: Any) -> Driver:
    """Twelve blocks of four tokens in the pool, steps of 1 ms a row; restoring a block takes as long as half a row."""
    tier = TierConfig(
        **{"num_blocks": 100, "save_seconds": 0.0, "restore_seconds": ROW_S / 2} | settings.pop("tier", {})
    )
    return Driver(num_blocks=12, block_size=4, cost=lambda shape: ROW_S * shape.total_rows, tier=tier, **settings)


def learn(driver: Driver) -> None:
    """Steps of several sizes, so that predictions are right."""
    for length in (1, 3, 6, 12, 20, 2, 5, 9):
        driver.add(length, max_tokens=1)
        driver.run()


def evicted_prompt(driver: Driver) -> list[int]:
    """A prompt whose 7 whole blocks are in the tier alone."""
    learn(driver)
    driver.add([1] * 30, max_tokens=1)
    driver.run()
    driver.add(46, max_tokens=1)
    driver.run()
    return [1] * 30


def restored(driver: Driver) -> int:
    return sum(len(outcome.result.tier.restored) for outcome in driver.outcomes)


def test_an_evicted_prefix_comes_back_instead_of_being_computed() -> None:
    driver = tiered()
    learn(driver)
    prompt = list(range(30))
    driver.add(prompt, max_tokens=2)
    driver.run()
    driver.add(46, max_tokens=2)  # evicts it
    driver.run()
    before = restored(driver)
    again = driver.add(prompt, max_tokens=6)
    driver.run()
    assert restored(driver) - before == 7  # whole blocks before the last token
    assert driver.chunks(again) == [(28, 2)]
    driver.check_output(again)
    check_replay(driver.header, driver.calls)


def test_a_preempted_request_comes_back_with_its_kv() -> None:
    driver = tiered(max_num_seqs=4)
    learn(driver)
    first, second = (driver.add([number] * 20, max_tokens=24) for number in (1, 2))
    driver.run()
    victims = [one for one in (first, second) if one.epoch > 1]  # preempted, then ended
    assert victims, "the pool holds 48 tokens, and both need 88"
    for request in (first, second):
        driver.check_output(request)
    assert restored(driver) > 0
    assert all(start >= 20 for victim in victims for start, _ in driver.chunks(victim)[1:]), "the prompt was recomputed"


def test_what_is_cheaper_to_compute_is_neither_saved_nor_restored() -> None:
    driver = tiered(tier={"save_seconds": 1.0})
    evicted_prompt(driver)
    assert not any(plan.moves.saves for plan in driver.plans)

    driver = tiered()
    evicted_prompt(driver)
    assert any(plan.moves.saves for plan in driver.plans)
    assert driver.scheduler.tier is not None
    driver.scheduler.tier.restore_time.seconds = 1.0  # it has become slow: its disk is busy, say
    again = driver.add([1] * 30, max_tokens=1)
    driver.run()
    assert not any(plan.moves.restores for plan in driver.plans)
    assert driver.chunks(again)[0][0] == 0


def test_what_the_tier_has_lost_is_computed_again() -> None:
    driver = tiered(loses=lambda block_hash: True)
    learn(driver)
    driver.add([1] * 30, max_tokens=2)
    driver.run()
    driver.add(46, max_tokens=2)
    driver.run()
    again = driver.add([1] * 30, max_tokens=2)
    driver.run()
    assert any(outcome.result.tier.lost for outcome in driver.outcomes)
    assert sum(length for _, length in driver.chunks(again)) >= 30
    driver.check_output(again)
    assert driver.scheduler.pool.num_free == 12


def test_other_requests_run_while_a_block_is_on_its_way() -> None:
    driver = tiered(caps=ExecutorCaps(max_steps_in_flight=2))
    learn(driver)
    driver.add([1] * 16, max_tokens=1)
    driver.run()
    driver.add(46, max_tokens=1)
    driver.run()
    stream = driver.add(3, max_tokens=12)
    driver.step()
    again = driver.add([1] * 16, max_tokens=1)
    driver.run()
    with_moves = [plan for plan in driver.plans if plan.moves.restores]
    assert with_moves
    assert all(stream.id in plan.decodes.request_ids for plan in with_moves), "the stream had to wait"
    assert driver.chunks(again) == [(12, 4)]


def test_a_request_that_is_aborted_while_its_blocks_return_leaves_none_behind() -> None:
    driver = tiered()
    again = driver.add(evicted_prompt(driver), max_tokens=1)
    assert driver.schedule() is not None
    driver.abort(again.id)
    driver.commit()
    driver.run()
    assert driver.scheduler.pool.num_free == 12
    assert not driver.scheduler.has_work


def test_contents_of_an_earlier_run_are_found_and_more_than_fit_are_dropped() -> None:
    contents = tuple(Content(bytes([number]), "") for number in range(5))
    tier = Tier(TierConfig(num_blocks=3, save_seconds=0.0, restore_seconds=0.0, contents=contents))
    assert [tier.holds(bytes([number])) for number in range(5)] == [False, False, True, True, True]
    assert tier.take_moves().drops == (b"\x00", b"\x01")


def test_a_flood_of_one_tenant_leaves_anothers_share_of_the_tier() -> None:
    tier = Tier(TierConfig(num_blocks=40, save_seconds=0.0, restore_seconds=0.0))
    for tenant, count in (("modest", 20), ("greedy", 500)):
        tier.saw(tenant, 0.0)
        for number in range(count):
            tier.take(0, Content(f"{tenant}{number}".encode(), tenant), 1.0)
    assert sum(tier.holds(f"modest{number}".encode()) for number in range(20)) == 20
    tier.saw("greedy", KEEP_S + 1)
    for number in range(500, 600):
        tier.take(0, Content(f"greedy{number}".encode(), "greedy"), 1.0)
    assert not any(tier.holds(f"modest{number}".encode()) for number in range(20))
    tier.check_invariants()


def test_the_times_of_moves_are_learned() -> None:
    tier = Tier(TierConfig(num_blocks=4, save_seconds=1.0, restore_seconds=1.0))
    for _ in range(100):
        tier.commit(TierResult(save_seconds=0.2, restore_seconds=0.1))
    assert round(tier.save_time.seconds, 3) == 0.2
    assert round(tier.restore_time.seconds, 3) == 0.1


def test_a_disk_that_was_slow_for_a_while_is_used_again() -> None:
    """What moves take is learned from moves: if none is made any more, nothing corrects it."""
    tier = Tier(TierConfig(num_blocks=10_000, save_seconds=0.0001, restore_seconds=0.0))
    numbers = iter(range(1 << 20))

    def saved(chances: int, seconds: float) -> int:
        """Evicts this number of blocks, each worth a millisecond."""
        num_saved = 0
        for number in islice(numbers, chances):
            tier.take(number, Content(b"%d" % number, ""), 0.001)
            if number % 16 == 15:
                moved = len(tier.take_moves().saves)
                tier.commit(TierResult(save_seconds=seconds if moved else 0.0))
                num_saved += moved
        return num_saved

    assert saved(160, 0.0001) == 160
    assert 0 < saved(10_240, 0.2) < 100, "a disk that stays slow is tried rarely"
    saved(1024, 0.0001)
    assert saved(160, 0.0001) == 160


@pytest.mark.slow
def test_a_disk_that_was_slow_to_read_is_used_again() -> None:
    driver = tiered()
    prompts = [[number] * 30 for number in (1, 2)]
    learn(driver)
    tier = driver.scheduler.tier
    assert tier is not None

    def restored_of(num_prompts: int) -> int:
        """Two prompts that evict each other."""
        before = restored(driver)
        for number in range(num_prompts):
            driver.add(prompts[number % 2], max_tokens=1)
            driver.run()
            driver.add(46, max_tokens=1)
            driver.run()
        return restored(driver) - before

    assert restored_of(20) > 100
    driver.executor._restore_seconds = 1.0
    assert 0 < restored_of(300) < 60, "it is tried rarely, and with few blocks"
    driver.executor._restore_seconds = ROW_S / 2
    restored_of(150)
    assert restored_of(20) > 100
    tier.check_invariants()


def test_a_block_that_is_dropped_before_it_was_saved_never_moves() -> None:
    tier = Tier(TierConfig(num_blocks=1, save_seconds=0.0, restore_seconds=0.0))
    tier.take(7, Content(b"a", ""), 1.0)
    tier.take(8, Content(b"b", ""), 1.0)
    moves = tier.take_moves()
    assert moves.saves == ((8, b"b", ""),)
    assert moves.drops == ()


def test_a_stored_block_that_is_dropped_taken_and_dropped_between_two_plans_leaves_the_tier() -> None:
    tier = Tier(TierConfig(num_blocks=1, save_seconds=0.0, restore_seconds=0.0))
    tier.take(7, Content(b"a", ""), 1.0)
    tier.take_moves()
    for name in (b"b", b"a", b"b"):
        tier.take(7, Content(name, ""), 1.0)
    moves = tier.take_moves()
    assert moves.drops == (b"a",)
    assert moves.saves == ((7, b"b", ""),)


def test_a_forgotten_block_is_dropped_even_if_no_request_follows() -> None:
    """Else its file would still be there at the next start."""
    driver = tiered()
    again = driver.add(evicted_prompt(driver), max_tokens=1)
    driver.run()
    tier = driver.scheduler.tier
    assert tier is not None
    assert tier.holds(again.block_hashes[0])
    tier.forget(again.block_hashes)
    assert driver.scheduler.has_work
    driver.run()
    assert set(driver.plans[-1].moves.drops) >= set(again.block_hashes[:7])


def test_of_more_blocks_than_can_be_copied_at_a_time_the_starts_of_prefixes_are_kept() -> None:
    driver = tiered(tier={"most_saving": 3})
    prompt = evicted_prompt(driver)
    request = driver.add(prompt, max_tokens=1)
    driver.run()
    driver.check_output(request)
    assert (request.num_cached_tokens, restored(driver)) == (12, 3)


def test_what_returns_is_not_pushed_out_by_what_it_evicts() -> None:
    driver = tiered(tier={"num_blocks": 9})
    learn(driver)
    for _ in range(4):
        for family in (1, 2):
            request = driver.add([family] * 34, max_tokens=1)
            driver.run()
            driver.check_output(request)
    assert driver.scheduler.tier is not None
    assert driver.scheduler.tier.num_stored <= 9
    assert restored(driver) > 0
    assert driver.scheduler.pool.num_free == 12


def test_tenants_whose_blocks_all_return_get_a_step_without_rows() -> None:
    driver = tiered()
    learn(driver)
    for tenant in ("a", "b"):
        driver.add([1] * 18, max_tokens=1, tenant=tenant)
    driver.run()
    driver.add(46, max_tokens=1)
    driver.run()
    again = [driver.add([1] * 18, max_tokens=1, tenant=tenant) for tenant in ("a", "b")]
    first = driver.schedule()
    assert first is not None
    assert first.num_rows == 0
    assert len(first.moves.restores) == 8
    driver.run()
    for request in again:
        driver.check_output(request)
        assert request.num_cached_tokens == 16


def test_a_request_waits_for_the_tier_once_for_each_slot() -> None:
    """Else two that evict each other's blocks could wait for ever."""
    driver = tiered()
    again = driver.add(evicted_prompt(driver), max_tokens=1)
    assert driver.schedule() is not None
    assert again.restored_epoch == again.epoch == 0
    tier = driver.scheduler.tier
    assert tier is not None
    driver.commit()
    while tier.num_returning:
        driver.step()
    assert len(driver.scheduler.pool.find(again.block_hashes)) == 7
    driver.scheduler.pool.release(driver.scheduler.pool.allocate(12), None)  # gone before it starts
    plan = driver.schedule()
    assert plan is not None
    assert not plan.moves.restores
    assert [chunk.start for chunk in plan.chunks] == [0]
    driver.run()
    driver.check_output(again)


# ---- faults, deadlines and blocks that move ----


def test_what_a_failed_row_was_built_on_leaves_the_tier_too() -> None:
    """Else the request would fetch the same KV again, and fail again."""
    driver = tiered()
    prompt = evicted_prompt(driver)
    again = driver.add(prompt, max_tokens=3)
    while not driver.chunks(again):
        driver.step()
    tier = driver.scheduler.tier
    assert tier is not None
    assert again.num_cached_tokens == 28
    assert tier.holds(again.block_hashes[0])
    driver.schedule()
    driver.lost_rows = {0}
    driver.commit()
    assert not any(tier.holds(block_hash) for block_hash in again.block_hashes)
    driver.run()
    assert {start for start, _ in driver.chunks(again)[-1:]} == {0}, "it was not computed from scratch"
    assert set(again.block_hashes[:7]) <= {block_hash for plan in driver.plans for block_hash in plan.moves.drops}
    driver.check_output(again)
    check_replay(driver.header, driver.calls)


def test_a_forgotten_block_that_was_offered_is_not_saved() -> None:
    tier = Tier(TierConfig(num_blocks=9, save_seconds=0.0, restore_seconds=0.0, keeps_all=True))
    tier.offer(7, Content(b"a", ""), 1.0)
    tier.take(8, Content(b"b", ""), 1.0)
    tier.forget([b"a", b"b"])
    assert tier.take_moves() == NO_MOVES
    tier.check_invariants()


def test_a_step_that_fails_with_moves_loses_no_block() -> None:
    """What is on its way arrives with the result of a later step."""
    fails = True

    def disturb(plan: StepPlan) -> None:
        if plan.moves.restores and fails:
            raise StepFailed("the device is lost")

    driver = tiered(disturb=disturb)
    again = driver.add(evicted_prompt(driver), max_tokens=3)
    driver.schedule()
    driver.commit()
    assert driver.scheduler.pool.find(again.block_hashes) == []
    fails = False
    driver.run()
    assert again.num_cached_tokens == 28
    driver.check_output(again)
    assert driver.scheduler.pool.num_free == 12
    check_replay(driver.header, driver.calls)


def test_a_request_whose_deadline_passes_while_its_blocks_return_leaves_them_to_others() -> None:
    driver = tiered()
    prompt = evicted_prompt(driver)
    driver.add(prompt, max_tokens=1, name="late", deadline="60s")
    driver.schedule()
    driver.executor.clock.now += 61.0
    assert driver.expire() == ["late"]
    driver.run()
    assert not driver.scheduler.has_work
    assert driver.scheduler.pool.num_free == 12
    other = driver.add(prompt, max_tokens=1)
    driver.run()
    assert other.num_cached_tokens == 28
    driver.check_output(other)


def test_an_engine_that_waits_for_the_tier_is_not_stuck() -> None:
    """A stream decodes meanwhile, for more steps than a policy lets prefill wait."""
    driver = Driver(
        num_blocks=100,
        block_size=4,
        cost=lambda shape: ROW_S * shape.total_rows,
        tier=TierConfig(num_blocks=200, save_seconds=0.0, restore_seconds=ROW_S),
    )
    learn(driver)
    prompt = [1] * 380
    driver.add(prompt, max_tokens=1)
    driver.run()
    driver.add(395, max_tokens=1)
    driver.run()
    driver.add(3, max_tokens=200)
    driver.step()
    again = driver.add(prompt[:200], max_tokens=1)
    driver.executor._restore_seconds = 2 * ROW_S
    num_steps = 0
    while not driver.chunks(again):
        driver.step()
        num_steps += 1
        assert driver.scheduler.admission_failure() is None
    assert num_steps > 64
    assert again.num_cached_tokens > 0


def test_a_request_that_finds_a_step_in_flight_still_waits_for_its_blocks() -> None:
    driver = tiered(caps=ExecutorCaps(max_steps_in_flight=2))
    prompt = evicted_prompt(driver)
    driver.add(2, max_tokens=2)
    driver.step()
    assert driver.scheduler.num_in_flight == 1, "its last token is pending"
    again = driver.add(prompt, max_tokens=1)
    assert driver.schedule() is None
    driver.run()
    assert again.num_cached_tokens == 28
