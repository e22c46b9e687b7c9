"""What a policy is: it turns a StepView into Quotas, how many tokens of which prompts go into the next step.

Every policy takes all decodes first; they differ in how much prefill they let in beside them. The policies themselves
are in `rule_policies` and `target_policy`, their notation in `policies`. Must not know: requests, blocks, executors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from evenflow.core.pacing import Pacing
from evenflow.core.plan import ChunkReason, ExecutorCaps, StepShape
from evenflow.core.step_time import StepTimeModel

# Where decodes alone fill the budget, prefill still gets so many tokens every so many steps.
FLOOR_TOKENS = 16
FLOOR_STEPS = 8


class Candidate(NamedTuple):
    """A prompt that could be continued or started in this step."""

    request_id: str
    start: int  # the first position to compute
    length: int  # positions left
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class StepView:
    """All that a policy may look at."""

    now: float
    num_in_flight: int  # steps planned before that are not committed yet
    num_decodes: int
    decode_context: int  # positions that the decodes see, in sum
    earliest_deadline: float | None  # of the streams that decode in this step; None: nobody has one yet
    tightest_target: float | None  # the smallest target of these streams; None: nobody decodes, or nothing is due
    overhead: float  # seconds that a step takes besides running
    step_time: StepTimeModel
    max_num_seqs: int
    candidates: Sequence[Candidate]  # in the order they are to be served
    free_tokens: int  # room in the KV cache
    long_prefill_token_threshold: int  # most tokens of one prompt in a step; 0: no such limit
    caps: ExecutorCaps


class Quota(NamedTuple):
    """So many tokens of `StepView.candidates[candidate]`."""

    candidate: int
    tokens: int
    reason: ChunkReason


class Quotas(NamedTuple):
    run_decodes: bool
    chunks: tuple[Quota, ...]


class Policy(ABC):
    """Decides on one step at a time. It may keep state, but only what `plan` and `observe` were given."""

    def __init__(self, max_step_tokens: int) -> None:
        # The most tokens of a step, but for decodes that alone exceed it and the floor of prefill.
        self.max_step_tokens = max_step_tokens
        self.pacing: Pacing | None = None  # None: no deadlines
        self.patience = 0.0  # by how many times its own prefill's time a request lets others pass
        self.feasible_target: float | None = None  # the least target that could be kept, where the one given cannot

    @abstractmethod
    def plan(self, view: StepView) -> Quotas: ...

    def observe(self, shape: StepShape, seconds: float) -> None:
        """A step of this shape took so long. Most policies have nothing to learn from it."""
        return


def share_out(
    view: StepView, budget: int, limit_of: Callable[[Candidate], int] | None = None, max_chunks: int | None = None
) -> list[Quota]:
    """Give the budget to the candidates in order: each as much as it needs, its limit allows and is left."""
    quotas: list[Quota] = []
    max_chunks = min(max_chunks or view.caps.max_prefill_sequences, view.caps.max_prefill_sequences)
    for index, candidate in enumerate(view.candidates):
        if budget <= 0 or len(quotas) == max_chunks:
            break
        limits = [(candidate.length, ChunkReason.END_OF_PROMPT), (budget, ChunkReason.BUDGET)]
        if limit_of is not None:
            limits.append((limit_of(candidate), ChunkReason.CHUNK_SIZE))
        if view.long_prefill_token_threshold:
            limits.append((view.long_prefill_token_threshold, ChunkReason.LONG_PREFILL))
        tokens, reason = min(limits, key=lambda limit: limit[0])
        tokens, reason = _align(tokens, reason, view.caps.chunk_alignment)
        quotas.append(Quota(index, tokens, reason))
        budget -= tokens
    return quotas


def _align(tokens: int, reason: ChunkReason, alignment: int) -> tuple[int, ChunkReason]:
    """Round down a chunk that does not end its prompt, unless nothing would be left of it."""
    aligned = tokens - tokens % alignment
    if reason is ChunkReason.END_OF_PROMPT or aligned in (0, tokens):
        return tokens, reason
    return aligned, ChunkReason.ALIGNMENT
