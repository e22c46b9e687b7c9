"""What a step computes and what it returned: the only types that an executor shares with the scheduler.

All are immutable, and `record` writes each as plain data: a recorded run is a test case and can be replayed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple

from evenflow.core.logprobs import LogprobRows
from evenflow.core.request import SamplingParams


class ChunkReason(StrEnum):
    """Why a chunk is not longer."""

    END_OF_PROMPT = "end_of_prompt"  # the prompt ends here
    BUDGET = "budget"  # the step's tokens were used up
    CHUNK_SIZE = "chunk_size"  # the policy's rule for the size of a chunk
    LONG_PREFILL = "long_prefill"  # long_prefill_token_threshold
    ALIGNMENT = "alignment"  # rounded down to a size that the executor runs well
    FLOOR = "floor"  # no room for prefill: the minimum that keeps it moving
    LATENCY = "latency"  # more would have made a stream's next token late
    TURN = "turn"  # more would have delayed the first token of a lighter tenant, which comes with this step
    WARM_UP = "warm_up"  # twice the largest step seen so far: beyond it, step times are guesses
    SHED = "shed"  # the step was slower than planned, and left out the rest so that its tokens were on time


class AttentionWaves(NamedTuple):
    """How an attention kernel fills a GPU: a chunk's rows in tiles, and a number of tiles at a time."""

    tile_rows: int
    num_tiles: int  # at a time
    is_split: bool = True  # along the context, if there are too few tiles to fill a wave

    def padded_rows(self, rows: int) -> int:
        """These rows rounded up to whole waves, which take as long."""
        if not rows:
            return 0
        tiles = -(-rows // self.tile_rows)
        wave_rows = self.tile_rows * self.num_tiles
        if tiles >= self.num_tiles or not self.is_split:
            return wave_rows * -(-tiles // self.num_tiles)
        return wave_rows // (self.num_tiles // tiles)

    def whole_rows(self, rows: int) -> int:
        """The most rows, up to these, that fill their last wave: one more would take longer."""
        tiles = rows // self.tile_rows
        while tiles and self.padded_rows(self.tile_rows * tiles + 1) == self.padded_rows(self.tile_rows * tiles):
            tiles -= 1
        return self.tile_rows * tiles


@dataclass(frozen=True, slots=True)
class ExecutorCaps:
    """An executor's limits and preferences."""

    max_steps_in_flight: int = 1
    max_prefill_sequences: int = 16  # chunks in one step
    chunk_alignment: int = 1  # chunks that do not end their prompt are rounded down to a multiple of this
    row_buckets: tuple[int, ...] = ()  # sizes of captured graphs, to which steps are padded, ascending
    attention_waves: AttentionWaves | None = None  # None: attention takes as long as it has rows and positions
    reuses_answers: bool = True  # a prompt may take up the KV that decodes have left
    sheds_rows: bool = False  # obeys `StepPlan.most_seconds`; needs one step in flight

    def __post_init__(self) -> None:
        assert not (self.sheds_rows and self.max_steps_in_flight > 1), (
            "the next step may build on rows that this one sheds"
        )

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
        """The figures of such a step on this executor. A decode with speculative tokens counts once for each."""
        num_chunks = prefill_rows = attention = wave_attention = 0
        for start, length in chunks:
            num_chunks += 1
            prefill_rows += length
            attention += length * (2 * start + length + 1) // 2
            if self.attention_waves is not None:
                wave_attention += self.attention_waves.padded_rows(length) * (2 * start + length + 1) // 2
        rows = num_decodes + prefill_rows
        return StepShape(
            total_rows=rows,
            padded_rows=self.padded_rows(rows),
            prefill_rows=prefill_rows,
            prefill_attention=attention,
            decode_sequences=num_decodes,
            decode_context=decode_context,
            attention_calls=num_chunks + (1 if num_decodes else 0),
            logit_rows=num_decodes + prefill_logit_rows,
            is_launched=bool(self.row_buckets) and rows > self.row_buckets[-1],
            wave_attention=wave_attention,
        )

    def prefill_shape(self, start: int, length: int) -> StepShape:
        """A step of a single chunk, which ends its prompt."""
        return self.step_shape(chunks=[(start, length)], prefill_logit_rows=1)


@dataclass(frozen=True, slots=True)
class Admission:
    """A request that takes a slot in this step, for the first time or after a preemption."""

    request_id: str
    epoch: int
    slot: int
    token_ids: tuple[int, ...]  # the prompt, and after a preemption the output so far
    num_prompt_tokens: int
    num_cached_tokens: int  # leading tokens whose KV is already in the first blocks of its table
    max_known_tokens: int  # upper bound of its tokens
    sampling: SamplingParams
    seed: int
    stop_token_ids: frozenset[int]  # not sampled before `min_tokens`


class BlockTableChange(NamedTuple):
    """Blocks appended to a slot's table, starting at entry `first`."""

    slot: int
    first: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Decodes:
    """One token for each of these requests, as columns: creating an object per decode would cost more than planning it.

    Row i feeds the token at `positions[i]`. The host need not know its id: an executor appends each sample to the
    tokens of its slot. Every decode row is sampled.
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
    samples: bool  # the last row is the last known token, and gives the next one
    prompt_logprobs: bool = False  # every row that predicts a prompt token needs logits

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def num_logit_rows(self) -> int:
        return self.length if self.prompt_logprobs else int(self.samples)


class StepShape(NamedTuple):
    """The figures that a step's cost depends on. They describe a step of any engine."""

    total_rows: int
    padded_rows: int
    prefill_rows: int
    prefill_attention: int  # sum over prefill rows of the positions that each attends to
    decode_sequences: int
    decode_context: int  # the same sum over decodes
    attention_calls: int
    logit_rows: int
    is_launched: bool = False  # op by op, at a cost to the host: it has more rows than any captured graph
    wave_attention: int = 0  # `prefill_attention`, each chunk padded to whole waves


class Save(NamedTuple):
    """A block of the pool that is copied to the tier."""

    block: int
    block_hash: bytes
    tenant: str


class TierMoves(NamedTuple):
    """KV blocks that leave the pool or come back to it: see `tier`. Blocks are named by what they hold."""

    saves: tuple[Save, ...] = ()  # copied before the rows run, which may overwrite them
    restores: tuple[tuple[int, bytes], ...] = ()  # block and hash; filled while this step and later ones run
    drops: tuple[bytes, ...] = ()  # before anything is saved, which may be the same block anew


class TierResult(NamedTuple):
    """The outcome of moves since the engine's last result. It does not depend on the step's rows."""

    restored: tuple[bytes, ...] = ()
    lost: tuple[bytes, ...] = ()  # could not be restored, and are not kept any more
    num_saving: int = 0  # copied, but not stored yet
    save_seconds: float = 0.0  # mean of a block; 0: none was saved
    restore_seconds: float = 0.0
    num_saved: int = 0  # blocks that are stored now, and their bytes as encoded
    saved_bytes: int = 0
    restored_bytes: int = 0

    def then(self, later: TierResult) -> TierResult:
        """This result merged with a later one, for when a step's result was lost."""
        return later._replace(
            restored=self.restored + later.restored,
            lost=self.lost + later.lost,
            save_seconds=later.save_seconds or self.save_seconds,
            restore_seconds=later.restore_seconds or self.restore_seconds,
            num_saved=self.num_saved + later.num_saved,
            saved_bytes=self.saved_bytes + later.saved_bytes,
            restored_bytes=self.restored_bytes + later.restored_bytes,
        )


NO_MOVES, NO_TIER_RESULT = TierMoves(), TierResult()


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. An executor applies it in this order: moves, releases, admissions, block tables, then the rows.

    A step without rows waits for a block to be restored or, if there is none, until all blocks are saved.
    """

    step_id: int
    released_slots: tuple[int, ...]
    admissions: tuple[Admission, ...]
    block_changes: tuple[BlockTableChange, ...]
    decodes: Decodes
    chunks: tuple[Chunk, ...]
    padded_rows: int
    moves: TierMoves = NO_MOVES
    most_seconds: float | None = None  # an executor that sheds rows leaves out the end of chunks to take no longer

    @property
    def num_rows(self) -> int:
        return len(self.decodes) + sum(chunk.length for chunk in self.chunks)

    @property
    def num_sequences(self) -> int:
        """Entries of the StepResult: one for each decode, then one for each chunk."""
        return len(self.decodes) + len(self.chunks)

    def with_lengths(self, lengths: Mapping[int, int]) -> StepPlan:
        """With the chunks of these sequences cut to these lengths, because the step shed their other rows."""
        if not lengths:
            return self
        chunks = [
            replace(chunk, length=lengths[number], reason=ChunkReason.SHED, samples=False)
            if number in lengths
            else chunk
            for number, chunk in enumerate(self.chunks, len(self.decodes))
        ]
        return replace(self, chunks=tuple(chunks))

    def shape(self, caps: ExecutorCaps, num_chunks: int | None = None) -> StepShape:
        """Its figures on an executor; with `num_chunks`, those of the step with only its first chunks."""
        chunks = self.chunks[:num_chunks]
        return caps.step_shape(
            num_decodes=len(self.decodes),
            decode_context=sum(self.decodes.positions) + len(self.decodes),
            chunks=[(chunk.start, chunk.length) for chunk in chunks],
            prefill_logit_rows=sum(chunk.num_logit_rows for chunk in chunks),
        )


class Shed(NamedTuple):
    """What a step computed of a chunk whose last rows it left out."""

    length: int  # rows that all layers computed: at least one. The others are to be computed again
    mean_length: int  # rows that a layer computed, on average: what the step's seconds were spent on


@dataclass(frozen=True, slots=True)
class StepResult:
    """The outcome of a step. Sequences are numbered as in the plan: decodes first, then chunks."""

    step_id: int
    tokens: tuple[tuple[int, ...], ...]  # new tokens of each sequence: none for a chunk that does not sample
    seconds: float  # end - max(submitted, end of the previous step): the step's own time
    errors: Mapping[int, str] = field(default_factory=dict)  # the request itself cannot go on
    logprobs: Mapping[int, LogprobRows] = field(default_factory=dict)
    prompt_logprobs: Mapping[int, LogprobRows] = field(default_factory=dict)  # for tokens start+1 .. end
    embeddings: Mapping[int, bytes] = field(default_factory=dict)  # float32 values, of unit length
    faults: Mapping[int, str] = field(default_factory=dict)  # the machine lost the result: computing it again may help
    out_of_memory: bool = False  # is that why?
    tier: TierResult = NO_TIER_RESULT
    shed: Mapping[int, Shed] = field(default_factory=dict)  # chunks that are shorter than planned, without a token
