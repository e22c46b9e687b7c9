"""Chunked prefill, the whole idea in one file: read it top to bottom. The engine is tested against it.

A model answers a prompt in two phases. Prefill runs the prompt through the model, many tokens at once; it fills the
cache and yields the first output token. Decode then runs one token at a time, the last one produced.
A long prefill in one piece stalls every stream that is decoding. Split into chunks, it lets them run in between:

    unchunked   PPPPPPPPPPPPPPPPPPPPd  d  d  d       P  a token of the prompt
    chunked     PPPPPd  PPPPPd  PPPPPd  PPPPPd       d  one more token for every stream that is decoding

Nothing here is optimised, and one sequence runs at a time.
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

# The engine's own rules for sizing chunks by load, re-exported.
from evenflow.core.chunk_rules import AdaptiveChunker as AdaptiveChunker
from evenflow.core.chunk_rules import select_optimal_chunk_size as select_optimal_chunk_size
from evenflow.errors import EngineFailed, InvalidConfig, InvalidRequest

# ---- 1. What a model is ---------------------------------------------------------------------------------------------

# model(token_ids, offset, cache) runs `token_ids` at positions [offset, offset + len(token_ids)) of one sequence.
# `cache` is the model's own result for earlier positions (keys and values), None at the start. It returns the next
# token's logits, and the cache for the next call. Section 7 takes models of other forms.
Model = Callable[..., Any]
Prompt = str | Sequence[int] | Any  # Any: a tensor of token ids


class Tokenizer(Protocol):
    """Tokenizers of transformers fit. `eos_token_id` ends an answer; None: only `max_seq_len` does."""

    @property
    def eos_token_id(self) -> int | None: ...
    def encode(self, text: str, /) -> list[int]: ...
    def decode(self, token_ids: list[int], /) -> str: ...


# ---- 2. Why chunks change no answer ---------------------------------------------------------------------------------
def chunked_attention_mask(chunk_start: int, chunk_size: int, total_length: int = 0) -> list[list[float]]:
    """Added to the attention scores, shape (L, S): 0 where a row's position sees a column's, else -inf.

    L is `chunk_size`, S the end of the chunk, or `total_length` where that is more.
    Position p sees every position <= p, including those of earlier chunks, which are in the cache. So a chunk's rows
    are rows of the whole prompt's mask, and each position computes the same as unchunked:

        chunked_attention_mask(2, 2)    position 2:  0  0  0  -inf
                                        position 3:  0  0  0   0
    """
    if chunk_start < 0 or chunk_size < 1:
        raise InvalidConfig(f"Got chunk_start={chunk_start}, chunk_size={chunk_size} but expected at least 0 and 1.")
    columns = range(max(chunk_start + chunk_size, total_length))
    return [[0.0 if column <= chunk_start + row else -math.inf for column in columns] for row in range(chunk_size)]


class ToyModel:
    """Two layers of attention over integers: exact, so any error in a mask or an offset shows.

    A position starts as a number made from its token and place; each layer mixes all visible numbers.
    """

    def __call__(
        self, token_ids: Sequence[int], offset: int, cache: tuple[list[int], list[int]] | None
    ) -> tuple[list[float], tuple[list[int], list[int]]]:
        embedded, mixed = cache or ([], [])
        embedded = embedded + [(token + 1) * (place + 1) for place, token in enumerate(token_ids, start=offset)]
        mask = chunked_attention_mask(offset, len(token_ids), len(embedded))
        mixed = mixed + [self._mix(embedded, row) for row in mask]
        next_token = self._mix(mixed, mask[-1]) % ToyTokenizer.vocabulary_size
        return [float(token == next_token) for token in range(ToyTokenizer.vocabulary_size)], (embedded, mixed)

    @staticmethod
    def _mix(values: list[int], row: list[float]) -> int:
        # In a softmax, a score of -inf gets no weight.
        return sum(value for value, added in zip(values, row, strict=True) if added == 0) ** 2 % 1_000_003


class ToyTokenizer:
    """A token is a byte; one extra id ends the answer."""

    vocabulary_size = 257
    eos_token_id = 256

    def encode(self, text: str, /) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: list[int], /) -> str:
        return bytes(token_ids).decode(errors="replace")


TOY_MODEL, TOY_TOKENIZER = ToyModel(), ToyTokenizer()


# ---- 3. One request -------------------------------------------------------------------------------------------------
class Request:
    """A prompt, as text, token ids or a tensor of them, and its progress. Decoding is greedy.

        [0, offset)                        in the cache
        [offset, len(prefill_tokens))      prompt not yet run, at most `prefill_max_step` tokens in one chunk

    `max_seq_len` bounds prompt and output together. The default model is the toy.
    """

    def __init__(
        self,
        prompt: Prompt,
        prefill_max_step: int = 128,
        *,
        model: Model = TOY_MODEL,
        tokenizer: Tokenizer = TOY_TOKENIZER,
        max_seq_len: float = math.inf,
    ) -> None:
        if prefill_max_step < 1:
            raise InvalidConfig(f"Got prefill_max_step={prefill_max_step} but expected at least 1 token.")
        tokens: Any = tokenizer.encode(prompt) if isinstance(prompt, str) and prompt else prompt
        self.prefill_tokens: list[int] = tokens.reshape(-1).tolist() if hasattr(tokens, "reshape") else list(tokens)
        if not self.prefill_tokens:
            raise InvalidRequest(f"Got prompt={prompt!r} but expected at least one token.")
        if (length := len(self.prefill_tokens)) >= max_seq_len:
            raise InvalidRequest(f"Got a prompt of {length} tokens but expected fewer than max_seq_len={max_seq_len}.")
        self.prefill_max_step = prefill_max_step
        self.model, self.tokenizer = AdaptedModel(model, tokens), tokenizer
        self.max_seq_len = max_seq_len
        self.offset = 0
        self.cache: Any = None
        self.token_ids: list[int] = []  # the output so far

    @property
    def is_prefill_done(self) -> bool:
        return self.offset >= len(self.prefill_tokens)

    @property
    def next_token(self) -> int | None:
        """The last token, input of the next decode; None until prefill is done."""
        return self.token_ids[-1] if self.token_ids else None

    @property
    def text(self) -> str:
        """The output as text, without the token that ends it."""
        return self.tokenizer.decode([token for token in self.token_ids if token != self.tokenizer.eos_token_id])

    @property
    def is_finished(self) -> bool:
        has_ended = self.token_ids[-1:] == [self.tokenizer.eos_token_id]
        return has_ended or len(self.prefill_tokens) + len(self.token_ids) >= self.max_seq_len

    def try_prefill(self) -> int:
        """Run one chunk and return its length. The last chunk yields the first output token."""
        if self.is_prefill_done:
            raise InvalidRequest(f"All {len(self.prefill_tokens)} tokens of the prompt have been run: decode instead.")
        chunk = self.prefill_tokens[self.offset : self.offset + self.prefill_max_step]
        self._run(chunk)
        return len(chunk)

    def decode(self) -> None:
        """Run the last token as a chunk of one, which yields the next token."""
        if self.next_token is None or self.is_finished:
            raise InvalidRequest("Only a request that is prefilled and not finished can decode.")
        self._run([self.next_token])

    def _run(self, token_ids: list[int]) -> None:
        logits, self.cache = self.model(token_ids, self.offset, self.cache)
        self.offset += len(token_ids)
        if self.is_prefill_done:  # within the prompt the next token is known: the prediction is dropped
            self.token_ids.append(max(range(len(logits)), key=logits.__getitem__))
        if self.is_finished:
            self.cache = None


# ---- 4. Which request is next ---------------------------------------------------------------------------------------
class PriorityScheduler:
    """Requests waiting for a slot. Append to either queue any time; the low one waits until the high one is empty."""

    def __init__(self) -> None:
        self.high_priority_queue: list[Request] = []
        self.low_priority_queue: list[Request] = []

    def schedule_next(self) -> Request | None:
        """Remove and return the next request, first come first served within a queue; None if both are empty."""
        queue = self.high_priority_queue or self.low_priority_queue
        return queue.pop(0) if queue else None


# ---- 5. Continuous batching: the loop -------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Step:
    """One pass of the loop: at most one chunk, and one token for each stream that was decoding."""

    prefilled: Request | None
    chunk_start: int
    chunk_size: int
    decoded: tuple[Request, ...]
    prefill_seconds: float
    decode_seconds: float


def run_steps(
    waiting: PriorityScheduler, batch_size: int = 5, clock: Callable[[], float] = time.perf_counter
) -> Iterator[Step]:
    """Run until no work is left, with at most `batch_size` requests in flight: a prefill starts when a slot is free.

    Between steps the caller may add requests and change their `prefill_max_step`, which is all a policy does.
    A model that keeps its cache itself holds one sequence: the next prefill then waits until that one has finished.
    """
    if batch_size < 1:
        raise InvalidConfig(f"Got batch_size={batch_size} but expected at least 1.")
    prefilling: Request | None = None
    decoding: list[Request] = []
    while True:
        # Phase 1: one chunk of the current prefill, or of the next one.
        is_model_taken = any(request.model.keeps_cache for request in decoding)
        if prefilling is None and len(decoding) < batch_size and not is_model_taken:
            prefilling = waiting.schedule_next()
        if prefilling is None and not decoding:
            return
        began = clock()
        chunk_start = prefilling.offset if prefilling else 0
        chunk_size = prefilling.try_prefill() if prefilling else 0
        halfway = clock()
        # Phase 2: one token for every stream. An engine runs these and the chunk in one forward pass.
        for request in decoding:
            request.decode()
        if chunk_size == 0 and not decoding:
            raise EngineFailed("A step ran no tokens though work is left: the loop would never end.")
        step = Step(prefilling, chunk_start, chunk_size, tuple(decoding), halfway - began, clock() - halfway)
        # Phase 3: a finished prefill becomes a stream, and finished streams free their slots.
        if prefilling is not None and prefilling.is_prefill_done:
            decoding.append(prefilling)
            prefilling = None
        decoding = [request for request in decoding if not request.is_finished]
        yield step


def batch_generate(
    model: Model,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    batch_size: int = 5,
    prefill_step: int = 128,
    max_seq_len: int = 512,
    *,
    metrics: ChunkedPrefillMetrics | None = None,
) -> list[Request]:
    """Answer all prompts: returns their finished requests, in order, with `text` and `token_ids`.

    `batch_size` and `prefill_step` change only waiting times, never a token.
    """
    if isinstance(prompts, str):
        raise InvalidRequest(f"Got prompts={prompts!r} but expected a list of prompts.")
    requests = [
        Request(prompt, prefill_step, model=model, tokenizer=tokenizer, max_seq_len=max_seq_len) for prompt in prompts
    ]
    waiting = PriorityScheduler()
    waiting.low_priority_queue.extend(requests)
    for step in run_steps(waiting, batch_size):
        if metrics is not None:
            metrics.record_step(step)
    return requests


batch_generate_with_chunked_prefill = batch_generate


# ---- 6. What it cost ------------------------------------------------------------------------------------------------
class ChunkedPrefillMetrics:
    """Counts of chunks and decode steps, and moving averages of their times."""

    def __init__(self) -> None:
        self.prefill_chunks_processed = 0
        self.prefill_tokens_processed = 0
        self.decode_requests_served = 0  # decode steps, each one token for every stream
        self.avg_chunk_time = 0.0
        self.avg_decode_time = 0.0

    def record_prefill_chunk(self, chunk_time: float, chunk_size: int) -> None:
        self.avg_chunk_time = _moving_average(self.avg_chunk_time, chunk_time, self.prefill_chunks_processed)
        self.prefill_chunks_processed += 1
        self.prefill_tokens_processed += chunk_size

    def record_decode_step(self, decode_time: float) -> None:
        self.avg_decode_time = _moving_average(self.avg_decode_time, decode_time, self.decode_requests_served)
        self.decode_requests_served += 1

    def record_step(self, step: Step) -> None:
        if step.chunk_size:
            self.record_prefill_chunk(step.prefill_seconds, step.chunk_size)
        if step.decoded:
            self.record_decode_step(step.decode_seconds)

    def get_interleaving_ratio(self) -> float:
        """Chunks per decode step; infinite before the first decode."""
        if self.decode_requests_served == 0:
            return math.inf
        return self.prefill_chunks_processed / self.decode_requests_served

    prefill_to_decode_ratio = property(get_interleaving_ratio)


def _moving_average(average: float, sample: float, num_samples: int) -> float:
    return 0.9 * average + 0.1 * sample if num_samples else sample


# ---- 7. Models of other forms ---------------------------------------------------------------------------------------
class AdaptedModel:
    """The model of section 1, made of one that takes any of these, and returns logits alone or with a cache:

        model(tokens, offset, cache)
        model(tokens, offset)          it keeps its cache itself, for one sequence: offset 0 starts a new one
        model(tokens)                  it has no cache, so each call is given the whole sequence so far
        model(tokens, past_key_values=cache, use_cache=True)          a model of transformers

    Tokens are a list of ids; for a torch module, or if the prompt is a tensor, a tensor of shape (1, n).
    Logits are a list or tensor of shape (V,), (1, V) or (1, n, V): the last row counts.
    """

    def __init__(self, model: Model, prompt: Any) -> None:
        self._model, self.keeps_cache = model, False
        plain: Any = getattr(model, "_orig_mod", model)  # without torch.compile
        parameters = inspect.signature(getattr(plain, "forward", plain)).parameters
        self._is_of_transformers = "past_key_values" in parameters
        by_position = [each for each in parameters.values() if each.kind < each.VAR_POSITIONAL]
        self._num_arguments = len(by_position) or 3  # none: they are *args
        like = next(iter(getattr(model, "parameters", list)()), prompt)
        self._tensor = like.new_empty(0).long() if hasattr(like, "new_empty") else None

    def __call__(self, token_ids: list[int], offset: int, cache: Any) -> tuple[Sequence[float], Any]:
        if self._num_arguments == 1:
            token_ids = cache = (cache or []) + token_ids
        tokens = token_ids if self._tensor is None else self._tensor.new_tensor([token_ids])
        if self._is_of_transformers:
            output = self._model(tokens, past_key_values=cache, use_cache=True)
            return self._last_row(output.logits), output.past_key_values
        answer = self._model(*(tokens, offset, cache)[: self._num_arguments])
        logits, *rest = answer if isinstance(answer, tuple) else (answer,)
        if rest and self._num_arguments >= 3:
            return self._last_row(logits), rest[0]
        self.keeps_cache = self._num_arguments > 1
        return self._last_row(logits), cache

    @staticmethod
    def _last_row(logits: Any) -> Sequence[float]:
        while isinstance(logits[-1], Sequence) or getattr(logits[-1], "ndim", False):
            logits = logits[-1]
        return list(logits.tolist() if hasattr(logits, "tolist") else logits)
