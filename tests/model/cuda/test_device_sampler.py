"""Sampling on the device against sampling on the host: the same logits and parameters give the same tokens."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from evenflow.core.request import SamplingParams
from evenflow.model.cuda.reference_ops import largest
from evenflow.model.cuda.sampler import GROUP_ROWS, DeviceSampler, DeviceSequence
from evenflow.model.sampler import SampledSequence, Samples, sample
from evenflow.model.token_rules import TokenRules
from tests.model.cuda.devices import needs_cuda

VOCAB = 300
DEVICES = ["cpu", pytest.param("cuda", marks=needs_cuda)]


class EveryThird:
    """A grammar that allows every third token, from the number of tokens on."""

    def allowed(self, tokens: list[int], num_prompt_tokens: int) -> Any:
        return np.arange(VOCAB) % 3 == len(tokens) % 3


def sequence(params: SamplingParams, *, seed: int = 0, prompt: int = 5, output: int = 3, grammar: Any = None) -> Any:
    tokens = random.Random(seed).choices(range(VOCAB), k=prompt + output)
    rules = TokenRules.of(params, VOCAB)
    return SampledSequence(params, seed, tokens, prompt, frozenset({2, 7}), grammar, rules)


def on_device(logits: Tensor, sequences: list[SampledSequence], device: str) -> Samples:
    def to_device(values: Any) -> Tensor:
        return torch.from_numpy(values).to(device)

    here = logits.to(device)
    rows = [DeviceSequence.of(slot, one, len(one.tokens) + 1, to_device) for slot, one in enumerate(sequences)]
    tokens, pending = DeviceSampler(to_device).sample(here, largest(here), rows)
    expected = tokens.tolist()  # waits for the device
    samples = pending.read()
    assert expected == samples.tokens
    for row, one in enumerate(rows):
        if one.history is not None:
            assert one.history.tolist() == [*one.sampled.tokens, samples.tokens[row]]
    assert torch.equal(here.cpu().nan_to_num(), logits.nan_to_num())
    return samples


def check(sequences: list[SampledSequence], device: str, scale: float = 3.0) -> Samples:
    logits = scale * torch.randn(len(sequences), VOCAB, generator=torch.Generator().manual_seed(len(sequences)))
    found = on_device(logits, sequences, device)
    expected = sample(logits.clone(), sequences)
    assert found.errors == expected.errors
    good = [row for row in range(len(sequences)) if row not in found.errors]
    assert [found.tokens[row] for row in good] == [expected.tokens[row] for row in good]
    assert found.logprobs.keys() == expected.logprobs.keys()
    for row, [logprobs] in found.logprobs.items():
        [other] = expected.logprobs[row]
        assert logprobs.chosen.token_id == other.chosen.token_id
        assert logprobs.chosen.logprob == pytest.approx(other.chosen.logprob, abs=1e-5)
        assert [one.token_id for one in logprobs.top] == [one.token_id for one in other.top]
    return found


PARAMS = {
    "greedy": {"temperature": 0.0},
    "warm": {"temperature": 1.3},
    "a tiny temperature": {"temperature": 1e-40},
    "top_k": {"temperature": 1.0, "top_k": 5},
    "a top_k of more than all": {"temperature": 1.0, "top_k": 1000},
    "top_p": {"temperature": 1.0, "top_p": 0.7},
    "a top_p of almost nothing": {"temperature": 1.0, "top_p": 1e-6},
    "min_p": {"temperature": 1.0, "min_p": 0.2},
    "all cuts": {"temperature": 2.0, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    "repetition": {"temperature": 1.0, "repetition_penalty": 1.8},
    "presence and frequency": {"presence_penalty": 1.5, "frequency_penalty": -0.7, "temperature": 0.0},
    "biases": {"logit_bias": {5: 50.0, 6: -3.0}, "temperature": 0.0},
    "allowed": {"temperature": 1.0, "allowed_token_ids": (4, 5, 90)},
    "bad words": {"bad_word_ids": ((3,), (11, 12)), "temperature": 0.0},
    "min_tokens": {"min_tokens": 10, "temperature": 0.0},
    "logprobs": {"logprobs": 4, "temperature": 0.0},
    "everything": {
        "temperature": 0.8,
        "top_k": 100,
        "top_p": 0.95,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.4,
        "logit_bias": {8: 2.0},
        "bad_word_ids": ((3,),),
        "min_tokens": 6,
        "logprobs": 0,
    },
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", PARAMS)
def test_each_parameter_gives_the_hosts_tokens(name: str, device: str) -> None:
    check([sequence(SamplingParams(**PARAMS[name]), seed=seed) for seed in range(40)], device)


@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_all_kinds_are_sampled_together(device: str) -> None:
    kinds = [SamplingParams(**given) for given in PARAMS.values()]
    rows = [
        sequence(
            kinds[number % len(kinds)],
            seed=number,
            output=number % 12,
            grammar=EveryThird() if number % 5 == 0 else None,
        )
        for number in range(2 * GROUP_ROWS + 30)
    ]
    check(rows, device)


EXTREMES: dict[str, list[Any]] = {
    "temperature": [0.0, 5e-324, 1e-30, 1.0, 100.0],
    "top_p": [5e-324, 1e-10, 1.0 - 2**-53, 1.0],
    "top_k": [0, 1, 2**31 - 1],
    "min_p": [0.0, 5e-324, 1.0],
    "repetition_penalty": [0.01, 1.0, 100.0],
    "presence_penalty": [-2.0, 0.0, 2.0],
    "frequency_penalty": [-2.0, 0.0, 2.0],
    "logit_bias": [None, dict.fromkeys(range(VOCAB), -100.0), {2: 100.0}],
    "allowed_token_ids": [None, (2, 7), tuple(range(VOCAB))],
    "min_tokens": [0, 16],
    "logprobs": [None, 0],
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("largest_logit", [3.0, 1e30, 3.4e38])
def test_extreme_parameters_and_logits_give_tokens_of_the_vocabulary(largest_logit: float, device: str) -> None:
    chooser = random.Random(0)
    chosen = [{name: chooser.choice(values) for name, values in EXTREMES.items()} for _ in range(200)]
    rows = [sequence(SamplingParams(**one), seed=seed, prompt=VOCAB) for seed, one in enumerate(chosen)]
    logits = torch.rand(len(rows), VOCAB, generator=torch.Generator().manual_seed(0)).mul_(2).sub_(1) * largest_logit
    logits[::7] = logits[::7].abs().neg()
    logits[::5, ::2] = -torch.inf
    for found in (on_device(logits, rows, device), sample(logits.clone(), rows)):
        assert not found.faults
        assert not found.errors
        for token, one in zip(found.tokens, chosen, strict=True):
            assert 0 <= token < VOCAB
            assert one["allowed_token_ids"] is None or token in one["allowed_token_ids"]


def test_a_forbidden_end_is_never_sampled() -> None:
    params = SamplingParams(min_tokens=10, temperature=5.0, logit_bias={2: 100.0, 7: 100.0})
    tokens = check([sequence(params, seed=seed) for seed in range(30)], "cpu").tokens
    assert not {2, 7} & set(tokens)


@pytest.mark.parametrize("device", DEVICES)
def test_rows_without_usable_logits_or_allowed_tokens_fail_alone(device: str) -> None:
    warm = SamplingParams(temperature=1.0, top_p=0.9, logprobs=1)
    nothing_allowed = SamplingParams(allowed_token_ids=(3,), bad_word_ids=((3,),))
    rows = [sequence(one) for one in (warm, SamplingParams(temperature=0.0), nothing_allowed, warm, warm)]
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(0))
    logits[0, 5] = torch.nan
    logits[1, 9] = torch.inf
    found = on_device(logits, rows, device)
    assert (found.faults.keys(), found.errors.keys()) == ({0, 1}, {2})
    assert "nan" in found.faults[0]
    assert "inf" in found.faults[1]
    assert "leave no token" in found.errors[2]
    assert found.logprobs.keys() == {3, 4}
    assert all(0 <= token < VOCAB for token in found.tokens)
