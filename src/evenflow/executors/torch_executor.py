"""Runs steps of a Llama-family model with torch on the CPU, in order, on a thread of its own.

It owns the state of each slot: tokens, KV memory, block table. Each sample is appended to its slot's tokens, so the
next step can be submitted before the host has seen it.
"""

from __future__ import annotations

import functools
import math
import time
from array import array
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from evenflow.core.plan import Admission, ExecutorCaps, RowLogprobs, StepPlan, StepResult
from evenflow.core.request import Pooling
from evenflow.errors import InvalidConfig, InvalidRequest, OutOfMemory
from evenflow.host import num_cpus, total_memory
from evenflow.model.attention.native import Span
from evenflow.model.config import ModelConfig
from evenflow.model.decoder import Decoder, MakeLinear
from evenflow.model.int4 import int4_head, int4_linear
from evenflow.model.kv_cache import PrefixStore, new_sequence_kv
from evenflow.model.linear import FloatLinear, can_pack
from evenflow.model.sampler import SampledSequence, logit_errors, row_logprobs, sample
from evenflow.model.token_rules import TokenRules
from evenflow.model.weights import needed_shapes

if TYPE_CHECKING:
    from evenflow.model.grammar import Grammars

WeightFormat = Literal["float32", "int4"]

_MAX_MEMORY_FOR_TWO_COPIES = 0.25  # of the machine's; a second, packed copy of the weights is made only within it
_LOGPROB_ROWS = 64  # logit rows held in memory at once for prompt logprobs


@dataclass(slots=True)
class _Slot:
    """A running sequence. `sampled` holds its tokens, with every sample appended."""

    sampled: SampledSequence
    kv: Tensor
    block_ids: list[int] = field(default_factory=list)
    row_sum: Tensor | None = None  # of the wanted rows so far, for an embedding


@dataclass(slots=True)
class _Part:
    """One sequence's part in a step: `length` rows from position `start`."""

    slot: _Slot
    start: int
    length: int
    samples: bool = True
    prompt_logprobs: bool = False

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def token_ids(self) -> list[int]:
        return self.slot.sampled.tokens[self.start : self.end]

    @property
    def num_wanted(self) -> int:
        """How many of its last rows are needed after the last layer."""
        return self.length if self.prompt_logprobs or self.pooling == "mean" else int(self.samples)

    @property
    def pooling(self) -> Pooling | None:
        return self.slot.sampled.params.pooling


class TorchExecutor:
    """Implements `Executor`. A failed step may have applied releases and admissions, but returns no samples."""

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, Tensor],
        *,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        weights: WeightFormat = "float32",
        threads: int | None = None,
        max_steps_in_flight: int = 1,
        grammars: Grammars | None = None,
    ) -> None:
        self._config = config
        self._grammars = grammars
        self.caps = ExecutorCaps(max_steps_in_flight=max_steps_in_flight)
        self._decoder = Decoder(config, tensors, *_linear_forms(config, weights))
        self._store = PrefixStore(config, num_blocks, block_size) if enable_prefix_caching else None
        self._slots: dict[int, _Slot] = {}
        self._in_flight: deque[Future[StepResult]] = deque()
        self._last_end = 0.0
        # Torch's number of threads belongs to the calling thread: set it on the one that runs the steps.
        self._worker = ThreadPoolExecutor(
            1, "evenflow-step", initializer=torch.set_num_threads, initargs=(threads or default_threads(),)
        )

    def submit(self, plan: StepPlan) -> None:
        self._in_flight.append(self._worker.submit(self._run, plan, time.perf_counter()))

    def wait(self) -> StepResult:
        return self._in_flight.popleft().result()

    def close(self) -> None:
        self._worker.shutdown(cancel_futures=True)
        if self._grammars is not None:
            self._grammars.close()
        self._in_flight.clear()
        self._slots.clear()

    def _run(self, plan: StepPlan, submitted: float) -> StepResult:
        began = max(submitted, self._last_end)
        try:
            with torch.inference_mode():
                return self._step(plan, began)
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, MemoryError) or "allocate memory" in str(error):
                raise OutOfMemory(_out_of_memory_advice(plan)) from error
            raise
        finally:
            self._last_end = time.perf_counter()

    def _step(self, plan: StepPlan, began: float) -> StepResult:
        for number in plan.released_slots:
            self._slots.pop(number, None)
        for admission in plan.admissions:
            self._slots[admission.slot] = self._admit(admission)
        for change in plan.block_changes:
            self._slots[change.slot].block_ids[change.first :] = change.block_ids
        if self._store is not None:
            for admission in plan.admissions:
                slot = self._slots[admission.slot]
                self._store.load(slot.kv, slot.block_ids, admission.num_cached_tokens)
        parts = list(self._parts(plan))
        if not parts:
            return StepResult(plan.step_id, (), time.perf_counter() - began)
        hidden = self._hidden(parts)
        prompt_logprobs, prompt_errors = self._all_prompt_logprobs(parts, hidden)
        embeddings = {
            number: values
            for number, part in enumerate(parts)
            if part.pooling is not None and (values := self._embedding(part, hidden[number])) is not None
        }
        tokens, errors, logprobs = self._sample(parts, hidden)
        errors = prompt_errors | errors
        if self._store is not None:
            for part in parts:
                self._store.save(part.slot.kv, part.slot.block_ids, part.start, part.end)
        seconds = time.perf_counter() - began
        return StepResult(plan.step_id, tokens, seconds, errors, logprobs, prompt_logprobs, embeddings)

    def _admit(self, admission: Admission) -> _Slot:
        constraint = None
        if admission.sampling.grammar is not None:
            assert self._grammars is not None, "a request with a grammar for an executor without grammars"
            constraint = self._grammars.constrain(admission.sampling.grammar)
        sampled = SampledSequence(
            params=admission.sampling,
            seed=admission.seed,
            tokens=list(admission.token_ids),
            num_prompt_tokens=admission.num_prompt_tokens,
            stop_token_ids=admission.stop_token_ids,
            constraint=constraint,
            rules=TokenRules.of(admission.sampling, self._config.vocab_size),
        )
        return _Slot(sampled, new_sequence_kv(self._config, admission.max_known_tokens))

    def _parts(self, plan: StepPlan) -> Iterator[_Part]:
        """In the order of the step's result: decodes, then chunks."""
        for number, position in zip(plan.decodes.slots, plan.decodes.positions, strict=True):
            yield _Part(self._slots[number], position, 1)
        for chunk in plan.chunks:
            yield _Part(self._slots[chunk.slot], chunk.start, chunk.length, chunk.samples, chunk.prompt_logprobs)

    def _hidden(self, parts: list[_Part]) -> tuple[Tensor, ...]:
        """Run all rows through the layers; returns the wanted rows of each part."""
        token_ids: list[int] = []
        wanted: list[int] = []
        for part in parts:
            token_ids += part.token_ids
            wanted += range(len(token_ids) - part.num_wanted, len(token_ids))
        spans = [Span(part.slot.kv, part.start, part.length) for part in parts]
        hidden = self._decoder.hidden(token_ids, spans, wanted)
        return torch.split_with_sizes(hidden, [part.num_wanted for part in parts])

    def _sample(
        self, parts: list[_Part], hidden: tuple[Tensor, ...]
    ) -> tuple[tuple[tuple[int, ...], ...], dict[int, str], dict[int, tuple[RowLogprobs, ...]]]:
        """Tokens, errors and logprobs by the part's number; appends each token to its slot's."""
        numbers = [number for number, part in enumerate(parts) if part.samples]
        tokens: list[tuple[int, ...]] = [()] * len(parts)
        if not numbers:
            return tuple(tokens), {}, {}
        for number in numbers:
            # A failed step may have left a sample that was never returned.
            del parts[number].slot.sampled.tokens[parts[number].end :]
        logits = self._decoder.logits(torch.cat([hidden[number][-1:] for number in numbers]))
        samples = sample(logits, [parts[number].slot.sampled for number in numbers])
        for row, number in enumerate(numbers):
            # Appended even for a failed row: a step in flight reads it before the failure is known.
            parts[number].slot.sampled.tokens.append(samples.tokens[row])
            tokens[number] = () if row in samples.errors else (samples.tokens[row],)
        errors = {numbers[row]: message for row, message in samples.errors.items()}
        return tuple(tokens), errors, {numbers[row]: (found,) for row, found in samples.logprobs.items()}

    def _all_prompt_logprobs(
        self, parts: list[_Part], hidden: tuple[Tensor, ...]
    ) -> tuple[dict[int, tuple[RowLogprobs, ...]], dict[int, str]]:
        """Prompt logprobs and errors by the part's number."""
        found: dict[int, tuple[RowLogprobs, ...]] = {}
        errors: dict[int, str] = {}
        for number, part in enumerate(parts):
            if part.prompt_logprobs:
                try:
                    found[number] = self._prompt_logprobs(part, hidden[number])
                except InvalidRequest as error:
                    errors[number] = str(error)
        return found, errors

    def _prompt_logprobs(self, part: _Part, hidden: Tensor) -> tuple[RowLogprobs, ...]:
        """For the prompt's tokens at start + 1 .. end; the last prompt row predicts output, so it is left out."""
        sampled = part.slot.sampled
        predicted = sampled.tokens[part.start + 1 : min(part.end + 1, sampled.num_prompt_tokens)]
        found: list[RowLogprobs] = []
        for first in range(0, len(predicted), _LOGPROB_ROWS):
            targets = predicted[first : first + _LOGPROB_ROWS]
            logits = self._decoder.logits(hidden[first : first + len(targets)])
            if unusable := logit_errors(logits):
                raise InvalidRequest(next(iter(unusable.values())))
            logprobs = logits.log_softmax(-1)
            found += [
                row_logprobs(row, token, sampled.params.prompt_logprobs)
                for row, token in zip(logprobs, targets, strict=True)
            ]
        return tuple(found)

    def _embedding(self, part: _Part, hidden: Tensor) -> bytes | None:
        """The prompt's embedding, once its last chunk is computed."""
        pooled = self._decoder.normed(hidden).sum(0)  # of the last row alone, or with the direction of the mean
        if part.slot.row_sum is not None:
            pooled += part.slot.row_sum
        part.slot.row_sum = pooled
        return array("f", F.normalize(pooled, dim=0).tolist()).tobytes() if part.samples else None


def default_threads() -> int:
    """torch's choice, which counts the machine's cores, or less in a container that may not use them all."""
    return min(torch.get_num_threads(), num_cpus())


def _linear_forms(config: ModelConfig, weights: WeightFormat) -> tuple[MakeLinear, MakeLinear]:
    """How to make the layers' linears, and the output head's."""
    if weights == "int4":
        return int4_linear, int4_head
    if weights != "float32":
        raise InvalidConfig(f"Got weights={weights!r} but expected 'float32' or 'int4'.")
    num_weights = sum(math.prod(shape) for shape in needed_shapes(config).values())
    affords_two_copies = 2 * num_weights * torch.float32.itemsize < total_memory() * _MAX_MEMORY_FOR_TWO_COPIES
    make_linear = functools.partial(FloatLinear, packs=affords_two_copies and can_pack())
    return make_linear, make_linear


def _out_of_memory_advice(plan: StepPlan) -> str:
    return (
        f"Memory ran out in a step of {plan.num_rows} tokens for {plan.num_sequences} sequences. Lower "
        "max_num_batched_tokens or max_num_seqs, set gpu_memory_utilization to 0.7-0.8, or use a smaller model."
    )
