"""Many callers, one engine thread: streams, cancellation, refusal, the end."""

from __future__ import annotations

import asyncio
import time

import pytest

from evenflow.core.plan import StepPlan
from evenflow.core.request import SamplingParams
from evenflow.errors import EngineFailed, InvalidRequest
from evenflow.executors.fake import fake_continuation
from tests.engine.fakes import VOCAB, fake_async_llm, fake_engine


def slowly(plan: StepPlan) -> None:
    time.sleep(0.001)


def test_streams_run_side_by_side_and_are_whole() -> None:
    async def main() -> None:
        async with fake_async_llm(fake_engine()) as llm:
            prompts = [[number] * (10 + number) for number in range(20)]
            outputs = await asyncio.gather(*(llm.generate(p, SamplingParams(max_tokens=9)) for p in prompts))
        for prompt, output in zip(prompts, outputs, strict=True):
            assert output.token_ids == fake_continuation(prompt, 9, VOCAB)

    asyncio.run(main())


def test_leaving_a_stream_aborts_its_request() -> None:
    async def main() -> None:
        engine = fake_engine(disturb=slowly)
        async with fake_async_llm(engine) as llm:
            stream = llm.stream([1, 2, 3], SamplingParams(max_tokens=300))
            async for delta in stream:
                assert delta.finish_reason is None
                break
            await stream.aclose()  # type: ignore[attr-defined]
            while engine.has_work:
                await asyncio.sleep(0.001)
            assert engine.scheduler.pool.num_held == 0

    asyncio.run(main())


def test_cancelling_a_task_aborts_its_request_and_no_other() -> None:
    async def main() -> None:
        engine = fake_engine(disturb=slowly)
        async with fake_async_llm(engine) as llm:
            doomed = asyncio.create_task(llm.generate([1, 2, 3], SamplingParams(max_tokens=300)))
            other = asyncio.create_task(llm.generate([4, 5], SamplingParams(max_tokens=50)))
            await asyncio.sleep(0.02)
            doomed.cancel()
            with pytest.raises(asyncio.CancelledError):
                await doomed
            assert (await other).finish_reason == "length"
            while engine.has_work:
                await asyncio.sleep(0.001)

    asyncio.run(main())


def test_a_bad_request_is_refused_to_its_caller_alone() -> None:
    async def main() -> None:
        async with fake_async_llm(fake_engine(num_blocks=4, disturb=slowly)) as llm:
            good = asyncio.create_task(llm.generate([1], SamplingParams(max_tokens=20)))
            with pytest.raises(InvalidRequest, match="empty"):
                await llm.generate([])
            with pytest.raises(InvalidRequest, match="KV cache holds 64"):
                await llm.generate([1] * 60, SamplingParams(max_tokens=60))
            assert (await good).finish_reason == "length"

    asyncio.run(main())


def test_an_id_in_use_is_refused_and_its_stream_goes_on() -> None:
    async def main() -> None:
        async with fake_async_llm(fake_engine(disturb=slowly)) as llm:
            first = llm.run(llm.prepare([1], SamplingParams(max_tokens=20), request_id="twice"))
            assert (await anext(first)).token_ids
            with pytest.raises(InvalidRequest, match="'twice'"):
                await anext(llm.run(llm.prepare([2], SamplingParams(max_tokens=1), request_id="twice")))
            *_, last = [delta async for delta in first]
            assert (last.finish_reason, len(last.output.token_ids)) == ("length", 20)

    asyncio.run(main())


def test_closing_tells_those_who_wait_and_those_who_come_later() -> None:
    async def main() -> None:
        llm = fake_async_llm(fake_engine(disturb=slowly))
        waiting = asyncio.create_task(llm.generate([1], SamplingParams(max_tokens=300)))
        await asyncio.sleep(0.01)
        await llm.close()
        with pytest.raises(EngineFailed, match="closed"):
            await waiting
        with pytest.raises(EngineFailed, match="closed"):
            await llm.generate([1])

    asyncio.run(main())


def test_a_defect_in_the_engine_reaches_every_caller() -> None:
    async def main() -> None:
        engine = fake_engine(disturb=slowly)
        async with fake_async_llm(engine) as llm:
            calls = [asyncio.create_task(llm.generate([n], SamplingParams(max_tokens=300))) for n in range(3)]
            await asyncio.sleep(0.02)
            engine.scheduler.commit = None  # type: ignore[assignment, method-assign]
            results = await asyncio.gather(*calls, return_exceptions=True)
            assert all(isinstance(result, EngineFailed) for result in results)

    asyncio.run(main())
