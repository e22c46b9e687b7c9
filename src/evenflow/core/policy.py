"""A policy turns a StepView into Quotas: how many tokens of which prompts go into the next step.

Every policy takes all decodes first; they differ in how much prefill runs beside them. The policies are in
`rule_policies` and `target_policy`, each with its PolicyKind; `policies` lists the kinds and reads their notation.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from evenflow.core.deadlines import Pacing
from evenflow.core.plan import ChunkReason, ExecutorCaps, StepShape
from evenflow.core.step_time import StepTimeModel

if TYPE_CHECKING:
    from evenflow.core.policies import PolicySpec

# When decodes alone fill the budget, prefill still gets FLOOR_TOKENS every FLOOR_STEPS steps.
FLOOR_TOKENS = 16
FLOOR_STEPS = 8
# A step in which a tenant's turn ends is filled with prompts of others up to this share only: more rows would delay
# first tokens, and lose nothing if they come in the next step. A step that is shorter still would not be efficient.
MIN_FILLED = 0.25


class Candidate(NamedTuple):
    """A prompt that could be continued or started in this step."""

    request_id: str
    start: int  # the first position to compute
    length: int  # positions left
    num_prompt_tokens: int


class StepView(NamedTuple):
    """What a policy knows when it plans a step."""

    now: float
    num_in_flight: int  # steps planned and not yet committed
    num_decodes: int
    decode_context: int  # sum over decodes of the positions that each attends to
    earliest_deadline: float | None  # of the streams decoding in this step; None: none has one yet
    tightest_target: float | None  # of these streams; None: no stream decodes, or the policy has no target
    overhead: float  # recent seconds per step outside the executor
    step_time: StepTimeModel
    max_num_seqs: int
    candidates: Sequence[Candidate]  # in serving order
    free_tokens: int  # free KV cache
    long_prefill_token_threshold: int  # upper bound of a prompt's tokens in a step; 0: none
    caps: ExecutorCaps
    turn: int  # how many candidates, from the first on, the tenant that is next has; see `ServiceLines.length_of_turn`

    @property
    def tokens_of_turn(self) -> float:
        """Prefill tokens until the next tenant's prompts have their first tokens, if other tenants have prompts too."""
        own = self.candidates[: self.turn]
        if self.turn == len(self.candidates) or not all(self._can_begin(one) for one in own):
            return math.inf
        return sum(one.length for one in own)

    def _can_begin(self, candidate: Candidate) -> bool:
        """Could this step give it its first token? Not if it is a recomputed request that already had one."""
        is_new = candidate.start + candidate.length == candidate.num_prompt_tokens
        return is_new and self.most_of(candidate) == candidate.length

    def most_of(self, candidate: Candidate) -> int:
        """Upper bound of a prompt's tokens in a step."""
        return min(candidate.length, self.long_prefill_token_threshold or candidate.length)


class Quota(NamedTuple):
    """Tokens for `StepView.candidates[candidate]`."""

    candidate: int
    tokens: int
    reason: ChunkReason


class Quotas(NamedTuple):
    run_decodes: bool
    chunks: tuple[Quota, ...]
    most_seconds: float | None = None  # see `StepPlan`


class Policy(ABC):
    """Plans one step at a time. Its state comes only from `plan` and `observe`."""

    # Does it look at steps without candidates? Else a simulation need not show it all of them.
    heeds_decodes = True

    def __init__(self, max_step_tokens: int) -> None:
        # Upper bound of a step's tokens. Decodes alone may exceed it, and so may the prefill floor.
        self.max_step_tokens = max_step_tokens
        self.pacing: Pacing | None = None  # None: no deadlines
        self.patience = 0.0  # a prompt is due this many times its own prefill after its arrival; 0: in order of arrival
        self.feasible_target: float | None = None  # the lowest feasible target, while the actual one is infeasible
        self.shortest_step = math.inf  # seconds of a step with the least prefill, and its overhead; inf: not known

    @abstractmethod
    def plan(self, view: StepView) -> Quotas: ...

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Learn from a step that ran. By default there is nothing to learn."""
        return

    def infeasibility_warning(self) -> tuple[float, float] | None:
        """The range in which the lowest feasible target is, once, when the target has been infeasible for a while."""
        return None


class Argument(Enum):
    """What is written after a policy's name."""

    NOTHING = ""
    BUDGET = ":N"  # the tokens of a step
    OPTIONAL_TIME = "[:TIME]"
    TARGET = ":TIME[,paced]"  # between a stream's tokens
    INTERVAL = ":STEPS"
    SHARE = ":PERCENT"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PolicyKind:
    """A policy as users choose it, and what the rest of evenflow must know about it."""

    name: str
    argument: Argument = Argument.NOTHING
    default_seconds: float | None = None  # with an optional time
    examples: Mapping[str, str]  # as users write it, each with its help
    build: Callable[[PolicySpec], Policy]
    cuts_prompts: bool = True  # False: a prompt's tokens are all in one step, which its budget must hold
    runs_on_hosts: bool = False  # also inside another engine

    @property
    def form(self) -> str:
        return self.name + self.argument.value


def share_out(
    view: StepView,
    budget: int,
    reason_of_budget: ChunkReason = ChunkReason.BUDGET,
    *,
    limit_of: Callable[[Candidate], int] | None = None,
    max_chunks: int | None = None,
) -> list[Quota]:
    """Give the budget to the candidates in order, each up to its length and limit."""
    quotas: list[Quota] = []
    max_chunks = min(max_chunks or view.caps.max_prefill_sequences, view.caps.max_prefill_sequences)
    for index, candidate in enumerate(view.candidates[:max_chunks]):
        if budget <= 0:
            break
        limits = [(candidate.length, ChunkReason.END_OF_PROMPT), (budget, reason_of_budget)]
        if limit_of is not None:
            limits.append((limit_of(candidate), ChunkReason.CHUNK_SIZE))
        if view.long_prefill_token_threshold:
            limits.append((view.long_prefill_token_threshold, ChunkReason.LONG_PREFILL))
        tokens, reason = min(limits, key=lambda limit: limit[0])
        aligned = tokens - tokens % view.caps.chunk_alignment
        if reason is not ChunkReason.END_OF_PROMPT and 0 < aligned < tokens:
            tokens, reason = aligned, ChunkReason.ALIGNMENT
        quotas.append(Quota(index, tokens, reason))
        budget -= tokens
    return quotas
