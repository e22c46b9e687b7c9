"""Steps in flight, chunks and captured graphs on many sequences at once: none of them changes an answer."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch

from evenflow.core.plan import StepResult
from evenflow.core.policies import PolicySpec
from evenflow.core.request import Request, SamplingParams
from evenflow.core.scheduler import Scheduler, SchedulerConfig
from evenflow.errors import OutOfMemory
from evenflow.executors.base import Executor
from evenflow.executors.cuda_executor import CudaExecutor
from evenflow.model.config import RopeConfig
from evenflow.model.cuda import reference_ops
from evenflow.model.cuda.attention.backend import StepLayout
from evenflow.model.cuda.attention.reference import ReferenceAttention
from evenflow.model.cuda.decoder import PagedDecoder
from tests.executors.conftest import paged
from tests.executors.plans import admit, blocks, chunk, decodes, generate, plan, prompt, run
from tests.model.cuda.devices import CPU, CUDA_BFLOAT16, CUDA_FLOAT32, Place, needs_cuda
from tests.model.tiny import random_tensors, tiny_config

# Of a size that every attention backend supports.
CONFIG = replace(
    tiny_config(num_heads=4, head_dim=64, attention_scale=0.125), rope=RopeConfig(10000.0, rotary_dim=64, scaling=None)
)
NUM_BLOCKS, BLOCK_SIZE = 96, 16
PLACES = [
    pytest.param(CPU, 0.01, id="cpu"),
    pytest.param(CUDA_FLOAT32, 0.01, id="cuda, float32", marks=needs_cuda),
    pytest.param(CUDA_BFLOAT16, 0.2, id="cuda, bfloat16", marks=needs_cuda),
]


def answers(executor: Executor, policy: str, num_blocks: int = NUM_BLOCKS) -> dict[str, Any]:
    """Token ids and logprobs of ten requests, some of which arrive later than others."""
    config = SchedulerConfig(num_blocks=num_blocks, block_size=BLOCK_SIZE, policy=PolicySpec.parse(policy))
    scheduler = Scheduler(config, executor.caps)
    sampling = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=2)
    waiting = [
        Request(f"r{number}", list(prompt(5 + 13 * number, number)), sampling, seed=0, max_model_len=400)
        for number in range(10)
    ]
    found: dict[str, Any] = {request.id: [] for request in waiting}
    now = 0.0
    while waiting or scheduler.has_work:
        for _ in range(2):
            if waiting:
                scheduler.add(waiting.pop())
        while scheduler.can_schedule and (step := scheduler.schedule(now)) is not None:
            executor.submit(step)
        result: StepResult = executor.wait()
        assert not result.errors
        now += 1.0
        for request, place, tokens in scheduler.commit(result, now).emissions:
            if tokens:
                found[request.id] += result.logprobs[place]
    executor.close()
    return found


def assert_same(found: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    """The same tokens, up to one whose two likeliest are as good as equal."""
    for name, rows in expected.items():
        for row, other in zip(found[name], rows, strict=True):
            assert row.chosen.logprob == pytest.approx(other.chosen.logprob, abs=tolerance)
            if row.chosen.token_id != other.chosen.token_id:
                assert other.top[0].logprob - other.top[1].logprob < tolerance
                break


def make(place: Place, uses_graphs: bool, **options: Any) -> Executor:
    options = {"num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE, "max_num_seqs": 10, **options}
    return paged(place, uses_graphs, CONFIG, random_tensors(CONFIG, gain=place.gain), **options)


@pytest.mark.parametrize(("place", "tolerance"), PLACES)
def test_neither_chunks_nor_graphs_nor_steps_in_flight_change_tokens(place: Place, tolerance: float) -> None:
    expected = answers(make(place, False, max_steps_in_flight=1), "unchunked")
    assert len({tuple(row.chosen.token_id for row in rows) for rows in expected.values()}) == 10
    assert_same(answers(make(place, False), "fixed:32"), expected, tolerance)
    assert_same(answers(make(place, True), "unchunked"), expected, tolerance)
    assert_same(answers(make(place, True), "fixed:20"), expected, tolerance)


@pytest.mark.parametrize(("place", "tolerance"), PLACES)
def test_a_preemption_changes_nothing(place: Place, tolerance: float) -> None:
    expected = answers(make(place, True), "fixed:64")
    few = 30
    assert_same(answers(make(place, True, num_blocks=few), "fixed:64", few), expected, tolerance)


class Watched(ReferenceAttention):
    """Keeps what it was planned for."""

    layouts: list[StepLayout]

    def plan(self, layout: StepLayout) -> None:
        self.layouts = [*getattr(self, "layouts", ()), layout]
        super().plan(layout)


def test_what_decodes_computed_is_computed_by_decodes_again_in_deterministic_mode() -> None:
    """A request that lost its KV, beside a decode, a prompt and one that was lost within its prompt."""
    found = []
    for deterministic in (False, True):
        attention = Watched(CONFIG)
        decoder = PagedDecoder(CONFIG, random_tensors(CONFIG), attention, reference_ops)
        sizes: dict[str, Any] = {"num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE, "max_model_len": 400}
        executor = CudaExecutor(decoder, max_num_seqs=8, deterministic=deterministic, uses_graphs=False, **sizes)
        assert executor.caps.reuses_answers is not deterministic
        first = plan(
            admissions=(admit(0, prompt(5)),), changes=(blocks(0, 0, 4),), chunks=(chunk(0, 0, 5, samples=True),)
        )
        run(executor, first)
        sampling = SamplingParams(temperature=0.0, prompt_logprobs=1, max_tokens=50)
        resumed = replace(admit(1, prompt(40, 1), sampling), num_prompt_tokens=30)
        halfway = replace(admit(2, prompt(40, 2)), num_prompt_tokens=20)
        result = run(
            executor,
            plan(
                admissions=(resumed, halfway, admit(3, prompt(9, 3))),
                changes=(blocks(1, 4, 4), blocks(2, 8, 4), blocks(3, 12, 4)),
                decoding=decodes((0, 5)),
                chunks=(
                    chunk(1, 0, 40, samples=True, prompt_logprobs=True),
                    chunk(2, 0, 33, samples=False),
                    chunk(3, 0, 9, samples=True),
                ),
            ),
        )
        later = run(executor, plan(chunks=(chunk(2, 33, 40, samples=True),)))
        predicted = [row.chosen.token_id for row in result.prompt_logprobs[1]]
        found.append((result.tokens, later.tokens, predicted))
        if deterministic:
            _, packed, last = attention.layouts
            assert packed.decode_contexts == [6, *range(31, 41), *range(21, 34)]
            assert (packed.chunk_starts, packed.chunk_lengths) == ([0, 0, 0], [30, 20, 9])
            assert (last.decode_contexts, last.chunk_lengths) == ([*range(34, 41)], [])
        executor.close()
    assert found[0] == found[1]
    assert found[0][2] == list(prompt(30, 1)[1:])


def test_graphs_come_in_the_sizes_that_steps_are_padded_to() -> None:
    executor = make(CPU, True, max_num_seqs=20)
    mixed = (*range(64, 1025, 64), *range(1152, 2049, 128))
    assert executor.caps.row_buckets == (1, 2, 4, 8, 16, 24, *mixed)
    assert make(CPU, True, max_num_seqs=100, max_step_rows=300).caps.row_buckets[-4:] == (104, 128, 192, 256)
    assert executor.caps.max_steps_in_flight == 2
    assert make(CPU, False).caps.row_buckets == ()
    assert isinstance(executor, CudaExecutor)


@pytest.mark.parametrize("place", [CPU, pytest.param(CUDA_FLOAT32, marks=needs_cuda)])
def test_padding_is_never_sampled(place: Place) -> None:
    """Rows that are sampled are padded to the size of a graph, which may be the number of all rows."""
    found = []
    for uses_graphs in (False, True):
        executor = make(place, uses_graphs)
        starts = [chunk(slot, 0, 5, samples=True) for slot in range(5)]
        tables = [blocks(slot, 4 * slot, 4) for slot in range(6)]
        run(
            executor,
            plan(admissions=[admit(slot, prompt(5, slot)) for slot in range(5)], changes=tables, chunks=starts),
        )
        late = admit(5, prompt(3, 5))
        decoding = decodes(*((slot, 5) for slot in range(5)))
        found.append(
            run(executor, plan(admissions=(late,), decoding=decoding, chunks=(chunk(5, 0, 3, samples=True),))).tokens
        )
        executor.close()
    assert found[0] == found[1]
    assert len(set(found[0])) > 3


@pytest.mark.parametrize("place", [CPU, pytest.param(CUDA_BFLOAT16, marks=needs_cuda)])
def test_memory_that_cannot_be_had_fails_the_step_and_not_the_executor(place: Place) -> None:
    executor = make(place, True)
    expected = generate(executor, admit(0, prompt(5)), (), 3)
    # Penalties are counted on the device, in memory for as many tokens as the request may have.
    huge = admit(3, prompt(5), SamplingParams(presence_penalty=1.0), max_known_tokens=1 << 45)
    with pytest.raises(OutOfMemory, match="max_num_batched_tokens"):
        run(executor, plan(admissions=(huge,), changes=(blocks(3, 0),), chunks=(chunk(3, 0, 5, samples=True),)))
    run(executor, plan(released=(3,)))
    assert generate(executor, admit(0, prompt(5)), (), 3) == expected


@pytest.mark.parametrize("place", [CPU, pytest.param(CUDA_BFLOAT16, marks=needs_cuda)])
def test_an_executor_that_is_closed_gives_its_memory_back(place: Place) -> None:
    executor = make(place, True)
    generate(executor, admit(0, prompt(5)), (), 3)
    assert isinstance(executor, CudaExecutor)
    kept = [weakref.ref(one) for one in (executor._decoder, executor._kv, executor._inputs)]
    gc.disable()  # it must not be needed
    try:
        executor.close()
        assert [ref() for ref in kept] == [None] * 3
    finally:
        gc.enable()


class LittleMemory(ReferenceAttention):
    """Fails as torch does where a step has more rows than fit."""

    max_rows = 400

    def plan(self, layout: StepLayout) -> None:
        if layout.num_rows > self.max_rows:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        super().plan(layout)


def test_a_step_that_does_not_fit_runs_in_pieces_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    config = replace(CONFIG, max_position=1024)
    tensors = random_tensors(config)
    sampling = SamplingParams(temperature=0.0, prompt_logprobs=1, max_tokens=8)
    pooled = SamplingParams(temperature=0.0, pooling="mean", max_tokens=1)
    found, embeddings = [], []
    for attention in (ReferenceAttention(config), LittleMemory(config)):
        decoder = PagedDecoder(config, tensors, attention, reference_ops)
        executor = CudaExecutor(decoder, num_blocks=128, block_size=16, max_model_len=1024, max_num_seqs=4)
        first = plan(
            admissions=(admit(0, prompt(30)),), changes=(blocks(0, 0, 4),), chunks=(chunk(0, 0, 30, samples=True),)
        )
        run(executor, first)
        both = plan(
            admissions=(admit(1, prompt(700, 1), sampling), admit(2, prompt(90, 2)), admit(3, prompt(450, 3), pooled)),
            changes=(blocks(1, 4, 48), blocks(2, 60, 10), blocks(3, 70, 30)),
            decoding=decodes((0, 30)),
            chunks=(
                chunk(1, 0, 700, samples=True, prompt_logprobs=True),
                chunk(2, 0, 90, samples=True),
                chunk(3, 0, 450, samples=True),
            ),
        )
        result = run(executor, both)
        after = run(executor, plan(released=(3,), decoding=decodes((0, 31), (1, 700), (2, 90))))
        found.append((result.tokens, after.tokens, [row.chosen.token_id for row in result.prompt_logprobs[1]]))
        embeddings.append(torch.frombuffer(bytearray(result.embeddings[3]), dtype=torch.float32))
        executor.close()
    assert found[0] == found[1]
    assert found[0][2] == list(prompt(700, 1)[1:])
    torch.testing.assert_close(embeddings[0], embeddings[1], rtol=0, atol=1e-5)
    assert [record.getMessage().partition(" are ")[0] for record in caplog.records] == [
        f"Memory ran out in a step of 1241 tokens. From now on at most {rows}" for rows in (620, 310)
    ]
