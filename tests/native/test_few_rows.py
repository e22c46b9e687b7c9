"""Native layers and linears for few rows against the same weights on torch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from evenflow.model.config import ModelConfig, RopeConfig
from evenflow.model.cpu.decoder import Decoder, MakeLinear
from evenflow.model.cpu.int4 import NativeInt4Linear, NativeInt8Linear, dequantise, quantise
from evenflow.model.cpu.kv_cache import new_sequence_kv
from evenflow.model.cpu.linear import FloatLinear
from evenflow.model.cpu.native_attention import Span
from evenflow.native.build import library
from evenflow.native.matrix import float_matrix, quantised_matrix
from tests.model.tiny import random_tensors, tiny_config

pytestmark = pytest.mark.skipif(library() is None, reason="no native kernels here")

CONFIGS = {
    "plain": tiny_config(),
    "one KV head, biases": tiny_config(num_kv_heads=1, qkv_bias=True, output_bias=True, mlp_bias=True),
    "QK norm, layers without rope": tiny_config(qk_norm=True, layer_uses_rope=(True, False, True, False)),
    "windows, half a head turns": tiny_config(
        layer_windows=(None, 3, 20, 40), rope=RopeConfig(theta=10000.0, rotary_dim=8, scaling=None)
    ),
    "sizes of groups": tiny_config(hidden_size=64, head_dim=32, attention_scale=32**-0.5, qkv_bias=True),
}


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def _logits(decoder: Decoder, lengths: list[int], *, native: bool) -> Tensor:
    """Of one step over sequences of 50 tokens and more, some of which get a decode and some a small chunk."""
    spans = []
    for seed, length in enumerate(lengths):
        kv = new_sequence_kv(decoder.config, 200)
        kv.copy_(torch.randn(kv.shape, generator=torch.Generator().manual_seed(seed)))
        spans.append(Span(kv, 50 + 5 * seed, length))
    token_ids = [(7 * row) % decoder.config.vocab_size for row in range(sum(lengths))]
    layers = decoder._native
    assert layers is not None
    decoder._native = layers if native else None
    try:
        hidden = decoder.hidden(token_ids, spans, wanted=range(len(token_ids))[::2])
    finally:
        decoder._native = layers
    return decoder.logits(hidden)


def _forms(config: ModelConfig) -> list[MakeLinear]:
    return [FloatLinear, NativeInt4Linear] if config.hidden_size % 32 == 0 else [FloatLinear]


@pytest.mark.parametrize("name", CONFIGS)
def test_layers_equal_those_of_torch(name: str) -> None:
    config = CONFIGS[name]
    for form in _forms(config):
        decoder = Decoder(config, random_tensors(config), form)
        for lengths in ([1], [1, 1], [3], [1] * 6, [1, 4, 1], [1] * 8):
            native, expected = (_logits(decoder, lengths, native=native) for native in (True, False))
            torch.testing.assert_close(native, expected, atol=1e-4, rtol=0)


def test_more_rows_than_a_block_equal_those_of_torch() -> None:
    config = CONFIGS["plain"]
    decoder = Decoder(config, random_tensors(config), FloatLinear)
    for lengths in ([16], [1] * 13, [1] * 12 + [20]):
        native, expected = (_logits(decoder, lengths, native=native) for native in (True, False))
        torch.testing.assert_close(native, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("shape", [(16, 64), (100, 96), (37, 32), (192, 576)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_are_those_of_the_weight(shape: tuple[int, int], has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(shape[0])
    weight = torch.randn(shape, generator=generator)
    bias = torch.randn(shape[0], generator=generator) if has_bias else None
    numbers, scales, zeros = quantise(weight)
    forms = {
        float_matrix(weight, bias, max_rows=32): weight,
        quantised_matrix(numbers + 8, scales, zeros - 8 * scales, bias, num_bits=4, max_rows=32): dequantise(
            numbers, scales, zeros
        ),
    }
    for matrix, values in forms.items():
        for count in range(1, 17):
            rows = torch.randn(count, shape[1], generator=generator)
            expected = F.linear(rows, values, bias)
            torch.testing.assert_close(matrix(rows), expected, atol=1e-4, rtol=0)
            torch.testing.assert_close(matrix.add_to(torch.ones_like(expected), rows), expected + 1, atol=1e-4, rtol=0)


def test_a_number_of_inputs_that_fills_no_vector_is_multiplied_to_its_end() -> None:
    weight, rows = torch.randn(6, 37), torch.randn(3, 37)
    torch.testing.assert_close(float_matrix(weight, None, max_rows=8)(rows), rows @ weight.t(), atol=1e-4, rtol=0)


def test_8_bits_keep_what_a_file_of_8_bits_holds() -> None:
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(-127, 128, (48, 2, 32), generator=generator)
    numbers[..., 0] = 127
    weight = (numbers * 0.0078125).view(48, 64)
    rows = torch.randn(4, 64, generator=generator)
    torch.testing.assert_close(NativeInt8Linear(weight, None)(rows), rows @ weight.t(), atol=1e-4, rtol=0)


def test_4_bits_keep_what_files_without_zeros_hold() -> None:
    numbers = torch.randint(-8, 8, (32, 2, 32), generator=torch.Generator().manual_seed(0))
    numbers[..., 0] = -8
    weight = (numbers * torch.tensor([0.25, -0.125]).view(1, 2, 1)).view(32, 64)
    assert torch.equal(dequantise(*quantise(weight)), weight)
