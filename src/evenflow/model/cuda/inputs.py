"""A step's inputs on the device: block tables by slot, the last token of each slot, and the rows of one step.

The host keeps a copy of the block tables, to compute each row's KV entry. All of a step's numbers are sent in one copy.
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
from evenflow.model.cuda.attention.backend import StepLayout
from evenflow.model.cuda.decoder import RowInputs


class RowSpan(NamedTuple):
    """Rows of a step: positions [start, start + length) of the sequence in a slot.

    A chunk's tokens are known; a decode feeds the slot's last sample (None), a repeated decode its earlier token.
    """

    slot: int
    start: int
    length: int
    token_ids: Sequence[int] | None = None
    is_repeated_decode: bool = False

    @property
    def is_decode(self) -> bool:
        return self.token_ids is None or self.is_repeated_decode


@dataclass(frozen=True, slots=True)
class StepRows:
    """Tensors on the device. A captured step reuses the same ones with other values."""

    inputs: RowInputs
    sequences: Tensor  # slots: decodes first, then chunks
    num_fed: int  # leading decodes, which feed the last sample
    kept: Tensor | None  # rows needed after the last layer; None: all
    layout: StepLayout


class DeviceInputs:
    """Owns the state between steps. Slot `num_slots` and block `num_blocks` are for padding rows."""

    def __init__(
        self,
        *,
        num_slots: int,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        device: torch.device,
        captured_rows: int = 0,
    ) -> None:
        self._block_size, self._device = block_size, device
        self._spare_slot = num_slots
        self._spare_entry = num_blocks * block_size
        width = -(-max_model_len // block_size)
        self._host_tables = np.full((num_slots + 1, width), num_blocks, dtype=np.int32)
        self._tables = torch.from_numpy(self._host_tables).to(device, copy=True)
        self.last_tokens = torch.zeros(num_slots + 1, dtype=torch.int32, device=device)
        # The graphs' inputs.
        captured_rows = max(captured_rows, num_slots)
        max_numbers = 4 * captured_rows + 2 * num_slots  # four by row and two by sequence
        self._captured_numbers = torch.zeros(max_numbers, dtype=torch.int32, device=device)
        self._captured_tokens = torch.zeros(captured_rows, dtype=torch.int32, device=device)
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

    def load(self, spans: Sequence[RowSpan], kept: Sequence[int] | None, captured_rows: int | None = None) -> StepRows:
        """Load a step's rows: decodes, repeated decodes, then chunks. With `captured_rows`, padded to that many in
        the graphs' memory; attention ignores the padding."""
        decodes, chunks = [span for span in spans if span.is_decode], [span for span in spans if not span.is_decode]
        num_fed = sum(span.token_ids is None for span in spans)
        slots, positions, entries, contexts = self._fields(spans)
        num_rows = len(positions)
        if captured_rows is not None:
            positions = _padded(positions, captured_rows, 0)
            entries = _padded(entries, captured_rows, self._spare_entry)
        known = [np.asarray(span.token_ids) for span in spans[num_fed:]]
        tokens = np.concatenate([np.zeros(0, np.int64), *known])
        fields = [positions, entries, slots, contexts, tokens, np.asarray(kept or (), dtype=np.int64)]
        sent = self._send(fields, None if captured_rows is None else self._captured_numbers)
        row_positions, row_entries, sequences, step_contexts, known_tokens, wanted = sent
        layout = StepLayout(
            [span.start + 1 for span in decodes],
            [span.start for span in chunks],
            [span.length for span in chunks],
            self._tables.index_select(0, sequences),
            step_contexts,
            self._block_size,
        )
        if captured_rows is None:
            token_ids = torch.empty(num_rows, dtype=torch.int32, device=self._device)
        else:
            token_ids = self._captured_tokens[:captured_rows]
        token_ids[num_fed:num_rows].copy_(known_tokens)
        inputs = RowInputs(token_ids, row_positions, row_entries)
        rows = StepRows(inputs, sequences, num_fed, None if kept is None else wanted, layout)
        self.feed_last_tokens(rows)
        return rows

    def load_captured_decodes(self, spans: Sequence[RowSpan], num_rows: int) -> StepRows:
        """Load decodes alone, padded to `num_rows`, in the graphs' memory. The graph itself must begin with
        `feed_last_tokens`."""
        spares = (self._spare_slot, 0, self._spare_entry, 1)
        fields = [_padded(field, num_rows, spare) for field, spare in zip(self._fields(spans), spares, strict=True)]
        sequences, positions, entries, contexts = self._send(fields, self._captured_numbers)
        tables = self._captured_tables[:num_rows]
        torch.index_select(self._tables, 0, sequences, out=tables)
        lengths = [span.start + 1 for span in spans] + [1] * (num_rows - len(spans))
        layout = StepLayout(lengths, (), (), tables, contexts, self._block_size, is_captured=True)
        inputs = RowInputs(self._captured_tokens[:num_rows], positions, entries)
        return StepRows(inputs, sequences, num_rows, None, layout)

    def feed_last_tokens(self, rows: StepRows) -> None:
        """Feed the last samples of the slots to their decodes."""
        token_ids = rows.inputs.token_ids[: rows.num_fed]
        torch.index_select(self.last_tokens, 0, rows.sequences[: rows.num_fed], out=token_ids)

    def to_device(self, values: NDArray[np.generic]) -> Tensor:
        return self._pinned(values).to(self._device, non_blocking=True)

    def _send(self, fields: Sequence[NDArray[np.int64]], target: Tensor | None) -> tuple[Tensor, ...]:
        """Send everything in one copy, to new memory or the start of `target`."""
        numbers = np.concatenate(fields).astype(np.int32)
        if target is None:
            sent = self.to_device(numbers)
        else:
            sent = target[: len(numbers)].copy_(self._pinned(numbers), non_blocking=True)
        return torch.split_with_sizes(sent, [*map(len, fields)])

    def _pinned(self, values: NDArray[np.generic]) -> Tensor:
        """Page-locked memory, so that the copy does not wait for the device. torch keeps it until then."""
        tensor = torch.from_numpy(values)
        return tensor.pin_memory() if self._device.type == "cuda" else tensor

    def _fields(self, spans: Sequence[RowSpan]) -> list[NDArray[np.int64]]:
        """Slots, positions, entries and contexts: by sequence, by row, by row, by sequence."""
        slots, starts, lengths = np.array([span[:3] for span in spans], dtype=np.int64).reshape(-1, 3).T
        firsts = np.cumsum(lengths) - lengths
        positions = np.arange(lengths.sum()) + np.repeat(starts - firsts, lengths)
        blocks = self._host_tables[np.repeat(slots, lengths), positions // self._block_size].astype(np.int64)
        entries = blocks * self._block_size + positions % self._block_size
        return [slots, positions, entries, starts + lengths]


def _padded(values: NDArray[np.int64], length: int, spare: int) -> NDArray[np.int64]:
    return np.concatenate((values, np.full(length - len(values), spare)))
