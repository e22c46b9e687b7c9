"""SGLang batches whose attention is computed in two calls: one for chunks, one for decodes."""

from __future__ import annotations

from itertools import takewhile
from typing import Any, NamedTuple


class MixedBatch(NamedTuple):
    """Of the sequences with chunks, then of those that decode: rows and positions, which include the rows."""

    chunk_rows: list[int]
    chunk_positions: list[int]
    decode_positions: list[int]


def mixed_batch(scheduler: Any, batch: Any) -> MixedBatch | None:
    """None: its attention is SGLang's own, because it has no prefill or no target is kept."""
    steering, starts, rows = scheduler.evenflow, batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu
    if steering is None or not steering.limits_prefill:
        return None
    if batch.forward_mode.is_decode_or_idle() or not starts or not rows:
        return None
    positions = [start + count for start, count in zip(starts, rows, strict=True)]
    if batch.seq_lens_cpu is not None:  # which is exact for decodes too
        positions = batch.seq_lens_cpu.tolist()
    num_chunks = len(rows) - sum(1 for _ in takewhile(lambda count: count == 1, reversed(rows)))
    return MixedBatch(rows[:num_chunks], positions[:num_chunks], positions[num_chunks:])
