"""Many callers, one engine thread: streams, cancellation, refusal, the end."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import time
import warnings

import pytest

from evenflow.core.plan import StepPlan
from evenflow.core.request import SamplingParams
from evenflow.engine.async_llm import AsyncLLM
from evenflow.errors import EngineFailed, InvalidRequest, LateRequest
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


def test_an_id_may_be_used_again_once_its_stream_was_left() -> None:
    """The engine still has the old request then, and speaks of it."""

    async def main() -> None:
        async with fake_async_llm(fake_engine(depth=2, disturb=slowly)) as llm:
            for number in range(30):
                left = llm.stream([5, number], SamplingParams(max_tokens=200), request_id="x")
                for _ in range(1 + number % 5):
                    await anext(left)
                await left.aclose()  # type: ignore[attr-defined]
                *_, last = [one async for one in llm.stream([9, 8], SamplingParams(max_tokens=6), request_id="x")]
                assert last.output.token_ids == fake_continuation([9, 8], 6, VOCAB)
                assert {last.request_id, last.output.request_id, last.output.chunks[0].request_id} == {"x"}

    asyncio.run(main())


def test_closing_a_stream_that_has_ended_harms_no_later_request_with_its_id() -> None:
    async def main() -> None:
        async with fake_async_llm(fake_engine(disturb=slowly)) as llm:
            ended = llm.stream([1, 2], SamplingParams(max_tokens=1), request_id="x")
            assert (await anext(ended)).finish_reason == "length"
            later = llm.stream([9, 8], SamplingParams(max_tokens=20), request_id="x")
            found = list((await anext(later)).token_ids)
            await ended.aclose()  # type: ignore[attr-defined]
            async for delta in later:
                found += delta.token_ids
            assert found == fake_continuation([9, 8], 20, VOCAB)

    asyncio.run(main())


def test_a_prepared_request_may_run_again() -> None:
    async def main() -> None:
        async with fake_async_llm(fake_engine(disturb=slowly)) as llm:
            request = llm.prepare([9, 8], SamplingParams(max_tokens=6))
            first = llm.run(request)
            await anext(first)
            await first.aclose()
            found = [token async for delta in llm.run(request) for token in delta.token_ids]
            assert found == fake_continuation([9, 8], 6, VOCAB)

    asyncio.run(main())


@pytest.mark.parametrize("depth", [1, 2])
def test_random_callers_with_few_ids_get_their_own_tokens(depth: int) -> None:
    """They leave, are cancelled, stop by text, expire, and use each other's ids; every fourth call waits for all."""

    async def read(llm: AsyncLLM, source: random.Random, own_id: str | None) -> None:
        prompt = [source.randrange(VOCAB) for _ in range(source.randint(1, 70))]
        length = source.randint(1, 40)
        expected = fake_continuation(prompt, length, VOCAB)
        stop = source.choice([(), (f" {expected[length // 2]}",)])
        deadline, num_wanted = source.choice([None, 0.1]), source.choice([1, 3, length])
        if own_id is not None:
            stop, deadline, num_wanted = (), None, length
        sampling, name = (
            SamplingParams(max_tokens=length, stop=stop, deadline=deadline),
            own_id or source.choice("abcd"),
        )
        found: list[int] = []
        async for delta in llm.stream(prompt, sampling, request_id=name):
            assert delta.request_id == name
            found += delta.token_ids
            assert found == expected[: len(found)]
            if len(found) >= num_wanted:
                break  # the generator is closed later, maybe after the next call with this id
        assert own_id is None or len(found) == length

    async def call(llm: AsyncLLM, seed: int) -> None:
        source = random.Random(seed)
        for number in range(24):
            is_whole = number % 4 == 0
            patience = None if is_whole else source.choice([None, 0.002, 0.02])
            try:
                async with asyncio.timeout(patience):
                    await read(llm, source, f"own {seed}" if is_whole else None)
            except (TimeoutError, LateRequest, InvalidRequest):  # late, or an id in use
                assert not is_whole

    async def main() -> None:
        engine = fake_engine(depth=depth, num_blocks=60, max_num_seqs=4, disturb=slowly)
        async with fake_async_llm(engine) as llm:
            await asyncio.gather(*(call(llm, seed) for seed in range(12)))
            while engine.has_work:
                await asyncio.sleep(0.001)
            assert engine.scheduler.pool.num_held == 0
            assert not llm._client.num_open
            assert not llm._client._outputs._builders

    asyncio.run(main())


def test_loops_one_after_another_share_it_and_two_at_once_do_not() -> None:
    llm = fake_async_llm(fake_engine(disturb=slowly))
    abandoned = asyncio.new_event_loop()
    left = abandoned.create_task(llm.generate([1, 2], SamplingParams(max_tokens=300)))
    abandoned.run_until_complete(asyncio.sleep(0.02))
    abandoned.close()  # with a request open, as a program that failed may leave it
    refused = []

    def elsewhere() -> None:
        try:
            asyncio.run(llm.generate([3]))
        except EngineFailed as error:
            refused.append(str(error))

    async def main() -> None:
        output = await llm.generate([9, 8], SamplingParams(max_tokens=9))
        assert output.token_ids == fake_continuation([9, 8], 9, VOCAB)
        assert not llm._client.num_open
        await asyncio.to_thread(elsewhere)
        assert "another event loop" in refused[0]

    asyncio.run(main())
    asyncio.run(main())
    asyncio.run(llm.close())
    left._log_destroy_pending = False  # type: ignore[attr-defined]


def test_a_call_in_a_fork_of_the_process_is_one_clear_error() -> None:
    llm = fake_async_llm(fake_engine())
    receiver, sender = multiprocessing.Pipe(duplex=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python's own advice against forks beside threads
        child = os.fork()
    if child == 0:
        try:
            asyncio.run(llm.generate([1]))
        except EngineFailed as error:
            sender.send(str(error))
        asyncio.run(llm.close())
        sender.send("closed")
        os._exit(0)
    assert receiver.poll(20), "the call hangs"
    assert "spawn" in receiver.recv()
    assert receiver.poll(20), "closing it hangs"
    assert receiver.recv() == "closed"
    os.waitpid(child, 0)
    asyncio.run(llm.close())
