"""Classes and tenants in plans: who goes first, who yields, what nobody loses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenflow.core.account import PROMOTED
from evenflow.core.plan import ExecutorCaps, StepShape
from evenflow.core.request import Request, Status
from evenflow.core.service_classes import DEFAULT_CLASSES
from evenflow.errors import LateRequest
from tests.core.driving import Driver, check_replay, layout

INTERACTIVE, STANDARD, BATCH = DEFAULT_CLASSES
ROW_S = 0.001


def by_rows(shape: StepShape) -> float:
    return ROW_S * shape.total_rows


def decoding(driver: Driver, number: int, **who: str) -> list[Request]:
    """Requests that have begun to decode, and go on for long."""
    requests = [driver.add(16, max_tokens=400, **who) for _ in range(number)]
    while any(not request.num_output_tokens for request in requests):
        driver.step()
    return requests


# ---- classes ----


def test_a_long_prefill_yields_between_chunks_and_keeps_what_it_computed() -> None:
    driver = Driver("fixed:64")
    long = driver.add(200, name="long", service_class="batch")
    driver.step()
    driver.add(100, name="urgent", service_class="interactive")
    driver.run()
    assert [layout(plan)[1] for plan in driver.plans[:5]] == [
        [("long", 0, 64)],
        [("urgent", 0, 64)],
        [("urgent", 64, 36), ("long", 64, 28)],
        [("long", 92, 63)],
        [("long", 155, 45)],
    ]
    assert long.epoch == 1  # it never left its slot
    driver.check_output(long)


def test_an_urgent_request_takes_the_slot_of_a_patient_one_which_goes_on_later() -> None:
    driver = Driver("fixed:64", max_num_seqs=3)
    patient = decoding(driver, 2, service_class="batch")
    usual = decoding(driver, 1)
    urgent = driver.add(20, max_tokens=2, service_class="interactive")
    driver.step()
    assert urgent.status is Status.RUNNING
    assert [one.status for one in (*patient, *usual)] == [Status.RUNNING, Status.PREEMPTED, Status.RUNNING]
    driver.run()
    for request in (*patient, *usual, urgent):
        driver.check_output(request)
    assert patient[1].num_cached_tokens > 0  # its KV was still there


def test_an_urgent_request_takes_memory_of_prompts_first_and_then_of_streams() -> None:
    driver = Driver("fixed:32", num_blocks=16)
    stream = driver.add(40, max_tokens=60, service_class="batch")
    while not stream.num_output_tokens:
        driver.step()
    prompt = driver.add(130, service_class="batch")
    driver.step()
    assert (stream.status, prompt.status) == (Status.RUNNING, Status.RUNNING)
    urgent = driver.add(100, max_tokens=4, service_class="interactive")
    driver.step()
    assert (urgent.status, stream.status, prompt.status) == (Status.RUNNING, Status.RUNNING, Status.PREEMPTED)
    driver.run()
    for request in (stream, prompt, urgent):
        driver.check_output(request)


def test_nobody_is_preempted_in_vain() -> None:
    driver = Driver("fixed:32", num_blocks=12, max_num_seqs=4)
    usual = driver.add(110, max_tokens=40)
    driver.step()
    patient = driver.add(16, max_tokens=30, service_class="batch")
    while not patient.num_output_tokens:
        driver.step()
    urgent = driver.add(150, max_tokens=2, service_class="standard")
    for _ in range(5):
        driver.step()
    assert patient.status is Status.RUNNING  # its blocks would not have been enough
    assert urgent.status is Status.WAITING
    driver.run()
    driver.check_output(usual)


def test_equals_do_not_take_each_others_slots() -> None:
    driver = Driver("fixed:64", max_num_seqs=2)
    running = decoding(driver, 2, service_class="interactive")
    driver.add(20, service_class="interactive")
    driver.add(20, service_class="batch")
    for _ in range(5):
        driver.step()
    assert all(one.status is Status.RUNNING for one in running)


def test_batch_work_leaves_its_reserve_of_slots_and_blocks() -> None:
    classes = (INTERACTIVE, STANDARD, replace(BATCH, reserve=0.25))
    driver = Driver("fixed:256", max_num_seqs=8, num_blocks=100, classes=classes)
    for _ in range(10):
        driver.add(16, max_tokens=50, service_class="batch")
    for _ in range(10):
        driver.step()
    assert driver.scheduler.num_running == 6
    driver.run()
    whole = driver.add(1500, service_class="batch")  # more than the reserve leaves: it runs when nothing else does
    driver.run()
    driver.check_output(whole)


def test_less_urgent_classes_do_not_get_what_a_more_urgent_one_leaves_but_do_get_their_share() -> None:
    """A reserve is for the decodes that run: else their tokens would wait, or they would be preempted."""
    classes = (INTERACTIVE, replace(STANDARD, reserve=0.5), BATCH)
    driver = Driver("fixed:64", max_num_seqs=8, classes=classes, cost=by_rows)
    running = decoding(driver, 4)
    urgent = [driver.add(16, max_tokens=400) for _ in range(200)]
    patient = driver.add(16, max_tokens=2, service_class="batch")
    for _ in range(3):
        driver.step()
    assert [one.is_running for one in (*running, urgent[0], patient)] == [True] * 4 + [False] * 2
    driver.add(4, max_tokens=2, service_class="interactive")
    driver.step()
    assert driver.scheduler.num_running == 5
    while not patient.num_output_tokens:
        driver.step()
    assert any(not one.num_output_tokens for one in urgent)


def test_a_class_has_targets_for_requests_without_their_own() -> None:
    classes = (replace(INTERACTIVE, tbt_target=0.02, ttft_target=0.5), STANDARD, replace(BATCH, tbt_target=2.0))
    driver = Driver("target:50ms", classes=classes, cost=by_rows)
    urgent = driver.add(10, service_class="interactive")
    own = driver.add(10, service_class="interactive", tbt_target=0.03, ttft_target=0.7)
    usual, patient = driver.add(10), driver.add(10, service_class="batch")
    assert [one.deadline.own_target for one in (urgent, own, usual, patient)] == [0.02, 0.03, None, 2.0]
    assert [one.place.ttft_target for one in (urgent, own, usual, patient)] == [0.5, 0.7, None, None]


def test_a_prompt_that_is_late_anyway_makes_way_for_those_that_are_not() -> None:
    classes = (replace(INTERACTIVE, ttft_target=0.3), STANDARD, BATCH)
    driver = Driver("fixed:50", classes=classes, cost=by_rows)
    driver.add(50, max_tokens=1)
    driver.run()  # the price of a row is known
    late = driver.add(400, name="late", service_class="interactive")
    usual = driver.add(100, name="usual")
    on_time = driver.add(200, name="on time", service_class="interactive")
    driver.run()
    firsts = {}
    for plan in driver.plans:
        for chunk in plan.chunks:
            firsts.setdefault(chunk.request_id, plan.step_id)
    assert firsts["on time"] < firsts["late"] < firsts["usual"]
    for request in (late, usual, on_time):
        driver.check_output(request)


def test_an_urgent_request_does_not_wait_for_a_prefix_that_a_patient_one_computes() -> None:
    driver = Driver("fixed:32")
    prompt = list(range(200))
    patient = driver.add(prompt, name="patient", service_class="batch")
    driver.step()
    urgent = driver.add(prompt, name="urgent", service_class="interactive")
    driver.step()
    assert layout(driver.plans[1])[1] == [("urgent", 32, 32)]
    driver.run()
    driver.check_output(patient)
    driver.check_output(urgent)


@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 2])
@settings(max_examples=6, deadline=None)
@given(
    prompt=st.integers(10, 300),
    patient_prompt=st.integers(10, 600),
    output=st.integers(1, 20),
    slots=st.integers(2, 8),
    share=st.sampled_from((0.05, 0.2)),
    target=st.booleans(),
)
def test_no_class_starves(
    depth: int, prompt: int, patient_prompt: int, output: int, slots: int, share: float, target: bool
) -> None:
    """However much urgent work waits, a class that waits too gets its share of the time.

    The bound: its share of all seconds, less those of one request and the one second that it saves before a promotion;
    and less its share of the time in which a promoted prompt waited for a slot.
    """
    row_s = 0.01
    classes = (INTERACTIVE, STANDARD, replace(BATCH, share=share, reserve=0.0))
    driver = Driver(
        "target:500ms" if target else "fixed:96",
        num_blocks=4000,
        max_num_seqs=slots,
        classes=classes,
        cost=lambda shape: row_s * shape.total_rows,
        caps=ExecutorCaps(max_steps_in_flight=depth),
    )
    driver.add(96, max_tokens=8)
    driver.run()  # step times are known
    begin, first = driver.executor.clock.now, len(driver.plans)
    for _ in range(40):
        driver.add(patient_prompt, max_tokens=output, service_class="batch")
    patient = [one for one in driver.requests.values() if one.service_class == "batch"]
    unfinished, rows_waited = driver.scheduler.requests, 0
    while driver.executor.clock.now - begin < 30.0 and any(not one.is_finished for one in patient):
        while sum(one.service_class == "interactive" for one in unfinished.values()) < 12:
            driver.add(prompt, max_tokens=output, service_class="interactive")
        num_plans = len(driver.plans)
        driver.step()
        if any(one.account.level == PROMOTED and one.status is Status.WAITING for one in patient):
            rows_waited += sum(plan.num_rows for plan in driver.plans[num_plans:])
    rows = Counter[str]()
    for plan in driver.plans[first:]:
        for name in plan.decodes.request_ids:
            rows[driver.requests[name].service_class] += 1
        for chunk in plan.chunks:
            rows[driver.requests[chunk.request_id].service_class] += chunk.length
    if all(one.is_finished for one in patient):
        return
    one_request = patient_prompt + output
    bound = share * (rows.total() - rows_waited) - one_request - 1 / row_s - 2 * 96
    assert rows["batch"] >= bound


@pytest.mark.slow
def test_a_promoted_request_pays_for_its_promotion() -> None:
    driver = Driver("fixed:100", cost=by_rows, max_num_seqs=8)
    driver.add(100, max_tokens=1)
    driver.run()
    patient = [driver.add(500, max_tokens=1, service_class="batch") for _ in range(8)]
    promotions = 0
    was_promoted: set[str] = set()
    begin = driver.executor.clock.now
    while driver.executor.clock.now - begin < 20:
        while sum(not one.is_finished for one in driver.requests.values() if one.service_class == "interactive") < 3:
            driver.add(200, max_tokens=1, service_class="interactive")
        driver.step()
        was_promoted |= {one.id for one in patient if one.account.level == PROMOTED}
        now_promoted = [one for one in patient if one.account.level == PROMOTED and not one.is_finished]
        assert len(now_promoted) <= 1
        promotions = len(was_promoted)
    assert 1 <= promotions <= 2  # 5% of 20 seconds, at half a second each


# ---- tenants ----


def served_rows(driver: Driver, first: int = 0) -> Counter[str]:
    rows = Counter[str]()
    for plan in driver.plans[first:]:
        for name in plan.decodes.request_ids:
            rows[driver.requests[name].tenant] += 1
        for chunk in plan.chunks:
            rows[driver.requests[chunk.request_id].tenant] += chunk.length
    return rows


def test_tenants_take_turns_by_chunks_however_long_their_prompts_are() -> None:
    driver = Driver("fixed:64")
    driver.add(640, max_tokens=1, name="long", tenant="greedy")
    for _ in range(3):
        driver.step()
    for number in range(3):
        driver.add(64, max_tokens=1, name=f"short{number}", tenant="modest")
    driver.run()
    served = [chunk.request_id for plan in driver.plans for chunk in plan.chunks]
    assert served[:3] == ["long"] * 3
    assert served[3:6] == ["short0", "short1", "short2"]  # what it lent before lets its burst go first
    assert served[6:] == ["long"] * 7


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(
    sizes=st.lists(st.integers(20, 800), min_size=2, max_size=5),
    weights=st.lists(st.sampled_from((1.0, 2.0, 0.5)), min_size=5, max_size=5),
    budget=st.sampled_from((32, 100, 200)),
    depth=st.sampled_from((1, 2)),
)
def test_backlogged_tenants_get_service_by_weight_within_a_chunk(
    sizes: list[int], weights: list[float], budget: int, depth: int
) -> None:
    tenants = [f"t{number}" for number in range(len(sizes))]
    of_tenant = dict(zip(tenants, weights, strict=False))
    driver = Driver(
        f"fixed:{budget}",
        num_blocks=10_000,
        max_num_seqs=64,
        tenant_weights=of_tenant,
        caps=ExecutorCaps(max_steps_in_flight=depth),
        cost=lambda shape: 0.01 * shape.total_rows,
    )

    def top_up() -> None:
        waiting = Counter(one.tenant for one in driver.scheduler.requests.values() if one.is_prompt)
        for tenant, size in zip(tenants, sizes, strict=True):
            for _ in range(waiting[tenant], 2 + budget // size):
                driver.add(size, max_tokens=1, tenant=tenant)

    for _ in range(20):  # what was lent before the start is given back
        top_up()
        driver.step()
    first = len(driver.plans)
    for _ in range(30):
        top_up()
        driver.step()
    rows = served_rows(driver, first)
    shares = [rows[tenant] / of_tenant[tenant] for tenant in tenants]
    most_in_a_step = 2 * depth * budget / min(of_tenant[tenant] for tenant in tenants)
    assert max(shares) - min(shares) <= most_in_a_step


def test_a_tenant_that_comes_second_has_lent_nothing_yet() -> None:
    """Before, it went first with a whole second of prompts."""
    driver = Driver("fixed:100", cost=by_rows, num_blocks=10_000)
    first = driver.add(1000, max_tokens=1, tenant="first")
    driver.step()
    for _ in range(10):
        driver.add(1000, max_tokens=1, tenant="second")
    for _ in range(22):
        driver.step()
    assert first.is_finished, "it has half of the time"


@pytest.mark.slow
def test_what_a_tenant_leaves_unused_is_lent_and_not_saved() -> None:
    driver = Driver("fixed:100", cost=by_rows, num_blocks=10_000)
    away = driver.add(100, max_tokens=1, tenant="away")
    busy = [driver.add(1000, max_tokens=1, tenant="busy") for _ in range(40)]
    for _ in range(200):  # twenty seconds
        driver.step()
    assert away.is_finished
    assert sum(one.is_finished for one in busy) >= 18
    first = len(driver.plans)
    for _ in range(20):
        driver.add(1000, max_tokens=1, tenant="away")
    for _ in range(60):
        driver.step()
    rows = served_rows(driver, first)
    assert rows["busy"] >= 60 * 100 / 2 - 1000 / 2 - 200  # half, but for the second that was lent


def test_a_tenant_without_a_slot_takes_one_of_a_tenant_that_has_more() -> None:
    driver = Driver("fixed:64", max_num_seqs=4)
    greedy = decoding(driver, 4, tenant="greedy")
    modest = driver.add(20, max_tokens=3, tenant="modest")
    driver.step()
    assert modest.status is Status.RUNNING
    assert [one.status for one in greedy] == [Status.RUNNING] * 3 + [Status.PREEMPTED]
    for _ in range(3):
        driver.add(20, max_tokens=300, tenant="modest")
    for _ in range(40):
        driver.step()
    running = Counter(one.tenant for one in driver.scheduler.requests.values() if one.status is Status.RUNNING)
    assert running == {"greedy": 2, "modest": 2}
    assert max(one.epoch for one in driver.scheduler.requests.values()) <= 1  # nobody yields twice
    driver.run()
    for request in driver.requests.values():
        driver.check_output(request)


def test_a_tenant_does_not_wait_for_a_shared_prefix_while_others_go_before_the_one_that_computes_it() -> None:
    driver = Driver("fixed:64", cost=by_rows)
    shared = list(range(500))
    heavy = driver.add([*shared, *range(600, 900)], max_tokens=1, tenant="heavy", salt="team")
    for _ in range(20):
        driver.add(64, max_tokens=1, tenant="heavy")
    for _ in range(4):
        driver.step()
    driver.add(1200, max_tokens=1, name="busy", tenant="busy")
    light = driver.add([*shared, 1, 2, 3], max_tokens=1, tenant="light", salt="team")
    num_steps = 0
    while not light.num_output_tokens:
        driver.step()
        num_steps += 1
    assert light.num_cached_tokens == 256, "what was there is used"
    assert num_steps <= 9, "as many steps of the other tenant as its own prompt takes, and these"
    driver.run()
    driver.check_output(heavy)
    driver.check_output(light)


def test_tenants_that_stand_level_compute_a_shared_prefix_once() -> None:
    driver = Driver("fixed:64", cost=by_rows)
    shared = list(range(320))
    both = [
        driver.add([*shared, number], max_tokens=1, tenant=tenant, salt="team")
        for number, tenant in enumerate(("a", "b"))
    ]
    driver.run()
    assert sum(length for request in both for _, length in driver.chunks(request)) == 320 + 2
    for request in both:
        driver.check_output(request)


def test_a_prompt_that_waits_for_memory_of_its_own_tenant_holds_up_no_other() -> None:
    driver = Driver("fixed:64", num_blocks=40)
    greedy = [driver.add(280, max_tokens=30, tenant="greedy") for _ in range(3)]
    for _ in range(12):
        driver.step()
    assert [one.status for one in greedy] == [Status.RUNNING, Status.RUNNING, Status.WAITING]
    modest = driver.add(16, max_tokens=2, tenant="modest")
    driver.step()
    assert modest.status is Status.RUNNING
    driver.run()


def test_the_decode_that_finds_no_block_takes_one_of_the_tenant_with_most() -> None:
    driver = Driver("fixed:64", num_blocks=12)
    greedy = [driver.add(40, max_tokens=40, tenant="greedy") for _ in range(3)]
    for _ in range(3):
        driver.step()
    modest = driver.add(20, max_tokens=40, tenant="modest")
    while not modest.is_finished:
        driver.step()
    assert modest.epoch == 1  # the youngest of all, but it never yielded
    assert max(one.epoch for one in greedy) > 1 or any(one.is_finished for one in greedy)
    driver.run()
    for request in (*greedy, modest):
        driver.check_output(request)


def most_context(tenants: tuple[str, ...]) -> int:
    """The most positions that streams of a flood have at a time; those of other tenants come now and then."""
    driver = Driver(
        "target:100ms",
        cost=lambda shape: 0.0002 * shape.total_rows + 1e-5 * shape.decode_context,
        num_blocks=10_000,
        max_num_seqs=64,
    )
    for number in range(60):
        driver.add(300, max_tokens=20, name=f"flood{number}", tenant="flood")
    most = 0
    for step in range(150):
        if step % 20 == 0:
            for tenant in tenants:
                driver.add(20, max_tokens=2, tenant=tenant)
        driver.step()
        running = [one for one in driver.scheduler.requests.values() if one.status is Status.RUNNING]
        most = max(most, sum(one.num_known for one in running if one.tenant == "flood"))
    driver.run()
    assert all(one.is_finished for one in driver.requests.values())
    return most


def test_streams_of_one_tenant_leave_the_target_to_prompts_of_others() -> None:
    limit = 1800  # positions, 18% of the target
    assert most_context(("light",)) <= limit + 3 * 320
    assert most_context(()) > limit + 3 * 320


@pytest.mark.parametrize("policy", ["fixed:400", "target:100ms"])
def test_a_first_token_does_not_wait_for_prompts_of_another_tenant_in_its_step(policy: str) -> None:
    """Those of another class fill the step: batch work takes what is left."""
    rows = {}
    for tenant, service_class in (("flood", "standard"), ("flood", "batch"), ("light", "batch")):
        driver = Driver(policy, cost=lambda shape: 0.002 + 0.0002 * shape.total_rows, num_blocks=10_000)
        for number in range(40):
            driver.add(400, max_tokens=2, name=f"flood{number}", tenant=tenant, service_class=service_class)
        for _ in range(8):
            driver.step()
        light = driver.add(150, max_tokens=4, name="light", tenant="light", service_class="standard")
        driver.step()
        assert light.num_output_tokens == 1
        [own, *others] = driver.plans[-1].chunks
        assert (own.request_id, own.length) == ("light", 150)
        rows[tenant, service_class] = sum(one.length for one in others)
        assert not others or others[-1].reason == "turn" or service_class == "batch"
        driver.run()
    assert rows["flood", "standard"] <= 100
    assert rows["flood", "batch"] >= 200 <= rows["light", "batch"]


def test_tenants_with_equal_shares_fill_their_steps() -> None:
    """None of them is owed more than the others: short steps would only cost efficiency."""
    driver = Driver("fixed:400", cost=lambda shape: 0.0002 * shape.total_rows, num_blocks=10_000, max_num_seqs=64)
    for number in range(40):
        for tenant in ("a", "b", "c"):
            driver.add(90, max_tokens=1, name=f"{tenant}{number}", tenant=tenant)
    driver.run()
    full = [sum(chunk.length for chunk in plan.chunks) for plan in driver.plans]
    assert full[:-1] == [400] * (len(full) - 1)


def test_one_tenant_or_many_alone_plan_the_same() -> None:
    """A single class and tenant is the plain scheduler, whatever their names."""
    plans = []
    for tenant, service_class in (("", ""), ("acme", "interactive")):
        driver = Driver("target:50ms", num_blocks=60, max_num_seqs=4, cost=by_rows)
        for number in range(12):
            driver.add(20 + 37 * number % 200, max_tokens=5 + number, tenant=tenant, service_class=service_class)
            driver.step()
        driver.run()
        plans.append([layout(plan) for plan in driver.plans])
    assert plans[0] == plans[1]


# ---- what would be late ----


def refusing(cost: Callable[[StepShape], float] = by_rows, **settings: object) -> Driver:
    """Usually a row takes a millisecond. Urgent prompts have a second to their first token."""
    urgent = replace(INTERACTIVE, ttft_target=1.0, refuse_late=True)
    driver = Driver("fixed:100", cost=cost, num_blocks=10_000, classes=(urgent, STANDARD, BATCH), **settings)
    for length in (40, 700, 90, 1300, 260) * 2:
        driver.add(length, max_tokens=5)
        driver.run()  # step times are known
    return driver


def test_a_request_that_would_miss_its_target_is_refused_and_what_is_taken_meets_it() -> None:
    driver = refusing()
    begin = driver.executor.clock.now
    taken = [driver.add(400, max_tokens=1, service_class="interactive") for _ in range(2)]
    with pytest.raises(LateRequest, match="retry later") as refusal:
        driver.add(400, max_tokens=1, service_class="interactive")
    assert refusal.value.expected_s == pytest.approx(1.2, rel=0.1)
    assert refusal.value.target_s == 1.0
    assert len(driver.scheduler.requests) == 2
    driver.add(150, max_tokens=1, service_class="interactive")  # there is room for a short one
    driver.add(5000, max_tokens=1, service_class="standard")  # nobody asked when it would come
    while not all(one.is_finished for one in taken):
        driver.step()
    assert driver.executor.clock.now - begin <= 1.0
    driver.add(400, max_tokens=1, service_class="interactive")


def test_what_goes_after_a_request_does_not_count_against_it() -> None:
    driver = refusing()
    for tenant in ("a", "b"):
        driver.add(3000, max_tokens=1, service_class="batch", tenant=tenant)
    driver.step()
    assert driver.add(800, max_tokens=1, service_class="interactive") is not None


def test_tenants_take_turns_in_the_estimate_too() -> None:
    driver = refusing(tenant_weights={"heavy": 2.0})
    for _ in range(2):
        driver.add(450, max_tokens=1, service_class="interactive", tenant="heavy")
    with pytest.raises(LateRequest):
        driver.add(450, max_tokens=1, service_class="interactive", tenant="heavy")
    driver.add(450, max_tokens=1, service_class="interactive", tenant="light")  # it goes before the second


def test_a_refused_request_leaves_no_trace() -> None:
    plans = []
    for is_refused in (False, True):
        driver = refusing()
        for tenant in ("a", "b"):
            driver.add(450, max_tokens=3, service_class="interactive", tenant=tenant)
            if is_refused:
                with pytest.raises(LateRequest):
                    driver.add(3000, max_tokens=1, service_class="interactive", tenant=tenant, name="late")
        driver.run()
        plans.append([layout(plan) for plan in driver.plans])
    assert plans[0] == plans[1]


def test_decodes_slow_prefill_down_in_the_estimate() -> None:
    driver = refusing(max_num_seqs=80)
    decoding(driver, 60)
    for _ in range(30):  # steps of 100 rows, of which 60 are decodes
        driver.add(40, max_tokens=1)
        driver.step()
    with pytest.raises(LateRequest) as refusal:
        driver.add(700, max_tokens=1, service_class="interactive")  # 0.7 s by itself, with two rows in five 1.75 s
    assert 1.2 < refusal.value.expected_s < 2.0


# ---- an estimate refuses nothing that would correct it ----


class Machine:
    """A row of prefill takes a millisecond, or longer while something disturbs it; a stream's token takes 50."""

    slowness = 1.0

    def __call__(self, shape: StepShape) -> float:
        return ROW_S * self.slowness * shape.prefill_rows + 0.05 * shape.decode_sequences


def answers(driver: Driver, length: int, count: int, pause: float = 5.0, **sampling: float) -> list[bool]:
    """Whether each of these prompts, one after the other, is taken."""
    taken = []
    for _ in range(count):
        advance(driver, pause)
        try:
            prompt = driver.add(length, max_tokens=1, service_class="interactive", **sampling)
        except LateRequest:
            taken.append(False)
            continue
        taken.append(True)
        while not prompt.is_finished:
            driver.step()
    return taken


def advance(driver: Driver, seconds: float) -> None:
    """Let time pass while the streams decode."""
    clock = driver.executor.clock
    until = clock.now + seconds
    while clock.now < until and driver.step():
        pass
    clock.now = max(clock.now, until)


def test_an_idle_engine_takes_what_it_refused_under_load() -> None:
    driver = refusing(Machine())
    decoding(driver, 6)
    for _ in range(30):
        driver.add(50, max_tokens=1)
        driver.step()
    assert not any(answers(driver, 700, 2, pause=0.0))
    driver.run()
    driver.add(100, max_tokens=1, service_class="interactive")
    driver.add(700, max_tokens=1, service_class="interactive")  # the streams that slowed prompts down have ended
    driver.run()
    assert all(answers(driver, 1500, 3)), "too long for the target, but nobody else waits"


def test_a_disturbance_is_forgotten_although_refused_prompts_are_never_measured() -> None:
    machine = Machine()
    driver = refusing(machine)
    machine.slowness = 6.0
    assert all(answers(driver, 500, 3))
    machine.slowness = 1.0
    assert all(answers(driver, 500, 5))


@pytest.mark.parametrize("sampling", [{}, {"deadline": 1.0}])
def test_a_client_that_comes_back_when_it_was_told_to_is_taken_and_measured(sampling: dict[str, float]) -> None:
    machine = Machine()
    driver = refusing(machine)
    driver.add(16, max_tokens=100_000)
    machine.slowness = 6.0
    answers(driver, 500, 2, pause=0.1)
    machine.slowness = 1.0
    with pytest.raises(LateRequest) as refusal:
        driver.add(500, max_tokens=1, service_class="interactive", **sampling)
    assert refusal.value.retry_after_s <= 30
    advance(driver, refusal.value.retry_after_s)
    assert all(answers(driver, 500, 3, pause=0.0, **sampling))
    check_replay(driver.header, driver.calls)


def test_while_a_load_stays_one_late_prompt_in_30_seconds_is_let_through() -> None:
    driver = refusing(Machine())
    for _ in range(6):
        driver.add(16, max_tokens=100_000)
    advance(driver, 40.0)
    driver.add(300, max_tokens=1)  # shows how long prompts take beside these streams
    begin = driver.executor.clock.now
    taken = answers(driver, 700, 60, pause=1.0)
    assert 2 <= sum(taken) <= 2 + (driver.executor.clock.now - begin) / 30


def test_nothing_is_refused_before_the_first_step_was_measured() -> None:
    urgent = replace(INTERACTIVE, ttft_target=0.001, refuse_late=True)
    driver = Driver("fixed:100", cost=by_rows, classes=(urgent, STANDARD, BATCH))
    for _ in range(4):  # prices are nominal: they say nothing of seconds
        driver.add(400, max_tokens=1, service_class="interactive")
        driver.add(400, max_tokens=1, deadline=0.001)
    driver.step()
    with pytest.raises(LateRequest):
        driver.add(400, max_tokens=1, service_class="interactive")


def test_a_backlog_says_when_it_will_be_done() -> None:
    driver = refusing()
    for _ in range(2):
        driver.add(450, max_tokens=1, service_class="interactive")
    with pytest.raises(LateRequest) as refusal:
        driver.add(450, max_tokens=1, service_class="interactive")
    assert refusal.value.retry_after_s == pytest.approx(refusal.value.expected_s - 1.0)
    advance(driver, refusal.value.retry_after_s)
    driver.add(450, max_tokens=1, service_class="interactive")
