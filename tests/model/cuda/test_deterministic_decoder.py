"""A whole decoder in deterministic mode: the same bits of logits for any chunks, batch and reuse of a prefix."""

from __future__ import annotations

import os
import random

import pytest
import torch

from tests.model.cuda.triton_device import DEVICE, HAS_CUDA, on_cuda

pytestmark = on_cuda

from evenflow.model.config import ModelConfig  # noqa: E402
from evenflow.model.cuda import deterministic  # noqa: E402
from evenflow.model.cuda.decoder import PagedDecoder  # noqa: E402
from evenflow.model.cuda.inputs import RowSpan  # noqa: E402
from evenflow.model.cuda.triton_attention import TritonAttention  # noqa: E402
from tests.model.cuda.test_paged_decoder import Sequences  # noqa: E402
from tests.model.tiny import random_tensors, tiny_config  # noqa: E402

# The interpreter takes seconds for each step.
_NUM_LAYERS, _LENGTH, _FEW_CHUNKINGS = (4, 150, 100) if HAS_CUDA else (1, 24, 2)
_NUM_CHUNKINGS = int(os.environ.get("EVENFLOW_CHUNKINGS", _FEW_CHUNKINGS))  # for each type
_SEED = int(os.environ.get("EVENFLOW_CHUNKINGS_SEED", 0))
_OF_A_PROMPT = 100


def _sequences(config: ModelConfig, dtype: torch.dtype) -> Sequences:
    tensors = {name: tensor.to(DEVICE, dtype) for name, tensor in random_tensors(config).items()}
    attention = TritonAttention(config, dtype, DEVICE, deterministic=True)
    return Sequences(PagedDecoder(config, tensors, attention, deterministic))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16] if HAS_CUDA else [torch.float32])
def test_logits_do_not_depend_on_chunks_or_batch(dtype: torch.dtype) -> None:
    config = tiny_config(
        num_layers=_NUM_LAYERS,
        layer_windows=(None, 20, None, None)[:_NUM_LAYERS],
        layer_uses_rope=(True, True, False, True)[:_NUM_LAYERS],
        qk_norm=True,
        qkv_bias=True,
    )
    draw = random.Random(_SEED)
    sequences = _sequences(config, dtype)
    for number in range(_NUM_CHUNKINGS):
        if number % _OF_A_PROMPT == 0:
            tokens = [draw.randrange(config.vocab_size) for _ in range(_LENGTH)]
            expected = sequences.prefill(0, tokens)
        cuts = sorted(draw.sample(range(1, _LENGTH), draw.randint(1, 4)))
        assert torch.equal(sequences.prefill(1, tokens, cuts), expected), cuts
        start = draw.randrange(1, _LENGTH - 3)  # what lies before is a prefix that is there already
        sequences.decode(1, tokens[start])
        both = sequences.logits(
            [RowSpan(1, start, 1), RowSpan(2, 0, 5, tokens[:5]), RowSpan(0, start, _LENGTH - start, tokens[start:])]
        )
        assert torch.equal(both[0], expected[start]), start
        assert torch.equal(both[1:6], expected[:5])
        assert torch.equal(both[6:], expected[start:]), start
