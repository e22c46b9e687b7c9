"""Kernels get bare addresses: what does not have the size they expect is refused, not read or written past its end."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from evenflow.model.cpu.decoder import Decoder
from evenflow.model.cpu.kv_cache import new_sequence_kv
from evenflow.model.cpu.linear import FloatLinear
from evenflow.model.cpu.native_attention import NativeStepAttention, Span
from evenflow.model.cpu.native_layers import NativeLayers, NativeNorm
from evenflow.native.build import library
from evenflow.native.matrix import NativeMatrix, float_matrix, quantised_matrix
from tests.model.tiny import random_tensors, tiny_config

pytestmark = pytest.mark.skipif(library() is None, reason="no native kernels here")

CONFIG = tiny_config()
PAIRS, PACKED = 8, (6 + 2 * 2) * 16


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def kv(num_tokens: int = 64) -> Tensor:
    return new_sequence_kv(CONFIG, num_tokens)


def floats() -> NativeMatrix:
    return float_matrix(zeros(16, 64), zeros(16), max_rows=8)


def codes() -> NativeMatrix:
    return quantised_matrix(zeros(20, 64), zeros(20, 2), zeros(20, 2), None, num_bits=4, max_rows=8)


@pytest.mark.parametrize("rows", [zeros(2, 63), zeros(2, 65), zeros(64), zeros(2, 64, dtype=torch.float64)])
@pytest.mark.parametrize("make", [floats, codes])
def test_a_product_refuses_other_rows(make: type[NativeMatrix], rows: Tensor) -> None:
    with pytest.raises(ValueError, match="Got rows of"):
        make()(rows)


@pytest.mark.parametrize("residual", [zeros(1, 16), zeros(2, 17), zeros(2, 16, dtype=torch.bfloat16)])
def test_a_product_refuses_to_add_to_other_rows(residual: Tensor) -> None:
    with pytest.raises(ValueError, match="Got outputs of"):
        floats().add_to(residual, zeros(2, 64))


def test_a_matrix_refuses_parts_that_do_not_fit_together() -> None:
    with pytest.raises(ValueError, match="Got bias of"):
        float_matrix(zeros(16, 64), zeros(15), max_rows=8)
    with pytest.raises(ValueError, match="Got weight of"):
        float_matrix(zeros(16, 64, dtype=torch.bfloat16), None, max_rows=8)
    with pytest.raises(ValueError, match="Got scales of"):
        quantised_matrix(zeros(16, 64), zeros(16, 1), zeros(16, 2), None, num_bits=4, max_rows=8)
    with pytest.raises(ValueError, match="Got zeros of"):
        quantised_matrix(zeros(32, 64), zeros(32, 2), zeros(16, 2), None, num_bits=8, max_rows=8)
    with pytest.raises(ValueError, match="Got 48 inputs but expected a multiple of 32"):
        quantised_matrix(zeros(16, 48), zeros(16, 1), zeros(16, 1), None, num_bits=4, max_rows=8)


@pytest.mark.parametrize(
    "span",
    [
        Span(kv(), 60, 5),
        Span(kv(), -1, 2),
        Span(kv(), 3, 0),
        Span(kv().double(), 0, 1),
        Span(kv()[:3], 0, 1),
        Span(kv()[:, :, :1], 0, 1),
        Span(kv()[..., :8], 0, 1),
        Span(kv().transpose(3, 4), 0, 1),
    ],
)
def test_attention_and_layers_refuse_positions_outside_of_a_sequences_memory(span: Span) -> None:
    with pytest.raises(ValueError, match=r"Got (KV memory|positions)"):
        NativeStepAttention(CONFIG, [Span(kv(), 0, 1), span])
    layers, length = native_layers(), max(1, span.length)
    with pytest.raises(ValueError, match=r"Got (KV memory|positions|rows)"):
        layers.run_(zeros(length, 72), zeros(length, PAIRS, dtype=torch.complex64), [span])


@pytest.mark.parametrize("packed", [zeros(2, PACKED), zeros(4, PACKED), zeros(3, PACKED - 1), zeros(3, PACKED).long()])
def test_attention_refuses_other_rows_than_its_spans_have(packed: Tensor) -> None:
    attention = NativeStepAttention(CONFIG, [Span(kv(), 5, 1), Span(kv(), 0, 2)])
    with pytest.raises(ValueError, match="Got packed rows of"):
        attention(0, packed)


def test_attention_refuses_a_step_without_rows() -> None:
    with pytest.raises(ValueError, match="Got no spans"):
        NativeStepAttention(CONFIG, [])


def native_layers() -> NativeLayers:
    layers = Decoder(CONFIG, random_tensors(CONFIG), FloatLinear)._native
    assert layers is not None
    return layers


@pytest.mark.parametrize("rows", [zeros(2, 72), zeros(4, 72), zeros(3, 71), zeros(3, 144)[:, ::2]])
def test_layers_refuse_other_rows_than_their_spans_have(rows: Tensor) -> None:
    spans = [Span(kv(), 5, 1), Span(kv(), 0, 2)]
    with pytest.raises(ValueError, match="Got rows of"):
        native_layers().run_(rows, zeros(3, PAIRS, dtype=torch.complex64), spans)
    with pytest.raises(ValueError, match="Got rotations of"):
        native_layers().run_(zeros(3, 72), zeros(2, PAIRS, dtype=torch.complex64), spans)


def test_layers_refuse_weights_of_another_model() -> None:
    layers = native_layers()._weights
    for changes in ({"hidden_size": 64}, {"intermediate_size": 128}, {"num_kv_heads": 3}, {"num_heads": 8}):
        with pytest.raises(ValueError, match=r"Got (matrices|norm)"):
            NativeLayers(tiny_config(**changes), layers)
    with pytest.raises(ValueError, match="Got 3 layers but expected 4"):
        NativeLayers(CONFIG, layers[:3])


def test_a_norm_refuses_other_rows() -> None:
    for rows in (zeros(2, 71), zeros(2, 73), zeros(72), zeros(2, 72).half()):
        with pytest.raises(ValueError, match="Got rows of"):
            NativeNorm(torch.ones(72), 1e-5)(rows)


def test_a_decoder_refuses_fewer_tokens_than_positions() -> None:
    decoder = Decoder(CONFIG, random_tensors(CONFIG), FloatLinear)
    with pytest.raises(ValueError, match="Got 2 token ids for 3 positions"):
        decoder.hidden([5, 6], [Span(kv(), 0, 3)])
