"""What one step computes and what came of it: the only types that cross into an executor.

All are frozen, and each has a record form (see `engine/recorder.py`), so that a recorded run is a test case, a
calibration set and a replay. Must not know: tensors, devices, text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from evenflow.core.request import SamplingParams


class ChunkReason(StrEnum):
    """Why a chunk is as long as it is, and not longer."""

    END_OF_PROMPT = "end_of_prompt"  # nothing was left to take
    BUDGET = "budget"  # the step's tokens were used up
    CHUNK_SIZE = "chunk_size"  # the policy's rule for the size of one chunk
    LONG_PREFILL = "long_prefill"  # long_prefill_token_threshold
    ALIGNMENT = "alignment"  # rounded down to what the executor runs well
    FLOOR = "floor"  # nothing was left for prefill; the least that keeps it moving
    LATENCY = "latency"  # more would have made a stream's next token late
    WARM_UP = "warm_up"  # twice the largest step seen so far: beyond that, step times are guesses


@dataclass(frozen=True, slots=True)
class ExecutorCaps:
    """What an executor can take and likes; the scheduler plans within it."""

    max_steps_in_flight: int = 1
    max_prefill_sequences: int = 16  # chunks in one step
    chunk_alignment: int = 1  # chunks that do not end their prompt are rounded down to this
    row_buckets: tuple[int, ...] = ()  # sizes of captured graphs, which steps are padded to, ascending; empty: none
    attention_tile: int = 1  # rows of a chunk that attention computes together, as many of them as there may be
    attention_wave: int = 0  # rows of a chunk that occupy the whole device at once; 0: nothing like that

    def is_launched(self, rows: int) -> bool:
        """Is a step of so many rows launched op by op, which costs the host more than replaying a graph?"""
        return bool(self.row_buckets) and rows > self.row_buckets[-1]

    def padded_rows(self, rows: int) -> int:
        return next((bucket for bucket in self.row_buckets if bucket >= rows), rows)

    def step_shape(
        self,
        *,
        num_decodes: int = 0,
        decode_context: int = 0,
        chunks: Iterable[tuple[int, int]] = (),  # starts and lengths
        prefill_logit_rows: int = 0,
    ) -> StepShape:
        """The figures of a step that holds this, as it runs here. A decode with guessed tokens counts once for each."""
        num_chunks = prefill_rows = attention = wave_attention = 0
        for start, length in chunks:
            num_chunks += 1
            prefill_rows += length
            attention += _attention(start, length, self.attention_tile)
            if 2 * length > self.attention_wave > 0:  # shorter ones are spread over the device
                wave_attention += _attention(start, length, self.attention_wave)
        rows = num_decodes + prefill_rows
        return StepShape(
            total_rows=rows,
            padded_rows=self.padded_rows(rows),
            prefill_rows=prefill_rows,
            prefill_attention=attention,
            wave_attention=wave_attention,
            decode_sequences=num_decodes,
            decode_context=decode_context,
            attention_calls=num_chunks + (1 if num_decodes else 0),
            logit_rows=num_decodes + prefill_logit_rows,
            is_launched=self.is_launched(rows),
        )

    def prefill_shape(self, start: int, length: int) -> StepShape:
        """A step of one chunk alone, which ends its prompt."""
        return self.step_shape(chunks=[(start, length)], prefill_logit_rows=1)


def _attention(start: int, length: int, granule: int) -> int:
    """The sum over a chunk's rows, padded to whole granules, of the positions each one sees."""
    rows = -(-length // granule) * granule
    return rows * (2 * start + length + 1) // 2


@dataclass(frozen=True, slots=True)
class Admission:
    """A request that takes a slot in this step, first or after a preemption: all an executor needs of it, once."""

    request_id: str
    epoch: int
    slot: int
    token_ids: tuple[int, ...]  # everything known: the prompt, and after a preemption the output so far
    num_prompt_tokens: int
    num_cached_tokens: int  # leading tokens whose KV lies in the first blocks of its table already
    max_known_tokens: int  # tokens this request can ever hold
    sampling: SamplingParams
    seed: int
    stop_token_ids: frozenset[int]  # not sampled before `min_tokens` are out


class BlockTableChange(NamedTuple):
    """Blocks appended to a slot's table, from entry `first` on."""

    slot: int
    first: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Decodes:
    """One token for each of these requests, as columns: an object a decode would cost more than planning it.

    Row i feeds the token at `positions[i]`, known to the host or not: an executor writes each sample behind the tokens
    of its slot, so that a token still in flight needs no id here. Every decode row is sampled.
    """

    request_ids: tuple[str, ...] = ()
    epochs: tuple[int, ...] = ()
    slots: tuple[int, ...] = ()
    positions: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.slots)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Positions [start, start + length) of one request."""

    request_id: str
    epoch: int
    slot: int
    start: int
    length: int
    reason: ChunkReason
    samples: bool  # the last row ends all that is known: it yields a token
    prompt_logprobs: bool = False  # every row that predicts a prompt token needs its logits

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def num_logit_rows(self) -> int:
        return self.length if self.prompt_logprobs else int(self.samples)


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a step costs is a function of these figures; any engine's step can be described by them."""

    total_rows: int
    padded_rows: int
    prefill_rows: int
    prefill_attention: int  # sum over prefill rows, padded to tiles, of the positions each one sees
    decode_sequences: int
    decode_context: int  # sum over decodes of the positions each one sees
    attention_calls: int
    logit_rows: int
    is_launched: bool = False  # op by op: it has more rows than any captured graph
    wave_attention: int = 0  # the same of long chunks, padded to whole waves


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. An executor applies it in this order: releases, admissions, block tables, then the rows."""

    step_id: int
    released_slots: tuple[int, ...]
    admissions: tuple[Admission, ...]
    block_changes: tuple[BlockTableChange, ...]
    decodes: Decodes
    chunks: tuple[Chunk, ...]
    padded_rows: int

    @property
    def num_rows(self) -> int:
        return len(self.decodes) + sum(chunk.length for chunk in self.chunks)

    @property
    def num_sequences(self) -> int:
        """Entries of the step's StepResult: one a decode, then one a chunk."""
        return len(self.decodes) + len(self.chunks)

    def shape(self, caps: ExecutorCaps, num_chunks: int | None = None) -> StepShape:
        """Its figures on an executor, or those of the same step with only the first of its chunks."""
        chunks = self.chunks[:num_chunks]
        return caps.step_shape(
            num_decodes=len(self.decodes),
            decode_context=sum(self.decodes.positions) + len(self.decodes),
            chunks=[(chunk.start, chunk.length) for chunk in chunks],
            prefill_logit_rows=sum(chunk.num_logit_rows for chunk in chunks),
        )


class TokenLogprob(NamedTuple):
    token_id: int
    logprob: float


class RowLogprobs(NamedTuple):
    """The token that came (or stood in the prompt) and the likeliest alternatives, best first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave. Sequences are numbered as in the plan: decodes first, then chunks."""

    step_id: int
    tokens: tuple[tuple[int, ...], ...]  # a sequence's new tokens: none for a chunk that does not sample
    seconds: float  # end - max(submitted, end of the step before): the time that belongs to this step
    errors: Mapping[int, str] = field(default_factory=dict)
    logprobs: Mapping[int, tuple[RowLogprobs, ...]] = field(default_factory=dict)
    prompt_logprobs: Mapping[int, tuple[RowLogprobs, ...]] = field(default_factory=dict)  # for tokens start+1 .. end
