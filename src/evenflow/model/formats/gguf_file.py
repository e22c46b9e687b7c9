"""Reads a GGUF file: its metadata at once, its tensors one at a time.

The `gguf` package dequantises tensors, but takes seconds to read a vocabulary: metadata is parsed here.
"""

import math
import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from evenflow.errors import BrokenModel, ModelNotFound
from evenflow.model.config import unsupported
from evenflow.model.formats.typed_values import TypedValues, Value

if TYPE_CHECKING:
    import torch

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
_MAX_ITEMS = 1 << 24  # of an array: read as Python objects, they take far more memory than in the file
_MAX_DIMENSIONS = 8
_SCALARS: dict[int, np.dtype[Any]] = {
    kind: np.dtype(code)
    for kind, code in enumerate(("<u1", "<i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?", "", "", "<u8", "<i8", "<f8"))
    if code
}
_TENSOR_TYPES = {
    GGMLQuantizationType[name] for name in ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where one tensor is stored; `shape` as in torch, outermost dimension first."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    num_bytes: int


class GgufFile(TypedValues):
    """An open GGUF file: its metadata by key, `tensors` by name."""

    def __init__(self, path: Path) -> None:
        self._bytes = _map_file(path)
        cursor = _Cursor(self._bytes)
        num_tensors, num_keys = _read_header(cursor)
        super().__init__("", _read_all(num_keys, "key", lambda: (cursor.string(), cursor.value(cursor.u32()))))
        headers = _read_all(num_tensors, "tensor", lambda: _read_tensor_header(cursor))
        alignment = self.get("general.alignment", int, _DEFAULT_ALIGNMENT)
        if alignment <= 0:
            raise BrokenModel(f"general.alignment is {alignment}, it must be positive")
        data_start = -(-cursor.position // alignment) * alignment
        self.tensors = {name: self._place(data_start, name, *header) for name, header in headers.items()}

    def read(self, name: str) -> "torch.Tensor":
        """A tensor as float32, in memory of its own."""
        import torch  # not needed for metadata

        tensor = self.tensors[name]
        stored = np.frombuffer(self._bytes, np.uint8, tensor.num_bytes, tensor.offset)
        values = dequantize(stored.reshape(math.prod(tensor.shape[:-1]), -1), tensor.kind)
        # Tensors stored as float32 come back as views of the file, which is read-only.
        return torch.from_numpy(values if values.flags.writeable else values.copy()).reshape(tensor.shape)

    def _place(self, data_start: int, name: str, shape: tuple[int, ...], kind_id: int, offset: int) -> GgufTensor:
        try:
            kind = GGMLQuantizationType(kind_id)
        except ValueError:
            raise unsupported(f"the tensor type {kind_id} of {name}") from None
        if kind not in _TENSOR_TYPES:
            raise unsupported(f"the tensor type {kind.name} of {name}")
        block_size, block_bytes = GGML_QUANT_SIZES[kind]
        if not shape or 0 in shape or shape[-1] % block_size:
            raise BrokenModel(f"{name} has shape {shape}, {kind.name} needs rows of {block_size} values")
        num_bytes = math.prod(shape) // block_size * block_bytes
        end = data_start + offset + num_bytes
        if end > len(self._bytes):
            raise BrokenModel(f"the file is truncated: {name} ends at byte {end}, the file at {len(self._bytes)}")
        return GgufTensor(shape, kind, data_start + offset, num_bytes)


class _Cursor:
    """Reads the header's values in order."""

    def __init__(self, content: mmap.mmap) -> None:
        self.position = 0
        self._content = content

    def take(self, num_bytes: int) -> bytes:
        end = self.position + num_bytes
        if end > len(self._content):
            raise BrokenModel(f"the file is truncated: its header continues past byte {len(self._content)}")
        taken = self._content[self.position : end]
        self.position = end
        return taken

    def u32(self) -> int:
        return int.from_bytes(self.take(4), "little")

    def u64(self) -> int:
        return int.from_bytes(self.take(8), "little")

    def string(self) -> str:
        return self._strings(1)[0]

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            item_kind, length = self.u32(), self.u64()
            if length > _MAX_ITEMS:
                raise BrokenModel(
                    f"an array of {length} items before byte {self.position}, no vocabulary has that many"
                )
            return self._strings(length) if item_kind == _STRING else self._scalars(item_kind, length)
        return self._scalars(kind, 1)[0]

    def _strings(self, length: int) -> list[str]:
        # A vocabulary has hundreds of thousands of strings: worth a loop without calls.
        content, position, size_at = self._content, self.position, struct.Struct("<Q").unpack_from
        strings, file_end = [], len(content)
        try:
            for _ in range(length):
                end = position + 8 + size_at(content, position)[0]
                if end > file_end:
                    raise BrokenModel(f"the file is truncated: a string at byte {position} ends at byte {end}")
                strings.append(content[position + 8 : end].decode())
                position = end
        except (struct.error, UnicodeDecodeError) as error:
            raise BrokenModel(f"broken string at byte {position} ({error})") from None
        self.position = position
        return strings

    def _scalars(self, kind: int, length: int) -> list[Any]:
        if kind not in _SCALARS:
            raise BrokenModel(f"unknown value type {kind} before byte {self.position}")
        dtype = _SCALARS[kind]
        values: list[Any] = np.frombuffer(self.take(length * dtype.itemsize), dtype).tolist()
        return values


def _map_file(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:
        raise BrokenModel("the file is empty") from None
    except OSError as error:
        raise ModelNotFound(f"the file cannot be read: {error.strerror}") from None


def _read_header(cursor: _Cursor) -> tuple[int, int]:
    """The numbers of tensors and of metadata keys."""
    magic = cursor.take(4)
    if magic != _MAGIC:
        raise BrokenModel(f"not a GGUF file: it starts with {magic!r}, not {_MAGIC!r}")
    version = cursor.u32()
    if version not in _VERSIONS:
        raise unsupported(f"GGUF version {version} (versions 2 and 3, little-endian, are read)")
    return cursor.u64(), cursor.u64()


def _read_all(count: int, what: str, read: Callable[[], tuple[str, Value]]) -> dict[str, Value]:
    """This many things by their names, none of which may come twice."""
    found: dict[str, Value] = {}
    for _ in range(count):
        name, value = read()
        if name in found:
            raise BrokenModel(f"the {what} {name} is there twice")
        found[name] = value
    return found


def _read_tensor_header(cursor: _Cursor) -> tuple[str, tuple[tuple[int, ...], int, int]]:
    """Name; shape, type and offset of the next tensor."""
    name = cursor.string()
    num_dimensions = cursor.u32()
    if num_dimensions > _MAX_DIMENSIONS:
        raise BrokenModel(f"{name} has {num_dimensions} dimensions, expected at most {_MAX_DIMENSIONS}")
    innermost_first = [cursor.u64() for _ in range(num_dimensions)]
    return name, (tuple(reversed(innermost_first)), cursor.u32(), cursor.u64())
