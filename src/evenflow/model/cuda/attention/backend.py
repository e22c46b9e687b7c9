"""The interface of attention backends over paged KV memory: planned once a step, run in each layer.

The KV memory of a layer is one tensor [blocks, keys and values, block size, KV heads, head dim]. Position p of a
sequence is entry p % block_size of block p // block_size in its table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from evenflow.core.plan import AttentionWaves


@dataclass(frozen=True, slots=True)
class StepLayout:
    """The rows of a step: first one for each decode, then the chunks one after another.

    Lists are on the host, for planning; tensors on the device, with a row for each decode, then for each chunk.
    """

    decode_contexts: Sequence[int]  # positions attended to, its own included
    chunk_starts: Sequence[int]
    chunk_lengths: Sequence[int]
    block_tables: Tensor  # int32 [sequences, entries]; entries after a sequence's context name any block
    contexts: Tensor  # int32 [sequences]: positions of a sequence after this step
    block_size: int
    # Decodes alone, run by a captured graph: one set of tensors for each number of decodes. The launches in `run` may
    # depend on the number of decodes, not on their contexts.
    is_captured: bool = False

    @property
    def num_decodes(self) -> int:
        return len(self.decode_contexts)

    @property
    def num_rows(self) -> int:
        return self.num_decodes + sum(self.chunk_lengths)


class AttentionBackend(Protocol):
    """Attention of all rows of a step, after their keys and values are written."""

    name: str
    waves: AttentionWaves | None  # how chunks fill the GPU; None: time is proportional to work

    def plan(self, layout: StepLayout) -> None:
        """Prepare the layers of one step. May run while the step before is still on the device.

        Copies to the device run on the current stream, which must be the layers' stream.
        For a captured layout, call it before the capture and before every replay.
        """

    def run(self, layer: int, queries: Tensor, kv: Tensor, out: Tensor | None = None) -> Tensor:
        """Attend [rows, heads, head dim] to this layer's KV memory; returns the same shape, in `out` if given."""

    def repeated(self, queries: Tensor, kv: Tensor, out: Tensor) -> Callable[[], None] | None:
        """A function without arguments that runs the planned step's attention with far fewer launches, or None.

        The n-th call attends to layer n's KV memory, with the queries that `queries` then holds; `kv` is the memory of
        all layers.
        """
