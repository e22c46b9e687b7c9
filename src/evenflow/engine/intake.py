"""Checks, tokenises and hashes requests. Needs no scheduler, so it may run on any thread or process."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from evenflow.core.grammar import Grammar
from evenflow.core.policies import PolicySpec
from evenflow.core.prefix_cache import hash_blocks
from evenflow.core.request import ALL_LOGPROBS, Request, SamplingParams
from evenflow.core.service_classes import DEFAULT_CLASSES, Classes, find_class
from evenflow.engine.outputs import TextCodec
from evenflow.errors import InvalidRequest

MAX_ALL_LOGPROBS = 1 << 17  # entries of `prompt_logprobs=-1`: more would delay other streams' tokens
_NUM_WORD_LISTS = 16  # of bad words, cached as tokens


@dataclass(frozen=True, slots=True)
class Limits:
    """This model's limits on a request."""

    max_model_len: int
    vocab_size: int

    def check_length(self, num_prompt_tokens: int, max_tokens: int | None = None) -> None:
        """Refuse a prompt that is too long, alone or with the requested output."""
        context = self.max_model_len
        # Clients recognise the error by these words.
        limit = f"This model's maximum context length is {context} tokens, prompt and output together."
        if num_prompt_tokens >= context:
            raise InvalidRequest(f"{limit} Got a prompt of {num_prompt_tokens} tokens; shorten it.")
        if max_tokens is not None and num_prompt_tokens + max_tokens > context:
            raise InvalidRequest(
                f"{limit} Got a prompt of {num_prompt_tokens} tokens and max_tokens={max_tokens}; shorten the prompt "
                f"or lower max_tokens to {context - num_prompt_tokens}."
            )


@dataclass(slots=True)
class Intake:
    """Makes the requests of one model."""

    limits: Limits
    block_size: int
    codec: TextCodec | None = None  # None: tokens in, tokens out
    clock: Callable[[], float] = time.perf_counter
    seed: int | None = None  # seeds the seeds of requests without one
    check_grammar: Callable[[Grammar], None] | None = None  # None: the engine cannot constrain output
    classes: Classes = DEFAULT_CLASSES
    _ids: itertools.count[int] = field(default_factory=itertools.count)
    _seeds: random.Random = field(init=False)
    _encode_words: Callable[[tuple[str, ...]], tuple[tuple[int, ...], ...]] = field(init=False)

    def __post_init__(self) -> None:
        self._seeds = random.Random(self.seed)
        self._encode_words = lru_cache(_NUM_WORD_LISTS)(self._encode_bad_words)  # shared by the choices of a request

    def prepare(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams,
        *,
        policy: PolicySpec,
        request_id: str | None = None,
        tenant: str = "",
        cache_salt: str | None = None,
        service_class: str | None = None,
        priority: int | None = None,
    ) -> Request:
        """Make a request, or raise InvalidRequest with the reason.

        A tenant has a share of the service and shares no prefixes with others; `cache_salt` separates prefixes in
        another way. The class is given by name or by vLLM's `priority`: lower is more urgent.
        """
        if sampling.n > 1:
            raise InvalidRequest(f"Got n={sampling.n} for a single request: `generate` and `chat` take it.")
        token_ids = self.encode(prompt)
        sampling = self._with_bad_word_ids(sampling)
        self._check(token_ids, sampling)
        _check_targets(sampling, policy)
        self._check_grammar(sampling.grammar)
        salt = (tenant if cache_salt is None else cache_salt).encode()
        return Request(
            request_id if request_id is not None else f"request-{next(self._ids)}",
            token_ids,
            sampling,
            seed=sampling.seed if sampling.seed is not None else self._seeds.getrandbits(63),
            max_model_len=self.limits.max_model_len,
            eos_token_ids=self.codec.eos_token_ids if self.codec is not None else (),
            salt=salt,
            block_hashes=hash_blocks(token_ids, self.block_size, salt),
            arrival_time=self.clock(),
            tenant=tenant,
            service_class=find_class(self.classes, service_class, priority).name,
        )

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        if not isinstance(prompt, str):
            return list(prompt)
        if self.codec is None:
            raise InvalidRequest("Got a text prompt but this engine has no tokenizer: give token ids.")
        return self.codec.encode(prompt)

    def _check(self, token_ids: list[int], sampling: SamplingParams) -> None:
        vocab_size = self.limits.vocab_size
        if not token_ids:
            raise InvalidRequest("Got an empty prompt but expected at least one token.")
        named = (sampling.stop_token_ids, sampling.logit_bias or (), sampling.allowed_token_ids or ())
        for token in itertools.chain(token_ids, *named, *sampling.bad_word_ids):
            if not isinstance(token, int) or not 0 <= token < vocab_size:
                raise InvalidRequest(f"Got token id {token!r} but the vocabulary has ids 0 to {vocab_size - 1}.")
        self.limits.check_length(len(token_ids))
        num_entries = (len(token_ids) - 1) * vocab_size
        if sampling.prompt_logprobs == ALL_LOGPROBS and num_entries > MAX_ALL_LOGPROBS:
            raise InvalidRequest(
                f"Got prompt_logprobs=-1 with a prompt of {len(token_ids)} tokens: that is {num_entries} logprobs but "
                f"expected at most {MAX_ALL_LOGPROBS}. Shorten the prompt, or ask for the top ones by a number."
            )

    def _with_bad_word_ids(self, sampling: SamplingParams) -> SamplingParams:
        """Each bad word as tokens, at the start of a text or after a space."""
        if not sampling.bad_words:
            return sampling
        bad_word_ids = dict.fromkeys([*sampling.bad_word_ids, *self._encode_words(sampling.bad_words)])
        return replace(sampling, bad_word_ids=tuple(bad_word_ids))

    def _encode_bad_words(self, bad_words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        if self.codec is None:
            raise InvalidRequest("Got bad_words but this engine has no tokenizer: give bad_word_ids.")
        words = [word.lstrip(" ") or word for word in bad_words]
        encoded = [tuple(self.codec.encode_inside(form)) for word in words for form in (word, f" {word}")]
        return tuple(filter(None, encoded))

    def _check_grammar(self, grammar: Grammar | None) -> None:
        if grammar is None:
            return
        if self.check_grammar is None:
            raise InvalidRequest("Got a grammar but this engine cannot constrain output.")
        self.check_grammar(grammar)


def _check_targets(sampling: SamplingParams, policy: PolicySpec) -> None:
    if policy.target is not None:
        return
    for name in ("tbt_target", "ttft_target"):
        if (seconds := getattr(sampling, name)) is not None:
            raise InvalidRequest(
                f"Got {name}={seconds} but the engine's policy is '{policy}': only the policy 'target' keeps targets."
            )
