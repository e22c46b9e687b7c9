"""Faults injected around each executor, with steps submitted behind the one that fails: every answer stays the same."""

from __future__ import annotations

from typing import Any

import pytest

from evenflow.core.policies import PolicySpec
from evenflow.core.request import Request, SamplingParams
from evenflow.core.scheduler import Scheduler, SchedulerConfig
from evenflow.engine.engine import Engine
from evenflow.engine.intake import Limits
from evenflow.executors.base import Executor
from evenflow.executors.faulty import Fault, FaultKind, FaultyExecutor, Moment
from tests.executors.conftest import EXECUTORS
from tests.executors.plans import prompt
from tests.model.tiny import random_tensors, tiny_config

CONFIG = tiny_config(num_layers=1, layer_windows=(None,), layer_uses_rope=(True,))
TENSORS = random_tensors(CONFIG)


def answers(executor: Executor, prompts: tuple[int, ...]) -> list[list[int]]:
    config = SchedulerConfig(num_blocks=60, block_size=4, policy=PolicySpec.parse("fixed:16"), max_num_seqs=3)
    engine = Engine(Scheduler(config, executor.caps), executor, Limits(200, 128), clock=lambda: 0.0)
    requests = []
    for number, length in enumerate(prompts):
        sampling = SamplingParams(max_tokens=8, temperature=0.0, bad_word_ids=[[5, 6]], ignore_eos=True)
        requests.append(Request(f"r{number}", prompt(length, number), sampling, seed=1, max_model_len=200))
        engine.add(requests[-1])
    while engine.has_work:
        engine.step()
    assert {one.error for one in requests} == {None}
    return [one.output_token_ids for one in requests]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("moment", ["prefill", "decode", "commit"])
@pytest.mark.parametrize(("kind", "prompts"), [("raise", (12,)), ("out-of-memory", (12, 30, 5))])
@pytest.mark.parametrize("name", ["contiguous", "paged"])
def test_a_fault_changes_no_answer(
    name: str, kind: FaultKind, prompts: tuple[int, ...], moment: Moment, depth: int
) -> None:
    options: dict[str, Any] = {"num_blocks": 60, "block_size": 4, "max_num_seqs": 3, "max_steps_in_flight": depth}
    executor = EXECUTORS[name](CONFIG, TENSORS, **options)
    expected = answers(executor, prompts)
    for after in (0, 3):
        faulty = FaultyExecutor(executor, [Fault(kind, moment, after)])
        assert answers(faulty, prompts) == expected
        assert faulty.num_raised == 1 or moment == "prefill"
