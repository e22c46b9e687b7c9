"""Logprobs of the rows of one request, packed: as objects, those of a long prompt would take megabytes and hold up
every process that they pass through."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, overload

_BYTES = 4  # of an id, and of a value


class TokenLogprob(NamedTuple):
    token_id: int
    logprob: float


class RowLogprobs(NamedTuple):
    """The sampled token, or that of the prompt, and the likeliest alternatives, best first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]


@dataclass(slots=True)
class LogprobRows(Sequence[RowLogprobs]):
    """A sequence of rows that are made when they are read. All have as many alternatives."""

    num_top: int = 0
    ids: bytearray = field(default_factory=bytearray)  # of each row: the chosen token, then the alternatives; int32
    values: bytearray = field(default_factory=bytearray)  # float32

    @classmethod
    def of(cls, rows: Iterable[RowLogprobs]) -> LogprobRows:
        rows = list(rows)
        entries = [entry for row in rows for entry in (row.chosen, *row.top)]
        ids, values = zip(*entries, strict=True) if entries else ((), ())
        num_top = len(rows[0].top) if rows else 0
        return cls(num_top, bytearray(array("i", ids)), bytearray(array("f", values)))

    @classmethod
    def joined(cls, parts: Iterable[LogprobRows]) -> LogprobRows:
        """One after the other."""
        joined = cls(0)
        for part in parts:
            joined.extend(part)
        return joined

    def extend(self, other: LogprobRows) -> None:
        if not self.ids:
            self.num_top = other.num_top
        self.ids += other.ids
        self.values += other.values

    @property
    def num_bytes(self) -> int:
        return len(self.ids) + len(self.values)

    def __len__(self) -> int:
        return len(self.ids) // self._row_bytes

    @overload
    def __getitem__(self, place: int) -> RowLogprobs: ...

    @overload
    def __getitem__(self, place: slice) -> LogprobRows: ...

    def __getitem__(self, place: int | slice) -> RowLogprobs | LogprobRows:
        if isinstance(place, slice):
            first, end, step = place.indices(len(self))
            if step != 1:
                return LogprobRows.of(self[one] for one in range(first, end, step))
            cut = slice(first * self._row_bytes, max(first, end) * self._row_bytes)
            return LogprobRows(self.num_top, self.ids[cut], self.values[cut])
        row = range(len(self))[place]
        cut = slice(row * self._row_bytes, (row + 1) * self._row_bytes)
        chosen, *top = map(TokenLogprob, array("i", self.ids[cut]), array("f", self.values[cut]))
        return RowLogprobs(chosen, tuple(top))

    def __iter__(self) -> Iterator[RowLogprobs]:
        return (self[row] for row in range(len(self)))

    @property
    def chosen(self) -> array[float]:
        """The logprobs of the chosen tokens."""
        return array("f", self.values)[:: self.num_top + 1]

    @property
    def _row_bytes(self) -> int:
        return _BYTES * (self.num_top + 1)
