"""The scheduler's plans, written out."""

from __future__ import annotations

import random

import pytest

from evenflow.core.plan import ExecutorCaps
from evenflow.core.request import FinishReason, Request, SamplingParams, Status
from evenflow.errors import InvalidRequest
from tests.core.driving import Driver, layout


def test_a_prompt_is_cut_into_chunks_of_the_budget() -> None:
    driver = Driver("fixed:128")
    request = driver.add(300, max_tokens=3)
    driver.run()
    assert driver.chunks(request) == [(0, 128), (128, 128), (256, 44)]
    assert driver.reasons(request) == ["budget", "budget", "end_of_prompt"]
    assert [list(plan.decodes.positions) for plan in driver.plans] == [[], [], [], [300], [301]]
    assert request.finish_reason is FinishReason.LENGTH
    driver.check_output(request)


def test_decodes_come_first_and_several_prompts_share_the_rest() -> None:
    driver = Driver("fixed:64")
    a = driver.add(10, max_tokens=8, name="a")
    driver.step()
    driver.add(40, name="b")
    driver.add(100, name="c")
    driver.run()
    assert [layout(plan) for plan in driver.plans[:5]] == [
        ([], [("a", 0, 10)]),
        (["a"], [("b", 0, 40), ("c", 0, 23)]),
        (["a", "b"], [("c", 23, 62)]),
        (["a", "b"], [("c", 85, 15)]),
        (["a", "b", "c"], []),
    ]
    assert a.num_output_tokens == 8


def test_the_token_that_max_tokens_allows_last_is_never_fed() -> None:
    driver = Driver()
    request = driver.add(5, max_tokens=1)
    driver.run()
    assert [plan.num_rows for plan in driver.plans] == [5]
    assert request.num_output_tokens == 1


def test_two_steps_in_flight_feed_tokens_before_their_ids_are_seen() -> None:
    driver = Driver("fixed:8", caps=ExecutorCaps(max_steps_in_flight=2))
    request = driver.add(12, max_tokens=3)
    first, second = driver.schedule(), driver.schedule()
    assert first is not None
    assert second is not None
    assert (request.num_scheduled, request.num_committed, request.num_pending) == (12, 0, 1)
    driver.commit()
    third = driver.schedule()
    assert third is not None
    assert list(third.decodes.positions) == [12]  # the first sample, still unseen
    assert request.num_known == 12
    driver.run()
    assert [list(plan.decodes.positions) for plan in driver.plans] == [[], [], [12], [13]]
    driver.check_output(request)


def test_a_stop_token_ends_a_request_and_drops_the_step_after_it() -> None:
    probe = Driver()
    tokens = probe.add(20, max_tokens=6, name="same")
    probe.run()
    stop = tokens.output_token_ids[2]
    driver = Driver(caps=ExecutorCaps(max_steps_in_flight=2))
    request = driver.add(20, max_tokens=6, name="same", stop_token_ids=(stop,))
    driver.run()
    assert request.finish_reason is FinishReason.STOP
    assert request.output_token_ids == tokens.output_token_ids[:3]
    assert driver.scheduler.pool.num_held == 0
    driver.scheduler.pool.check_invariants()


def test_a_stop_token_ends_a_request_also_before_min_tokens() -> None:
    """A sampler gives one that early only if nothing else may come, as at the end of a grammar."""
    probe = Driver()
    tokens = probe.add(20, max_tokens=6, name="same")
    probe.run()
    driver = Driver()
    request = driver.add(20, max_tokens=6, name="same", min_tokens=4, stop_token_ids=(tokens.output_token_ids[1],))
    driver.run()
    assert request.finish_reason is FinishReason.STOP
    assert request.output_token_ids == tokens.output_token_ids[:2]


def test_finish_keeps_so_many_tokens() -> None:
    driver = Driver()
    request = driver.add(20, max_tokens=50)
    for _ in range(10):
        driver.step()
    assert driver.scheduler.finish(request.id, FinishReason.STOP, keep=4)
    assert request.num_output_tokens == 4
    assert not driver.scheduler.has_work


@pytest.mark.parametrize("depth", [1, 2])
def test_abort_in_every_state_gives_all_blocks_back(depth: int) -> None:
    driver = Driver("fixed:16", max_num_seqs=2, caps=ExecutorCaps(max_steps_in_flight=depth))
    decoding = driver.add(8, max_tokens=100)
    driver.step()
    prefilling, waiting = driver.add(200), driver.add(30)
    driver.step()
    driver.schedule() if driver.scheduler.can_schedule else None
    for request in (decoding, prefilling, waiting):
        assert driver.scheduler.abort(request.id)
        assert request.finish_reason is FinishReason.ABORT
        assert not driver.scheduler.abort(request.id)
    driver.run()
    assert driver.scheduler.pool.num_free == 1000
    driver.scheduler.pool.check_invariants()


def test_blocks_of_an_aborted_request_are_not_given_away_while_its_step_runs() -> None:
    driver = Driver(num_blocks=4, caps=ExecutorCaps(max_steps_in_flight=2))
    old = driver.add(60)
    driver.schedule()
    driver.scheduler.abort(old.id)
    new = driver.add(60)
    assert driver.scheduler.pool.num_settling == 4
    assert driver.schedule() is None
    driver.commit()
    assert driver.schedule() is not None
    driver.run()
    driver.check_output(new)


def test_the_youngest_yields_when_blocks_run_out_and_finishes_later_with_the_same_tokens() -> None:
    driver = Driver(num_blocks=8)
    old, young = driver.add(40, max_tokens=60, name="old"), driver.add(40, max_tokens=60, name="young")
    driver.run()
    assert (old.epoch, young.epoch) == (1, 2)  # both left their slot once for good, the young one once before
    for request in (old, young):
        assert request.num_output_tokens == 60
        driver.check_output(request)
    resumed = [a for plan in driver.plans for a in plan.admissions if a.request_id == "young"][1]
    assert len(resumed.token_ids) > 40
    assert resumed.num_cached_tokens > 0  # what it had computed was still there


def test_a_newcomer_waits_until_its_whole_prompt_fits() -> None:
    driver = Driver(num_blocks=10)
    first = driver.add(100, max_tokens=20)
    driver.step()
    second = driver.add(60, max_tokens=4)
    while not first.is_finished:
        driver.step()
        if not first.is_finished:
            assert second.status is Status.WAITING
    driver.run()
    assert second.finish_reason is FinishReason.LENGTH
    assert second.epoch == 1


def test_slots_bound_the_requests_that_run() -> None:
    driver = Driver(max_num_seqs=2)
    for _ in range(5):
        driver.add(10, max_tokens=3)
    driver.run()
    assert max(plan.num_sequences for plan in driver.plans) == 2
    assert all(slot in (0, 1) for plan in driver.plans for slot in plan.decodes.slots)


def test_a_prefix_hit_skips_whole_chunks() -> None:
    driver = Driver("fixed:32")
    prompt = list(range(100))
    first = driver.add(prompt)
    driver.run()
    second = driver.add(prompt)
    third = driver.add(prompt[:50] + [999] * 50)
    driver.run()
    assert driver.chunks(first) == [(0, 32), (32, 32), (64, 32), (96, 4)]
    assert driver.chunks(second) == [(96, 4)]
    assert driver.chunks(third)[0][0] == 48
    for request in (first, second, third):
        driver.check_output(request)


def test_a_prompt_that_is_cached_whole_still_computes_its_end() -> None:
    driver = Driver()
    prompt = list(range(64))
    driver.add(prompt)
    driver.run()
    again = driver.add(prompt)
    driver.run()
    assert driver.chunks(again) == [(48, 16)]
    driver.check_output(again)


def test_an_equal_prompt_waits_for_the_one_being_computed() -> None:
    driver = Driver("fixed:64")
    prompt = list(range(200))
    first, second = driver.add(prompt, name="first"), driver.add(prompt, name="second")
    driver.run()
    assert driver.chunks(first) == [(0, 64), (64, 64), (128, 64), (192, 8)]
    assert second.num_cached_tokens >= 64
    assert sum(length for _, length in driver.chunks(second)) <= 200 - 64
    driver.check_output(second)


def test_an_aborted_producer_does_not_leave_others_waiting() -> None:
    driver = Driver("fixed:16")
    prompt = list(range(200))
    first, second = driver.add(prompt), driver.add(prompt)
    driver.step()
    driver.scheduler.abort(first.id)
    driver.run()
    assert second.finish_reason is FinishReason.LENGTH
    driver.check_output(second)


def test_tenants_do_not_share_a_prefix() -> None:
    from evenflow.core.prefix_cache import hash_blocks

    prompt = list(range(64))
    assert not set(hash_blocks(prompt, 16, b"a")) & set(hash_blocks(prompt, 16, b"b"))


def test_prefix_caching_can_be_off() -> None:
    driver = Driver(enable_prefix_caching=False)
    prompt = list(range(64))
    driver.add(prompt)
    driver.run()
    again = driver.add(prompt)
    driver.run()
    assert driver.chunks(again) == [(0, 64)]


def test_where_answers_are_not_reused_only_prompts_are_shared() -> None:
    for reuses_answers, num_cached in ((True, 96), (False, 32)):
        driver = Driver(caps=ExecutorCaps(reuses_answers=reuses_answers))
        first = driver.add(list(range(40)), max_tokens=60)
        driver.run()
        again = driver.add(first.tokens, max_tokens=2)  # the next turn: two blocks of prompt, four of the answer
        driver.run()
        assert again.num_cached_tokens == num_cached
        driver.check_output(again)


def test_prompt_logprobs_need_every_row_so_nothing_is_taken_from_the_cache() -> None:
    driver = Driver("fixed:32")
    prompt = list(range(64))
    driver.add(prompt)
    driver.run()
    again = driver.add(prompt, prompt_logprobs=0)
    driver.run()
    assert driver.chunks(again) == [(0, 32), (32, 32)]
    assert all(c.prompt_logprobs for plan in driver.plans for c in plan.chunks if c.request_id == again.id)


def test_a_failed_sequence_ends_its_request_alone_and_publishes_nothing() -> None:
    failing = {"bad"}

    def disturb(plan: object) -> dict[int, str]:
        names = [*plan.decodes.request_ids, *(c.request_id for c in plan.chunks)]  # type: ignore[attr-defined]
        return {index: "NaN" for index, name in enumerate(names) if name in failing}

    driver = Driver(disturb=disturb)
    bad, good = driver.add(list(range(40)), name="bad"), driver.add(40, name="good")
    driver.run()
    assert (bad.finish_reason, bad.error) == (FinishReason.ERROR, "NaN")
    assert good.finish_reason is FinishReason.LENGTH
    failing.clear()
    again = driver.add(list(range(40)), name="again")
    driver.run()
    assert again.num_cached_tokens == 0
    driver.check_output(again)


def test_long_prompts_take_at_most_the_threshold_of_a_step() -> None:
    driver = Driver("fixed:256", long_prefill_token_threshold=64)
    long, short = driver.add(200, name="long"), driver.add(50, name="short")
    driver.run()
    assert driver.chunks(long) == [(0, 64), (64, 64), (128, 64), (192, 8)]
    assert driver.reasons(long) == ["long_prefill"] * 3 + ["end_of_prompt"]
    assert driver.chunks(short) == [(0, 50)]


def test_chunks_are_rounded_to_what_the_executor_likes_except_at_the_end() -> None:
    driver = Driver("fixed:100", caps=ExecutorCaps(chunk_alignment=16))
    request = driver.add(250)
    driver.run()
    assert driver.chunks(request) == [(0, 96), (96, 96), (192, 58)]
    assert driver.reasons(request)[0] == "alignment"


def test_rows_are_padded_to_the_executors_buckets() -> None:
    driver = Driver(caps=ExecutorCaps(row_buckets=(8, 32)))
    driver.add(20, max_tokens=2)
    driver.run()
    assert [plan.padded_rows for plan in driver.plans] == [32, 8]


def test_a_request_that_can_never_fit_is_refused() -> None:
    driver = Driver(num_blocks=4)
    with pytest.raises(InvalidRequest, match="KV cache holds 64"):
        driver.add(60, max_tokens=5)
    driver.add(60, max_tokens=4, name="fits")
    with pytest.raises(InvalidRequest, match="'fits'"):
        driver.add(10, name="fits")
    driver.run()


def test_shape_describes_the_step() -> None:
    driver = Driver("fixed:12")
    driver.add(10, max_tokens=5, name="a")
    driver.step()
    driver.add(30, name="b")
    driver.step()
    driver.step()
    shape = driver.plans[2].shape(ExecutorCaps())  # a at position 11, b's rows 11 to 21
    assert (shape.total_rows, shape.prefill_rows, shape.decode_sequences) == (12, 11, 1)
    assert shape.decode_context == 12
    assert shape.prefill_attention == sum(range(12, 23))
    assert shape.logit_rows == 1
    assert shape.attention_calls == 2


def test_counters_at_rest() -> None:
    request = Request("r", [1, 2, 3], SamplingParams(max_tokens=2), seed=0, max_model_len=4)
    assert request.max_known_tokens == 4
    assert request.num_unscheduled == 3
    assert "known=3" in repr(request)


def test_a_preempted_request_forgets_what_was_in_flight() -> None:
    driver = Driver(num_blocks=8, caps=ExecutorCaps(max_steps_in_flight=2))
    old, young = driver.add(40, max_tokens=60, name="old"), driver.add(40, max_tokens=60, name="young")
    while young.status is not Status.PREEMPTED:
        driver.schedule() if driver.scheduler.can_schedule else driver.commit()
    assert (young.num_scheduled, young.num_committed, young.num_pending) == (0, 0, 0)
    assert driver.scheduler.num_in_flight == 1  # with a token of it that will be dropped
    driver.run()
    for request in (old, young):
        driver.check_output(request)


def test_nobody_is_preempted_for_blocks_that_are_about_to_come_free() -> None:
    driver = Driver(num_blocks=12, caps=ExecutorCaps(max_steps_in_flight=2))
    oldest = driver.add(47, max_tokens=30, name="oldest")
    middle = driver.add(47, max_tokens=30, name="middle")
    youngest = driver.add(47, max_tokens=30, name="youngest")
    driver.run()
    assert [request.epoch for request in (oldest, middle, youngest)] == [1, 1, 2]


def test_a_step_that_waits_behind_another_is_not_charged_for_it() -> None:
    driver = Driver(caps=ExecutorCaps(max_steps_in_flight=2), cost=lambda shape: 0.1)
    driver.add(4, max_tokens=40)
    driver.run()
    assert len(driver.plans) == 40
    assert driver.scheduler.overhead == pytest.approx(0, abs=1e-9)


def test_a_prompt_that_does_not_fit_is_passed_by_what_does_within_a_bound() -> None:
    driver = Driver(num_blocks=20)
    running = driver.add(160, max_tokens=40)
    driver.step()
    large = driver.add(200, max_tokens=8)
    small = [driver.add(24, max_tokens=8, name=f"small{number}") for number in range(12)]
    while not running.is_finished:
        driver.step()
        assert large.status is Status.WAITING
    passed = [one for one in small if one.is_finished or one.is_running]
    most = large.max_known_tokens // small[0].max_known_tokens
    assert passed == small[:most]  # no more tokens than its own, and in their order
    driver.run()
    assert all(one.is_finished for one in [large, *small])
    first_tokens = [name for plan in driver.plans for name in (chunk.request_id for chunk in plan.chunks)]
    assert first_tokens.index(large.id) < first_tokens.index(small[most].id)
    assert large.epoch == 1  # passing preempted nobody


def test_a_prompt_that_does_not_fit_holds_up_none_that_shares_its_prefix() -> None:
    driver = Driver(num_blocks=40)
    driver.add(480, max_tokens=100)
    driver.step()
    system = [7] * 32
    large = driver.add([*system, *range(300)], max_tokens=60)
    small = [driver.add([*system, number], max_tokens=2) for number in range(4)]
    for _ in range(12):
        driver.step()
    assert large.status is Status.WAITING
    assert all(one.is_finished for one in small)
    assert [one.num_cached_tokens for one in small] == [0, 32, 32, 32]  # the first computes it for the others
    driver.run()
    assert large.num_cached_tokens == 32


def test_no_prompt_passes_one_that_needs_less() -> None:
    driver = Driver(num_blocks=12)
    running = driver.add(150, max_tokens=20)
    driver.step()
    first = driver.add(60, max_tokens=4)
    longer = driver.add(20, max_tokens=60)  # it would fit now, and stay for longer
    while not running.is_finished:
        driver.step()
        if not running.is_finished:
            assert {first.status, longer.status} == {Status.WAITING}
    driver.run()


@pytest.mark.parametrize("seed", range(4))
def test_no_prompt_starves_for_those_that_pass_it(seed: int) -> None:
    """A flood of small prompts for ever: a large one still starts, after at most its own tokens of theirs."""
    rng = random.Random(seed)
    driver = Driver("fixed:128", num_blocks=40)
    for _ in range(8):
        driver.add(rng.randint(10, 60), max_tokens=rng.randint(1, 30))
    driver.step()
    large = driver.add(600, max_tokens=4)
    later: list[Request] = []
    while not large.is_running:
        while len(driver.scheduler.requests) < 12:
            later.append(driver.add(rng.randint(10, 60), max_tokens=rng.randint(1, 30)))
        driver.step()
        driver.scheduler.pool.check_invariants()
    passed = [one for one in later if one.is_running or one.is_finished]
    assert 0 < sum(one.max_known_tokens for one in passed) <= large.max_known_tokens


def test_a_record_stays_what_it_was_when_the_request_was_added() -> None:
    driver = Driver()
    request = driver.add(20, max_tokens=40)
    record = request.record()
    before = list(record.block_hashes)
    driver.run()
    assert len(request.block_hashes) > len(before)
    assert record.block_hashes == before
