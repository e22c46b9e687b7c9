"""KV blocks in host memory: encoded, or raw in pinned memory that a GPU reads and writes directly."""

from __future__ import annotations

import threading
from collections import OrderedDict

import torch
from torch import Tensor

from evenflow.model.kv_codec import BlockLayout

_SLAB_BYTES = 16 << 20  # allocated at a time

Held = bytes | Tensor


class HostBlocks:
    """The most recently used blocks, at most `max_bytes`. Thread-safe."""

    def __init__(self, max_bytes: int, layout: BlockLayout, *, is_pinned: bool) -> None:
        self._max_bytes, self._layout, self._is_pinned = max_bytes, layout, is_pinned
        self._held: OrderedDict[bytes, Held] = OrderedDict()  # least recently used first
        self._num_bytes = 0
        self._free: list[Tensor] = []
        self._lock = threading.Lock()

    def reserve(self, num_outside: int) -> None:
        """Allocate all memory for raw blocks: pinning a gigabyte takes 0.3 s, during which a GPU idles.

        `num_outside`: the maximum of blocks being filled or read, beside those held.
        """
        with self._lock:
            while len(self._free) < self._max_bytes // self._layout.num_bytes + num_outside:
                self._grow()

    def new_place(self) -> Tensor:
        """Memory for a raw block; `put` it once it is filled."""
        with self._lock:
            if not self._free:
                self._grow()
            return self._free.pop()

    def _grow(self) -> None:
        shape = max(1, _SLAB_BYTES // self._layout.num_bytes), *self._layout.shape
        self._free += torch.empty(shape, dtype=self._layout.dtype, pin_memory=self._is_pinned).unbind()

    def put(self, block_hash: bytes, data: Held) -> None:
        """Add a block as the most recently used; older ones make room."""
        with self._lock:
            self._forget(block_hash)
            self._held[block_hash] = data
            self._num_bytes += size_of(data)
            while self._num_bytes > self._max_bytes:
                self._forget(next(iter(self._held)))

    def take(self, block_hash: bytes) -> Held | None:
        """Remove and return a block, so that nothing overwrites it; None if it is absent."""
        with self._lock:
            data = self._held.pop(block_hash, None)
            self._num_bytes -= 0 if data is None else size_of(data)
            return data

    def remove(self, block_hash: bytes) -> None:
        with self._lock:
            self._forget(block_hash)

    def clear(self) -> None:
        with self._lock:
            self._held.clear()
            self._free.clear()
            self._num_bytes = 0

    def _forget(self, block_hash: bytes) -> None:
        data = self._held.pop(block_hash, None)
        if data is None:
            return
        self._num_bytes -= size_of(data)
        if isinstance(data, Tensor):
            self._free.append(data)


def size_of(data: Held) -> int:
    return data.nbytes if isinstance(data, Tensor) else len(data)
