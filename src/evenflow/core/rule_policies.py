"""Policies that follow a rule instead of predicting step times: budget, turns, load, recent times, prompt length."""

from __future__ import annotations

from collections.abc import Sequence

from evenflow.core.chunk_rules import AdaptiveChunker, chunk_size_for_prompt, select_optimal_chunk_size
from evenflow.core.plan import ChunkReason, StepShape
from evenflow.core.policy import (
    FLOOR_STEPS,
    FLOOR_TOKENS,
    MIN_FILLED,
    Argument,
    Policy,
    PolicyKind,
    Quota,
    Quotas,
    StepView,
    share_out,
)

_ADAPTIVE_BASE_CHUNK, _ADAPTIVE_TIME_S = 128, 0.05


class Unchunked(Policy):
    """Whole prompts, as many as fit in the budget and at least one."""

    heeds_decodes = False

    def plan(self, view: StepView) -> Quotas:
        quotas: list[Quota] = []
        budget = self.max_step_tokens - view.num_decodes
        for index, candidate in enumerate(view.candidates[: view.caps.max_prefill_sequences]):
            if quotas and candidate.length > budget:
                break
            quotas.append(Quota(index, candidate.length, ChunkReason.END_OF_PROMPT))
            budget -= candidate.length
        return Quotas(True, tuple(quotas))


UNCHUNKED = PolicyKind(
    name="unchunked",
    examples={"unchunked": "a prompt in one step"},
    build=lambda spec: Unchunked(spec.budget),
    cuts_prompts=False,
    runs_on_hosts=True,
)


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
        return Quotas(False, tuple(share_out(view, self.max_step_tokens, ChunkReason.CHUNK_SIZE, max_chunks=1)))


ALTERNATE = PolicyKind(
    name="alternate",
    argument=Argument.BUDGET,
    examples={"alternate:128": "a chunk and a decode step in turn"},
    build=lambda spec: Alternate(spec.budget),
)


class Budgeted(Policy):
    """Decodes first; chunks share the rest of the budget, by the subclass's rule."""

    heeds_decodes = False

    def __init__(self, max_step_tokens: int) -> None:
        super().__init__(max_step_tokens)
        self._steps_without_prefill = 0

    def plan(self, view: StepView) -> Quotas:
        left = self.max_step_tokens - view.num_decodes
        quotas: Sequence[Quota] = ()
        if view.candidates and left > 0:
            short = max(view.tokens_of_turn, MIN_FILLED * self.max_step_tokens - view.num_decodes)
            limits = (left, ChunkReason.BUDGET), (short, ChunkReason.TURN)
            tokens, reason = min(limits, key=lambda limit: limit[0])
            quotas = self.chunks(view, int(tokens), reason)
        elif view.candidates and self._steps_without_prefill + 1 >= FLOOR_STEPS:
            floor = share_out(view, min(FLOOR_TOKENS, self.max_step_tokens), max_chunks=1)
            quotas = [quota._replace(reason=ChunkReason.FLOOR) for quota in floor]
        self._steps_without_prefill = 0 if quotas or not view.candidates else self._steps_without_prefill + 1
        return Quotas(True, tuple(quotas))

    def chunks(self, view: StepView, budget: int, reason: ChunkReason) -> Sequence[Quota]:
        return share_out(view, budget, reason)


FIXED = PolicyKind(
    name="fixed",
    argument=Argument.BUDGET,
    examples={"fixed:512": "at most this many tokens in a step, decodes first"},
    build=lambda spec: Budgeted(spec.budget),
    runs_on_hosts=True,
)


class ByLoad(Budgeted):
    """One chunk size a step, smaller when most slots decode, larger for long prompts."""

    def chunks(self, view: StepView, budget: int, reason: ChunkReason) -> Sequence[Quota]:
        first = view.candidates[0]
        size = select_optimal_chunk_size(
            sequence_length=first.num_prompt_tokens,
            available_memory=max(view.free_tokens, first.length),  # a prompt that is running has its blocks already
            active_decode_requests=view.num_decodes,
            batch_size=view.max_num_seqs,
        )
        return share_out(view, min(size, budget), ChunkReason.CHUNK_SIZE)


LOAD = PolicyKind(
    name="load",
    examples={"load": "a chunk size by load and prompt length"},
    build=lambda spec: ByLoad(spec.budget),
)


class Adaptive(Budgeted):
    """One chunk size a step: halved under decode pressure, doubled while recent steps are faster than the target."""

    heeds_decodes = True

    def __init__(self, max_step_tokens: int, latency_target: float) -> None:
        super().__init__(max_step_tokens)
        self._chunker = AdaptiveChunker(decode_latency_target=latency_target)

    def chunks(self, view: StepView, budget: int, reason: ChunkReason) -> Sequence[Quota]:
        size = self._chunker.select_chunk_size(_ADAPTIVE_BASE_CHUNK, view.num_decodes / view.max_num_seqs)
        return share_out(view, min(size, budget), ChunkReason.CHUNK_SIZE)

    def observe(self, shape: StepShape, seconds: float) -> None:
        if shape.prefill_rows:
            self._chunker.recent_chunk_times.append(seconds)


ADAPTIVE = PolicyKind(
    name="adaptive",
    argument=Argument.OPTIONAL_TIME,
    default_seconds=_ADAPTIVE_TIME_S,
    examples={"adaptive": "a chunk size by recent step times"},
    build=lambda spec: Adaptive(spec.budget, spec.seconds or _ADAPTIVE_TIME_S),
)


class ByPromptLength(Budgeted):
    """Chunks of 512, 1,024 or 2,048 tokens, by the length of their prompt."""

    def chunks(self, view: StepView, budget: int, reason: ChunkReason) -> Sequence[Quota]:
        return share_out(
            view, budget, reason, limit_of=lambda candidate: chunk_size_for_prompt(candidate.num_prompt_tokens)
        )


PROMPT_LENGTH = PolicyKind(
    name="prompt-length",
    examples={"prompt-length": "a chunk size by the length of the prompt"},
    build=lambda spec: ByPromptLength(spec.budget),
)
