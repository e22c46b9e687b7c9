"""Runs steps of a Llama-family model on one device with paged KV memory: a GPU, or a CPU to test it.

Steps are launched in order and not waited for. Sampled tokens stay on the device, where the next step reads them; the
host reads a copy when it waits for the step.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from evenflow.core.plan import ExecutorCaps, RowLogprobs, StepPlan, StepResult
from evenflow.executors.pooling import add_rows, to_bytes, unit_length
from evenflow.executors.sequences import Part, new_sampled, out_of_memory, parts_of
from evenflow.executors.step_timer import StepTimer
from evenflow.model.cuda.blocks import PagedBlocks
from evenflow.model.cuda.decoder import PagedDecoder
from evenflow.model.cuda.graphs import DecodeGraphs, graph_sizes
from evenflow.model.cuda.inputs import DeviceInputs, RowSpan, StepRows
from evenflow.model.cuda.logprobs import Logprobs, logprobs_of, start_copy
from evenflow.model.cuda.sampler import GROUP_ROWS, DeviceSampler, DeviceSequence, Greedy, PendingSamples
from evenflow.model.sampler import logit_errors

if TYPE_CHECKING:
    from evenflow.model.grammar import Grammars

logger = logging.getLogger("evenflow")

_LEAST_SLOTS = 16  # a calibration runs some streams whatever the engine's own limit
_FEWEST_ROWS = 128  # a step of fewer is not divided
_PENDING = -1  # in a sequence's tokens: sampled, but not read yet

_Part = Part[DeviceSequence]


class _PromptRows(NamedTuple):
    """Log-probabilities of some tokens of a prompt, and the largest logit of each row."""

    largest: Tensor
    logprobs: Logprobs

    def to_host(self) -> _PromptRows:
        return _PromptRows(start_copy(self.largest), self.logprobs.to_host())


@dataclass(slots=True)
class _Launched:
    """A step on the device, or one that could not be launched."""

    plan: StepPlan
    timer: StepTimer
    parts: list[_Part] = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)  # the numbers of the parts that sample
    samples: PendingSamples | None = None
    prompt_rows: dict[int, list[_PromptRows]] = field(default_factory=dict)
    row_sums: dict[int, Tensor] = field(default_factory=dict)
    embeddings: dict[int, Tensor] = field(default_factory=dict)
    error: Exception | None = None
    result: StepResult | None = None

    def read(self) -> StepResult:
        """Wait for the device; fill in the tokens of the step's sequences."""
        if self.error is not None:
            raise self.error
        if self.result is None:
            self.timer.wait()
            self.result = self._read()
        return self.result

    def _read(self) -> StepResult:
        tokens: list[tuple[int, ...]] = [()] * len(self.parts)
        prompt_logprobs, errors = self._read_prompts()
        logprobs: dict[int, tuple[RowLogprobs, ...]] = {}
        if self.samples is not None:
            samples = self.samples.read()
            for number, token in zip(self.sampled, samples.tokens, strict=True):
                part = self.parts[number]
                if part.end < len(part.slot.sampled.tokens):  # else a later step failed and dropped it
                    part.slot.sampled.tokens[part.end] = token
                tokens[number] = (token,)
            sample_errors = {self.sampled[row]: message for row, message in samples.errors.items()}
            logprobs = {self.sampled[row]: (found,) for row, found in samples.logprobs.items()}
            for number in sample_errors:
                tokens[number] = ()
            errors |= sample_errors
        embeddings = {number: to_bytes(values) for number, values in self.embeddings.items()}
        seconds = self.timer.seconds
        return StepResult(self.plan.step_id, tuple(tokens), seconds, errors, logprobs, prompt_logprobs, embeddings)

    def _read_prompts(self) -> tuple[dict[int, tuple[RowLogprobs, ...]], dict[int, str]]:
        """Prompt logprobs and errors by the part's number."""
        found: dict[int, tuple[RowLogprobs, ...]] = {}
        errors: dict[int, str] = {}
        for number, groups in self.prompt_rows.items():
            num_top = self.parts[number].slot.sampled.params.prompt_logprobs
            unusable = logit_errors([value for group in groups for value in group.largest.tolist()])
            if unusable:
                errors[number] = next(iter(unusable.values()))
            else:
                rows = [row for group in groups for row in group.logprobs.rows([num_top] * len(group.largest))]
                found[number] = tuple(rows)
        return found, errors


class _Piece(NamedTuple):
    """A part of a step, or some rows of it."""

    number: int  # of the part
    part: _Part
    is_decode: bool

    @property
    def span(self) -> RowSpan:
        token_ids = None if self.is_decode else self.part.token_ids
        return RowSpan(self.part.slot.slot, self.part.start, self.part.length, token_ids)


class CudaExecutor:
    """Implements `Executor`. A plan's block ids are the blocks of its KV memory, so prefixes are shared in place."""

    def __init__(
        self,
        decoder: PagedDecoder,
        *,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        max_num_seqs: int = 256,
        max_steps_in_flight: int = 2,
        uses_graphs: bool = True,
        grammars: Grammars | None = None,
    ) -> None:
        self._decoder, self._grammars = decoder, grammars
        sizes = graph_sizes(max_num_seqs) if uses_graphs else ()
        self._inputs = DeviceInputs(
            num_slots=max(max_num_seqs, _LEAST_SLOTS, *sizes),
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=max_model_len,
            device=decoder.device,
        )
        self._kv = decoder.new_kv(num_blocks + 1, block_size)  # and one for padding
        self.blocks = PagedBlocks(self._kv)
        self._sampler = DeviceSampler(self._inputs.to_device)
        self._slots: dict[int, DeviceSequence] = {}
        self._in_flight: deque[_Launched] = deque()
        self._most_rows = sys.maxsize  # computed at a time; lowered when memory runs out
        self._captured_rows: dict[int, StepRows] = {}
        # All graphs write to the same memory: each would keep logits of its own otherwise.
        shape = max(sizes, default=0), decoder.config.vocab_size
        self._captured_logits = torch.empty(shape, dtype=torch.float32, device=decoder.device)
        self._graphs = DecodeGraphs(self._run_captured, sizes, decoder.device)
        with torch.inference_mode():
            self._graphs.capture_all(self._prepare_capture)
        self.caps = ExecutorCaps(max_steps_in_flight=max_steps_in_flight, row_buckets=sizes)

    def submit(self, plan: StepPlan) -> None:
        """Launches the step. An error comes from `wait`."""
        step = _Launched(plan, StepTimer(self._decoder.device))
        try:
            with torch.inference_mode():
                self._launch(step)
        except Exception as error:
            step.error = out_of_memory(error, plan) or error
        step.timer.stop()
        self._in_flight.append(step)

    def wait(self) -> StepResult:
        return self._in_flight.popleft().read()

    def close(self) -> None:
        if self._grammars is not None:
            self._grammars.close()
        self._in_flight.clear()
        self._slots.clear()

    def _launch(self, step: _Launched) -> None:
        plan = step.plan
        for number in plan.released_slots:
            self._slots.pop(number, None)
        for admission in plan.admissions:
            sampled = new_sampled(admission, self._decoder.config.vocab_size, self._grammars)
            self._slots[admission.slot] = DeviceSequence.of(
                admission.slot, sampled, admission.max_known_tokens, self._inputs.to_device
            )
        self._inputs.change_tables(plan.block_changes)
        step.parts = list(parts_of(plan, self._slots))
        if not step.parts:
            return
        if any(part.samples and part.slot.follows_output for part in step.parts):
            for earlier in self._in_flight:
                if earlier.error is None:
                    earlier.read()
        step.sampled = [number for number, part in enumerate(step.parts) if part.samples]
        size = None if plan.chunks else self._graphs.size_for(len(step.parts))
        if size is not None:
            rows = self._inputs.load_captured([piece.span for piece in next(_groups(step))], size)
            self._decoder.attention.plan(rows.layout)
            self._sample(step, *self._graphs.replay(size))
            return
        while not self._runs_in_memory(step):
            if self._decoder.device.type == "cuda":
                torch.cuda.empty_cache()

    def _runs_in_memory(self, step: _Launched) -> bool:
        """Launch the step operation by operation. If memory runs out, False: fewer rows at a time may do."""
        try:
            self._run_groups(step)
            return True
        except (MemoryError, RuntimeError) as error:
            rows = min(self._most_rows, step.plan.num_rows)
            if out_of_memory(error, step.plan) is None or rows <= _FEWEST_ROWS:
                raise
        self._most_rows = max(_FEWEST_ROWS, rows // 2)
        logger.warning(
            "Memory ran out in a step of %d tokens. From now on at most %d are computed at a time, which is slower: "
            "lower max_num_batched_tokens or gpu_memory_utilization.",
            *(step.plan.num_rows, self._most_rows),
        )
        return False

    def _run_groups(self, step: _Launched) -> None:
        step.prompt_rows, step.row_sums = {}, {}  # memory may have run out before
        hidden = [self._run_group(step, group) for group in _groups(step, self._most_rows)]
        if step.sampled:
            self._sample(step, *self._scores(torch.cat(hidden) if len(hidden) > 1 else hidden[0]))
        for number, row_sum in step.row_sums.items():
            part = step.parts[number]
            part.slot.row_sum = row_sum
            if part.samples:
                step.embeddings[number] = start_copy(unit_length(row_sum))

    def _run_group(self, step: _Launched, group: Sequence[_Piece]) -> Tensor:
        """Some of a step's rows through the layers; returns those that are sampled from."""
        kept: list[int] = []
        num_rows = 0
        for piece in group:
            num_rows += piece.part.length
            kept += range(num_rows - piece.part.num_wanted, num_rows)
        rows = self._inputs.load([piece.span for piece in group], kept if len(kept) < num_rows else None)
        self._decoder.attention.plan(rows.layout)
        hidden = self._hidden(rows)
        if not any(piece.part.is_read_row_by_row for piece in group):
            return hidden
        wanted = torch.split_with_sizes(hidden, [piece.part.num_wanted for piece in group])
        for piece, found in zip(group, wanted, strict=True):
            if piece.part.prompt_logprobs:
                step.prompt_rows.setdefault(piece.number, []).extend(self._prompt_rows(piece.part, found))
            if piece.part.pooling is not None:
                before = step.row_sums.get(piece.number, piece.part.slot.row_sum)
                step.row_sums[piece.number] = add_rows(before, found)
        sampled = [found[-1:] for piece, found in zip(group, wanted, strict=True) if piece.part.samples]
        return torch.cat([hidden[:0], *sampled])

    def _hidden(self, rows: StepRows) -> Tensor:
        token_ids = self._inputs.token_ids(rows)
        return self._decoder.hidden(token_ids, rows.positions, rows.entries, self._kv, rows.kept)

    def _scores(self, hidden: Tensor, out: Tensor | None = None) -> tuple[Tensor, Greedy]:
        logits = self._decoder.logits(hidden, out)
        return logits, Greedy(*logits.max(-1))

    def _prepare_capture(self, size: int) -> None:
        """The inputs of a step of padding alone."""
        rows = self._captured_rows[size] = self._inputs.load_captured((), size)
        self._decoder.attention.plan(rows.layout)

    def _run_captured(self, size: int) -> tuple[Tensor, Greedy]:
        return self._scores(self._hidden(self._captured_rows[size]), self._captured_logits[:size])

    def _sample(self, step: _Launched, logits: Tensor, greedy: Greedy) -> None:
        """For the parts that sample, in their order. Their tokens are pending until the step is read."""
        parts = [step.parts[number] for number in step.sampled]
        for part in parts:
            part.drop_unreturned()
        tokens, step.samples = self._sampler.sample(logits, greedy, [part.slot for part in parts])
        slots = self._inputs.to_device(np.array([part.slot.slot for part in parts]))
        self._inputs.last_tokens.index_copy_(0, slots, tokens)
        for part in parts:
            part.slot.sampled.tokens.append(_PENDING)

    def _prompt_rows(self, part: _Part, hidden: Tensor) -> list[_PromptRows]:
        """In groups of rows, so that only a few rows of logits are in memory at a time."""
        predicted, num_top = np.array(part.predicted), part.slot.sampled.params.prompt_logprobs
        found = []
        for first in range(0, len(predicted), GROUP_ROWS):
            targets = predicted[first : first + GROUP_ROWS]
            logits = self._decoder.logits(hidden[first : first + len(targets)])
            logprobs = logprobs_of(logits, self._inputs.to_device(targets), [num_top])
            found.append(_PromptRows(logits.amax(-1), logprobs).to_host())
        return found


def _groups(step: _Launched, most_rows: int = sys.maxsize) -> Iterator[list[_Piece]]:
    """The step's parts in order, in groups of at most `most_rows` rows: a chunk may be divided."""
    group: list[_Piece] = []
    room = most_rows
    for number, whole in enumerate(step.parts):
        part = whole
        while part.length > room:
            first = replace(part, length=room, samples=False)
            if room:
                group.append(_Piece(number, first, is_decode=False))
            yield group
            part = replace(part, start=part.start + room, length=part.length - room)
            group, room = [], most_rows
        group.append(_Piece(number, part, is_decode=number < len(step.plan.decodes)))
        room -= part.length
    yield group
