"""Judges answers by transformers' logits for the same weights: is each token the one that the request asked for?

The logits come from one pass over the prompt and the answer. If each token follows from those before it, the answer is
what transformers would have generated, whatever near ties there were.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from evenflow.core.logprobs import RowLogprobs
from evenflow.core.request import Request
from evenflow.engine.outputs import RequestOutput
from evenflow.model.loader import load_model
from evenflow.model.sampler import SampledSequence, sample
from evenflow.model.text.grammar import Grammars
from evenflow.model.token_rules import TokenRules
from tests.differential.configurations import MODELS
from tests.models import reference_model, tiny_hf_folder

NEAR = 1e-3  # logits that are closer may be in either order: rounding differs by about 1e-5
_TRIALS = 20  # of logits that differ that little, to see whether a drawn token hangs on it


class Finding(AssertionError):
    """What a run has shown to be wrong."""


def require(holds: object, message: str) -> None:
    if not holds:
        raise Finding(message)


@cache
def models_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="evenflow-differential-")


@cache
def model_path(name: str) -> Path:
    architecture, changes = MODELS[name]
    return tiny_hf_folder(Path(models_folder().name) / name.replace(" ", "-"), architecture, **changes)


@cache
def judge_of(name: str) -> Judge:
    architecture, changes = MODELS[name]
    loaded = load_model(model_path(name))
    model = reference_model(architecture, **changes).requires_grad_(False)
    return Judge(model, Grammars(loaded.tokenizer, loaded.config.vocab_size), loaded.tokenizer)


@dataclass(frozen=True)
class Judge:
    model: Any
    grammars: Grammars
    tokenizer: Any

    def check(self, request: Request, output: RequestOutput) -> None:
        """Tokens, logprobs, embedding and text. Holds for every output, also one that was cut short."""
        prompt, answer = output.prompt_token_ids, output.token_ids
        hidden = self.model.model(torch.tensor([prompt + answer])).last_hidden_state[0]
        logits = self.model.lm_head(hidden)
        if request.sampling.pooling is not None:
            _check_embedding(request, output, hidden[: len(prompt)])
        self._check_tokens(request, prompt, answer, logits[len(prompt) - 1 :])
        rows = logits.log_softmax(-1)
        if request.sampling.logprobs is not None:
            _check_logprobs("logprobs", output.logprobs or [], answer, rows[len(prompt) - 1 :])
        if request.sampling.prompt_logprobs is not None and answer:
            _check_logprobs("prompt_logprobs", output.prompt_logprobs or [], prompt[1:], rows)
        self._check_text(request, output)

    def _check_tokens(self, request: Request, prompt: list[int], answer: list[int], logits: Tensor) -> None:
        constraint = None
        if request.sampling.grammar is not None:
            constraint = self.grammars.constrain(request.sampling.grammar)
        sequence = SampledSequence(
            replace(request.sampling, logprobs=None),
            request.seed,
            list(prompt),
            len(prompt),
            request.stop_token_ids,
            constraint,
            TokenRules.of(request.sampling, logits.shape[-1]),
        )
        for place, (token, row) in enumerate(zip(answer, logits, strict=False)):
            best = int(row.argmax())
            expected = best if _is_plain(request) else _sampled(row, sequence)
            if token != expected and not _is_near(row, token, sequence):
                raise Finding(
                    f"{request.id}: token {place} of its answer is {token}, logit {row[token]:.5f}, but transformers' "
                    f"first is {best}, logit {row[best]:.5f}. Prompt {prompt}, answer {answer}"
                )
            sequence.tokens.append(token)

    def _check_text(self, request: Request, output: RequestOutput) -> None:
        stops_at_token = output.finish_reason == "stop" and output.stop_reason is None
        shown = [token for token in output.token_ids if not (stops_at_token and token in request.stop_token_ids)]
        decoder = self.tokenizer.stream_decoder(output.prompt_token_ids)
        num_early = request.sampling.min_tokens  # no stop string may end in their text
        early = "".join(map(decoder.push, shown[:num_early]))
        later = "".join(map(decoder.push, shown[num_early:])) + decoder.flush()
        whole = early + later
        if len(output.token_ids) <= num_early:
            early = whole
        firsts = {stop: max(0, len(early) - len(stop) + 1) for stop in request.sampling.stop}
        met = [(place, stop) for stop, first in firsts.items() if (place := whole.find(stop, first)) >= 0]
        if output.stop_reason is None:
            require(not met, f"{request.id}: {whole!r} contains a stop string of {request.sampling.stop}")
            require(output.text == whole, f"{request.id}: its text is {output.text!r} but its tokens give {whole!r}")
            return
        require(met, f"{request.id}: it stopped at {output.stop_reason!r}, which is not in {whole!r}")
        end = min(met)[0]
        require(output.text == whole[:end], f"{request.id}: its text is {output.text!r}, expected {whole[:end]!r}")


def _is_plain(request: Request) -> bool:
    """Is it the likeliest token that is asked for, by the model alone?"""
    sampling = request.sampling
    penalties = sampling.repetition_penalty - 1, sampling.presence_penalty, sampling.frequency_penalty
    rules = sampling.logit_bias, sampling.allowed_token_ids, sampling.bad_word_ids, sampling.grammar
    return not (sampling.temperature or sampling.min_tokens or any(penalties) or any(rules))


def _sampled(row: Tensor, sequence: SampledSequence) -> int:
    return sample(row[None].clone(), [sequence]).tokens[0]


def _is_near(row: Tensor, token: int, sequence: SampledSequence) -> bool:
    """May rounding have given this token?"""
    generator = torch.Generator().manual_seed(0)
    noise = (torch.rand((_TRIALS, len(row)), generator=generator) - 0.5) * NEAR
    for other in noise:
        other[token] = other[token].abs()
    return any(_sampled(row + other, sequence) == token for other in noise)


def _check_embedding(request: Request, output: RequestOutput, hidden: Tensor) -> None:
    if output.finish_reason != "length":
        return
    pooled = hidden[-1] if request.sampling.pooling == "last" else hidden.mean(0)
    expected = pooled / pooled.norm()
    require(output.embedding is not None, f"{request.id}: no embedding")
    apart = (torch.tensor(output.embedding) - expected).abs().max()
    require(apart < NEAR, f"{request.id}: its embedding is off by {apart}")


def _check_logprobs(name: str, found: Sequence[RowLogprobs], tokens: list[int], rows: Tensor) -> None:
    require(len(found) == len(tokens), f"{len(found)} {name} for {len(tokens)} tokens")
    for row, token, expected in zip(found, tokens, rows, strict=False):
        require(row.chosen.token_id == token, f"{name} of token {row.chosen.token_id} in the place of {token}")
        best = expected.topk(len(row.top)).values.tolist()
        pairs = [
            (row.chosen.logprob, float(expected[token])),
            *((one.logprob, float(expected[one.token_id])) for one in row.top),
            *zip((one.logprob for one in row.top), best, strict=True),
        ]
        apart = max(abs(one - other) for one, other in pairs)
        require(apart < NEAR, f"{name} of token {token} are off by {apart}")
