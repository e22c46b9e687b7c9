"""An engine over the fake executor whose every step is told as an event, as the engine process does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from evenflow.core.plan import StepShape
from evenflow.core.request import SamplingParams
from evenflow.core.scheduler import Committed
from evenflow.engine.engine import Engine
from evenflow.engine.outputs import Delta
from evenflow.server.metrics.events import EngineState, StepEvent, step_event
from evenflow.server.metrics.observer import Observer
from tests.engine.fakes import fake_engine


def step_seconds(shape: StepShape) -> float:
    return 0.010 + 0.001 * shape.prefill_rows + 0.0005 * shape.decode_sequences


class ToldEngine:
    """Steps an engine and keeps what each step gave."""

    def __init__(
        self, policy: str = "fixed:64", cost: Callable[[StepShape], float] = step_seconds, **options: Any
    ) -> None:
        self.engine: Engine = fake_engine(policy, cost=cost, **options)
        self.clock = self.engine.clock
        self.deltas: list[Delta] = []
        self._committed: list[tuple[Committed, float]] = []
        self.engine.watch_step = lambda committed, now: self._committed.append((committed, now))

    def add(
        self, request_id: str, num_prompt_tokens: int, max_tokens: int = 8, token: int = 1, **sampling: Any
    ) -> None:
        params = SamplingParams(max_tokens=max_tokens, **sampling)
        self.engine.add(self.engine.prepare([token] * num_prompt_tokens, params, request_id=request_id))

    def step(self) -> StepEvent:
        self.deltas = self.engine.step()
        [(committed, now)] = self._committed
        self._committed.clear()
        return step_event(self.engine, committed, now)

    def steps(self) -> Iterator[StepEvent]:
        while self.engine.has_work:
            yield self.step()


class ObservedEngine(ToldEngine):
    """The same with an Observer that is told all that a server would tell it."""

    def __init__(self, *arguments: Any, max_model_len: int = 400, **options: Any) -> None:
        super().__init__(*arguments, max_model_len=max_model_len, **options)
        self.observer = Observer("a-model", clock=self.clock)
        self.observer.on_engine_state(
            EngineState(is_up=True, max_model_len=max_model_len, num_blocks=200, block_size=16)
        )

    def add(
        self, request_id: str, num_prompt_tokens: int, max_tokens: int = 8, token: int = 1, **sampling: Any
    ) -> None:
        tenant = sampling.pop("tenant", "")
        super().add(request_id, num_prompt_tokens, max_tokens, token, **sampling)
        self.observer.on_request_started(
            request_id, tenant=tenant, num_prompt_tokens=num_prompt_tokens, max_tokens=max_tokens, now=self.clock()
        )

    def abort(self, request_id: str) -> None:
        output = self.engine.abort(request_id)
        assert output is not None
        self.observer.on_request_finished(request_id, "abort", len(output.token_ids), self.clock())

    def step(self) -> StepEvent:
        event = super().step()
        self.observer.on_step(event)
        for delta in self.deltas:
            if delta.finish_reason is not None:
                output = delta.output
                self.observer.on_request_finished(
                    delta.request_id, delta.finish_reason, len(output.token_ids), self.clock()
                )
        return event

    def run(self) -> list[StepEvent]:
        return list(self.steps())

    def figure(self, name: str, **labels: str) -> float | None:
        """What Prometheus would read under this name."""
        if not name.startswith("process_"):
            labels = {"model_name": "a-model", "engine": "0", **labels}
        return self.observer.collectors.get_sample_value(name, labels)
