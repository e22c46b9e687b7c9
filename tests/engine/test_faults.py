"""The fault table: each fault at each moment, and what the engine promises for it. Also docs/faults.md."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from evenflow.core.plan import ExecutorCaps, StepPlan
from evenflow.core.policies import PolicySpec
from evenflow.core.request import Request, SamplingParams
from evenflow.core.scheduler import Scheduler, SchedulerConfig
from evenflow.core.tier import TierConfig
from evenflow.engine.engine import Engine
from evenflow.engine.intake import Limits
from evenflow.engine.llm import LLM
from evenflow.engine.outputs import RequestOutput
from evenflow.engine.watchdog import Pulse
from evenflow.errors import EngineFailed, InvalidConfig
from evenflow.executors.fake import FakeExecutor, fake_continuation
from evenflow.executors.faulty import MOMENTS, Fault, FaultKind, FaultyExecutor, Moment
from tests.engine.fakes import VOCAB, fake_async_llm, prepare
from tests.engine.paged import paged_llm
from tests.models import tiny_llama

PROMPTS = {"a": list(range(100)), "b": list(range(200, 240)), "c": list(range(300, 310))}
MAX_TOKENS = 12
# Such moments before the first fault: the first request runs alone.
AFTER = {"admission": 1, "prefill": 2, "decode": 14, "restore": 0, "commit": 15}


@dataclass
class Run:
    """An engine over a faulty executor, with the requests that were added to it."""

    faults: list[Fault]
    depth: int = 1
    policy: str = "fixed:64"
    num_blocks: int = 60
    clock_is_real: bool = False
    tier: TierConfig | None = None
    requests: dict[str, Request] = field(default_factory=dict)

    def __post_init__(self) -> None:
        caps = ExecutorCaps(max_steps_in_flight=self.depth)
        inner = FakeExecutor(
            vocab_size=VOCAB,
            caps=caps,
            cost=lambda shape: 0.001 * shape.total_rows,
            restore_seconds=self.tier.restore_seconds if self.tier is not None else 0.0,
        )
        self.executor = FaultyExecutor(inner, self.faults)
        sizes = {"num_blocks": self.num_blocks, "max_num_seqs": 8}
        config = SchedulerConfig(**sizes, policy=PolicySpec.parse(self.policy), tier=self.tier)
        clock = self._real_clock if self.clock_is_real else inner.clock
        limits = Limits(400, VOCAB)
        self.engine = Engine(Scheduler(config, caps), self.executor, limits, clock=clock)

    def _real_clock(self) -> float:
        """An hour later once a step has failed: one that hangs is found at once, and a busy machine's never."""
        return time.perf_counter() + 3600.0 * self.executor.num_raised

    def add(self, name: str, prompt: list[int] | None = None, max_tokens: int = MAX_TOKENS) -> None:
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        self.requests[name] = prepare(self.engine, prompt or PROMPTS[name], sampling, name)
        self.engine.add(self.requests[name])

    def run(self) -> None:
        for _ in range(2000):
            if not self.engine.has_work:
                break
            self.engine.step()
        scheduler = self.engine.scheduler
        assert not scheduler.requests
        scheduler.pool.check_invariants()
        if scheduler.tier is not None:
            scheduler.tier.check_invariants()
        assert scheduler.pool.num_free == scheduler.pool.num_blocks

    def check_answer(self, name: str) -> None:
        request = self.requests[name]
        prompt = request.tokens[: request.num_prompt_tokens]
        assert (request.error, request.finish_reason) == (None, "length")
        assert request.output_token_ids == fake_continuation(prompt, MAX_TOKENS, VOCAB)


def run_all(faults: list[Fault], depth: int) -> Run:
    run = Run(faults, depth)
    run.add("before", PROMPTS["a"])  # its prefix is cached, so `a` restores it
    run.run()
    for name in PROMPTS:
        run.add(name)
    run.run()
    return run


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("kind", ["raise", "nan", "out-of-memory"])
def test_a_fault_that_passes_is_not_seen_by_anybody(kind: FaultKind, moment: Moment, depth: int) -> None:
    """The step is lost, its requests are computed again, and every answer is what it would have been."""
    run = run_all([Fault(kind, moment, after=AFTER[moment])], depth)
    assert run.executor.num_raised == 1
    for name in ("before", *PROMPTS):
        run.check_answer(name)
    scheduler = run.engine.scheduler
    has_shrunk = scheduler.policy.max_step_tokens < 64 and scheduler.pool.num_blocks < 60
    assert has_shrunk == (kind == "out-of-memory")


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("kind", ["raise", "nan", "out-of-memory"])
def test_a_fault_that_stays_ends_only_its_own_request(kind: FaultKind, moment: Moment, depth: int) -> None:
    """The request that fails again, alone, ends with the reason. Those that shared its steps go on."""
    run = run_all([Fault(kind, moment, count=1000, request_id="a")], depth)
    bad = run.requests.pop("a")
    assert bad.finish_reason == "error"
    assert bad.error is not None
    assert f"at {moment}" in bad.error
    for name in run.requests:
        run.check_answer(name)


# ---- KV that is fetched from host memory or disk ----


@pytest.mark.parametrize(("depth", "keeps_all"), [(1, True), (2, False)])
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("kind", ["raise", "nan", "out-of-memory"])
def test_a_fault_while_prefixes_move_is_not_seen_by_anybody(
    kind: FaultKind, moment: Moment, keeps_all: bool, depth: int
) -> None:
    """The same promise in a pool that holds one prompt at a time, at several moments of each kind."""
    num_fetched = 0
    for after in (0, 5, 14, 27):
        tier = TierConfig(num_blocks=40, save_seconds=0.0, restore_seconds=0.002, keeps_all=keeps_all)
        run = Run([Fault(kind, moment, after=after)], depth, num_blocks=14, tier=tier)
        for turn in range(3):
            for name, prompt in PROMPTS.items():
                run.add(f"{name}{turn}", prompt)
                if name != "b":  # two of them together
                    run.run()
        for name in run.requests:
            run.check_answer(name)
        num_fetched += sum(request.num_cached_tokens > 0 for request in run.requests.values())
    assert num_fetched


def fetching(faults: list[Fault]) -> Run:
    """`a` waits for its 6 blocks, which left the pool for the tier."""
    tier = TierConfig(num_blocks=40, save_seconds=0.0, restore_seconds=0.002)
    run = Run(faults, num_blocks=14, tier=tier)
    for name, prompt in (("before", PROMPTS["a"]), ("between", list(range(250, 450)))):
        run.add(name, prompt)
        run.run()
    run.add("a")
    return run


def test_without_a_fault_the_prefix_is_fetched() -> None:
    run = fetching([])
    run.run()
    assert run.requests["a"].num_cached_tokens == 96
    run.check_answer("a")


@pytest.mark.parametrize("kind", ["raise", "out-of-memory"])
def test_blocks_that_were_not_fetched_are_computed_again(kind: FaultKind) -> None:
    run = fetching([Fault(kind, "restore")])
    scheduler = run.engine.scheduler
    report = run.engine.step()
    assert report is not None
    assert run.executor.num_raised == 1
    assert scheduler.prefix_cache.find(run.requests["a"]) == []
    run.run()
    run.check_answer("a")
    assert run.requests["a"].num_cached_tokens == 0
    assert scheduler.tier is not None
    assert scheduler.tier.num_returning == 0


def test_a_prefix_that_gives_nan_is_not_fetched_again() -> None:
    run = fetching([Fault("nan", "restore")])
    run.run()
    assert run.executor.num_raised == 1
    run.check_answer("a")
    assert run.requests["a"].num_cached_tokens == 0


def test_a_result_that_is_lost_says_later_what_was_fetched() -> None:
    """Else the engine would wait for these blocks for ever."""
    run = fetching([Fault("raise", "commit", after=0, count=2, request_id="b")])
    run.add("b")
    run.run()
    assert run.executor.num_raised == 2
    run.check_answer("a")
    assert run.requests["b"].error is not None


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_step_that_hangs_fails_every_caller_of_a_thread(moment: Moment, caplog: pytest.LogCaptureFixture) -> None:
    """A thread cannot be ended. The server's engine is a process: tests/server/engine/test_faults.py."""

    async def main() -> None:
        run = Run([Fault("hang", moment, after=AFTER[moment])], clock_is_real=True)
        llm = fake_async_llm(run.engine)
        sampling = SamplingParams(max_tokens=MAX_TOKENS)
        assert (await llm.generate(PROMPTS["a"], sampling)).finish_reason == "length"
        with pytest.raises(EngineFailed, match="a step hangs"):
            await asyncio.gather(*(llm.generate(PROMPTS["a"], sampling) for _ in range(3)))
        with pytest.raises(EngineFailed, match="a step hangs"):
            await llm.generate(PROMPTS["b"], sampling)
        await llm.close()
        run.executor.close()

    asyncio.run(main())
    assert "a step hangs, which this process cannot end" in caplog.text


def test_a_slow_step_is_not_a_hung_one() -> None:
    """By the prediction: the same seconds are far too long for one step and normal for another."""
    now = 100.0
    for upper_s, seconds, is_hung in [(0.01, 59, False), (0.01, 62, True), (30.0, 62, False), (30.0, 700, True)]:
        pulse = Pulse(60.0)
        with pulse.beat(lambda: now):
            pulse.extend(upper_s)
            assert pulse.is_overdue(now + seconds) == is_hung
        assert not pulse.is_overdue(now + 1e9), "an engine that waits for requests does not hang"
    first = Pulse(60.0)
    with first.beat(lambda: now):
        first.extend(0.0)
        assert not first.is_overdue(now + 500), "nothing is known, and kernels may be compiled"


def test_an_executor_that_fails_every_step_ends_the_engine() -> None:
    """Some errors leave a GPU unusable: only a new process helps, and the server starts one."""
    run = Run([Fault("raise", "commit", count=1000)])
    for number in range(20):
        run.add(f"r{number}", [number] * 20)
    with pytest.raises(EngineFailed, match="8 steps failed in a row, the last by: a fault was injected"):
        run.run()


def test_what_a_failed_row_computed_is_not_used_by_others() -> None:
    """Its blocks may hold NaNs, which every prompt that starts alike would inherit."""
    run = Run([Fault("nan", "decode", after=3, request_id="a")])
    run.add("a")
    found: list[int] = []
    while not found:
        report = run.engine.step()
        assert report is not None
        found = [len(run.engine.scheduler.prefix_cache.find(run.requests["a"]))] if report.retried else []
    assert found == [0]
    run.run()
    run.check_answer("a")


def test_memory_that_runs_out_again_and_again_ends_one_request_and_keeps_half_of_the_pool() -> None:
    run = Run([Fault("out-of-memory", "prefill", count=1000, request_id="a")], policy="unchunked")
    for name in PROMPTS:
        run.add(name)
    run.run()
    assert run.requests["a"].error is not None
    assert "memory ran out" in run.requests["a"].error
    for name in ("b", "c"):
        run.check_answer(name)
    assert 30 <= run.engine.scheduler.pool.num_blocks < 60
    run.engine.set_target(0.05)
    assert run.engine.scheduler.policy.max_step_tokens == 16, "another policy keeps to the smaller steps"


def test_a_suspect_delays_streams_by_no_more_than_every_other_step() -> None:
    run = Run([Fault("raise", "prefill", request_id="b", count=1)])
    run.add("a")
    while not run.requests["a"].num_output_tokens:
        run.engine.step()
    run.add("b")
    run.add("c")
    while not run.engine.scheduler._recovery.suspects:
        run.engine.step()
    assert run.engine.scheduler._recovery.suspects.keys() == {"a", "b", "c"}
    kinds: list[int] = []
    while run.engine.has_work and run.engine.scheduler._recovery.suspects:
        report = run.engine.step()
        assert report is not None
        kinds.append(report.num_decodes)
        assert len(report.chunks) <= 1
        assert not (report.chunks and report.num_decodes)
    assert kinds[-1] == 1, "the last suspect decodes alone"
    run.run()
    for name in PROMPTS:
        run.check_answer(name)


def test_suspects_recover_beside_more_streams_than_a_step_has_room_for() -> None:
    run = Run([Fault("raise", "decode")], policy="fixed:2")
    run.add("a", [1, 2])
    run.add("b", [3])
    while not run.engine.scheduler._recovery.suspects:
        run.engine.step()
    for number in range(4):
        run.add(f"stream-{number}", [number], max_tokens=200)
    while not all(run.requests[name].is_finished for name in "ab"):
        run.engine.step()
    assert not any(run.requests[f"stream-{number}"].is_finished for number in range(4))
    for name in "ab":
        run.check_answer(name)


def test_a_result_that_is_not_the_plans_is_a_fault_of_the_step() -> None:
    class Forgetful(FakeExecutor):
        forgets = True

        def wait(self):  # type: ignore[no-untyped-def]
            result = super().wait()
            if result.step_id == 2 and self.forgets:
                return type(result)(result.step_id, (), 0.0)
            return result

    run = Run([])
    run.executor._executor = Forgetful(vocab_size=VOCAB)
    run.add("a")
    run.run()
    run.check_answer("a")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "explode", "moment": "decode"}, "kind='explode' but expected one of: raise, nan, hang"),
        ({"kind": "raise", "moment": "lunch"}, "moment='lunch' but expected one of: admission, prefill, decode"),
        ({"kind": "raise", "moment": "admission", "num_admitted": -1}, "num_admitted=-1 but expected >= 0"),
        ({"kind": "raise", "moment": "decode", "count": 0}, "count=0"),
    ],
)
def test_a_fault_that_cannot_be_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        Fault(**fields)  # type: ignore[arg-type]


# ---- an engine that admits nothing although it could ----


def stuck_engine() -> Run:
    """A stream decodes, and a policy that forgets prompts leaves another waiting."""
    run = Run([])
    run.add("a", list(range(10)))
    run.engine.step()
    scheduler = run.engine.scheduler
    scheduler.room._admissible = lambda: iter(())  # type: ignore[method-assign]
    return run


def test_an_engine_that_admits_nothing_although_it_could_says_so(caplog: pytest.LogCaptureFixture) -> None:
    run = stuck_engine()
    object.__setattr__(run.requests["a"].sampling, "max_tokens", 300)
    run.requests["a"].max_known_tokens = 350
    run.add("b")
    failures = []
    for _ in range(80):
        report = run.engine.step()
        assert report is not None
        failures.append(report.admission_failure)
    assert failures[0] is None
    assert failures[-1] is not None
    assert "although the next one fits" in failures[-1]
    assert caplog.text.count("The scheduler is stuck") == 1


def test_an_engine_without_room_is_not_stuck() -> None:
    run = Run([], num_blocks=22)
    run.add("a", list(range(10)))
    run.engine.step()
    object.__setattr__(run.requests["a"].sampling, "max_tokens", 300)
    run.requests["a"].max_known_tokens = 310
    run.add("b", list(range(320)))
    for _ in range(120):
        report = run.engine.step()
        assert report is not None
        assert report.admission_failure is None


@pytest.mark.parametrize("depth", [1, 2])
def test_an_engine_with_more_requests_than_slots_is_not_stuck(depth: int) -> None:
    """Slots come free long after the last prompt. The requests are the choices of `n: 128`."""
    run = Run([], depth)
    for number in range(128):
        run.add(f"r{number}", list(range(40)), max_tokens=80 + 37 * number % 90)
    while run.engine.has_work:
        report = run.engine.step()
        assert report is None or report.admission_failure is None


def test_rows_that_a_fault_concerns() -> None:
    run = Run([])
    run.add("a")
    plan = run.engine.scheduler.schedule(0.0)
    assert isinstance(plan, StepPlan)
    rows = {moment: Fault("raise", moment).rows(plan) for moment in MOMENTS}
    assert rows == {"admission": [0], "prefill": [0], "decode": [], "restore": [], "commit": [0]}
    assert Fault("raise", "commit", request_id="b").rows(plan) == []


# ---- a real model ----


@pytest.fixture(scope="module")
def model() -> Iterator[LLM]:
    settings: dict[str, Any] = {"policy": "fixed:16", "kv_cache_memory": 16 << 20, "threads": 1}
    with LLM(tiny_llama(), **settings) as llm:
        yield llm


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("kind", ["raise", "nan", "out-of-memory"])
def test_a_real_model_gives_the_same_answers_after_a_fault(model: LLM, kind: FaultKind, moment: Moment) -> None:
    prompts = [[5, 6, 7, *range(40)], [9, 8], list(range(60, 90))]
    sampling = SamplingParams(max_tokens=12, temperature=0.7, seed=3, ignore_eos=True)
    expected = [output.token_ids for output in model.generate(prompts, sampling)]
    executor = model.engine.executor
    faulty = FaultyExecutor(executor, [Fault(kind, moment, after=2 * (moment in ("decode", "commit")))])
    model.engine.executor = faulty
    try:
        outputs = model.generate(prompts, sampling)
    finally:
        model.engine.executor = executor
    assert faulty.num_raised == 1
    assert [output.error for output in outputs] == [None] * 3
    assert [output.token_ids for output in outputs] == expected


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("make", [LLM, paged_llm])
def test_a_step_that_fails_leaves_real_executors_with_steps_in_flight_as_they_were(
    make: Callable[..., LLM], depth: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Before, within and after its admissions; at a decode; with its result lost."""
    faults = [Fault("raise", "admission", num_admitted=number) for number in range(3)]
    faults += [Fault("raise", moment, after=1) for moment in MOMENTS if moment not in ("admission", "restore")]
    long = list(range(3, 90))
    prompts = [[5, 6, 7, *range(40)], [9, 8], list(range(60, 90)), [*long, 7], [4] * 20]
    sampling = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
    caplog.set_level("CRITICAL", "evenflow")
    with make(tiny_llama(), policy="fixed:32", max_num_seqs=4, max_model_len=128, max_steps_in_flight=depth) as llm:
        expected = [output.token_ids for output in llm.generate([*prompts, long], sampling)]
        executor = llm.engine.executor
        for fault in faults:
            faulty = llm.engine.executor = FaultyExecutor(executor, [fault])
            outputs = llm.generate([*prompts, long], sampling)
            assert faulty.num_raised == 1
            assert [output.token_ids for output in outputs] == expected, fault
        llm.engine.executor = executor
        assert llm.engine.scheduler.pool.num_free == llm.engine.scheduler.pool.num_blocks


def test_logits_that_are_nan_are_found_and_computed_again(model: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """One NaN in a row of a real model's logits, at the fifth sample."""
    prompts = [[5, 6, 7], [9, 8, 3]]
    sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    expected = [output.token_ids for output in model.generate(prompts, sampling)]
    decoder: Any = model.engine.executor._decoder  # type: ignore[attr-defined]
    logits_of, calls = decoder.logits, itertools.count()

    def broken(hidden: Tensor) -> Tensor:
        found: Tensor = logits_of(hidden)
        if next(calls) == 4:
            found[1, 7] = torch.nan
        return found

    monkeypatch.setattr(decoder, "logits", broken)
    retried = []
    for prompt in prompts:
        model.add(model.prepare(prompt, sampling))
    outputs: dict[str, RequestOutput] = {}
    while model.engine.has_work:
        report = model.engine.step()
        assert report is not None
        retried += report.retried
        for delta in model._outputs.take(report):
            outputs[delta.request_id] = delta.output
    assert len(retried) == 1
    assert [output.token_ids for output in outputs.values()] == expected
