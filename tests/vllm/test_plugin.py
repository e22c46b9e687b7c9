"""The steered scheduler in virtual time: what it keeps, what it leaves as it is, and what it refuses."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.driving import (
    AsyncScheduler,
    Driver,
    LaunchingDriver,
    Scheduler,
    make_request,
    make_scheduler,
    vllm_version,
)

from evenflow.errors import MissingDependency  # isort: skip
from evenflow.advisor.vllm_flags import caps_lone_prompts  # isort: skip
from evenflow.vllm import plugin  # isort: skip
from evenflow.vllm.graphs import CAPTURE_SIZES, graph_flags  # isort: skip
from evenflow.vllm.launch import VLLM, VllmLaunch, worker_flags  # isort: skip
from evenflow.core.report import StepReport  # isort: skip
from evenflow.hosts.reporter import Reporter  # isort: skip
from evenflow.hosts.uses import Uses  # isort: skip

TARGET = 0.05
DEPTHS = pytest.mark.parametrize("depth", [1, 2])


def warmed_up(depth: int = 1, num_chats: int = 32, **settings: Any) -> tuple[Driver, list[str]]:
    """A driver whose chats decode, after a long prompt that taught the model what chunks cost."""
    driver = Driver(make_scheduler(is_async=depth > 1, **settings), depth=depth)
    chats = [make_request(64, 5000) for _ in range(num_chats)]
    driver.add(*chats)
    driver.run(num_steps=20)
    teacher = make_request(16_000, 1)
    driver.add(teacher)
    while teacher.request_id not in driver.tokens:
        driver.step()
    driver.times.clear()
    return driver, [chat.request_id for chat in chats]


def run_until_answered(driver: Driver, request: Any) -> None:
    while request.request_id not in driver.times:
        driver.step()


def test_installed_vllm_is_a_tested_one() -> None:
    assert vllm_version().startswith(tuple(f"{version}." for version in VLLM.tested_versions))


def test_vllm_takes_the_sizes_of_graphs_and_the_worker() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parsed = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args([*graph_flags([]), *worker_flags([])])
    settings = AsyncEngineArgs.from_cli_args(parsed)
    assert tuple(settings.compilation_config.cudagraph_capture_sizes) == CAPTURE_SIZES
    assert settings.worker_cls == "evenflow.vllm.WarmWorker"


def test_a_cpu_is_asked_for_neither() -> None:
    assert VllmLaunch.target_flags(sys.executable, []) == []


@pytest.mark.parametrize(("is_async", "base"), [(False, Scheduler), (True, AsyncScheduler)])
def test_base_is_the_one_vllm_would_choose(is_async: bool, base: type) -> None:
    scheduler = make_scheduler(is_async=is_async)
    assert type(scheduler).__bases__ == (base,)


def test_changed_interface_is_refused_with_one_message() -> None:
    class Changed(Scheduler):  # type: ignore[misc, valid-type]
        def update_from_output(self, output: Any) -> None: ...

    with pytest.raises(MissingDependency, match=r"Scheduler.update_from_output.*tested on 0.26, 0.32, 0.33"):
        plugin.steered(Changed)


def test_missing_attribute_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "REQUEST", Uses("vllm.v1.request:Request", ("num_tokens", "no_such_counter")))
    with pytest.raises(MissingDependency, match=r"relies on: Request\.no_such_counter"):
        make_scheduler()


@DEPTHS
def test_target_is_kept_where_vllm_stalls(depth: int) -> None:
    longest = {}
    for target in (None, "50ms"):
        driver, chats = warmed_up(depth, target=target)
        long = make_request(32_768, 5)
        driver.add(long)
        run_until_answered(driver, long)
        longest[target] = max(driver.gaps(*chats))
    assert longest["50ms"] <= 1.05 * TARGET
    assert longest[None] > 4 * TARGET


@DEPTHS
def test_steps_are_filled_up_to_the_target(depth: int) -> None:
    driver, _ = warmed_up(depth)
    first = len(driver.ran)
    long = make_request(32_768, 5)
    driver.add(long)
    run_until_answered(driver, long)
    full = [ran.seconds for ran in driver.ran[first:] if long.request_id in ran.chunks][1:-1]
    assert sum(full) / len(full) > 0.85 * TARGET
    assert driver.scheduler.steering.core.step_time.error < 0.08


def test_first_chunks_at_most_double() -> None:
    driver = Driver(make_scheduler())
    driver.add(make_request(64, 500))
    driver.run(num_steps=5)
    long = make_request(20_000, 1)
    driver.add(long)
    run_until_answered(driver, long)
    rows = [ran.output.total_num_scheduled_tokens for ran in driver.ran]
    assert rows[0] <= 16
    assert all(after <= 2 * max(rows[:i]) for i, after in enumerate(rows[1:], start=1))


@DEPTHS
def test_decodes_are_in_every_step(depth: int) -> None:
    driver, chats = warmed_up(depth)
    driver.add(*[make_request(3_000, 5) for _ in range(4)])
    first = len(driver.ran)
    driver.run(num_steps=60)
    assert all(set(chats) <= set(ran.decodes) for ran in driver.ran[first:])


@DEPTHS
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_every_request_gets_all_its_tokens(depth: int, prefix_caching: bool) -> None:
    """Also where blocks are short, so that requests are preempted over and over."""
    scheduler = make_scheduler(is_async=depth > 1, num_blocks=120, prefix_caching=prefix_caching, max_num_seqs=16)
    driver = Driver(scheduler, depth=depth)
    requests = [make_request(50 + 13 * i, 60 + i) for i in range(24)]
    for request in requests:
        driver.add(request)
        driver.run(num_steps=3)
    driver.run()
    assert {r.request_id: len(driver.tokens[r.request_id]) for r in requests} == {
        r.request_id: r.max_tokens for r in requests
    }
    assert sum(request.num_preemptions for request in requests) > 0


def crowded(depth: int = 1) -> Any:
    """One long prompt, in many small chunks, among chats that grow and come without end until no block is free."""
    scheduler = make_scheduler("40ms", is_async=depth > 1, num_blocks=160, max_num_seqs=12)
    driver = Driver(scheduler, depth=depth, cost=lambda rows, attention, decodes: 0.01 + 0.0008 * rows)
    driver.add(make_request(64, 100))
    driver.run(num_steps=20)
    long = make_request(2_000, 4)
    driver.add(long)
    for _ in range(1_000):
        driver.step()
        if len(scheduler.waiting) < 4:
            driver.add(make_request(32, 400))
    return long


@DEPTHS
def test_long_prompt_gets_through_while_blocks_are_short(depth: int) -> None:
    long = crowded(depth)
    assert long.num_output_tokens == 4
    assert long.num_preemptions == 0  # whoever came after it yields


def test_without_the_guard_its_work_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin.VllmSteering, "_may_preempt", lambda self, num_tokens: False)
    assert crowded().num_preemptions > 0


def test_what_was_learned_is_there_at_the_next_start() -> None:
    driver, _ = warmed_up()
    driver.scheduler.shutdown()
    again = Driver(make_scheduler())
    chats = [make_request(64, 5000) for _ in range(32)]
    again.add(*chats)
    again.run(num_steps=10)
    again.add(long := make_request(16_000, 1))
    again.times.clear()
    run_until_answered(again, long)
    gaps = again.gaps(*(chat.request_id for chat in chats))
    assert max(gaps) <= 1.1 * TARGET
    assert sorted(gaps)[len(gaps) // 2] >= 0.7 * TARGET  # no slow start
    other = make_scheduler(num_stages=2)
    assert not other.steering.core.step_time.is_calibrated  # cut over devices in another way


def test_settings_of_vllm_are_as_before_after_each_step() -> None:
    driver, _ = warmed_up()
    before = own_settings(driver.scheduler)
    driver.add(make_request(20_000, 1), make_request(200, 1))
    driver.run(num_steps=10)
    after = own_settings(driver.scheduler)
    assert before == after


def test_the_advisor_knows_which_prompts_vllm_caps() -> None:
    scheduler = make_scheduler(target=None)
    scheduler.scheduler_config.long_prefill_token_threshold = 64
    prompt = make_request(500)
    scheduler.add_request(prompt)
    alone = scheduler.schedule().num_scheduled_tokens[prompt.request_id]
    assert alone == (64 if caps_lone_prompts(vllm_version()) else 500)
    others = [make_request(500), make_request(500)]
    for request in others:
        scheduler.add_request(request)
    scheduled = scheduler.schedule().num_scheduled_tokens
    assert [scheduled[request.request_id] for request in others] == [64, 64]


def own_settings(scheduler: Any) -> tuple[Any, ...]:
    threshold = scheduler.scheduler_config.long_prefill_token_threshold
    return scheduler.policy, scheduler.max_num_scheduled_tokens, threshold


@pytest.mark.parametrize(("milliseconds", "launch_seconds"), [(25, 0.03), (50, 0.03), (60, 0.044)])
def test_steps_too_large_for_a_graph_are_told_apart(milliseconds: int, launch_seconds: float) -> None:
    """One row more than the largest graph costs much of the host's time, which delays the step before."""
    scheduler = make_scheduler(f"{milliseconds}ms", is_async=True, largest_graph=512)
    driver = LaunchingDriver(scheduler, launch_seconds=launch_seconds)
    chats = [make_request(64, 5_000) for _ in range(32)]
    driver.add(*chats)
    for _ in range(9):  # the first ones teach it
        driver.run(num_steps=20)
        driver.add(long := make_request(16_000, 1))
        driver.times.clear()
        run_until_answered(driver, long)
    gaps = sorted(driver.gaps(*(chat.request_id for chat in chats)))
    assert gaps[int(0.98 * len(gaps))] <= 1.1 * milliseconds / 1000
    assert gaps[len(gaps) // 2] >= 0.5 * milliseconds / 1000


@pytest.mark.parametrize("num_accepted", [0, 2, 3])
def test_speculated_tokens_count_as_rows(num_accepted: int, monkeypatch: pytest.MonkeyPatch) -> None:
    reports: list[StepReport] = []
    monkeypatch.setattr(Reporter, "report", lambda self, report: reports.append(report))
    driver = Driver(make_scheduler(num_speculative_tokens=3), num_accepted=num_accepted)
    chats = [make_request(64, 400) for _ in range(8)]
    driver.add(*chats)
    for _ in range(30):
        speculate(driver, chats)
    long = make_request(8_000, 1)
    driver.add(long)
    while long.request_id not in driver.times:
        speculate(driver, chats)
    mixed = [ran for ran in driver.ran if long.request_id in ran.chunks]
    assert all(rows == 4 for ran in mixed for rows in ran.decodes.values())
    assert reports[-1].num_decodes == 4 * len(chats)
    assert max(ran.seconds for ran in mixed) <= 1.05 * TARGET
    driver.run()
    assert {len(driver.tokens[chat.request_id]) for chat in chats} == {400}


@pytest.mark.parametrize("num_accepted", [0, 3])
def test_gaps_are_counted_per_burst(num_accepted: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that is too long is one late gap for each stream, however many tokens it gives them."""
    reports: list[StepReport] = []
    monkeypatch.setattr(Reporter, "report", lambda self, report: reports.append(report))
    driver = Driver(make_scheduler(num_speculative_tokens=3), num_accepted=num_accepted)
    chats = [make_request(64, 400) for _ in range(8)]
    driver.add(*chats)
    for _ in range(10):
        speculate(driver, chats)
    assert not any(report.late for report in reports[2:])
    driver.cost = lambda *_: 1.5 * TARGET
    before = {name: len(tokens) for name, tokens in driver.tokens.items()}
    speculate(driver, chats)
    late = reports[-1].late
    assert sorted(token.request_id for token in late) == sorted(chat.request_id for chat in chats)
    assert [token.gap for token in late] == pytest.approx([1.5 * TARGET] * len(chats))
    assert {len(tokens) - before[name] for name, tokens in driver.tokens.items()} == {1 + num_accepted}


def speculate(driver: Driver, chats: list[Any]) -> None:
    for chat in chats:
        if chat in driver.scheduler.running and not chat.is_prefill_chunk:
            chat.spec_token_ids = [1, 2, 3]
    driver.step()


def test_context_of_a_cached_prefix_is_foreseen() -> None:
    driver, chats = warmed_up(prefix_caching=True)
    prefix = [7 * i % 991 for i in range(30_000)]
    first = make_request(0, 1, prompt=prefix)
    driver.add(first)
    run_until_answered(driver, first)
    second = make_request(0, 1, prompt=prefix + [1] * 3000)
    driver.times.clear()
    start = len(driver.ran)
    driver.add(second)
    run_until_answered(driver, second)
    assert sum(ran.chunks.get(second.request_id, 0) for ran in driver.ran[start:]) < 3_100
    assert max(driver.gaps(*chats)) <= 1.05 * TARGET


def test_short_prompt_passes_a_long_one() -> None:
    driver, _ = warmed_up()
    long = make_request(60_000, 1)
    driver.add(long)
    driver.run(num_steps=3)
    arrived = driver.now
    short = make_request(300, 1)
    driver.add(short)
    run_until_answered(driver, short)
    assert driver.times[short.request_id][0] - arrived < 4 * TARGET
    assert long.request_id not in driver.times
    driver.add(long_too := make_request(50_000, 1), short_too := make_request(200, 1))
    run_until_answered(driver, short_too)
    assert long_too.request_id not in driver.times


def test_long_prompt_is_not_passed_for_ever() -> None:
    driver, _ = warmed_up(num_chats=4)
    long = make_request(20_000, 1)
    driver.add(long)
    for _ in range(400):
        driver.add(make_request(800, 1))
        driver.step()
        if long.request_id in driver.times:
            return
    pytest.fail("the long prompt starved")


def test_order_of_priorities_is_left_to_vllm() -> None:
    driver = Driver(make_scheduler(policy="priority", max_num_seqs=4))
    requests = [make_request(2_000, 3) for _ in range(6)]
    for number, request in enumerate(requests):
        request.priority = -number
    driver.add(*requests)
    driver.run()
    answered = sorted(driver.times, key=lambda request_id: driver.times[request_id][0])
    assert answered == [request.request_id for request in reversed(requests)]


def test_a_request_may_bring_its_own_target() -> None:
    driver, _ = warmed_up(target="100ms")
    fast = make_request(64, 5_000, extra_args={"tbt_target": 0.03})
    driver.add(fast)
    driver.run(num_steps=10)
    driver.times.clear()
    long = make_request(20_000, 1)
    driver.add(long)
    run_until_answered(driver, long)
    assert max(driver.gaps(fast.request_id)) <= 1.05 * 0.03


def test_steps_of_a_pipeline_share_the_target() -> None:
    driver, _ = warmed_up(depth=2, num_stages=2)
    start = len(driver.ran)
    long = make_request(20_000, 1)
    driver.add(long)
    run_until_answered(driver, long)
    assert max(ran.seconds for ran in driver.ran[start:]) <= 1.05 * TARGET / 2


def test_target_that_cannot_be_kept_is_said_once(caplog_vllm: list[str]) -> None:
    driver, _ = warmed_up(target="5ms")
    driver.add(make_request(3_000, 1))
    driver.run(num_steps=120)
    assert sum("is infeasible" in line for line in caplog_vllm) == 1


def test_nothing_is_steered_where_prompts_are_not_cut(caplog_vllm: list[str]) -> None:
    driver = Driver(make_scheduler(chunked=False, max_num_batched_tokens=65_536))
    driver.add(make_request(5_000, 2))
    driver.run()
    assert driver.ran[0].output.total_num_scheduled_tokens == 5_000
    assert any("no latency target is kept" in line for line in caplog_vllm)


def test_aborted_requests_leave_nothing_behind() -> None:
    driver, chats = warmed_up()
    driver.scheduler.finish_requests(chats, plugin_status())
    driver.add(make_request(100, 2))
    driver.run()
    assert driver.scheduler.steering.core.num_streams == 0


def plugin_status() -> Any:
    from vllm.v1.request import RequestStatus

    return RequestStatus.FINISHED_ABORTED


def test_a_long_prompt_takes_no_tokens_meant_for_others() -> None:
    """More short prompts wait before the long one than a step considers. Their tokens cost less than the long one's."""
    driver, chats = warmed_up()
    driver.add(make_request(60_000, 1))
    driver.run(num_steps=40)  # from here on a token of it takes long
    driver.times.clear()
    short = [make_request(1_000, 2) for _ in range(40)]
    driver.add(*short)
    while not all(request.request_id in driver.times for request in short):
        driver.step()
    gaps = driver.gaps(*chats)
    assert max(gaps) <= 1.1 * TARGET


def test_a_waiting_prompt_that_vllm_does_not_start_holds_nothing_back(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, _ = warmed_up()
    scheduler = driver.scheduler
    driver.add(long := make_request(20_000, 1))
    driver.run(num_steps=3)
    manager = scheduler.kv_cache_manager
    allocate = manager.allocate_slots

    def refuse_new(request: Any, *args: Any, **kwargs: Any) -> Any:
        return allocate(request, *args, **kwargs) if request is long or request.num_output_tokens else None

    monkeypatch.setattr(manager, "allocate_slots", refuse_new)
    driver.add(make_request(100, 1))
    run_until_answered(driver, long)


# ---- classes and tenants ----


def of_class(name: str, num_prompt_tokens: int, max_tokens: int = 1, tenant: str = "") -> Any:
    return make_request(num_prompt_tokens, max_tokens, extra_args={"service_class": name, "tenant": tenant})


def order_of(driver: Driver, *requests: Any) -> list[str]:
    """Their ids by first token."""
    while not all(request.request_id in driver.times for request in requests):
        driver.step()
    ids = {request.request_id for request in requests}
    return sorted(ids, key=lambda request_id: driver.times[request_id][0])


@DEPTHS
def test_classes_order_the_waiting_queue_and_running_prompts(depth: int) -> None:
    driver, chats = warmed_up(depth)
    batch = of_class("batch", 60_000)
    driver.add(batch)
    driver.run(num_steps=4)
    standard = [make_request(6_000, 1) for _ in range(4)]
    urgent = [of_class("interactive", 6_000) for _ in range(4)]
    driver.add(*standard, *urgent)
    answered = order_of(driver, batch, *standard, *urgent)
    assert set(answered[:4]) == {request.request_id for request in urgent}
    assert set(answered[4:8]) == {request.request_id for request in standard}
    assert answered[8] == batch.request_id  # a long prompt of a patient class yields between two chunks
    assert max(driver.gaps(*chats)) <= 1.05 * TARGET


def test_a_priority_names_a_class_too_and_unknown_names_are_the_default() -> None:
    driver, _ = warmed_up()
    unknown, urgent = of_class("fast", 6_000), make_request(6_000, 1)
    urgent.priority = -3
    driver.add(make_request(6_000, 1), unknown, urgent)
    assert order_of(driver, urgent, unknown)[0] == urgent.request_id


@DEPTHS
def test_a_tenant_with_a_flood_does_not_delay_another(depth: int) -> None:
    waits = {}
    for target in (None, "50ms"):
        driver, _ = warmed_up(depth, target=target)
        flood = [make_request(16_000, 1, extra_args={"tenant": "flood"}) for _ in range(12)]
        driver.add(*flood)
        driver.run(num_steps=5)
        arrived = driver.now
        light = make_request(2_000, 1, extra_args={"tenant": "light"})
        driver.add(light)
        run_until_answered(driver, light)
        waits[target] = driver.times[light.request_id][0] - arrived
    assert waits["50ms"] < 4 * TARGET
    assert waits[None] > 8 * waits["50ms"]


def test_tenants_with_prompts_of_unequal_length_get_equal_time() -> None:
    driver, _ = warmed_up()
    first = len(driver.ran)
    long = [make_request(16_000, 1, extra_args={"tenant": "long"}) for _ in range(8)]
    short = [make_request(1_000, 1, extra_args={"tenant": "short"}) for _ in range(200)]
    driver.add(*long, *short)
    driver.run(num_steps=80)
    tokens = {"long": 0, "short": 0}
    tenant_of = {r.request_id: r.sampling_params.extra_args["tenant"] for r in (*long, *short)}
    for ran in driver.ran[first:]:
        for request_id, length in ran.chunks.items():
            tokens[tenant_of[request_id]] += length
    assert 0.5 < tokens["long"] / tokens["short"] < 1.2  # a token of a long prompt costs more


def test_no_class_starves_in_vllm() -> None:
    driver, _ = warmed_up(num_chats=4)
    driver.add(batch := of_class("batch", 4_000))
    for _ in range(600):
        while len(driver.scheduler.waiting) < 4:
            driver.add(of_class("interactive", 4_000))
        driver.step()
        if batch.request_id in driver.times:
            return
    pytest.fail("batch work starved")


@DEPTHS
def test_the_least_urgent_is_preempted_first(depth: int) -> None:
    scheduler = make_scheduler(is_async=depth > 1, num_blocks=120, max_num_seqs=16)
    driver = Driver(scheduler, depth=depth)
    patient = [of_class("batch", 150, 120) for _ in range(4)]
    urgent = [of_class("interactive", 150, 120) for _ in range(6)]
    driver.add(*patient)
    driver.run(num_steps=3)
    driver.add(*urgent)
    driver.run()
    assert sum(request.num_preemptions for request in urgent) == 0
    assert sum(request.num_preemptions for request in patient) > 0
    assert all(len(driver.tokens[request.request_id]) == 120 for request in (*patient, *urgent))


def test_classes_and_weights_come_from_a_shares_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "shares.toml"
    path.write_text("[classes.fast]\nrank = -5\nshare = 0.5\n\n[classes.slow]\nrank = 3\nshare = 0.1\n")
    monkeypatch.setenv("EVENFLOW_SHARES", str(path))
    driver, _ = warmed_up()
    slow, fast = of_class("slow", 6_000), of_class("fast", 6_000)
    driver.add(slow, fast)
    assert order_of(driver, slow, fast) == [fast.request_id, slow.request_id]
