"""An engine over the fake executor, stepped report by report as the engine process does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from evenflow.core.plan import StepShape
from evenflow.core.report import StepReport
from evenflow.core.request import SamplingParams
from evenflow.engine.engine import Engine
from evenflow.server.metrics.observer import EngineState, Observer, ServedRequest
from tests.engine.fakes import fake_engine, prepare


def step_seconds(shape: StepShape) -> float:
    return 0.010 + 0.001 * shape.prefill_rows + 0.0005 * shape.decode_sequences


class SteppedEngine:
    """Steps an engine and counts the tokens of each request."""

    def __init__(
        self, policy: str = "fixed:64", cost: Callable[[StepShape], float] = step_seconds, **options: Any
    ) -> None:
        self.engine: Engine = fake_engine(policy, cost=cost, **options)
        self.clock = self.engine.clock
        self.num_tokens: Counter[str] = Counter()

    def add(
        self, request_id: str, num_prompt_tokens: int, max_tokens: int = 8, token: int = 1, **sampling: Any
    ) -> None:
        params = SamplingParams(max_tokens=max_tokens, **sampling)
        self.engine.add(prepare(self.engine, [token] * num_prompt_tokens, params, request_id))

    def step(self) -> StepReport:
        report = self.engine.step()
        assert report is not None
        for request_id, tokens in zip(report.ids, report.tokens, strict=True):
            self.num_tokens[request_id] += len(tokens)
        return report

    def steps(self) -> Iterator[StepReport]:
        while self.engine.has_work:
            yield self.step()


class ObservedEngine(SteppedEngine):
    """The same with an Observer that is notified as by a server."""

    def __init__(self, *arguments: Any, max_model_len: int = 400, **options: Any) -> None:
        super().__init__(*arguments, max_model_len=max_model_len, **options)
        self.observer = Observer("a-model", clock=self.clock)
        self.observer.on_engine_state(
            EngineState(is_up=True, max_model_len=max_model_len, num_blocks=200, block_size=16)
        )

    def add(
        self, request_id: str, num_prompt_tokens: int, max_tokens: int = 8, token: int = 1, **sampling: Any
    ) -> None:
        names = {name: sampling.pop(name, "") for name in ("tenant", "key", "service_class")}
        super().add(request_id, num_prompt_tokens, max_tokens, token, **sampling)
        sizes = {"num_prompt_tokens": num_prompt_tokens, "max_tokens": max_tokens}
        record = ServedRequest(request_id, started_at=self.clock(), **sizes, **names)
        self.observer.on_request_started(record)

    def abort(self, request_id: str) -> None:
        assert self.engine.abort(request_id)
        self.observer.on_request_finished(request_id, "abort", self.num_tokens[request_id], self.clock())

    def step(self) -> StepReport:
        report = super().step()
        self.observer.on_step(report)
        for row, (reason, _) in report.ended.items():
            request_id = report.ids[row]
            self.observer.on_request_finished(request_id, reason, self.num_tokens[request_id], self.clock())
        return report

    def run(self) -> list[StepReport]:
        return list(self.steps())

    def figure(self, name: str, **labels: str) -> float | None:
        """What Prometheus would read under this name."""
        if not name.startswith("process_"):
            labels = {"model_name": "a-model", "engine": "0", **labels}
        return self.observer.collectors.get_sample_value(name, labels)


def samples() -> dict[str, set[str]]:
    """The name of every sample that a server shows after a request and a refusal, with its labels."""
    observed = ObservedEngine("target:40ms")
    observed.add("one", 30, tenant="someone")
    observed.run()
    observed.observer.on_request_rejected("queue_full")
    return {
        sample.name: set(sample.labels)
        for family in observed.observer.collectors.collect()
        for sample in family.samples
    }
