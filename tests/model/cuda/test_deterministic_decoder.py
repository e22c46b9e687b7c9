"""A whole decoder in deterministic mode: the same bits of logits for any chunks, batch and reuse of a prefix.

A decode's are the same in any batch, too, and if it runs again; they are not those of a chunk.
"""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch

from tests.model.cuda.triton_device import DEVICE, HAS_CUDA, on_cuda

pytestmark = on_cuda

from evenflow.model.config import ModelConfig, RopeConfig  # noqa: E402
from evenflow.model.cuda import deterministic  # noqa: E402
from evenflow.model.cuda.attention.triton_chunks import TritonAttention  # noqa: E402
from evenflow.model.cuda.decoder import PagedDecoder  # noqa: E402
from evenflow.model.cuda.inputs import RowSpan  # noqa: E402
from tests.model.cuda.test_paged_decoder import Sequences  # noqa: E402
from tests.model.tiny import random_tensors, tiny_config  # noqa: E402

# The interpreter takes seconds for each step.
_NUM_LAYERS, _LENGTH, _FEW_CHUNKINGS = (4, 150, 100) if HAS_CUDA else (1, 24, 2)
_NUM_CHUNKINGS = int(os.environ.get("EVENFLOW_CHUNKINGS", _FEW_CHUNKINGS))  # for each type
_SEED = int(os.environ.get("EVENFLOW_CHUNKINGS_SEED", 0))
_OF_A_PROMPT = 100


def _sequences(config: ModelConfig, dtype: torch.dtype, by: str) -> Sequences:
    tensors = {name: tensor.to(DEVICE, dtype) for name, tensor in random_tensors(config).items()}
    if by == "flashinfer":
        module = pytest.importorskip("evenflow.model.cuda.attention.flashinfer", exc_type=ImportError)
        attention = module.FlashInferAttention(config, dtype, DEVICE, deterministic=True)
    else:
        attention = TritonAttention(config, dtype, DEVICE, deterministic=True)
    return Sequences(PagedDecoder(config, tensors, attention, deterministic))


_KINDS = [
    (torch.float32, "triton", 20),
    (torch.bfloat16, "triton", 20),
    (torch.bfloat16, "flashinfer", None),
    (torch.bfloat16, "flashinfer", 20),
]


@pytest.mark.parametrize(("dtype", "by", "window"), _KINDS if HAS_CUDA else _KINDS[:1])
def test_logits_do_not_depend_on_chunks_or_batch(dtype: torch.dtype, by: str, window: int | None) -> None:
    sizes: dict[str, Any] = {}
    if by == "flashinfer":
        sizes = {"head_dim": 128, "rope": RopeConfig(10000.0, rotary_dim=128, scaling=None)}
    config = tiny_config(
        **sizes,
        num_layers=_NUM_LAYERS,
        layer_windows=(None, window, None, None)[:_NUM_LAYERS],
        layer_uses_rope=(True, True, False, True)[:_NUM_LAYERS],
        qk_norm=True,
        qkv_bias=True,
    )
    draw = random.Random(_SEED)
    sequences = _sequences(config, dtype, by)
    for number in range(_NUM_CHUNKINGS):
        if number % _OF_A_PROMPT == 0:
            tokens = [draw.randrange(config.vocab_size) for _ in range(_LENGTH)]
            expected = sequences.prefill(0, tokens)
        cuts = sorted(draw.sample(range(1, _LENGTH), draw.randint(1, 4)))
        assert torch.equal(sequences.prefill(1, tokens, cuts), expected), cuts
        start = draw.randrange(1, _LENGTH - 3)  # what lies before is a prefix that is there already
        others = [RowSpan(2, 0, 5, tokens[:5]), RowSpan(0, start, _LENGTH - start, tokens[start:])]
        sequences.decode(1, tokens[start])
        [alone] = sequences.logits([RowSpan(1, start, 1)])
        packed = sequences.logits([RowSpan(1, start, 1), *others])
        again = sequences.logits([RowSpan(1, start, 1, tokens[start : start + 1], is_repeated_decode=True), *others])
        for both in (packed, again):
            assert torch.equal(both[0], alone), start
            assert torch.equal(both[1:6], expected[:5])
            assert torch.equal(both[6:], expected[start:]), start
