from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from step_log import FIXED_BUDGETS, RandomBudget, StepLog, recording
from step_recording import Chunk


@dataclass
class Request:
    request_id: str
    num_tokens: int
    num_computed_tokens: int = 0
    is_prefill_chunk: bool = False


@dataclass
class Output:
    num_scheduled_tokens: dict[str, int]
    preempted_req_ids: set[str] = field(default_factory=set)

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())


class Scheduler:
    """Schedules running requests in their order, then the waiting, as vLLM does."""

    def __init__(self, sizes: list[int]) -> None:
        self.vllm_config = SimpleNamespace(compilation_config=SimpleNamespace(cudagraph_capture_sizes=[4, 1, 2]))
        self.max_num_scheduled_tokens = 100
        self.running: list[Request] = []
        self.waiting = [Request(f"r{index}", size) for index, size in enumerate(sizes)]
        self.requests = {request.request_id: request for request in self.waiting}

    def schedule(self) -> Output:
        output, left = Output({}), self.max_num_scheduled_tokens
        while self.waiting and len(self.running) < 2:
            self.running.append(self.waiting.pop(0))
        for request in self.running:
            remaining = request.num_tokens - request.num_computed_tokens
            length = min(left, remaining if remaining > 0 else 1)
            if length:
                request.num_computed_tokens += length
                request.is_prefill_chunk = request.num_computed_tokens < request.num_tokens
                output.num_scheduled_tokens[request.request_id] = length
                left -= length
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> str:
        return "outputs"


class FixedBudget:
    def next(self, num_decodes: int, has_prefill: bool) -> int:
        return 64


def test_notes_each_step_as_it_was_made() -> None:
    ticks = iter(range(1000))
    log = StepLog(clock=lambda: float(next(ticks)))
    scheduler = recording(Scheduler, log)([60, 100])
    log.begin_load(1)
    log._budget = FixedBudget()  # type: ignore[assignment]
    first, second = scheduler.schedule(), scheduler.schedule()
    assert log.launching(second) is log.steps[1]
    assert log.launching(first) is None
    assert scheduler.update_from_output(first, None) == "outputs"
    third = scheduler.schedule()
    scheduler.update_from_output(second, None)
    scheduler.update_from_output(third, None)
    steps = [logged.step for logged in log.steps]
    assert [step.chunks for step in steps] == [
        [Chunk(0, 60, True), Chunk(0, 4, False)],
        [Chunk(4, 63, False)],
        [Chunk(67, 33, True)],
    ]
    assert [(step.num_decodes, step.decode_context) for step in steps] == [(0, 0), (1, 61), (1, 62)]
    assert [step.num_in_flight for step in steps] == [0, 1, 1]
    assert [step.num_rows for step in steps] == [64, 64, 34]
    assert all(0 < step.schedule_us < step.scheduled_us < step.seen_us for step in steps)
    assert log.capture_sizes == [1, 2, 4]
    assert not log.is_idle
    scheduler.requests.clear()
    assert log.is_idle


def test_steps_without_tokens_are_not_noted() -> None:
    log = StepLog()
    scheduler = recording(Scheduler, log)([])
    log.begin_load(1)
    output = scheduler.schedule()
    scheduler.update_from_output(output, None)
    assert log.steps == []
    assert log.launching(output) is None


def test_decodes_are_moved_before_prefills() -> None:
    scheduler = recording(Scheduler, StepLog())([])
    prefill, decode = Request("p", 90, 10, is_prefill_chunk=True), Request("d", 20, 20)
    scheduler.running = [prefill, decode]
    scheduler.requests.update(p=prefill, d=decode)
    scheduler.schedule()
    assert scheduler.running == [decode, prefill]


def test_budgets_vary_and_leave_room_for_the_decodes() -> None:
    budget = RandomBudget(5, 8192)
    seen = [budget.next(100, True) for _ in range(3000)]
    assert min(seen) == 116
    assert max(seen) > 7000
    assert all(seen.count(fixed) > 50 for fixed in FIXED_BUDGETS)
    assert len(set(seen)) > 100
    assert RandomBudget(5, 8192).next(8190, True) == 8192


def test_steps_without_prefill_do_not_use_up_a_budget() -> None:
    budget, other = RandomBudget(5, 8192), RandomBudget(5, 8192)
    expected = [budget.next(0, True) for _ in range(20)]
    for _ in range(50):
        other.next(0, False)
    assert [other.next(0, True) for _ in range(20)] == expected
