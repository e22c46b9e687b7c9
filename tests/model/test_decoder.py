"""The decoder against transformers, on the same random weights of every architecture it covers."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from evenflow.model.config import ModelConfig, RopeConfig
from evenflow.model.cpu.decoder import Decoder
from evenflow.model.cpu.kv_cache import new_sequence_kv
from evenflow.model.cpu.linear import FloatLinear
from evenflow.model.cpu.native_attention import Span
from tests.model.architectures import CASES, transformers_model
from tests.model.tiny import random_tensors, tiny_config

pytest.importorskip("transformers")


def _run(decoder: Decoder, token_ids: list[int], cuts: list[int]) -> Tensor:
    """The logits of all positions, computed in chunks that end at `cuts`."""
    kv = new_sequence_kv(decoder.config, len(token_ids))
    rows = [
        decoder.hidden(token_ids[start:end], [Span(kv, start, end - start)])
        for start, end in zip([0, *cuts], [*cuts, len(token_ids)], strict=True)
    ]
    return decoder.logits(torch.cat(rows))


def _token_ids(config: ModelConfig, count: int, seed: int = 0) -> list[int]:
    return torch.randint(0, config.vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(autouse=True)
def _no_gradients() -> Any:
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(name: str) -> None:
    config = CASES[name][0]
    tensors = random_tensors(config)
    token_ids = _token_ids(config, 90)
    expected = transformers_model(name, tensors)(torch.tensor([token_ids])).logits[0]

    decoder = Decoder(config, tensors, FloatLinear)

    torch.testing.assert_close(_run(decoder, token_ids, []), expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(_run(decoder, token_ids, [1, 2, 40, 41, 80]), expected, atol=1e-4, rtol=0)


DECODERS = {
    name: Decoder(config, random_tensors(config), FloatLinear)
    for name, config in {
        "plain": tiny_config(),
        "window": tiny_config(layer_windows=(None, 3, 20, 150)),
        "no rope, QK norm": tiny_config(layer_uses_rope=(True, False, True, False), qk_norm=True),
    }.items()
}


@pytest.mark.parametrize("name", DECODERS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_chunks_give_the_same_logits(name: str, data: st.DataObject) -> None:
    decoder = DECODERS[name]
    length = data.draw(st.integers(2, 300))
    cuts = sorted(data.draw(st.sets(st.integers(1, length - 1), max_size=8)))
    token_ids = _token_ids(decoder.config, length, seed=length)
    torch.testing.assert_close(_run(decoder, token_ids, cuts), _run(decoder, token_ids, []), atol=2e-4, rtol=0)


@pytest.mark.parametrize("name", DECODERS)
def test_sequences_packed_into_a_step_do_not_see_each_other(name: str) -> None:
    decoder = DECODERS[name]
    prompts = [_token_ids(decoder.config, count, seed=count) for count in (30, 1, 170, 64)]
    computed = [29, 0, 100, 0]  # before the packed step: a decode, a first token, a later chunk, a whole prompt
    alone = [_run(decoder, prompt, []) for prompt in prompts]

    kvs = [new_sequence_kv(decoder.config, len(prompt)) for prompt in prompts]
    for prompt, count, kv in zip(prompts, computed, kvs, strict=True):
        if count:
            decoder.hidden(prompt[:count], [Span(kv, 0, count)])
    spans = [Span(kv, n, len(prompt) - n) for prompt, n, kv in zip(prompts, computed, kvs, strict=True)]
    token_ids = [token for prompt, n in zip(prompts, computed, strict=True) for token in prompt[n:]]
    packed = decoder.logits(decoder.hidden(token_ids, spans))

    expected = torch.cat([logits[n:] for logits, n in zip(alone, computed, strict=True)])
    torch.testing.assert_close(packed, expected, atol=1e-4, rtol=0)


def test_partial_rotation_leaves_the_rest_of_a_head_alone() -> None:
    """With rotary_dim 8 of 16, zeroing the rotated half's weights must leave logits that ignore positions."""
    config = tiny_config(rope=RopeConfig(theta=10000.0, rotary_dim=8, scaling=None))
    tensors = dict(random_tensors(config))
    for name in [name for name in tensors if "q_proj" in name]:
        heads = tensors[name].clone().view(config.num_heads, config.head_dim, -1)
        heads[:, :8] = 0
        tensors[name] = heads.view(tensors[name].shape)
    no_positions = dataclasses.replace(config, layer_uses_rope=(False,) * config.num_layers)
    token_ids = _token_ids(config, 40)

    turned = _run(Decoder(config, tensors, FloatLinear), token_ids, [])
    unturned = _run(Decoder(no_positions, tensors, FloatLinear), token_ids, [])

    torch.testing.assert_close(turned, unturned, atol=1e-5, rtol=0)
