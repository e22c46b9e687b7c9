"""A step that fails at any of its operations: whatever it had done by then, every answer is what it would have been."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import evenflow
from evenflow.core.policies import PolicySpec
from evenflow.core.prefix_cache import hash_blocks
from evenflow.core.request import Request, SamplingParams
from evenflow.core.scheduler import Scheduler, SchedulerConfig
from evenflow.engine.engine import Engine
from evenflow.engine.intake import Limits
from evenflow.executors.base import Executor
from evenflow.executors.cuda_executor import CudaExecutor
from tests.executors.conftest import EXECUTORS
from tests.executors.plans import prompt
from tests.model.cuda.devices import needs_cuda
from tests.model.tiny import random_tensors, tiny_config

SOURCES = tuple(str(Path(evenflow.__file__).parent / folder) for folder in ("executors", "model", "native"))
CONFIG = tiny_config(num_layers=1, layer_windows=(None,), layer_uses_rope=(True,))
TENSORS = random_tensors(CONFIG)
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 5, "ignore_eos": True}
# Requests that arrive together, each time when the others have ended. The long one takes over the first one's slot.
REQUESTS: list[dict[str, tuple[tuple[int, ...], dict[str, Any]]]] = [
    {"first": (prompt(60), GREEDY)},
    {
        "long": (prompt(58, 1), GREEDY),
        "penalised": (prompt(9, 2), {**GREEDY, "presence_penalty": 1.5, "repetition_penalty": 1.3}),
        "biased": (prompt(5, 3), {**GREEDY, "logit_bias": {7: 2.0}, "bad_word_ids": [[5, 6]], "logprobs": 1}),
        "shares a prefix": (prompt(60)[:24] + prompt(10, 5), GREEDY),
        "embedded": (prompt(20, 4), {"temperature": 0.0, "max_tokens": 1, "pooling": "mean"}),
    },
    {"first again": (prompt(60), GREEDY)},
]


class Operations:
    """What a thread calls from evenflow's code while it runs a step, by source line. One of the calls may fail."""

    def __init__(self, step_id: int, fails_at: int | None = None) -> None:
        self.step_id, self._fails_at = step_id, fails_at
        self.places: list[tuple[str, int]] = []

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        sys.setprofile(self._see)
        try:
            return function(*arguments)
        finally:
            sys.setprofile(None)

    def _see(self, frame: FrameType, event: str, argument: Any) -> None:
        place = frame.f_code.co_filename, frame.f_lineno
        is_call = event == "c_call" or (event == "call" and not frame.f_code.co_flags & inspect.CO_GENERATOR)
        if is_call and place[0].startswith(SOURCES):
            self.places.append(place)
            if len(self.places) - 1 == self._fails_at:
                message = "out of memory" if self._fails_at % 2 else "a fault"
                raise RuntimeError(f"{message} at {place}")


@dataclass(eq=False)
class Embedding:
    """Its last bits depend on the chunks that the prompt was computed in."""

    values: NDArray[np.float32]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Embedding) and np.allclose(self.values, other.values, rtol=0, atol=1e-3)


class Watched:
    """An executor whose steps can be made to fail inside."""

    def __init__(self, name: str, depth: int) -> None:
        options: dict[str, Any] = {"num_blocks": 60, "block_size": 4, "max_num_seqs": 4, "max_steps_in_flight": depth}
        self.executor: Executor = EXECUTORS[name](CONFIG, TENSORS, **options)
        self._name = "_launch" if isinstance(self.executor, CudaExecutor) else "_step"
        self._run_step = getattr(self.executor, self._name)

    def answers(self, operations: Operations) -> dict[str, Any]:
        """Of all requests."""

        def run_step(step: Any, *rest: Any) -> Any:
            if getattr(step, "plan", step).step_id == operations.step_id:
                return operations.run(self._run_step, step, *rest)
            return self._run_step(step, *rest)

        setattr(self.executor, self._name, run_step)
        config = SchedulerConfig(num_blocks=60, block_size=4, policy=PolicySpec.parse("fixed:32"), max_num_seqs=4)
        engine = Engine(Scheduler(config, self.executor.caps), self.executor, Limits(200, 128), clock=lambda: 0.0)
        embeddings: dict[str, Any] = {}
        requests: list[Request] = []
        for arriving in REQUESTS:
            for name, (token_ids, sampling) in arriving.items():
                params, hashes = SamplingParams(**sampling), hash_blocks(token_ids, 4)
                requests.append(Request(name, token_ids, params, seed=3, max_model_len=200, block_hashes=hashes))
                engine.add(requests[-1])
            while engine.has_work:
                report = engine.step()
                assert report is not None
                for row, values in report.embeddings.items():
                    embeddings[report.ids[row]] = Embedding(np.frombuffer(values, dtype=np.float32))
        engine.scheduler.pool.check_invariants()
        assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_blocks
        assert {one.error for one in requests} == {None}
        assert requests[-1].num_cached_tokens == 56 or operations.places
        return {one.id: embeddings.get(one.id, one.output_token_ids) for one in requests}


@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(
    ("step_ids", "every"), [(range(6, 8), 12), pytest.param(range(0, 20, 5), 12, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", [pytest.param(name, marks=needs_cuda if "cuda" in name else ()) for name in EXECUTORS])
def test_a_step_that_fails_at_any_operation_changes_no_answer(
    name: str, depth: int, step_ids: range, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every n-th source line of these steps."""
    monkeypatch.setattr("evenflow.engine.engine.logger.disabled", True)
    monkeypatch.setattr("evenflow.executors.cuda_executor._MIN_ROWS", 4)  # runs a step again in parts
    watched = Watched(name, depth)
    expected = watched.answers(Operations(-1))
    num_failed = 0
    for step_id in step_ids:
        whole = Operations(step_id)
        assert watched.answers(whole) == expected
        first_calls = {place: number for number, place in reversed([*enumerate(whole.places)])}
        for number in [*first_calls.values()][(step_id + depth) % every :: every]:
            assert watched.answers(Operations(step_id, number)) == expected, (step_id, whole.places[number])
            num_failed += 1
    assert num_failed > 10
    watched.executor.close()
