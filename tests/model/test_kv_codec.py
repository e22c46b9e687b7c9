"""KV blocks encoded and decoded: exactly, or within the error that 8 bits allow."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenflow.model.kv_codec import CODECS, BlockLayout

TYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPE = (2, 2, 3, 16, 32)


def noise(dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("form", ["plain", "lossless"])
def test_every_bit_comes_back_even_of_odd_values(form: str, dtype: torch.dtype) -> None:
    block = noise(dtype)
    odd = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), torch.finfo(dtype).max, torch.finfo(dtype).tiny / 4]
    block.view(-1)[: len(odd)] = torch.tensor(odd, dtype=torch.float64).to(dtype)
    layout = BlockLayout(SHAPE, dtype)
    again = CODECS[form].decode(CODECS[form].encode(block), layout)
    assert again.dtype == dtype
    assert torch.equal(again.view(torch.uint8), block.view(torch.uint8))


def test_lossless_takes_a_view_that_is_not_contiguous() -> None:
    block = noise(torch.float32).transpose(2, 3)
    again = CODECS["lossless"].decode(CODECS["lossless"].encode(block), BlockLayout(tuple(block.shape), block.dtype))
    assert torch.equal(again, block)


@pytest.mark.parametrize("dtype", TYPES)
def test_int8_is_within_half_a_step_of_each_heads_largest_value(dtype: torch.dtype) -> None:
    block = noise(dtype)
    block[0, 0, 0, 0] *= 1000  # an outlier harms its own token and head alone
    block[0, 0, 0, 1] = 0.0
    again = CODECS["int8"].decode(CODECS["int8"].encode(block), BlockLayout(SHAPE, dtype))
    largest = block.float().abs().amax(-1, keepdim=True)
    rounding = torch.finfo(dtype).eps * block.float().abs()  # of the result, to its own type
    assert (again.float() - block.float()).abs().le(largest / 254 * 1.001 + rounding).all()
    assert again[0, 0, 0, 1].eq(0).all()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", CODECS)
def test_no_block_takes_more_bytes_than_stated(name: str, dtype: torch.dtype) -> None:
    codec, layout = CODECS[name], BlockLayout(SHAPE, dtype)
    random_bits = torch.randint(0, 256, (layout.num_bytes,), dtype=torch.uint8).view(dtype).view(SHAPE)
    for block in (noise(dtype), random_bits, torch.zeros(SHAPE, dtype=dtype)):
        assert len(codec.encode(block)) <= codec.max_bytes(layout)


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(sorted(CODECS)), content=st.binary(max_size=400), cut=st.integers(0, 6000))
def test_bytes_that_are_no_block_are_refused_and_nothing_else_happens(name: str, content: bytes, cut: int) -> None:
    layout = BlockLayout((1, 2, 2, 8, 16), torch.float32)
    codec = CODECS[name]
    whole = codec.encode(torch.randn(layout.shape))
    for broken in (content, whole[:cut], whole + content):
        if broken != whole and len(broken) != len(whole):
            with pytest.raises(ValueError):
                codec.decode(broken, layout)
