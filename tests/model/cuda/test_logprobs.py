"""Log-probabilities on the device: right, and with the same bits whatever rows are computed together."""

from __future__ import annotations

import pytest
import torch

from evenflow.model.cuda.logprobs import logprobs_of
from tests.model.cuda.devices import needs_cuda

DEVICES = ["cpu", pytest.param("cuda", marks=needs_cuda)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("vocab", [1, 2, 7, 300, 50_257])
def test_logprobs_are_those_of_torch_and_the_same_bits_in_any_batch(vocab: int, device: str) -> None:
    logits = 5 * torch.randn(40, vocab, generator=torch.Generator().manual_seed(vocab))
    chosen = torch.arange(40) % vocab
    found = logprobs_of(logits.to(device), chosen.to(device), [2])
    expected = logits.double().log_softmax(-1)
    assert torch.allclose(found.chosen.cpu().double(), expected.gather(1, chosen.unsqueeze(1)).squeeze(1), atol=1e-5)
    assert torch.allclose(found.top.cpu().double(), expected.topk(min(2, vocab)).values, atol=1e-5)
    for first, last in [(0, 1), (7, 9), (3, 36), (39, 40)]:
        part = logprobs_of(logits[first:last].to(device), chosen[first:last].to(device), [2])
        assert torch.equal(part.chosen, found.chosen[first:last])
        assert torch.equal(part.top, found.top[first:last])


@pytest.mark.parametrize("device", DEVICES)
def test_tokens_that_are_ruled_out_have_no_probability(device: str) -> None:
    logits = torch.tensor([[1.0, float("-inf"), 1.0]], device=device)
    found = logprobs_of(logits, torch.tensor([1], device=device), [3])
    assert found.chosen.tolist() == [float("-inf")]
    assert found.top[0, :2].tolist() == pytest.approx([-0.6931, -0.6931], abs=1e-4)
