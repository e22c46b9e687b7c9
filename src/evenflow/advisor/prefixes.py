"""How much of a trace's prompts an unlimited prefix cache would already hold, from the ids of their leading blocks.

Must not know: how a real cache evicts; so every figure is an upper bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from evenflow.advisor.lengths import LengthFigures, Lengths


@dataclass(frozen=True, slots=True)
class PrefixFigures:
    """`hit_rate` is a share of all prompt tokens; `uncached` are the tokens that each prompt would still compute."""

    block_tokens: int
    num_blocks: int
    num_distinct_blocks: int
    hit_rate: float
    uncached: LengthFigures


class PrefixTally:
    """Follows the prompts of one trace in their order."""

    BLOCK_TOKENS = 512  # what an id stands for in Mooncake's traces, the only ones that have ids

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._num_blocks = 0
        self._num_tokens = 0
        self._num_hit_tokens = 0
        self._uncached = Lengths()

    def add(self, block_ids: Sequence[int], num_tokens: int) -> None:
        num_leading = next((i for i, block_id in enumerate(block_ids) if block_id not in self._seen), len(block_ids))
        # A prompt's last token is always computed: its output is what the first answer token is sampled from.
        num_hit = min(num_leading * self.BLOCK_TOKENS, num_tokens - 1)
        self._seen.update(block_ids)
        self._num_blocks += len(block_ids)
        self._num_tokens += num_tokens
        self._num_hit_tokens += num_hit
        self._uncached.add(num_tokens - num_hit)

    def figures(self) -> PrefixFigures | None:
        if not self._num_blocks:
            return None
        return PrefixFigures(
            block_tokens=self.BLOCK_TOKENS,
            num_blocks=self._num_blocks,
            num_distinct_blocks=len(self._seen),
            hit_rate=self._num_hit_tokens / self._num_tokens,
            uncached=self._uncached.figures(),
        )
