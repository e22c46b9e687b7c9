"""The decoder over paged KV memory against transformers, on the same weights; on a GPU too, where there is one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from evenflow.core.plan import BlockTableChange
from evenflow.model.cuda.decoder import PagedDecoder
from evenflow.model.cuda.inputs import DeviceInputs, RowSpan
from tests.model.architectures import CASES, transformers_model
from tests.model.cuda.devices import CPU, CUDA_BFLOAT16, PLACES, Place, needs_cuda
from tests.model.tiny import random_tensors, tiny_config

pytest.importorskip("transformers")

_BLOCK_SIZE, _NUM_BLOCKS, _NUM_SLOTS = 16, 64, 6


class Sequences:
    """A decoder's memory, with the blocks of all slots dealt in turn, so that none has neighbouring ones."""

    def __init__(self, decoder: PagedDecoder) -> None:
        self._decoder = decoder
        self._kv = decoder.new_kv(_NUM_BLOCKS + 1, _BLOCK_SIZE)
        self._inputs = DeviceInputs(
            num_slots=_NUM_SLOTS,
            num_blocks=_NUM_BLOCKS,
            block_size=_BLOCK_SIZE,
            max_model_len=decoder.config.max_position,
            device=decoder.device,
        )
        order = torch.randperm(_NUM_BLOCKS, generator=torch.Generator().manual_seed(1)).tolist()
        tables = (BlockTableChange(slot, 0, tuple(order[slot::_NUM_SLOTS])) for slot in range(_NUM_SLOTS))
        self._inputs.change_tables(tuple(tables))

    def logits(self, spans: Sequence[RowSpan]) -> Tensor:
        """Of all rows of a step."""
        rows = self._inputs.load(spans, None)
        self._decoder.attention.plan(rows.layout)
        hidden = self._decoder.hidden(rows.inputs, self._kv)
        return self._decoder.logits(hidden).cpu()

    def prefill(self, slot: int, token_ids: list[int], cuts: Sequence[int] = ()) -> Tensor:
        """Of all positions of a prompt, computed in chunks that end at `cuts`."""
        bounds = zip([0, *cuts], [*cuts, len(token_ids)], strict=True)
        return torch.cat(
            [self.logits([RowSpan(slot, start, end - start, token_ids[start:end])]) for start, end in bounds]
        )

    def decode(self, slot: int, token_id: int) -> None:
        """What the next decode of this slot feeds."""
        self._inputs.last_tokens[slot] = token_id


def assert_close(found: Tensor, expected: Tensor, place: Place) -> None:
    difference = (found - expected).norm() / expected.norm()
    assert difference < place.tolerance


def token_ids_of(count: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 128, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(name: str, place: Place) -> None:
    config = CASES[name][0]
    # Rounded first: what is compared is the computation, not the rounding of the weights.
    tensors = {key: tensor.to(place.dtype).float() for key, tensor in random_tensors(config, gain=place.gain).items()}
    token_ids = token_ids_of(90)
    expected = transformers_model(name, tensors)(torch.tensor([token_ids])).logits[0]
    sequences = Sequences(place.decoder(config, tensors))
    assert_close(sequences.prefill(0, token_ids), expected, place)
    assert_close(sequences.prefill(1, token_ids, [1, 2, 40, 41, 80]), expected, place)


@pytest.mark.parametrize("name", [pytest.param(name, marks=needs_cuda) for name in ("llama", "qwen2", "qwen3")])
def test_sixteen_bits_cost_no_more_than_in_transformers(name: str) -> None:
    config = CASES[name][0]
    tensors = {key: tensor.bfloat16().float() for key, tensor in random_tensors(config).items()}
    token_ids = token_ids_of(90)
    model, batch = transformers_model(name, tensors).cuda(), torch.tensor([token_ids], device="cuda")
    exact = model(batch).logits[0].cpu()
    theirs = model.bfloat16()(batch).logits[0].float().cpu()
    ours = Sequences(CUDA_BFLOAT16.decoder(config, tensors)).prefill(0, token_ids)
    assert (ours - exact).norm() < 1.3 * (theirs - exact).norm()


CONFIGS = {
    "plain": tiny_config(),
    "window": tiny_config(layer_windows=(None, 3, 20, 150)),
    "no rope, QK norm": tiny_config(layer_uses_rope=(True, False, True, False), qk_norm=True),
}


@pytest.mark.parametrize("name", CONFIGS)
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_any_chunks_give_the_same_logits(name: str, data: st.DataObject) -> None:
    length = data.draw(st.integers(2, 150))
    cuts = sorted(data.draw(st.sets(st.integers(1, length - 1), max_size=6)))
    sequences = Sequences(CPU.decoder(CONFIGS[name], random_tensors(CONFIGS[name])))
    token_ids = token_ids_of(length, seed=length)
    assert_close(sequences.prefill(0, token_ids, cuts), sequences.prefill(1, token_ids), CPU)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", CONFIGS)
def test_decodes_and_chunks_packed_into_a_step_do_not_see_each_other(name: str, place: Place) -> None:
    sequences = Sequences(place.decoder(CONFIGS[name], random_tensors(CONFIGS[name], gain=place.gain)))
    prompts = [token_ids_of(count, seed=count) for count in (30, 90, 1, 110, 64)]
    computed = [29, 89, 0, 50, 0]  # before the packed step: two decodes, a first token, a later chunk, a whole prompt
    alone = [sequences.prefill(5, prompt) for prompt in prompts]
    spans = []
    for slot, (prompt, count) in enumerate(zip(prompts, computed, strict=True)):
        if count:
            sequences.prefill(slot, prompt[:count])
        if slot < 2:
            sequences.decode(slot, prompt[count])
        spans.append(RowSpan(slot, count, len(prompt) - count, None if slot < 2 else prompt[count:]))
    expected = torch.cat([logits[count:] for logits, count in zip(alone, computed, strict=True)])
    assert_close(sequences.logits(spans), expected, place)
