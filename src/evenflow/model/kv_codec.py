"""Encodings of KV blocks outside the pool: raw, lossless, or 8 bits per value.

All work on any layout whose last dimension is a head's. docs/kv_tier.md has the measurements.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

_LENGTH_BYTES = 4
_SCALE = np.dtype("<f4")


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """The shape and type of one block's KV, as an executor holds it."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_values(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_values * self.dtype.itemsize


# Waits for a copy of a block, and gives it on the host: written to the tensor, if there is one.
BlockCopy = Callable[[Tensor | None], Tensor]


def copied(block: Tensor, into: Tensor | None) -> Tensor:
    """Of a copy that is on the host already."""
    return block if into is None else into.copy_(block)


class Codec(Protocol):
    """Turns a block into bytes and back. `decode` raises ValueError if these are not what `encode` gave."""

    name: str

    def encode(self, block: Tensor) -> bytes: ...

    def decode(self, content: bytes, layout: BlockLayout) -> Tensor: ...

    def max_bytes(self, layout: BlockLayout) -> int: ...


class Plain:
    """The block's own bytes: a GPU can compute a packed one again before a CPU has unpacked it."""

    name = "plain"

    def encode(self, block: Tensor) -> bytes:
        return _bytes_of(block).tobytes()

    def decode(self, content: bytes, layout: BlockLayout) -> Tensor:
        if len(content) != layout.num_bytes:
            raise ValueError(f"{len(content)} bytes are not a block of {layout.num_bytes}")
        return torch.frombuffer(bytearray(content), dtype=layout.dtype).view(layout.shape)

    def max_bytes(self, layout: BlockLayout) -> int:
        return layout.num_bytes


class Lossless:
    """Packs the bytes with sign and exponent, which are alike; mantissas are noise and stay as they are.

    Huffman coding alone packs them better than matches do, and several times faster.
    """

    name = "lossless"

    def encode(self, block: Tensor) -> bytes:
        planes = _bytes_of(block).reshape(-1, block.element_size()).T
        packer = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS, 9, zlib.Z_HUFFMAN_ONLY)
        packed = packer.compress(planes[-1].tobytes()) + packer.flush()
        return b"".join((len(packed).to_bytes(_LENGTH_BYTES, "little"), packed, planes[:-1].tobytes()))

    def decode(self, content: bytes, layout: BlockLayout) -> Tensor:
        start = _LENGTH_BYTES + int.from_bytes(content[:_LENGTH_BYTES], "little")
        try:
            highest = zlib.decompress(content[_LENGTH_BYTES:start], -zlib.MAX_WBITS, layout.num_values)
        except zlib.error as error:
            raise ValueError(str(error)) from error
        if len(highest) + len(content) - start != layout.num_bytes:
            raise ValueError(f"{len(content)} bytes are not a block of {layout.num_bytes}")
        values = np.empty((layout.num_values, layout.dtype.itemsize), np.uint8)
        values[:, -1] = np.frombuffer(highest, np.uint8)
        lower = np.frombuffer(content, np.uint8, offset=start)
        for place, plane in enumerate(lower.reshape(-1, layout.num_values)):
            values[:, place] = plane
        return torch.from_numpy(values.reshape(-1)).view(layout.dtype).view(layout.shape)

    def max_bytes(self, layout: BlockLayout) -> int:
        """Deflate falls back to stored pieces, which add some bytes each."""
        return layout.num_bytes + layout.num_values // 1000 + 64


class Int8:
    """One scale for each token and head: values are within 1/254 of the largest among them."""

    name = "int8"

    def encode(self, block: Tensor) -> bytes:
        values = block.float()
        scales = values.abs().amax(-1, keepdim=True) / 127
        rounded = (values / scales.clamp_min(torch.finfo(torch.float32).tiny)).round_().to(torch.int8)
        return scales.numpy().astype(_SCALE).tobytes() + rounded.numpy().tobytes()

    def decode(self, content: bytes, layout: BlockLayout) -> Tensor:
        if len(content) != self.max_bytes(layout):
            raise ValueError(f"{len(content)} bytes are not a block of {self.max_bytes(layout)}")
        num_scales = layout.num_values // layout.shape[-1]
        scales = torch.from_numpy(np.frombuffer(content, _SCALE, num_scales).astype(np.float32))
        rounded = torch.frombuffer(bytearray(content[num_scales * _SCALE.itemsize :]), dtype=torch.int8)
        return (rounded.view(-1, layout.shape[-1]) * scales[:, None]).to(layout.dtype).view(layout.shape)

    def max_bytes(self, layout: BlockLayout) -> int:
        return layout.num_values + layout.num_values // layout.shape[-1] * _SCALE.itemsize


CODECS: dict[str, Codec] = {codec.name: codec for codec in (Plain(), Lossless(), Int8())}


def _bytes_of(block: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """In memory order, the lowest byte of a value first."""
    return block.contiguous().view(-1).view(torch.uint8).numpy()
