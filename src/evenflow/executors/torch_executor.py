"""Runs steps of a Llama-family model with torch on the CPU, in order, on its own thread.

It owns the state of each slot: tokens, KV memory, block table. Each sample is appended to its slot's tokens, so the
next step can be submitted before the host has seen it.
"""

from __future__ import annotations

import functools
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from evenflow.core.logprobs import LogprobRows
from evenflow.core.plan import Admission, ExecutorCaps, StepPlan, StepResult
from evenflow.errors import InvalidConfig
from evenflow.executors.lost_slots import LostSlots
from evenflow.executors.pooling import add_rows, to_bytes, unit_length
from evenflow.executors.sequences import Part, SampledParts, new_sampled, out_of_memory, parts_of
from evenflow.executors.shedding import Shedder, TailTime
from evenflow.host import num_cpus, total_memory
from evenflow.model.config import ModelConfig
from evenflow.model.cpu.attention import runs_natively
from evenflow.model.cpu.decoder import Decoder, MakeLinear, Remainder
from evenflow.model.cpu.int4 import fixed_order_int4_linear, fixed_order_int8_head, int4_head, int4_linear
from evenflow.model.cpu.kv_cache import PrefixStore, new_sequence_kv
from evenflow.model.cpu.linear import FloatLinear, can_pack, fixed_order_linear
from evenflow.model.cpu.native_attention import Span
from evenflow.model.formats.weights import needed_shapes
from evenflow.model.sampler import SampledSequence, logit_faults, logprob_rows, sample
from evenflow.native.build import why_unavailable

if TYPE_CHECKING:
    from evenflow.model.text.grammar import Grammars

WeightFormat = Literal["float32", "int4"]

_MAX_MEMORY_FOR_TWO_COPIES = 0.25  # of the machine's; the limit for a second, packed copy of the weights
_LOGPROB_ROWS = 64  # logit rows in memory at a time for prompt logprobs


@dataclass(slots=True)
class _Slot:
    """A running sequence. `sampled` holds its tokens, with every sample appended."""

    sampled: SampledSequence
    kv: Tensor
    block_ids: list[int] = field(default_factory=list)
    row_sum: Tensor | None = None  # of the rows so far, for an embedding


class TorchExecutor:
    """Implements `Executor`."""

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
        deterministic: bool = False,
        max_steps_in_flight: int = 1,
        grammars: Grammars | None = None,
    ) -> None:
        self._config = config
        self._grammars = grammars
        # In fixed order, all layers run in one call.
        sheds_rows = max_steps_in_flight == 1 and not deterministic
        self.caps = ExecutorCaps(max_steps_in_flight=max_steps_in_flight, sheds_rows=sheds_rows)
        forms = _fixed_order_forms(config, weights) if deterministic else _linear_forms(config, weights)
        self._decoder = Decoder(config, tensors, *forms, fixed_order=deterministic)
        self.blocks = PrefixStore(config, num_blocks, block_size) if enable_prefix_caching else None
        self._slots: dict[int, _Slot] = {}
        self._lost = LostSlots()
        self._in_flight: deque[Future[StepResult]] = deque()
        self._last_end = 0.0
        self._tail_time = TailTime()
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
        remaining = self._lost.remaining(plan)
        try:
            with torch.inference_mode():
                return remaining.result(self._step(remaining.plan, began))
        except Exception as error:
            for slot in self._lost.add(plan):
                self._slots.pop(slot, None)
            if (explained := out_of_memory(error, plan)) is not None:
                raise explained from error
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
        if self.blocks is not None:
            for admission in plan.admissions:
                slot = self._slots[admission.slot]
                self.blocks.load(slot.kv, slot.block_ids, admission.num_cached_tokens)
        parts = list(parts_of(plan, self._slots))
        if not parts:
            return StepResult(plan.step_id, (), time.perf_counter() - began)
        shedder = None
        if plan.most_seconds is not None:
            end = began + plan.most_seconds - self._tail_time.predict(_num_logprob_rows(parts))
            lengths = [chunk.length for chunk in plan.chunks]
            shedder = Shedder(len(plan.decodes), lengths, self._config.num_layers, end, time.perf_counter)
        hidden = self._hidden(parts, shedder)
        layers_ended = time.perf_counter()
        prompt_logprobs, faults = self._all_prompt_logprobs(parts, hidden)
        embeddings = {
            number: values
            for number, part in enumerate(parts)
            if part.pooling is not None and (values := self._embedding(part, hidden[number])) is not None
        }
        samples = self._sample(parts, hidden)
        if self.blocks is not None:
            for part in parts:
                self.blocks.save(part.slot.kv, part.slot.block_ids, part.start, part.end)
        ended = time.perf_counter()
        self._tail_time.observe(_num_logprob_rows(parts), ended - layers_ended)
        rows = tuple(samples.tokens), ended - began, samples.errors, samples.logprobs
        faults |= samples.faults
        shed = shedder.shed() if shedder is not None else {}
        return StepResult(plan.step_id, *rows, prompt_logprobs, embeddings, faults, shed=shed)

    def _admit(self, admission: Admission) -> _Slot:
        sampled = new_sampled(admission, self._config.vocab_size, self._grammars)
        return _Slot(sampled, new_sequence_kv(self._config, admission.max_known_tokens))

    def _hidden(self, parts: list[Part[_Slot]], shedder: Shedder | None) -> tuple[Tensor, ...]:
        """Run all rows through the layers; returns the wanted rows of each part. The shedder may shorten parts."""
        token_ids = [token for part in parts for token in part.token_ids]
        cut = None if shedder is None else functools.partial(_cut, parts, shedder)
        hidden = self._decoder.hidden(token_ids, _spans(parts), _wanted(parts), cut)
        return torch.split_with_sizes(hidden, [part.num_wanted for part in parts])

    def _sample(self, parts: list[Part[_Slot]], hidden: tuple[Tensor, ...]) -> SampledParts:
        """Sample by part; appends each token to its slot."""
        numbers = [number for number, part in enumerate(parts) if part.samples]
        found = SampledParts([()] * len(parts))
        if not numbers:
            return found
        logits = self._decoder.logits(torch.cat([hidden[number][-1:] for number in numbers]))
        samples = sample(logits, [parts[number].slot.sampled for number in numbers])
        for number, token in zip(numbers, samples.tokens, strict=True):
            # Also of a failed row: a step in flight reads it before the failure is known.
            parts[number].slot.sampled.tokens.append(token)
        found.take(numbers, samples)
        return found

    def _all_prompt_logprobs(
        self, parts: list[Part[_Slot]], hidden: tuple[Tensor, ...]
    ) -> tuple[dict[int, LogprobRows], dict[int, str]]:
        """Prompt logprobs and faults by part."""
        found: dict[int, LogprobRows] = {}
        faults: dict[int, str] = {}
        for number, part in enumerate(parts):
            if part.prompt_logprobs:
                try:
                    found[number] = self._prompt_logprobs(part, hidden[number])
                except ArithmeticError as error:
                    faults[number] = str(error)
        return found, faults

    def _prompt_logprobs(self, part: Part[_Slot], hidden: Tensor) -> LogprobRows:
        predicted, num_top = part.predicted, part.slot.sampled.params.prompt_logprobs
        found = []
        for first in range(0, len(predicted), _LOGPROB_ROWS):
            targets = predicted[first : first + _LOGPROB_ROWS]
            logits = self._decoder.logits(hidden[first : first + len(targets)])
            if unusable := logit_faults(logits.amax(-1).tolist()):
                raise ArithmeticError(next(iter(unusable.values())))
            found.append(logprob_rows(logits.log_softmax(-1), targets, num_top))
        return LogprobRows.joined(found)

    def _embedding(self, part: Part[_Slot], hidden: Tensor) -> bytes | None:
        """The prompt's embedding, once its last chunk is computed."""
        assert part.pooling is not None
        part.slot.row_sum = add_rows(part.slot.row_sum, self._decoder.normed(hidden), part.pooling)
        return to_bytes(unit_length(part.slot.row_sum)) if part.samples else None


def _spans(parts: Sequence[Part[_Slot]]) -> list[Span]:
    return [Span(part.slot.kv, part.start, part.length) for part in parts]


def _wanted(parts: Sequence[Part[_Slot]]) -> list[int]:
    """Indices of the rows needed after the last layer, among all parts' rows."""
    ends = accumulate(part.length for part in parts)
    return [row for part, end in zip(parts, ends, strict=True) for row in range(end - part.num_wanted, end)]


def _num_logprob_rows(parts: Sequence[Part[_Slot]]) -> int:
    return sum(part.length for part in parts if part.prompt_logprobs)


def _cut(parts: Sequence[Part[_Slot]], shedder: Shedder, done: int) -> Remainder | None:
    """Shorten the parts if the step would end too late, judged after this many layers."""
    if not shedder.after_layer(done):
        return None
    starts = accumulate((part.length for part in parts), initial=0)
    lengths = [*(part.length for part in parts[: -len(shedder.lengths)]), *shedder.lengths]
    rows = [row for start, length in zip(starts, lengths, strict=False) for row in range(start, start + length)]
    for part, length in zip(parts, lengths, strict=True):
        part.shorten(length)
    return Remainder(rows, _spans(parts), _wanted(parts))


def default_threads() -> int:
    """torch's default, the machine's cores, or fewer if a container limits them."""
    return min(torch.get_num_threads(), num_cpus())


def _linear_forms(config: ModelConfig, weights: WeightFormat) -> tuple[MakeLinear, MakeLinear]:
    """Makers of the layers' linears and of the output head."""
    if weights == "int4":
        return int4_linear, int4_head
    if weights != "float32":
        raise InvalidConfig(f"Got weights={weights!r} but expected 'float32' or 'int4'.")
    num_weights = sum(math.prod(shape) for shape in needed_shapes(config).values())
    affords_two_copies = 2 * num_weights * torch.float32.itemsize < total_memory() * _MAX_MEMORY_FOR_TWO_COPIES
    make_linear = functools.partial(FloatLinear, packs=affords_two_copies and can_pack())
    return make_linear, make_linear


def _fixed_order_forms(config: ModelConfig, weights: WeightFormat) -> tuple[MakeLinear, MakeLinear]:
    """The same, with the native kernel at any number of rows."""
    if not runs_natively(config):
        reason = why_unavailable() or f"they do not support this model, whose heads have {config.head_dim} values"
        raise InvalidConfig(
            f"Got deterministic=True, which needs evenflow's native kernels on a CPU, but {reason}. Leave it out, or "
            "see `evenflow doctor`."
        )
    if weights == "int4":
        return fixed_order_int4_linear, fixed_order_int8_head
    return fixed_order_linear, fixed_order_linear
