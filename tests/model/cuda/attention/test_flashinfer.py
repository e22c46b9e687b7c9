"""FlashInfer against plain torch, on a GPU: its kernels are built on the first run, which takes minutes."""

from __future__ import annotations

import random

import pytest
import torch

from evenflow.model.config import ModelConfig
from evenflow.model.cuda.attention.backend import StepLayout
from evenflow.model.cuda.attention.reference import ReferenceAttention
from tests.model.cuda.paged import PagedStep, paged_step
from tests.model.tiny import tiny_config

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
pytest.importorskip("flashinfer", reason="FlashInfer is not installed: pip install 'evenflow[cuda]'")

from evenflow.model.cuda.attention.flashinfer import FlashInferAttention, why_unsupported  # noqa: E402

_GPU = torch.device("cuda")


def _config(group: int, window: int | None) -> ModelConfig:
    return tiny_config(
        num_heads=group * 2,
        num_kv_heads=2,
        head_dim=128,
        attention_scale=128**-0.5,
        layer_windows=(None, window, None, None),
        max_position=8192,  # longer contexts, all chunks together, are read page by page
    )


def _step(config: ModelConfig, decodes: list[int], chunks: list[tuple[int, int]], seed: int) -> PagedStep:
    step = paged_step(config, decodes, chunks, 16, torch.bfloat16, _GPU, seed)
    step.kv.nan_to_num_()  # its kernels multiply unwritten entries of a page by zero
    return step


def _assert_matches(config: ModelConfig, found: FlashInferAttention, step: PagedStep) -> None:
    expected = ReferenceAttention(config)
    found.plan(step.layout)
    expected.plan(step.layout)
    for layer in (0, 1):
        torch.testing.assert_close(
            found.run(layer, step.queries, step.kv), expected.run(layer, step.queries, step.kv), rtol=2e-2, atol=2e-2
        )


@pytest.mark.parametrize(("group", "window"), [(1, None), (4, None), (4, 100), (7, None)])
def test_matches_plain_torch(group: int, window: int | None) -> None:
    config = _config(group, window)
    backend = FlashInferAttention(config, torch.bfloat16, _GPU)
    draw = random.Random(group)
    _assert_matches(config, backend, _step(config, [5], [], 0))
    _assert_matches(config, backend, _step(config, [], [(0, 3000)], 1))
    _assert_matches(config, backend, _step(config, [3000, *[20] * 150], [(0, 300)], 2))  # the long one is divided
    for chunks in ([(7000, 70)], [(7001, 500)], [(5000, 200), (0, 100), (2500, 30)]):  # in parts, pages or gathered
        _assert_matches(config, backend, _step(config, [30], chunks, 3))
        assert backend._rounds[0].division is not None
    for seed in range(8):
        decodes = [draw.randint(1, 3000) for _ in range(draw.randint(0, 40))]
        chunks = [(draw.choice([0, draw.randint(1, 3000)]), draw.randint(1, 900)) for _ in range(draw.randint(1, 3))]
        _assert_matches(config, backend, _step(config, decodes, chunks, seed))


@pytest.mark.parametrize("num_others", [0, 150])
def test_a_captured_graph_follows_its_plans(num_others: int) -> None:
    config, others = _config(4, None), [7] * num_others
    backend, expected = FlashInferAttention(config, torch.bfloat16, _GPU), ReferenceAttention(config)
    longest = _step(config, [2000, 2000, 1, *others], [], 0)
    tables, queries, kv = longest.layout.block_tables.zero_(), longest.queries, longest.kv
    contexts = longest.layout.contexts

    def plan(step: PagedStep) -> None:
        tables.zero_()[:, : step.layout.block_tables.shape[1]] = step.layout.block_tables
        queries.copy_(step.queries)
        kv[: len(step.kv)] = step.kv
        backend.plan(StepLayout(step.layout.decode_contexts, (), (), tables, contexts, 16, is_captured=True))

    plan(_step(config, [1, 1, 1, *others], [], 1))
    backend.run(0, queries, kv)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = backend.run(0, queries, kv)
    for seed, decodes in enumerate(([1, 1, 1], [1900, 3, 700], [16, 2000, 1999])):
        step = _step(config, decodes + others, [], seed)
        plan(step)
        graph.replay()
        expected.plan(step.layout)
        torch.testing.assert_close(output, expected.run(0, step.queries, step.kv), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("chunks", [[(900, 40)], [(7000, 200)], [(7001, 500)], [(3000, 100), (0, 700)]])
def test_repeated_attends_in_one_layer_after_the_other(chunks: list[tuple[int, int]]) -> None:
    config = _config(4, None)
    backend, expected = FlashInferAttention(config, torch.bfloat16, _GPU), ReferenceAttention(config)
    step = _step(config, [30, 700], chunks, 0)
    layers = torch.stack([step.kv, 2 * step.kv, step.kv.flip(0)])
    queries, output = step.queries.clone(), torch.empty_like(step.queries)
    backend.plan(step.layout)
    attend = backend.repeated(queries, layers, output)
    assert attend is not None
    for layer, kv in enumerate(layers):
        queries.copy_(step.queries + layer)
        attend()
        expected.plan(step.layout)
        torch.testing.assert_close(output, expected.run(0, queries, kv), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("window", [None, 100])
def test_chunks_that_do_not_fit_the_copy_together_run_in_rounds(window: int | None) -> None:
    config = _config(4, window)
    backend = FlashInferAttention(config, torch.bfloat16, _GPU, deterministic=True)
    chunks = [(7000, 70), (5000, 200), (0, 1), (3000, 5), (7999, 1)]
    whole = _step(config, [30, 900], chunks, 0)
    _assert_matches(config, backend, whole)
    assert len(backend._rounds) == 4
    expected = [backend.run(layer, whole.queries, whole.kv) for layer in (0, 1)]
    rows = sum(length for _, length in chunks[:2])
    few = StepLayout([], [5000], [200], whole.layout.block_tables[3:4], torch.empty(0), 16)
    backend.plan(few)
    for layer in (0, 1):
        found = backend.run(layer, whole.queries[2 + 70 : 2 + rows], whole.kv)
        assert torch.equal(found, expected[layer][2 + 70 : 2 + rows])


def test_says_what_it_does_not_support() -> None:
    assert why_unsupported(torch.bfloat16, _GPU, 128) is None
    assert "no kernels for torch.float32" in str(why_unsupported(torch.float32, _GPU))
    assert "no kernels for heads of 80" in str(why_unsupported(torch.bfloat16, _GPU, 80))
