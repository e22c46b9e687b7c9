"""The interface of attention backends over paged KV memory: planned once per step, run in each layer.

The KV memory of a layer is one tensor [blocks, keys and values, block size, KV heads, head dim]. A token at position p
of a sequence lies in entry p % block_size of the block that its table names at p // block_size.
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

    Lists are for planning on the host; tensors are on the device, with a row for each decode, then for each chunk.
    """

    decode_contexts: Sequence[int]  # positions that each decode attends to, its own included
    chunk_starts: Sequence[int]
    chunk_lengths: Sequence[int]
    block_tables: Tensor  # int32 [sequences, entries]; entries after a sequence's context name any block
    contexts: Tensor  # int32 [sequences]: positions of a sequence after this step
    block_size: int
    # Decodes alone, run by a captured graph: all steps with as many decodes have the same tensors, with other values.
    # What `run` launches may depend on the number of decodes, not on their contexts.
    is_captured: bool = False

    @property
    def num_decodes(self) -> int:
        return len(self.decode_contexts)

    @property
    def num_rows(self) -> int:
        return self.num_decodes + sum(self.chunk_lengths)


class AttentionBackend(Protocol):
    """Runs the attention of all rows of a step, whose keys and values are written already."""

    name: str
    waves: AttentionWaves | None  # how chunks fill the GPU; None: their time follows their work

    def plan(self, layout: StepLayout) -> None:
        """Prepare for the layers of one step. May run while the step before is still on the device.

        Copies go to the device on the current stream, which must be the one that the layers run on.
        For a captured layout it is called before the capture and before every replay.
        """

    def run(self, layer: int, queries: Tensor, kv: Tensor, out: Tensor | None = None) -> Tensor:
        """Attend [rows, heads, head dim] to this layer's KV memory; returns the same shape, in `out` if it is given."""

    def repeated(self, queries: Tensor, kv: Tensor, out: Tensor) -> Callable[[], None] | None:
        """The same as a function without arguments that takes much less time to launch, if the planned step has one.

        The first call attends to the KV memory of the first layer, the next to that of the second, and so on, with
        what `queries` holds at that time; `kv` is the memory of all layers.
        """
