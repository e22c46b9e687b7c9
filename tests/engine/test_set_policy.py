"""Another policy while the engine runs: from the next step on, and a recording of it can be replayed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from evenflow.core.policies import PolicySpec
from evenflow.core.request import Request, SamplingParams
from evenflow.engine.async_llm import AsyncLLM
from evenflow.engine.llm import LLM
from evenflow.errors import InvalidConfig
from evenflow.executors.fake import fake_continuation
from evenflow.executors.recorded import replay
from tests.engine.fakes import VOCAB, fake_async_llm, fake_engine, prepare
from tests.models import tiny_llama

PROMPT = list(range(3, 203))


@pytest.mark.parametrize("depth", [1, 2])
def test_the_next_step_follows_the_new_policy_and_the_tokens_stay_the_same(depth: int, tmp_path: Path) -> None:
    engine = fake_engine("fixed:32", depth=depth, record=tmp_path / "steps.jsonl")
    request = prepare(engine, PROMPT, SamplingParams(max_tokens=6))
    engine.add(request)
    engine.step()
    engine.set_policy(PolicySpec("fixed", 100))
    while engine.has_work:
        engine.step()
    engine.close()

    lengths = [chunk.length for plan in replay(tmp_path / "steps.jsonl") for chunk in plan.chunks]
    assert lengths == [32] * depth + [100, 200 - 100 - 32 * depth]
    assert request.output_token_ids == fake_continuation(PROMPT, 6, VOCAB)


def test_a_policy_brings_its_own_budget_and_leaves_the_other_settings() -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=2)
    with LLM(tiny_llama(), policy="fixed:64", long_prefill_token_threshold=24, enable_prefix_caching=False) as llm:
        found = {}
        for policy in ("fixed:64", "unchunked", "load", "fixed:16"):
            llm.set_policy(policy)
            [output] = llm.generate([PROMPT[:100]], sampling)
            found[llm.policy] = [chunk.length for chunk in output.chunks]
        with pytest.raises(InvalidConfig, match="'fixed:0'"):
            llm.set_policy("fixed:0")
        assert llm.policy == "fixed:16"
    assert found == {
        "fixed:64": [24, 24, 24, 24, 4],
        "unchunked": [100],
        "load": [24, 24, 24, 24, 4],
        "fixed:16": [16, 16, 16, 16, 16, 16, 4],
    }


def test_async_callers_get_it_in_turn() -> None:
    async def main() -> list[int]:
        async with AsyncLLM(tiny_llama(), policy="fixed:64", enable_prefix_caching=False) as llm:
            num_chunks = []
            for policy in ("fixed:50", "unchunked"):
                llm.set_policy(policy)
                output = await llm.generate(PROMPT[:100], SamplingParams(temperature=0.0, max_tokens=2))
                num_chunks.append(len(output.chunks))
            return num_chunks

    assert asyncio.run(main()) == [2, 1]


def test_prepared_requests_join_the_line_in_the_order_they_are_run() -> None:
    queued: list[Request] = []
    engine = fake_engine("fixed:64")
    add = engine.scheduler.add

    def add_and_note(request: Request) -> None:
        add(request)
        queued.append(request)

    engine.scheduler.add = add_and_note  # type: ignore[method-assign]

    async def main() -> list[str]:
        async with fake_async_llm(engine) as llm:
            requests = [llm.prepare([number] * length) for number, length in enumerate((300, 3, 4, 250))]

            async def run(number: int) -> None:
                async for _ in llm.run(requests[number]):
                    pass

            await asyncio.gather(*map(run, (0, 1, 2, 3)))
        return [request.id for request in requests]

    assert asyncio.run(main()) == [request.id.partition("#")[0] for request in queued]
    ranks = [request.rank for request in queued]
    assert ranks == sorted(ranks)
