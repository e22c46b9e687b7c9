"""The paged Triton kernels against plain torch, and bit against bit in deterministic mode."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from tests.model.cuda.triton_device import DEVICE, HALF, HAS_CUDA, on_cuda

pytestmark = on_cuda

from evenflow.model.config import ModelConfig  # noqa: E402
from evenflow.model.cuda import triton_attention  # noqa: E402
from evenflow.model.cuda.attention import StepLayout  # noqa: E402
from evenflow.model.cuda.reference import ReferenceAttention  # noqa: E402
from evenflow.model.cuda.triton_attention import TritonAttention  # noqa: E402
from tests.model.cuda.paged import PagedStep, paged_step  # noqa: E402
from tests.model.tiny import tiny_config  # noqa: E402

# The interpreter takes milliseconds for each tile, so that sizes are small there.
_LONGEST, _NUM_SEEDS = (5000, 40) if HAS_CUDA else (260, 6)


def _config(group: int, num_kv_heads: int, head_dim: int, window: int | None) -> ModelConfig:
    return tiny_config(
        num_heads=group * num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        attention_scale=head_dim**-0.5,
        layer_windows=(None, window, None, None),
    )


def _assert_matches(config: ModelConfig, step: PagedStep, deterministic: bool = False) -> None:
    dtype = step.queries.dtype
    found, expected = TritonAttention(config, dtype, DEVICE, deterministic), ReferenceAttention(config)
    found.plan(step.layout)
    expected.plan(step.layout)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for layer in (0, 1):
        torch.testing.assert_close(
            found.run(layer, step.queries, step.kv),
            expected.run(layer, step.queries, step.kv),
            rtol=tolerance,
            atol=tolerance,
        )


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("seed", range(_NUM_SEEDS))
def test_matches_plain_torch(seed: int, deterministic: bool) -> None:
    draw = random.Random(seed)
    config = _config(
        group=draw.choice([1, 3, 4, 7, 16, 20]),
        num_kv_heads=draw.choice([1, 2]),
        head_dim=draw.choice([16, 64, 80, 96, 128, 256]),
        window=draw.choice([None, 1, 40, 100]),
    )
    decodes = [draw.randint(1, _LONGEST) for _ in range(draw.randint(0, 3))]
    chunks = [(draw.choice([0, draw.randint(1, _LONGEST)]), draw.randint(1, 20)) for _ in range(draw.randint(1, 2))]
    dtype, block_size = draw.choice([torch.float32, HALF]), draw.choice([16, 32, 64])
    _assert_matches(config, paged_step(config, decodes, chunks, block_size, dtype, DEVICE, seed), deterministic)


@pytest.mark.parametrize("deterministic", [False, True])
def test_splits_long_contexts_of_few_tiles(deterministic: bool) -> None:
    config = _config(group=2, num_kv_heads=1, head_dim=16, window=700)
    step = paged_step(config, [1300, 3], [(1100, 4)], device=DEVICE)
    backend = TritonAttention(config, torch.float32, DEVICE, deterministic)
    backend.plan(step.layout)
    assert all(len(launch.merges) for launch in backend._launches)
    _assert_matches(config, step, deterministic)


def test_reads_rows_of_a_wider_tensor_and_one_layer_of_a_larger_memory() -> None:
    config = _config(group=3, num_kv_heads=2, head_dim=16, window=None)
    step = paged_step(config, [20], [(5, 9)], device=DEVICE)
    packed = torch.zeros(len(step.queries), config.num_heads + 4, 16, device=DEVICE)
    packed[:, : config.num_heads] = step.queries
    memory = torch.stack((step.kv, torch.full_like(step.kv, torch.nan)), dim=1)
    _assert_matches(config, PagedStep(step.layout, packed[:, : config.num_heads], memory[:, 0]))


def test_a_graph_reads_each_plan_from_the_same_memory() -> None:
    config = _config(group=2, num_kv_heads=1, head_dim=16, window=None)
    backend, expected = TritonAttention(config, torch.float32, DEVICE), ReferenceAttention(config)
    first = paged_step(config, [250, 2], [], device=DEVICE, is_captured=True)
    backend.plan(first.layout)
    captured = list(backend._launches)
    later = paged_step(config, [3, 170], [], device=DEVICE, is_captured=True, seed=1)
    first.layout.block_tables.zero_()[:, : later.layout.block_tables.shape[1]] = later.layout.block_tables
    backend.plan(StepLayout([3, 170], [], [], first.layout.block_tables, later.layout.contexts, 16, True))
    backend._launches = captured  # what a replay would launch
    expected.plan(later.layout)
    torch.testing.assert_close(backend.run(0, later.queries, later.kv), expected.run(0, later.queries, later.kv))


def _outputs(config: ModelConfig, whole: PagedStep, cuts: list[int], others: int) -> Tensor:
    """Rows of a prompt, computed in chunks that end at `cuts`, the rest one by one, beside copies of the sequence."""
    backend = TritonAttention(config, whole.queries.dtype, DEVICE, deterministic=True)
    tables, length, rows = whole.layout.block_tables.repeat(1 + others, 1), len(whole.queries), []
    ends = [*cuts, *range(cuts[-1] + 1, length + 1)]
    for start, end in zip([0, *ends[:-1]], ends, strict=True):
        if start >= cuts[-1]:
            layout = StepLayout([end] * (1 + others), (), (), tables, torch.empty(0), whole.layout.block_size)
        else:
            layout = StepLayout((), [start], [end - start], tables, torch.empty(0), whole.layout.block_size)
        backend.plan(layout)
        queries = whole.queries[start:end].repeat(1 + others if start >= cuts[-1] else 1, 1, 1)
        rows.append(backend.run(0, queries, whole.kv)[: end - start])
    return torch.cat(rows)


@pytest.mark.parametrize(
    ("group", "head_dim", "length", "dtype"),
    [
        (4, 128, 1400, torch.bfloat16),
        (7, 64, 1400, torch.bfloat16),
        (1, 256, 700, torch.bfloat16),
        (4, 80, 600, torch.float32),
    ]
    if HAS_CUDA
    else [(3, 16, 80, torch.float32)],
)
@pytest.mark.parametrize("window", [None, 40])
def test_the_bits_do_not_depend_on_chunks_or_batch(
    group: int, head_dim: int, length: int, dtype: torch.dtype, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not HAS_CUDA:
        monkeypatch.setattr(triton_attention, "_DETERMINISTIC_SPLIT", 32)  # several parts in a short prompt
    config = tiny_config(
        num_heads=group,
        num_kv_heads=1,
        head_dim=head_dim,
        attention_scale=head_dim**-0.5,
        layer_windows=(window, None, None, None),
    )
    whole = paged_step(config, [], [(0, length)], dtype=dtype, device=DEVICE)
    expected = _outputs(config, whole, [length], others=0)
    draw = random.Random(0)
    for others in (2, 0, 0):
        cuts = [*sorted(draw.sample(range(1, length - 2), 2)), length - draw.randint(0, 2)]
        assert torch.equal(_outputs(config, whole, cuts, others), expected), cuts
