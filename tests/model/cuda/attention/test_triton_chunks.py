"""The paged Triton kernels against plain torch, and bit against bit in deterministic mode."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from tests.model.cuda.triton_device import DEVICE, HALF, HAS_CUDA, on_cuda

pytestmark = on_cuda

from evenflow.model.config import ModelConfig  # noqa: E402
from evenflow.model.cuda.attention import triton_chunks, triton_decodes  # noqa: E402
from evenflow.model.cuda.attention.backend import StepLayout  # noqa: E402
from evenflow.model.cuda.attention.reference import ReferenceAttention  # noqa: E402
from evenflow.model.cuda.attention.triton_chunks import TritonAttention  # noqa: E402
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
    assert backend._decodes._launch is not None
    assert len(backend._decodes._launch.merges)
    assert backend._chunks is not None
    assert len(backend._chunks.merges)
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
    captured = backend._decodes._launch
    later = paged_step(config, [3, 170], [], device=DEVICE, is_captured=True, seed=1)
    first.layout.block_tables.zero_()[:, : later.layout.block_tables.shape[1]] = later.layout.block_tables
    backend.plan(StepLayout([3, 170], [], [], first.layout.block_tables, later.layout.contexts, 16, True))
    backend._decodes._launch = captured  # what a replay would launch
    expected.plan(later.layout)
    torch.testing.assert_close(backend.run(0, later.queries, later.kv), expected.run(0, later.queries, later.kv))


def _chunked(config: ModelConfig, whole: PagedStep, cuts: list[int]) -> Tensor:
    """Rows of a prompt, computed in chunks that end at `cuts`."""
    backend = TritonAttention(config, whole.queries.dtype, DEVICE, deterministic=True)
    tables, rows = whole.layout.block_tables, []
    for start, end in zip([0, *cuts[:-1]], cuts, strict=True):
        backend.plan(StepLayout((), [start], [end - start], tables, torch.empty(0), whole.layout.block_size))
        rows.append(backend.run(0, whole.queries[start:end], whole.kv))
    return torch.cat(rows)


def _decoded(config: ModelConfig, whole: PagedStep, positions: list[int]) -> Tensor:
    """The same rows as decodes of one step."""
    backend = TritonAttention(config, whole.queries.dtype, DEVICE)
    tables = whole.layout.block_tables.repeat(len(positions), 1)
    contexts = [position + 1 for position in positions]
    backend.plan(StepLayout(contexts, (), (), tables, torch.empty(0), whole.layout.block_size))
    return backend.run(0, whole.queries[positions], whole.kv)


_CASES = (
    [
        (4, 128, 1400, torch.bfloat16),
        (7, 64, 1400, torch.bfloat16),
        (1, 256, 700, torch.bfloat16),
        (4, 80, 600, torch.float32),
    ]
    if HAS_CUDA
    else [(3, 16, 80, torch.float32)]
)


def _whole(
    group: int, head_dim: int, length: int, dtype: torch.dtype, window: int | None
) -> tuple[ModelConfig, PagedStep]:
    config = tiny_config(
        num_heads=group,
        num_kv_heads=1,
        head_dim=head_dim,
        attention_scale=head_dim**-0.5,
        layer_windows=(window, None, None, None),
    )
    return config, paged_step(config, [], [(0, length)], dtype=dtype, device=DEVICE)


@pytest.mark.parametrize(("group", "head_dim", "length", "dtype"), _CASES)
@pytest.mark.parametrize("window", [None, 40])
def test_the_bits_do_not_depend_on_chunks(
    group: int, head_dim: int, length: int, dtype: torch.dtype, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not HAS_CUDA:
        monkeypatch.setattr(triton_chunks, "_DETERMINISTIC_SPLIT", 32)  # several parts in a short prompt
    config, whole = _whole(group, head_dim, length, dtype, window)
    expected = _chunked(config, whole, [length])
    draw = random.Random(0)
    for _ in range(3):
        cuts = [*sorted(draw.sample(range(1, length - 2), 2)), length]
        assert torch.equal(_chunked(config, whole, cuts), expected), cuts


@pytest.mark.parametrize(("group", "head_dim", "length", "dtype"), _CASES)
@pytest.mark.parametrize("window", [None, 40])
def test_a_decodes_bits_do_not_depend_on_the_others(
    group: int, head_dim: int, length: int, dtype: torch.dtype, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not HAS_CUDA:
        monkeypatch.setattr(triton_decodes, "_MIN_PART", 16)
    config, whole = _whole(group, head_dim, length, dtype, window)
    draw = random.Random(0)
    positions = [length - 1, *(draw.randrange(length) for _ in range(30 if HAS_CUDA else 5))]
    alone = torch.cat([_decoded(config, whole, [position]) for position in positions])  # long ones are shared
    many = positions * (20 if HAS_CUDA else 2)  # none is
    assert torch.equal(_decoded(config, whole, many), alone.repeat(len(many) // len(positions), 1, 1))
    assert torch.equal(_decoded(config, whole, positions), alone)
