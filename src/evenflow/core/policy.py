"""How many tokens of which prompts go into the next step: a policy turns a StepView into Quotas.

Every policy takes all decodes first. They differ in how much prefill they let in beside them; `make_policy` reads the
one notation for them that the command line, the API and results share. Must not know: requests, blocks, executors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from evenflow.core.chunk_rules import AdaptiveChunker, chunk_size_for_prompt, select_optimal_chunk_size
from evenflow.core.plan import ChunkReason, ExecutorCaps, StepShape
from evenflow.errors import InvalidConfig

# Where decodes alone fill the budget, prefill still gets so many tokens every so many steps.
FLOOR_TOKENS = 16
FLOOR_STEPS = 8

_ADAPTIVE_BASE_CHUNK = 128


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
    num_decodes: int
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


class Unchunked(Policy):
    """A prompt is prefilled in one step: whole prompts, as many as the budget holds, and always one."""

    def plan(self, view: StepView) -> Quotas:
        quotas: list[Quota] = []
        budget = self.max_step_tokens - view.num_decodes
        for index, candidate in enumerate(view.candidates[: view.caps.max_prefill_sequences]):
            if quotas and candidate.length > budget:
                break
            quotas.append(Quota(index, candidate.length, ChunkReason.END_OF_PROMPT))
            budget -= candidate.length
        return Quotas(True, tuple(quotas))


class Alternate(Policy):
    """One chunk, then one decode step, in turn."""

    def __init__(self, chunk_size: int) -> None:
        super().__init__(chunk_size)
        self._chunk_ran_last = False

    def plan(self, view: StepView) -> Quotas:
        prefills = bool(view.candidates) and not (self._chunk_ran_last and view.num_decodes)
        self._chunk_ran_last = prefills
        if not prefills:
            return Quotas(True, ())
        chunk = share_out(view, self.max_step_tokens, max_chunks=1)
        return Quotas(False, tuple(_because_of_chunk_size(chunk)))


def _because_of_chunk_size(quotas: Iterable[Quota]) -> Iterable[Quota]:
    """Where the budget of a step is the policy's chunk size, say so."""
    for quota in quotas:
        yield quota._replace(reason=ChunkReason.CHUNK_SIZE) if quota.reason is ChunkReason.BUDGET else quota


class Budgeted(Policy):
    """Decodes first, the rest of the step's budget to chunks; what a chunk may hold is the subclass's rule."""

    def __init__(self, max_step_tokens: int) -> None:
        super().__init__(max_step_tokens)
        self._steps_without_prefill = 0

    def plan(self, view: StepView) -> Quotas:
        left = self.max_step_tokens - view.num_decodes
        quotas: Sequence[Quota] = ()
        if view.candidates and left > 0:
            quotas = self.chunks(view, left)
        elif view.candidates and self._steps_without_prefill + 1 >= FLOOR_STEPS:
            floor = share_out(view, min(FLOOR_TOKENS, self.max_step_tokens), max_chunks=1)
            quotas = [quota._replace(reason=ChunkReason.FLOOR) for quota in floor]
        self._steps_without_prefill = 0 if quotas or not view.candidates else self._steps_without_prefill + 1
        return Quotas(True, tuple(quotas))

    def chunks(self, view: StepView, budget: int) -> Sequence[Quota]:
        return share_out(view, budget)


class ByLoad(Budgeted):
    """One chunk size a step, smaller when most slots decode, larger for long prompts."""

    def chunks(self, view: StepView, budget: int) -> Sequence[Quota]:
        first = view.candidates[0]
        size = select_optimal_chunk_size(
            sequence_length=first.num_prompt_tokens,
            available_memory=max(view.free_tokens, first.length),  # a prompt that is running has its blocks already
            active_decode_requests=view.num_decodes,
            batch_size=view.max_num_seqs,
        )
        return list(_because_of_chunk_size(share_out(view, min(size, budget))))


class Adaptive(Budgeted):
    """One chunk size a step: halved under decode pressure, doubled while recent steps are faster than the target."""

    def __init__(self, max_step_tokens: int, latency_target: float) -> None:
        super().__init__(max_step_tokens)
        self._chunker = AdaptiveChunker(decode_latency_target=latency_target)

    def chunks(self, view: StepView, budget: int) -> Sequence[Quota]:
        size = self._chunker.select_chunk_size(_ADAPTIVE_BASE_CHUNK, view.num_decodes / view.max_num_seqs)
        return list(_because_of_chunk_size(share_out(view, min(size, budget))))

    def observe(self, shape: StepShape, seconds: float) -> None:
        if shape.prefill_rows:
            self._chunker.recent_chunk_times.append(seconds)


class ByPromptLength(Budgeted):
    """Chunks of 512, 1,024 or 2,048 tokens, by the length of their prompt."""

    def chunks(self, view: StepView, budget: int) -> Sequence[Quota]:
        return share_out(view, budget, limit_of=lambda candidate: chunk_size_for_prompt(candidate.num_prompt_tokens))


POLICY_FORMS = ("unchunked", "alternate:N", "fixed:N", "load", "adaptive[:MS]", "prompt-length")


def make_policy(text: str, max_num_batched_tokens: int) -> Policy:
    """Build the policy that `text` names; `max_num_batched_tokens` bounds those whose own text gives no bound."""
    name, _, argument = text.partition(":")
    if name == "unchunked" and not argument:
        return Unchunked(max_num_batched_tokens)
    if name == "alternate":
        return Alternate(_positive_int(text, argument))
    if name == "fixed":
        return Budgeted(_positive_int(text, argument))
    if name == "load" and not argument:
        return ByLoad(max_num_batched_tokens)
    if name == "adaptive":
        milliseconds = _positive_int(text, argument.removesuffix("ms")) if argument else 50
        return Adaptive(max_num_batched_tokens, milliseconds / 1000)
    if name == "prompt-length" and not argument:
        return ByPromptLength(max_num_batched_tokens)
    raise InvalidConfig(f"Got policy={text!r} but expected one of: {', '.join(POLICY_FORMS)}.")


def _positive_int(policy: str, argument: str) -> int:
    if not argument.isdecimal() or int(argument) == 0:
        raise InvalidConfig(f"Got policy={policy!r} but expected a whole number >= 1 after the colon.")
    return int(argument)
