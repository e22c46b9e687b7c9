"""The memory behind the pool: encoded KV blocks on the host and, if a folder is given, on disk.

The same code serves a CPU and a GPU; what differs is how a block of the pool is read and written (`BlockMemory`). A
step copies only the blocks that it would overwrite. Two background threads encode, write files and fill blocks.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from evenflow.core.blocks import Content
from evenflow.core.plan import ExecutorCaps, Save, StepPlan, StepResult, TierMoves, TierResult
from evenflow.core.tier import TierConfig
from evenflow.executors.base import Executor
from evenflow.executors.block_files import BlockFiles
from evenflow.executors.host_blocks import Held, HostBlocks, size_of
from evenflow.model.kv_codec import BlockCopy, BlockLayout, Codec, Plain, copied

logger = logging.getLogger("evenflow")

_TOGETHER = 16  # blocks restored at a time
_TRIALS = tuple(Save(0, b"not of a prefix" + bytes([number]), "") for number in range(_TOGETHER))
_CLOSE_SECONDS = 1.0  # for pending saves
_WAIT_SECONDS = 0.05  # of a step without rows: a new request must not wait for a hung disk
_PAUSE_SECONDS = 60.0  # between a failed write and the next attempt


class BlockMemory(Protocol):
    """The blocks of a pool, as its executor holds them."""

    @property
    def layout(self) -> BlockLayout: ...

    @property
    def is_on_gpu(self) -> bool: ...

    @property
    def max_copied(self) -> int:
        """Maximum copies at a time."""
        ...

    def read(self, block_ids: Sequence[int]) -> Sequence[BlockCopy]:
        """Copies of these blocks, taken before any step submitted later."""
        ...

    def write(self, block_ids: Sequence[int], blocks: Sequence[Tensor]) -> None:
        """Write these blocks; returns when they are written."""
        ...


@dataclass(slots=True)
class _Moved:
    """Counts of the blocks moved in one direction."""

    count: int = 0
    num_bytes: int = 0
    num_timed: int = 0
    seconds: float = 0.0  # of the timed ones

    def add(self, num_bytes: int, seconds: float | None) -> None:
        self.count += 1
        self.num_bytes += num_bytes
        if seconds is not None:
            self.num_timed += 1
            self.seconds += seconds

    @property
    def mean_seconds(self) -> float:
        return self.seconds / max(1, self.num_timed)


class KvTier:
    """Carries out the moves of plans. `tier.Tier` decides them and tracks stored blocks; missing blocks are reported as
    lost, and recomputed."""

    def __init__(self, memory: BlockMemory, codec: Codec, *, host_bytes: int, files: BlockFiles | None = None) -> None:
        self._memory, self._codec, self._files = memory, codec, files
        self._layout = memory.layout
        self._host_bytes = host_bytes
        self._host = HostBlocks(host_bytes, self._layout, is_pinned=memory.is_on_gpu)
        if memory.is_on_gpu and isinstance(codec, Plain):
            self._host.reserve(_TOGETHER + 1)  # plus one being saved
        self._staged: dict[bytes, BlockCopy] = {}  # copied out of the pool, not encoded yet
        self._to_drop: list[bytes] = []  # before any other save
        self._dropping: Counter[bytes] = Counter()  # queued or in progress: their stored content must not be read
        self._paused_until = 0.0  # no file is written before then; 0: the last write succeeded
        self._num_saving = self._num_returning = 0
        self._restored: list[bytes] = []
        self._lost: list[bytes] = []
        self._saved, self._filled = _Moved(), _Moved()  # since the last result
        self._changed = threading.Condition()
        self._is_closed = False
        # Two, because a restore must not wait for saves.
        self._saver, self._restorer = (
            ThreadPoolExecutor(1, f"evenflow-{name}", initializer=torch.set_num_threads, initargs=(1,))
            for name in ("save", "restore")
        )

    # ---- called by the thread that steps ----

    def apply(self, moves: TierMoves) -> None:
        """Copy the blocks to be saved, start all other moves. Never fails: at worst a block is lost."""
        if moves.drops:
            self._start_drop(moves.drops)
        room = self._memory.max_copied - self._num_saving
        if moves.saves and room > 0:
            self._stage(moves.saves[-room:])  # earlier ones are not kept
        for first in range(0, len(moves.restores), _TOGETHER):
            group = moves.restores[first : first + _TOGETHER]
            with self._changed:
                self._num_returning += len(group)
            self._restorer.submit(self._restore, group)

    def _start_drop(self, hashes: Sequence[bytes]) -> None:
        """Drop blocks soon: their files may be wrong, and would be read at the next start if this process died.

        Cancels pending saves. A block that is saved again meanwhile is read from its new copy, or lost.
        """
        with self._changed:
            self._to_drop += hashes
            self._dropping.update(hashes)
            for block_hash in hashes:
                self._staged.pop(block_hash, None)
        self._saver.submit(self._drop_next)

    def _stage(self, saves: Sequence[Save]) -> None:
        began = time.perf_counter()
        try:
            copies = self._memory.read([save.block for save in saves])
        except (MemoryError, RuntimeError) as error:
            logger.warning("%d KV blocks were not kept: no memory to copy them (%s).", len(saves), error)
            return
        copying = (time.perf_counter() - began) / len(saves)
        staged = list(zip(saves, copies, strict=True))
        with self._changed:
            self._num_saving += len(saves)
            self._staged |= {save.block_hash: copy for save, copy in staged}
        self._saver.submit(self._save, staged, copying)

    def wait(self) -> None:
        """Wait briefly until a block is restored or lost; with none to restore, until all blocks are saved."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._restored or self._lost or not (self._num_returning or self._num_saving), _WAIT_SECONDS
            )

    def collect(self) -> TierResult:
        """The outcome of moves since the last call."""
        with self._changed:
            result = TierResult(
                restored=tuple(self._restored),
                lost=tuple(self._lost),
                num_saving=self._num_saving,
                save_seconds=self._saved.mean_seconds,
                restore_seconds=self._filled.mean_seconds,
                num_saved=self._saved.count,
                saved_bytes=self._saved.num_bytes,
                restored_bytes=self._filled.num_bytes,
            )
            self._saved, self._filled = _Moved(), _Moved()
            self._num_returning -= len(self._restored) + len(self._lost)
            self._restored, self._lost = [], []
        return result

    def measure(self) -> tuple[float, float]:
        """Measure the seconds to save and to restore one block of random content. No request may hold blocks.

        With files, restores are timed from files: most blocks are stored only there.
        """
        block = torch.randn(self._layout.shape, generator=torch.Generator().manual_seed(0)).to(self._layout.dtype)
        most = self._codec.max_bytes(self._layout)
        num_held = self._files.capacity(most) if self._files is not None else self._host_bytes // most
        trials = _TRIALS[: max(1, num_held)]
        times = []
        with torch.inference_mode():
            self._memory.write([0], [block])
            for _ in range(3):  # the first run is slower
                began = time.perf_counter()
                for save, copy in zip(trials, self._memory.read([save.block for save in trials]), strict=True):
                    self._keep(save, copy)
                kept = time.perf_counter()
                if self._files is not None:
                    for save in trials:
                        self._host.remove(save.block_hash)
                self._fill([(save.block, save.block_hash) for save in trials])
                times.append(((kept - began) / len(trials), (time.perf_counter() - kept) / len(trials)))
        self._drop([save.block_hash for save in trials])
        return min(times)

    def config(self) -> TierConfig:
        """The scheduler's view of this tier. Saved blocks go to the host and to files: capacity is the larger."""
        save_seconds, restore_seconds = self.measure()
        most = self._codec.max_bytes(self._layout)
        in_files = self._files.capacity(most) if self._files is not None else 0
        return TierConfig(
            num_blocks=max(in_files, self._host_bytes // most),
            save_seconds=save_seconds,
            restore_seconds=restore_seconds,
            most_saving=self._memory.max_copied,
            keeps_all=self._files is not None,
            contents=self._files.contents if self._files is not None else (),
        )

    def close(self) -> None:
        """Finish pending saves within _CLOSE_SECONDS, and all drops: dropped content may be wrong."""
        with suppress(TimeoutError):
            self._saver.submit(lambda: None).result(_CLOSE_SECONDS)  # behind all earlier work
        self._is_closed = True
        self._restorer.shutdown(cancel_futures=True)
        self._saver.shutdown()
        self._host.clear()
        self._staged.clear()
        del self._memory

    # ---- called by the background threads ----

    def _save(self, staged: list[tuple[Save, BlockCopy]], copying: float) -> None:
        waits = True  # the first save, for earlier steps
        while staged:  # popped: the GPU's buffer is freed with its last copy
            save, copy = staged.pop(0)
            self._drop_next()
            began, num_bytes = time.perf_counter(), 0
            try:
                if not self._is_closed and self._staged.get(save.block_hash) is copy:  # else it was dropped
                    num_bytes = self._keep(save, copy)
            except Exception:  # such as a GPU failure: the block is lost, the thread continues
                logger.exception("a KV block was not kept")
            with self._changed:
                if self._staged.get(save.block_hash) is copy:  # else it was dropped, and perhaps copied again
                    del self._staged[save.block_hash]
                self._num_saving -= 1
                if num_bytes:
                    self._saved.add(num_bytes, None if waits else time.perf_counter() - began + copying)
                self._changed.notify_all()
            waits = False

    def _keep(self, save: Save, copy: BlockCopy) -> int:
        """Store a block; returns its size in bytes."""
        with torch.inference_mode():
            data = self._encode(copy)
        self._write_file(Content(save.block_hash, save.tenant), data)
        self._host.put(save.block_hash, data)
        return size_of(data)

    def _encode(self, copy: BlockCopy) -> Held:
        return copy(self._host.new_place()) if isinstance(self._codec, Plain) else self._codec.encode(copy(None))

    def _decode(self, data: Held) -> Tensor:
        return data if isinstance(data, Tensor) else self._codec.decode(data, self._layout)

    def _write_file(self, content: Content, data: Held) -> None:
        if self._files is None or time.monotonic() < self._paused_until:
            return
        try:
            self._files.write(content, self._codec.encode(data) if isinstance(data, Tensor) else data)
        except OSError as error:
            if not self._paused_until:
                logger.warning("The prefix cache is not kept on disk: %s. The disk is tried again each minute.", error)
            self._paused_until = time.monotonic() + _PAUSE_SECONDS
            return
        if self._paused_until:
            logger.info("The prefix cache is kept on disk again.")
            self._paused_until = 0.0

    def _restore(self, group: Sequence[tuple[int, bytes]]) -> None:
        began = time.perf_counter()
        try:
            filled = self._fill(group)
        except Exception as error:  # the blocks are lost, the thread continues
            logger.warning("%d KV blocks cannot be restored and are computed again: %r.", len(group), error)
            filled = {}
        seconds = (time.perf_counter() - began) / len(group)
        if lost := [block_hash for _, block_hash in group if block_hash not in filled]:
            self._start_drop(lost)  # the scheduler will not: it does not know them
        with self._changed:
            self._restored += filled
            self._lost += lost
            for num_bytes in filled.values():
                self._filled.add(num_bytes, seconds)
            self._changed.notify_all()

    def _fill(self, group: Sequence[tuple[int, bytes]]) -> dict[bytes, int]:
        """Fill blocks of the pool; returns the sizes in bytes of the blocks found, by hash."""
        taken: dict[bytes, Held] = {}
        values: dict[bytes, Tensor] = {}
        with torch.inference_mode():
            try:
                for _, block_hash in group:
                    with self._changed:
                        staged, is_stale = self._staged.get(block_hash), block_hash in self._dropping
                    if staged is not None:
                        values[block_hash] = staged(None)
                    elif not is_stale and (data := self._take(block_hash)) is not None:
                        taken[block_hash] = data
                        values[block_hash] = self._decode(data)
                if values:
                    blocks = [block for block, block_hash in group if block_hash in values]
                    self._memory.write(blocks, list(values.values()))
            finally:  # return the taken blocks
                for block_hash, data in taken.items():
                    self._host.put(block_hash, data)
        return {name: size_of(taken[name]) if name in taken else self._layout.num_bytes for name in values}

    def _take(self, block_hash: bytes) -> Held | None:
        data = self._host.take(block_hash)
        if data is None and self._files is not None:
            data = self._files.read(block_hash)
        if isinstance(data, bytes) and isinstance(self._codec, Plain):
            return self._encode(partial(copied, self._codec.decode(data, self._layout)))
        return data

    def _drop_next(self) -> None:
        with self._changed:
            hashes, self._to_drop = self._to_drop, []
        self._drop(hashes)
        with self._changed:
            self._dropping -= Counter(hashes)

    def _drop(self, hashes: Sequence[bytes]) -> None:
        for block_hash in hashes:
            self._host.remove(block_hash)
            if self._files is not None:
                try:
                    self._files.remove(block_hash)
                except OSError as error:
                    logger.warning("A file of the prefix cache cannot be removed: %s.", error)


class TieredExecutor:
    """An executor with a tier behind its pool. Implements `Executor`."""

    def __init__(self, executor: Executor, tier: KvTier) -> None:
        self._executor, self._tier = executor, tier
        self._has_rows: deque[bool] = deque()  # for each step in flight

    @property
    def caps(self) -> ExecutorCaps:
        return self._executor.caps

    def submit(self, plan: StepPlan) -> None:
        self._tier.apply(plan.moves)
        self._executor.submit(plan)
        self._has_rows.append(plan.num_sequences > 0)

    def wait(self) -> StepResult:
        has_rows = self._has_rows.popleft()
        result = self._executor.wait()
        if not has_rows:
            self._tier.wait()
        return replace(result, tier=self._tier.collect())

    def close(self) -> None:
        self._tier.close()
        self._executor.close()
