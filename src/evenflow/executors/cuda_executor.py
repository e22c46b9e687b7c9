"""Runs steps of a Llama-family model on one device with paged KV memory: a GPU, or a CPU to test it.

Launching does not wait. Sampled tokens stay on the device for the next step; the host reads a copy when it waits for
the step.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from evenflow.core.logprobs import LogprobRows
from evenflow.core.plan import ExecutorCaps, StepPlan, StepResult
from evenflow.executors.lost_slots import LostSlots, Remaining
from evenflow.executors.pooling import add_rows, to_bytes, unit_length
from evenflow.executors.sequences import Part, SampledParts, new_sampled, out_of_memory, parts_of
from evenflow.model.cuda.blocks import PagedBlocks
from evenflow.model.cuda.decoder import PagedDecoder, RowInputs
from evenflow.model.cuda.graphs import Graphs, graph_sizes, mixed_graph_sizes, size_for
from evenflow.model.cuda.inputs import DeviceInputs, RowSpan, StepRows
from evenflow.model.cuda.logprobs import Logprobs, logprobs_of, start_copy
from evenflow.model.cuda.sampler import GROUP_ROWS, DeviceSampler, DeviceSequence, PendingSamples
from evenflow.model.sampler import logit_faults

if TYPE_CHECKING:
    from evenflow.model.text.grammar import Grammars

logger = logging.getLogger("evenflow")

_MIN_SLOTS = 16  # calibration runs several streams, whatever the engine's limit
_MIN_ROWS = 128  # smaller steps are not divided when memory runs out
_TIMED_RUNS = 5  # per step size, to compare them
_PENDING = -1  # placeholder in a sequence's tokens: sampled, not read yet

_Part = Part[DeviceSequence]


class _StepTimer:
    """Times a step on its device: with events on a GPU, which runs behind the host, else with the clock.

    Starts when created. A step queued behind another starts when that one ends.
    """

    def __init__(self, device: torch.device) -> None:
        self._events: list[torch.cuda.Event] = []
        self._seconds, self._began = 0.0, time.perf_counter()
        if device.type == "cuda":
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
            self._events[0].record()

    def stop(self) -> None:
        """Call this once the whole step has been launched."""
        self._seconds = time.perf_counter() - self._began
        if self._events:
            self._events[1].record()

    def wait(self) -> None:
        """Wait until the device has finished the step."""
        if self._events:
            self._events[1].synchronize()

    @property
    def seconds(self) -> float:
        """Valid after `wait`."""
        if not self._events:
            return self._seconds
        return float(self._events[0].elapsed_time(self._events[1])) / 1000


class _PromptRows(NamedTuple):
    """Log-probabilities of some tokens of a prompt, and the largest logit of each row."""

    largest: Tensor
    logprobs: Logprobs

    def to_host(self) -> _PromptRows:
        return _PromptRows(start_copy(self.largest), self.logprobs.to_host())


@dataclass(slots=True)
class _Launched:
    """A step on the device, or one that could not be launched."""

    remaining: Remaining
    timer: _StepTimer
    parts: list[_Part] = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)  # indices of the sampling parts
    samples: PendingSamples | None = None
    prompt_rows: dict[int, list[_PromptRows]] = field(default_factory=dict)
    row_sums: dict[int, Tensor] = field(default_factory=dict)
    embeddings: dict[int, Tensor] = field(default_factory=dict)
    error: Exception | None = None
    result: StepResult | None = None

    @property
    def plan(self) -> StepPlan:
        return self.remaining.plan

    def read(self) -> StepResult:
        """Wait for the device; fill in the tokens of the step's sequences."""
        if self.error is not None:
            raise self.error
        if self.result is None:
            self.timer.wait()
            self.result = self.remaining.result(self._read())
        return self.result

    def _read(self) -> StepResult:
        prompt_logprobs, faults = self._read_prompts()
        found = SampledParts([()] * len(self.parts))
        if self.samples is not None:
            samples = self.samples.read()
            for number, token in zip(self.sampled, samples.tokens, strict=True):
                part = self.parts[number]
                part.slot.sampled.tokens[part.end] = token
            found.take(self.sampled, samples)
        embeddings = {number: to_bytes(values) for number, values in self.embeddings.items()}
        rows = tuple(found.tokens), self.timer.seconds, found.errors, found.logprobs
        return StepResult(self.plan.step_id, *rows, prompt_logprobs, embeddings, faults | found.faults)

    def _read_prompts(self) -> tuple[dict[int, LogprobRows], dict[int, str]]:
        """Prompt logprobs and faults by the part's number."""
        found: dict[int, LogprobRows] = {}
        faults: dict[int, str] = {}
        for number, groups in self.prompt_rows.items():
            num_top = self.parts[number].slot.sampled.params.prompt_logprobs
            unusable = logit_faults([value for group in groups for value in group.largest.tolist()])
            if unusable:
                faults[number] = next(iter(unusable.values()))
            else:
                found[number] = LogprobRows.joined([group.logprobs.rows(num_top) for group in groups])
        return found, faults


class _Piece(NamedTuple):
    """A part of a step, or some rows of it."""

    number: int  # the part's index
    part: _Part
    is_decode: bool
    is_repeated: bool = False  # a decode whose token is known: the sequence lost its KV

    @property
    def span(self) -> RowSpan:
        token_ids = None if self.is_decode and not self.is_repeated else self.part.token_ids
        return RowSpan(self.part.slot.slot, self.part.start, self.part.length, token_ids, self.is_repeated)


class CudaExecutor:
    """Implements `Executor`. A plan's block ids are the blocks of its KV memory, so prefixes are shared in place.

    `deterministic`: KV computed by decodes is recomputed only by decodes, as chunk kernels differ in the last bits.
    Prompts do not reuse such KV; if it is lost, its tokens run as decodes.
    """

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
        max_step_rows: int = 8192,
        grammars: Grammars | None = None,
        deterministic: bool = False,
    ) -> None:
        self._decoder, self._grammars, self._deterministic = decoder, grammars, deterministic
        self._sizes = graph_sizes(max_num_seqs) if uses_graphs else ()
        self._mixed_sizes = mixed_graph_sizes(max_step_rows) if uses_graphs else ()
        self._inputs = DeviceInputs(
            num_slots=max(max_num_seqs, _MIN_SLOTS, *self._sizes),
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=max_model_len,
            device=decoder.device,
            captured_rows=max(self._mixed_sizes, default=0),
        )
        self._kv = decoder.new_kv(num_blocks + 1, block_size)  # plus one for padding
        self.blocks = PagedBlocks(self._kv)
        self._sampler = DeviceSampler(self._inputs.to_device)
        self._slots: dict[int, DeviceSequence] = {}
        self._lost = LostSlots()
        self._in_flight: deque[_Launched] = deque()
        self._max_rows = sys.maxsize  # per forward pass; lowered when memory runs out
        self._captured_rows: dict[int, StepRows] = {}
        self._captured_inputs: dict[int, RowInputs] = {}
        # Shared by all graphs: otherwise each would keep logits of its own.
        shape = max(self._sizes, default=0), decoder.config.vocab_size
        self._captured_logits = torch.empty(shape, dtype=torch.float32, device=decoder.device)
        self._memory = decoder.new_memory(max(self._mixed_sizes, default=0))
        self._mixed_sizes = self._worthwhile(self._mixed_sizes)
        self._decode_graphs = Graphs(self._run_decodes, decoder.device)
        self._layer_graphs = Graphs(self._run_layer, decoder.device)
        with torch.inference_mode():
            self._capture()
        larger = tuple(size for size in self._mixed_sizes if size > max(self._sizes))
        self.caps = ExecutorCaps(
            max_steps_in_flight=max_steps_in_flight,
            row_buckets=self._sizes + larger,
            attention_waves=decoder.attention.waves,
            reuses_answers=not deterministic,
        )

    def submit(self, plan: StepPlan) -> None:
        """Launch the step. `wait` raises its errors."""
        step = _Launched(self._lost.remaining(plan), _StepTimer(self._decoder.device))
        try:
            with torch.inference_mode():
                self._launch(step)
        except Exception as error:
            step.error = out_of_memory(error, plan) or error
            for slot in self._lost.add(plan):
                self._slots.pop(slot, None)
        step.timer.stop()
        self._in_flight.append(step)

    def wait(self) -> StepResult:
        return self._in_flight.popleft().read()

    def close(self) -> None:
        if self._grammars is not None:
            self._grammars.close()
        self._in_flight.clear()
        self._slots.clear()
        # Graphs refer to this object: free the device's memory now, not when the garbage collector runs.
        del self._decoder, self._kv, self._memory, self._captured_logits, self._decode_graphs, self._layer_graphs
        del self._inputs, self._captured_inputs, self._captured_rows, self._sampler, self.blocks

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
        size = None if plan.chunks else size_for(len(step.parts), self._sizes)
        if size is not None:
            rows = self._inputs.load_captured_decodes([piece.span for piece in _pieces(step)], size)
            self._decoder.attention.plan(rows.layout)
            self._sample(step, *self._decode_graphs.replay(size), is_stored=True)
            return
        while not self._runs_in_memory(step):
            if self._decoder.device.type == "cuda":
                torch.cuda.empty_cache()

    def _runs_in_memory(self, step: _Launched) -> bool:
        """Launch the step operation by operation. False: memory ran out; retry with fewer rows at a time."""
        try:
            self._run_groups(step)
            return True
        except (MemoryError, RuntimeError) as error:
            rows = min(self._max_rows, step.plan.num_rows)
            if out_of_memory(error, step.plan) is None or rows <= _MIN_ROWS:
                raise
        self._max_rows = max(_MIN_ROWS, rows // 2)
        logger.warning(
            "Memory ran out in a step of %d tokens. From now on at most %d are computed at a time, which is slower: "
            "lower max_num_batched_tokens or gpu_memory_utilization.",
            *(step.plan.num_rows, self._max_rows),
        )
        return False

    def _run_groups(self, step: _Launched) -> None:
        step.prompt_rows, step.row_sums = {}, {}  # of an attempt that ran out of memory
        groups = list(_groups(_pieces(step, self._deterministic), self._max_rows))
        hidden = [self._run_group(step, group, pads=len(groups) == 1) for group in groups]
        for number, row_sum in step.row_sums.items():
            if step.parts[number].samples:
                step.embeddings[number] = start_copy(unit_length(row_sum))
        if step.sampled:
            self._sample(step, *self._scores(torch.cat(hidden) if len(hidden) > 1 else hidden[0]))
        for number, row_sum in step.row_sums.items():  # last: a step that runs out of memory is repeated as a whole
            step.parts[number].slot.row_sum = row_sum

    def _run_group(self, step: _Launched, group: Sequence[_Piece], pads: bool) -> Tensor:
        """Run some of a step's rows through the layers; returns the sampled rows, padded if `pads`."""
        order = sorted(range(len(group)), key=lambda place: (not group[place].is_decode, group[place].is_repeated))
        ends = dict(zip(order, accumulate(group[place].part.length for place in order), strict=True))
        kept: list[int] = []
        for place, piece in enumerate(group):
            kept += range(ends[place] - piece.part.num_wanted, ends[place])
        num_rows = sum(piece.part.length for piece in group)
        is_read_row_by_row = any(piece.part.is_read_row_by_row for piece in group)
        num_padding = 0
        if pads and kept and not is_read_row_by_row:
            # Pad to a size that the graphs have run: a new number of rows may load kernels, as long as a step.
            num_padding = max(0, (size_for(len(kept), self._sizes) or 0) - len(kept))
        wanted_rows = [*kept, *[0] * num_padding] if num_padding or len(kept) < num_rows else None
        size = size_for(num_rows, self._mixed_sizes)
        rows = self._inputs.load([group[place].span for place in order], wanted_rows, size)
        self._decoder.attention.plan(rows.layout)
        hidden = self._decoder.hidden(rows.inputs, self._kv, rows.kept) if size is None else self._replay(rows, size)
        if not is_read_row_by_row:
            return hidden
        wanted = torch.split_with_sizes(hidden, [piece.part.num_wanted for piece in group])
        for piece, found in zip(group, wanted, strict=True):
            if piece.part.prompt_logprobs:
                step.prompt_rows.setdefault(piece.number, []).extend(self._prompt_rows(piece.part, found))
            if piece.part.pooling is not None:
                before = step.row_sums.get(piece.number, piece.part.slot.row_sum)
                step.row_sums[piece.number] = add_rows(before, found, piece.part.pooling)
        sampled = [found[-1:] for piece, found in zip(group, wanted, strict=True) if piece.part.samples]
        return torch.cat([hidden[:0], *sampled])

    def _replay(self, rows: StepRows, size: int) -> Tensor:
        """Replay a step of at most `size` rows: graphs with attention between them."""
        memory = self._memory.first(rows.layout.num_rows)
        attend = self._decoder.attention_of(self._kv, memory)
        for layer in range(self._decoder.config.num_layers):
            self._layer_graphs.replay((size, layer))
            attend(layer)
        return self._decoder.after_last_attention(memory, rows.kept)

    def _scores(self, hidden: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Logits and their most likely tokens."""
        logits = self._decoder.logits(hidden, out)
        return logits, self._decoder.likeliest(logits)

    def _capture(self) -> None:
        """Capture all graphs, in steps of padding alone."""
        for size in reversed(self._sizes):
            rows = self._captured_rows[size] = self._inputs.load_captured_decodes((), size)
            self._decoder.attention.plan(rows.layout)
            self._decode_graphs.capture(size)
        for size in reversed(self._mixed_sizes):
            self._captured_inputs[size] = self._inputs.load((), None, size).inputs
            for layer in range(self._decoder.config.num_layers):
                self._layer_graphs.capture((size, layer))

    def _worthwhile(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """Sizes faster than every larger one: a library's matrix products are slow at some sizes."""
        if self._decoder.device.type != "cuda":
            return sizes
        with torch.inference_mode():
            seconds = {size: self._seconds_of_layer(size) for size in reversed(sizes)}
        return tuple(size for size in sizes if seconds[size] <= min(seconds[other] for other in sizes if other >= size))

    def _seconds_of_layer(self, size: int) -> float:
        inputs, layer = self._inputs.load((), None, size).inputs, self._decoder.config.num_layers - 1
        seconds = []
        for _ in range(_TIMED_RUNS):
            timer = _StepTimer(self._decoder.device)
            for _ in range(_TIMED_RUNS):  # back to back, which hides the launches
                self._decoder.before_attention(layer, inputs, self._kv, self._memory.first(size))
            timer.stop()
            timer.wait()
            seconds.append(timer.seconds)
        return min(seconds)

    def _run_decodes(self, size: int) -> tuple[Tensor, Tensor]:
        rows = self._captured_rows[size]
        self._inputs.feed_last_tokens(rows)
        logits, likeliest = self._scores(self._decoder.hidden(rows.inputs, self._kv), self._captured_logits[:size])
        self._inputs.last_tokens.index_copy_(0, rows.sequences.long(), likeliest[0])
        return logits, likeliest

    def _run_layer(self, key: tuple[int, int]) -> None:
        size, layer = key
        self._decoder.before_attention(layer, self._captured_inputs[size], self._kv, self._memory.first(size))

    def _sample(self, step: _Launched, logits: Tensor, likeliest: Tensor, is_stored: bool = False) -> None:
        """Sample for the sampling parts, in order. Tokens are pending until the step is read.

        `is_stored`: the slots' last tokens are already the most likely ones.
        """
        parts = [step.parts[number] for number in step.sampled]
        tokens, step.samples = self._sampler.sample(logits, likeliest, [part.slot for part in parts])
        if not (is_stored and all(part.slot.is_plain for part in parts)):
            slots = self._inputs.to_device(np.array([part.slot.slot for part in parts]))
            self._inputs.last_tokens.index_copy_(0, slots, tokens)
        for part in parts:
            part.slot.sampled.tokens.append(_PENDING)

    def _prompt_rows(self, part: _Part, hidden: Tensor) -> list[_PromptRows]:
        """Prompt logprobs in groups of rows: few rows of logits fit in memory at a time."""
        predicted, num_top = np.array(part.predicted), part.slot.sampled.params.prompt_logprobs
        found = []
        for first in range(0, len(predicted), GROUP_ROWS):
            targets = predicted[first : first + GROUP_ROWS]
            logits = self._decoder.logits(hidden[first : first + len(targets)])
            logprobs = logprobs_of(logits, self._inputs.to_device(targets), [num_top])
            found.append(_PromptRows(logits.amax(-1), logprobs).to_host())
        return found


def _pieces(step: _Launched, repeats_decodes: bool = False) -> Iterator[_Piece]:
    """The step's parts in order. With `repeats_decodes`, tokens first computed by decodes are decodes again."""
    for number, part in enumerate(step.parts):
        if number < len(step.plan.decodes):
            yield _Piece(number, part, is_decode=True)
            continue
        end = part.end
        if repeats_decodes:
            end = min(end, max(part.start, part.slot.sampled.num_prompt_tokens))
        if end > part.start:
            is_whole = end == part.end
            yield _Piece(number, replace(part, length=end - part.start, samples=part.samples and is_whole), False)
        for position in range(end, part.end):
            samples = part.samples and position + 1 == part.end
            again = replace(part, start=position, length=1, samples=samples, prompt_logprobs=False)
            yield _Piece(number, again, is_decode=True, is_repeated=True)


def _groups(pieces: Iterable[_Piece], max_rows: int) -> Iterator[list[_Piece]]:
    """Groups of at most `max_rows` rows, in order; a chunk may be split."""
    group: list[_Piece] = []
    room = max_rows
    for piece in pieces:
        part = piece.part
        while part.length > room:
            if room:
                group.append(piece._replace(part=replace(part, length=room, samples=False)))
            yield group
            part = replace(part, start=part.start + room, length=part.length - room)
            group, room = [], max_rows
        group.append(piece._replace(part=part))
        room -= part.length
    yield group
