"""Executors that run a model, driven by hand-made plans: the CPU's, and the GPU's on a CPU."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch

from evenflow.core.plan import Admission, BlockTableChange
from evenflow.core.request import Pooling, SamplingParams
from evenflow.errors import OutOfMemory
from evenflow.executors.base import Executor
from tests.executors.conftest import MakeExecutor
from tests.executors.plans import GREEDY, admit, blocks, chunk, decodes, generate, plan, prompt, run
from tests.model.tiny import random_tensors, tiny_config


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=1.5, max_tokens=64, top_p=0.95)])
def test_chunks_do_not_change_tokens(make_executor: MakeExecutor, sampling: SamplingParams) -> None:
    executor = make_executor(enable_prefix_caching=False)
    whole = generate(executor, admit(0, prompt(50), sampling), (), 20)
    assert len(set(whole)) > 3
    assert generate(executor, admit(0, prompt(50), sampling), (1, 7, 8, 33), 20) == whole
    assert generate(executor, admit(5, prompt(50), sampling), tuple(range(1, 50)), 20) == whole


def test_one_step_holds_chunks_and_decodes_of_many(make_executor: MakeExecutor) -> None:
    executor = make_executor(enable_prefix_caching=False)
    alone = [generate(executor, admit(slot, prompt(20 + slot, slot)), (), 4) for slot in range(4)]

    first = run(
        executor,
        plan(
            0,
            admissions=(admit(0, prompt(20, 0)), admit(1, prompt(21, 1))),
            changes=(blocks(0, 0), blocks(1, 32)),
            chunks=(chunk(0, 0, 20, True), chunk(1, 0, 9, False)),
        ),
    )
    second = run(
        executor,
        plan(
            1,
            admissions=(admit(2, prompt(22, 2)), admit(3, prompt(23, 3))),
            changes=(blocks(2, 64), blocks(3, 96)),
            decoding=decodes((0, 20)),
            chunks=(chunk(1, 9, 21, True), chunk(2, 0, 22, True), chunk(3, 0, 22, False)),
        ),
    )
    third = run(
        executor, plan(2, decoding=decodes((2, 22), (0, 21), (1, 21)), chunks=(chunk(3, 22, 23, samples=True),))
    )

    assert (first.step_id, second.step_id, third.step_id) == (0, 1, 2)
    assert first.tokens == ((alone[0][0],), ())
    assert second.tokens == ((alone[0][1],), (alone[1][0],), (alone[2][0],), ())
    assert third.tokens == ((alone[2][1],), (alone[0][2],), (alone[1][1],), (alone[3][0],))


def test_two_steps_in_flight_feed_a_token_nobody_has_seen(make_executor: MakeExecutor) -> None:
    executor = make_executor(enable_prefix_caching=False, max_steps_in_flight=2)
    assert executor.caps.max_steps_in_flight == 2
    expected = generate(executor, admit(0, prompt(10)), (), 8)

    first = plan(
        0, admissions=(admit(0, prompt(10)),), changes=(blocks(0, 0),), chunks=(chunk(0, 0, 10, samples=True),)
    )
    executor.submit(first)
    tokens: list[int] = []
    for step_id, position in enumerate(range(10, 17), start=1):
        executor.submit(plan(step_id, decoding=decodes((0, position))))
        result = executor.wait()
        assert result.step_id == step_id - 1
        tokens += result.tokens[0]
    tokens += executor.wait().tokens[0]
    assert tokens == expected


def test_a_cached_prefix_gives_the_same_tokens(make_executor: MakeExecutor) -> None:
    executor = make_executor()
    shared = prompt(12)
    other = shared + prompt(9, seed=3)
    expected = generate(make_executor(), admit(0, other), (), 10)

    # Fills blocks 0-2 by a chunk that ends inside block 2, and then a decode-like chunk that completes it.
    run(executor, plan(admissions=(admit(0, shared),), changes=(blocks(0, 0),), chunks=(chunk(0, 0, 11, False),)))
    run(executor, plan(chunks=(chunk(0, 11, 12, samples=True),)))
    run(executor, plan(released=(0,)))
    hit = admit(1, other, num_cached_tokens=12)
    tokens = [
        *run(
            executor,
            plan(
                admissions=(hit,),
                changes=(BlockTableChange(1, 0, (0, 1, 2, 40, 41, 42, 43, 44)),),
                chunks=(chunk(1, 12, 21, samples=True),),
            ),
        ).tokens[0]
    ]
    tokens += [token for p in range(21, 30) for token in run(executor, plan(decoding=decodes((1, p)))).tokens[0]]
    assert tokens == expected


def test_decoded_blocks_can_be_shared_too(make_executor: MakeExecutor) -> None:
    executor = make_executor()
    first = generate(executor, admit(0, prompt(6)), (), 10)  # computes 15 tokens: blocks 0, 1 and 2 are full
    longer = prompt(6) + tuple(first[:9])
    expected = generate(make_executor(), admit(0, longer), (), 5)
    assert generate(executor, admit(0, longer, num_cached_tokens=12), (), 5) == expected


def test_blocks_appended_later_are_those_that_get_filled(make_executor: MakeExecutor) -> None:
    executor = make_executor()
    token_ids = prompt(16)
    expected = generate(make_executor(), admit(0, token_ids), (), 5)
    table = (BlockTableChange(0, 0, (9, 8)),)
    run(executor, plan(admissions=(admit(0, token_ids),), changes=table, chunks=(chunk(0, 0, 8, False),)))
    run(executor, plan(changes=(BlockTableChange(0, 2, (7, 6)),), chunks=(chunk(0, 8, 16, samples=True),)))
    run(
        executor,
        plan(
            released=(0,),
            admissions=(admit(0, token_ids, num_cached_tokens=12),),
            changes=(BlockTableChange(0, 0, (9, 8, 7, 5, 4, 3)),),
        ),
    )
    tokens = [*run(executor, plan(chunks=(chunk(0, 12, 16, samples=True),))).tokens[0]]
    tokens += [token for p in range(16, 20) for token in run(executor, plan(decoding=decodes((0, p)))).tokens[0]]
    assert tokens == expected


def test_a_slot_taken_over_in_the_step_that_frees_it(make_executor: MakeExecutor) -> None:
    executor = make_executor(enable_prefix_caching=False)
    expected = generate(executor, admit(0, prompt(30, 5)), (), 2)
    first = plan(admissions=(admit(0, prompt(40)),), changes=(blocks(0, 0),), chunks=(chunk(0, 0, 40, samples=True),))
    run(executor, first)
    taken = run(
        executor,
        plan(
            released=(0,),
            admissions=(admit(0, prompt(30, 5)),),
            changes=(blocks(0, 32),),
            chunks=(chunk(0, 0, 30, samples=True),),
        ),
    )
    assert [*taken.tokens[0], *run(executor, plan(decoding=decodes((0, 30)))).tokens[0]] == expected


def test_resuming_after_a_preemption_gives_the_same_tokens(make_executor: MakeExecutor) -> None:
    sampling = SamplingParams(temperature=1.0, max_tokens=64, repetition_penalty=1.3, frequency_penalty=0.5)
    executor = make_executor(enable_prefix_caching=False)
    whole = generate(executor, admit(0, prompt(20), sampling), (), 12)
    resumed = admit(1, prompt(20) + tuple(whole[:5]), sampling, num_prompt_tokens=20, epoch=1)
    assert generate(executor, resumed, (13,), 7) == whole[5:]


def test_nothing_to_run_is_an_empty_result(make_executor: MakeExecutor) -> None:
    result = run(make_executor(), plan(3, released=(0,)))
    assert (result.step_id, result.tokens) == (3, ())
    assert result.seconds >= 0


def test_prompt_logprobs_are_the_same_in_any_chunks(make_executor: MakeExecutor) -> None:
    executor = make_executor(enable_prefix_caching=False)
    sampling = SamplingParams(temperature=0.0, prompt_logprobs=2, logprobs=3)
    token_ids = prompt(150)

    def logprobs(cuts: list[int]) -> list[Any]:
        found: list[Any] = []
        admissions: tuple[Admission, ...] = (admit(0, token_ids, sampling),)
        for start, end in zip([0, *cuts], [*cuts, 150], strict=True):
            rows = chunk(0, start, end, samples=end == 150, prompt_logprobs=True)
            changes = (blocks(0, 0, 40),) if start == 0 else ()
            result = run(executor, plan(admissions=admissions, changes=changes, chunks=(rows,)))
            found += result.prompt_logprobs[0]
            admissions = ()
        assert len(result.logprobs[0]) == 1
        assert len(result.logprobs[0][0].top) == 3
        assert result.logprobs[0][0].chosen == result.logprobs[0][0].top[0]
        run(executor, plan(released=(0,)))
        return found

    whole = logprobs([])
    assert [row.chosen.token_id for row in whole] == list(token_ids[1:])
    assert all(len(row.top) == 2 and row.top[0].logprob >= row.chosen.logprob for row in whole)
    chunked = logprobs([1, 50, 149])
    assert [row.top[0].token_id for row in chunked] == [row.top[0].token_id for row in whole]
    torch.testing.assert_close(
        torch.tensor([row.chosen.logprob for row in chunked]),
        torch.tensor([row.chosen.logprob for row in whole]),
        atol=1e-4,
        rtol=0,
    )


def test_a_sequence_without_usable_logits_fails_alone(make_executor: MakeExecutor) -> None:
    broken_token = 5
    tensors = random_tensors(tiny_config())
    tensors["embed_tokens.weight"][broken_token] = float("nan")
    executor = make_executor(tensors, enable_prefix_caching=False)
    good = tuple(token for token in prompt(20) if token != broken_token)
    expected = generate(executor, admit(0, good), (), 3)
    both = plan(
        admissions=(admit(0, good), admit(1, (*good, broken_token))),
        changes=(blocks(0, 0), blocks(1, 32)),
        chunks=(chunk(1, 0, len(good) + 1, samples=True), chunk(0, 0, len(good), samples=True)),
    )
    executor.submit(both)
    executor.submit(plan(1, decoding=decodes((0, len(good)), (1, len(good) + 1))))
    first, second = executor.wait(), executor.wait()
    assert first.tokens == ((), (expected[0],))
    assert list(first.faults) == [0]
    assert "nan" in first.faults[0]
    assert second.tokens == ((expected[1],), ())
    assert list(second.faults) == [1]


def test_a_prompt_without_usable_logits_has_no_logprobs(make_executor: MakeExecutor) -> None:
    tensors = random_tensors(tiny_config())
    tensors["embed_tokens.weight"][5] = float("inf")
    executor = make_executor(tensors, enable_prefix_caching=False)
    sampling = SamplingParams(temperature=0.0, prompt_logprobs=0)
    good = tuple(token for token in prompt(90) if token != 5)
    broken = (*good[:-3], 5, *good[-3:])
    result = run(
        executor,
        plan(
            admissions=(admit(0, broken, sampling), admit(1, good, sampling)),
            changes=(blocks(0, 0), blocks(1, 32)),
            chunks=(
                chunk(0, 0, len(broken), samples=False, prompt_logprobs=True),
                chunk(1, 0, len(good), samples=True, prompt_logprobs=True),
            ),
        ),
    )
    assert list(result.faults) == [0]
    assert "no usable logits" in result.faults[0]
    assert list(result.prompt_logprobs) == [1]
    assert len(result.prompt_logprobs[1]) == len(good) - 1


@pytest.mark.parametrize("pooling", get_args(Pooling))
def test_embeddings_are_the_same_in_any_chunks(make_executor: MakeExecutor, pooling: Pooling) -> None:
    executor = make_executor(enable_prefix_caching=False)
    token_ids, sampling = prompt(100), SamplingParams(temperature=0.0, max_tokens=1, pooling=pooling)

    def embedding(cuts: list[int]) -> torch.Tensor:
        for start, end in zip([0, *cuts], [*cuts, 100], strict=True):
            step = plan(
                released=(0,) if start == 0 else (),
                admissions=(admit(0, token_ids, sampling), admit(1, prompt(9, 1))) if start == 0 else (),
                changes=(blocks(0, 0), blocks(1, 32)) if start == 0 else (),
                chunks=(
                    chunk(0, start, end, samples=end == 100),
                    *((chunk(1, 0, 9, samples=True),) if start == 0 else ()),
                ),
            )
            result = run(executor, step)
            assert list(result.embeddings) == ([0] if end == 100 else [])
        return torch.frombuffer(bytearray(result.embeddings[0]), dtype=torch.float32)

    whole = embedding([])
    torch.testing.assert_close(whole.norm(), torch.tensor(1.0))
    torch.testing.assert_close(embedding([1, 50, 99]), whole, rtol=0, atol=1e-4)


def test_a_step_that_fails_is_reported_by_its_own_wait(make_executor: MakeExecutor) -> None:
    executor = make_executor(enable_prefix_caching=False, max_steps_in_flight=2)
    executor.submit(plan(0, decoding=decodes((9, 0))))
    good = plan(1, admissions=(admit(0, prompt(5)),), changes=(blocks(0, 0),), chunks=(chunk(0, 0, 5, samples=True),))
    executor.submit(good)
    with pytest.raises(KeyError):
        executor.wait()
    assert executor.wait().step_id == 1


def test_a_step_that_fails_while_it_admits_takes_only_its_own_sequences_along(make_executor: MakeExecutor) -> None:
    """One slot was filled, its table is still that of the sequence before, and three steps behind it are submitted."""
    executor = make_executor(max_steps_in_flight=4)
    kept, late, started = prompt(20), prompt(9, 3), prompt(40, 4)
    expected_kept, expected_late = (generate(make_executor(), admit(0, one), (), 3) for one in (kept, late))
    first = plan(admissions=(admit(1, kept),), changes=(blocks(1, 40, 5),), chunks=(chunk(1, 0, 20, samples=True),))
    run(executor, first)
    run(
        executor,
        plan(
            released=(1,),
            admissions=(admit(0, late),),
            changes=(blocks(0, 0, 4),),
            chunks=(chunk(0, 0, 8, samples=False),),
        ),
    )
    huge = admit(2, late, SamplingParams(presence_penalty=1.0), max_known_tokens=1 << 50)
    fails = plan(
        2,
        admissions=(admit(1, started), huge),
        changes=(blocks(1, 80, 20), blocks(2, 60, 8)),
        chunks=(chunk(0, 8, 9, samples=True), chunk(1, 0, 10, samples=False), chunk(2, 0, 9, samples=True)),
    )
    behind = plan(
        3,
        admissions=(admit(3, late),),
        changes=(blocks(3, 120, 8), BlockTableChange(0, 4, (39,))),
        decoding=decodes((0, 9), (2, 9)),
        chunks=(chunk(1, 10, 30, samples=False), chunk(3, 0, 9, samples=True)),
    )
    for step in (fails, behind, plan(4, decoding=decodes((0, 10), (3, 9))), plan(5, decoding=decodes((2, 10)))):
        executor.submit(step)
    with pytest.raises(OutOfMemory):
        executor.wait()
    found = [executor.wait() for _ in range(3)]
    assert [one.tokens for one in found] == [((), (), (), (expected_late[0],)), ((), (expected_late[1],)), ((),)]
    assert [sorted(one.faults) for one in found] == [[0, 1, 2], [0], [0]]

    again = plan(
        6,
        released=(1,),
        admissions=(admit(1, late),),
        changes=(blocks(1, 60, 8),),
        chunks=(chunk(1, 0, 9, samples=True),),
        decoding=decodes((3, 10)),
    )
    assert run(executor, again).tokens == ((expected_late[2],), (expected_late[0],))
    hit = admit(4, kept, num_cached_tokens=16)
    assert generate_from(executor, hit, (40, 41, 42, 43, 44, 45)) == expected_kept


def generate_from(executor: Executor, admission: Admission, table: tuple[int, ...]) -> list[int]:
    """Three tokens of a request whose first blocks are cached."""
    slot, length = admission.slot, len(admission.token_ids)
    step = plan(
        admissions=(admission,),
        changes=(BlockTableChange(slot, 0, table),),
        chunks=(chunk(slot, admission.num_cached_tokens, length, samples=True),),
    )
    tokens = [*run(executor, step).tokens[0]]
    return tokens + [run(executor, plan(decoding=decodes((slot, p)))).tokens[0][0] for p in (length, length + 1)]


def test_a_sequence_that_every_token_would_stop_may_stop_at_once(make_executor: MakeExecutor) -> None:
    """Else `min_tokens` would leave nothing to sample. Ends beyond the vocabulary change nothing."""
    executor = make_executor(enable_prefix_caching=False)
    expected = generate(executor, admit(0, prompt(9), GREEDY), (), 3)
    for sampling in (SamplingParams(temperature=0.0, min_tokens=3), SamplingParams(min_tokens=3, top_p=1e-9)):
        for stops in (range(128), range(128, 140)):
            admission = admit(0, prompt(9), sampling, stop_token_ids=frozenset(stops))
            assert generate(executor, admission, (), 3) == expected
