"""An executor without a model: deterministic tokens, a programmable cost, a clock that only it advances.

Each cell of its KV memory holds a digest of all tokens up to there, read and written through the block tables. A block
handed out while still in use, a prefix hit on the wrong block or a chunk at the wrong place therefore changes the
tokens, just as it would in a real model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from evenflow.core.plan import ExecutorCaps, Shed, StepPlan, StepResult, StepShape, TierMoves, TierResult

_START = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def _extend(digest: int, token: int) -> int:
    return ((digest ^ (token + 1)) * 0x100000001B3 + 0x632BE5AB) & _MASK


def fake_continuation(prompt: Sequence[int], count: int, vocab_size: int) -> list[int]:
    """FakeExecutor's tokens after this prompt, independent of chunks, batches and preemptions."""
    digest = _START
    for token in prompt:
        digest = _extend(digest, token)
    output: list[int] = []
    while len(output) < count:
        output.append(_token_of(digest, vocab_size))
        digest = _extend(digest, output[-1])
    return output


def _token_of(digest: int, vocab_size: int) -> int:
    return (digest >> 20) % vocab_size


class VirtualClock:
    """A clock that advances only when it is set."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@dataclass(slots=True)
class _Slot:
    tokens: list[int]
    block_ids: list[int] = field(default_factory=list)


class FakeExecutor:
    """Runs plans in no real time.

    `cost`: a step's seconds, which pass on `clock`. `disturb` sees each plan before it runs; it may raise to fail the
    step, or return errors for some sequences. `shed`: the rows left out of a step that may shed. Restored blocks arrive
    one every `restore_seconds`, except lost ones (`loses`).
    """

    def __init__(
        self,
        *,
        vocab_size: int = 1000,
        block_size: int = 16,
        caps: ExecutorCaps | None = None,
        cost: Callable[[StepShape], float] = lambda shape: 0.0,
        clock: VirtualClock | None = None,
        disturb: Callable[[StepPlan], Mapping[int, str] | None] = lambda plan: None,
        shed: Callable[[StepPlan], Mapping[int, Shed]] = lambda plan: {},
        restore_seconds: float = 0.0,
        loses: Callable[[bytes], bool] = lambda block_hash: False,
    ) -> None:
        self.caps = caps or ExecutorCaps()
        self.clock = clock or VirtualClock()
        self._vocab_size = vocab_size
        self._block_size = block_size
        self._cost = cost
        self._disturb = disturb
        self._shed = shed
        self._slots: dict[int, _Slot] = {}
        self._cells: dict[int, int] = {}  # block * block_size + offset -> digest of all tokens up to there
        self._queue: deque[tuple[StepPlan, float]] = deque()
        self._last_end = 0.0
        self._restore_seconds = restore_seconds
        self._loses = loses
        self._tier: dict[bytes, list[int]] = {}  # cells of stored blocks
        self._num_saved = 0  # since the last result
        self._returning: deque[tuple[float, int, bytes]] = deque()  # arrival time, block, hash

    def submit(self, plan: StepPlan) -> None:
        if len(self._queue) == self.caps.max_steps_in_flight:
            raise RuntimeError(f"more than {self.caps.max_steps_in_flight} steps in flight")
        self._queue.append((plan, self.clock.now))

    def wait(self) -> StepResult:
        plan, submitted = self._queue.popleft()
        shed = self._shed(plan) if plan.most_seconds is not None else {}
        run = plan.with_lengths({number: one.mean_length for number, one in shed.items()})
        seconds = self._cost(run.shape(self.caps))
        self._last_end = max(submitted, self._last_end) + seconds
        self.clock.now = max(self.clock.now, self._last_end)
        self._move(plan.moves)
        if not plan.num_sequences and self._returning:
            self._last_end = self.clock.now = max(self.clock.now, self._returning[0][0])
        self._apply_changes(plan)
        errors = self._disturb(plan) or {}
        sequences: list[tuple[int, ...]] = [
            (self._run(slot, position, 1),)
            for slot, position in zip(plan.decodes.slots, plan.decodes.positions, strict=True)
        ]
        for chunk in plan.with_lengths({number: one.length for number, one in shed.items()}).chunks:
            sampled = self._run(chunk.slot, chunk.start, chunk.length, samples=chunk.samples)
            sequences.append((sampled,) if chunk.samples else ())
        return StepResult(plan.step_id, tuple(sequences), seconds, errors=errors, tier=self._restored(), shed=shed)

    def _move(self, moves: TierMoves) -> None:
        for block_hash in moves.drops:
            del self._tier[block_hash]
        for block, block_hash, _ in moves.saves:
            self._tier[block_hash] = [self._cells[cell] for cell in self._cells_of(block)]
            self._num_saved += 1
        for block, block_hash in moves.restores:
            after = self._returning[-1][0] if self._returning else self.clock.now
            self._returning.append((after + self._restore_seconds, block, block_hash))

    def _restored(self) -> TierResult:
        restored, lost = [], []
        while self._returning and self._returning[0][0] <= self.clock.now:
            _, block, block_hash = self._returning.popleft()
            if self._loses(block_hash):
                del self._tier[block_hash]
                lost.append(block_hash)
                continue
            for cell, digest in zip(self._cells_of(block), self._tier[block_hash], strict=True):
                self._cells[cell] = digest
            restored.append(block_hash)
        num_saved, self._num_saved = self._num_saved, 0
        return TierResult(
            restored=tuple(restored),
            lost=tuple(lost),
            restore_seconds=self._restore_seconds if restored else 0.0,
            num_saved=num_saved,
            saved_bytes=num_saved * self._block_size,  # one byte a token
            restored_bytes=len(restored) * self._block_size,
        )

    def _cells_of(self, block: int) -> range:
        return range(block * self._block_size, (block + 1) * self._block_size)

    def close(self) -> None:
        self._queue.clear()

    def _apply_changes(self, plan: StepPlan) -> None:
        for slot in plan.released_slots:
            self._slots.pop(slot, None)
        for admission in plan.admissions:
            if admission.slot in self._slots:
                raise RuntimeError(f"slot {admission.slot} is taken")
            self._slots[admission.slot] = _Slot(list(admission.token_ids))
        for change in plan.block_changes:
            table = self._slots[change.slot].block_ids
            if change.first != len(table):
                raise RuntimeError(f"slot {change.slot}: a table of {len(table)} blocks grows at entry {change.first}")
            table += change.block_ids

    def _run(self, slot_number: int, start: int, length: int, samples: bool = True) -> int:
        if length < 1:
            raise RuntimeError(f"slot {slot_number}: a chunk of {length} tokens")
        slot = self._slots[slot_number]
        digest = _START if start == 0 else self._cells[self._cell(slot, start - 1)]
        for position in range(start, start + length):
            digest = _extend(digest, slot.tokens[position])
            self._cells[self._cell(slot, position)] = digest
        token = _token_of(digest, self._vocab_size)
        if samples:
            if len(slot.tokens) != start + length:
                raise RuntimeError(f"slot {slot_number}: a sample at {start + length} of {len(slot.tokens)} tokens")
            slot.tokens.append(token)
        return token

    def _cell(self, slot: _Slot, position: int) -> int:
        return slot.block_ids[position // self._block_size] * self._block_size + position % self._block_size
