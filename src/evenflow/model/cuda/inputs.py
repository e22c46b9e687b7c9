"""A step's inputs on the device: block tables by slot, the last token of each slot, and the rows of one step.

The host keeps a copy of the block tables, to know where each row's keys and values go. All of a step's numbers travel
in one copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenflow.core.plan import BlockTableChange
from evenflow.model.cuda.attention import StepLayout

_FIELDS_OF_DECODES = 4  # of a captured step: sequences, positions, entries, contexts


class RowSpan(NamedTuple):
    """Rows of a step: positions [start, start + length) of the sequence in a slot.

    The tokens of a chunk are known; a decode (None) feeds the slot's last sample.
    """

    slot: int
    start: int
    length: int
    token_ids: Sequence[int] | None = None


@dataclass(frozen=True, slots=True)
class StepRows:
    """Tensors on the device. A captured step has the same ones each time, with other values."""

    sequences: Tensor  # slots: decodes first, then chunks
    positions: Tensor
    entries: Tensor  # of the KV memory
    chunk_tokens: Tensor
    kept: Tensor | None  # rows that are needed after the last layer; None: all
    layout: StepLayout


class DeviceInputs:
    """Owns what outlives a step. Slot `num_slots` and block `num_blocks` are spare: padding rows use them."""

    def __init__(
        self, *, num_slots: int, num_blocks: int, block_size: int, max_model_len: int, device: torch.device
    ) -> None:
        self._block_size, self._device = block_size, device
        self._spare_slot = num_slots
        self._spare_entry = num_blocks * block_size
        width = -(-max_model_len // block_size)
        self._host_tables = np.full((num_slots + 1, width), num_blocks, dtype=np.int32)
        self._tables = torch.from_numpy(self._host_tables).to(device, copy=True)
        self.last_tokens = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        self._captured_numbers = torch.zeros(_FIELDS_OF_DECODES * num_slots, dtype=torch.int32, device=device)
        self._captured_tables = self._tables[:num_slots].clone()

    def change_tables(self, changes: Sequence[BlockTableChange]) -> None:
        if not changes:
            return
        width = self._host_tables.shape[1]
        assert all(change.first + len(change.block_ids) <= width for change in changes), "more than max_model_len"
        places = np.concatenate([np.arange(len(c.block_ids)) + (c.slot * width + c.first) for c in changes])
        block_ids = np.concatenate([np.asarray(change.block_ids) for change in changes])
        self._host_tables.reshape(-1)[places] = block_ids
        on_device = self.to_device(np.stack((places, block_ids)))
        self._tables.view(-1)[on_device[0]] = on_device[1].int()

    def load(self, spans: Sequence[RowSpan], kept: Sequence[int] | None) -> StepRows:
        """The rows of a step that is launched operation by operation: decodes, then chunks."""
        decodes, chunks = _split(spans)
        tokens = np.concatenate([np.zeros(0, np.int64), *(np.asarray(span.token_ids) for span in chunks)])
        fields = [*self._fields(spans), tokens, np.asarray(kept or (), dtype=np.int64)]
        numbers = self.to_device(np.concatenate(fields).astype(np.int32))
        sequences, positions, entries, contexts, chunk_tokens, wanted = torch.split_with_sizes(
            numbers, [*map(len, fields)]
        )
        layout = StepLayout(
            [span.start + 1 for span in decodes],
            [span.start for span in chunks],
            [span.length for span in chunks],
            self._tables.index_select(0, sequences),
            contexts,
            self._block_size,
        )
        return StepRows(sequences, positions, entries, chunk_tokens, None if kept is None else wanted, layout)

    def load_captured(self, spans: Sequence[RowSpan], num_rows: int) -> StepRows:
        """Decodes alone, padded to `num_rows`, in the memory that graphs read."""
        padding = num_rows - len(spans)
        spares = (self._spare_slot, 0, self._spare_entry, 1)
        fields = [
            np.concatenate((field, np.full(padding, spare)))
            for field, spare in zip(self._fields(spans), spares, strict=True)
        ]
        numbers = self._captured_numbers[: _FIELDS_OF_DECODES * num_rows]
        numbers.copy_(self._pinned(np.concatenate(fields).astype(np.int32)), non_blocking=True)
        sequences, positions, entries, contexts = numbers.view(_FIELDS_OF_DECODES, num_rows)
        tables = self._captured_tables[:num_rows]
        torch.index_select(self._tables, 0, sequences, out=tables)
        lengths = [span.start + 1 for span in spans] + [1] * padding
        layout = StepLayout(lengths, (), (), tables, contexts, self._block_size, is_captured=True)
        return StepRows(sequences, positions, entries, numbers[:0], None, layout)

    def token_ids(self, rows: StepRows) -> Tensor:
        """What each row feeds: the last sample of a decode's slot, then the chunks' tokens."""
        num_decodes = rows.layout.num_decodes
        sampled = self.last_tokens.index_select(0, rows.sequences[:num_decodes])
        return torch.cat((sampled, rows.chunk_tokens)) if len(rows.chunk_tokens) else sampled

    def to_device(self, values: NDArray[np.generic]) -> Tensor:
        return self._pinned(values).to(self._device, non_blocking=True)

    def _pinned(self, values: NDArray[np.generic]) -> Tensor:
        """Page-locked, or the copy would wait for the device. torch keeps it until the copy has been made."""
        tensor = torch.from_numpy(values)
        return tensor.pin_memory() if self._device.type == "cuda" else tensor

    def _fields(self, spans: Sequence[RowSpan]) -> list[NDArray[np.int64]]:
        """Slots and contexts by sequence, positions and entries by row, in the order of a captured step."""
        slots, starts, lengths = np.array([span[:3] for span in spans], dtype=np.int64).reshape(-1, 3).T
        firsts = np.cumsum(lengths) - lengths
        positions = np.arange(lengths.sum()) + np.repeat(starts - firsts, lengths)
        blocks = self._host_tables[np.repeat(slots, lengths), positions // self._block_size].astype(np.int64)
        entries = blocks * self._block_size + positions % self._block_size
        return [slots, positions, entries, starts + lengths]


def _split(spans: Sequence[RowSpan]) -> tuple[list[RowSpan], list[RowSpan]]:
    return [s for s in spans if s.token_ids is None], [s for s in spans if s.token_ids is not None]
