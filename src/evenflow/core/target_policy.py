"""The latency-target policy: as much prefill in each step as keeps every stream's next token on time.

It asks the StepTimeModel how long a step would take and searches for the largest one that meets the earliest deadline.
The model learns the machine while it runs.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from evenflow.core.deadlines import NO_DEADLINE, Pacing
from evenflow.core.feasibility import WINDOW, Feasibility
from evenflow.core.plan import ChunkReason, StepShape
from evenflow.core.policy import (
    FLOOR_TOKENS,
    MIN_FILLED,
    Argument,
    Candidate,
    Policy,
    PolicyKind,
    Quota,
    Quotas,
    StepView,
    share_out,
)

if TYPE_CHECKING:
    from evenflow.core.policies import PolicySpec

# With no stream decoding, longer steps are more efficient; but a request that arrives meanwhile has to wait.
IDLE_STRETCH = 2.0
# Beyond the largest step seen the model extrapolates: a step grows at most by this factor.
SLOW_START = 2
# A prompt's first token is due this many times its own prefill after its arrival; the earliest due goes first.
PATIENCE = 2.0

_Chunks = list[tuple[Candidate, int]]  # with their tokens


class Target(Policy):
    """The largest chunks whose predicted time plus margin meets the earliest deadline; never below a floor."""

    def __init__(self, max_step_tokens: int, pacing: Pacing) -> None:
        super().__init__(max_step_tokens)
        self.pacing: Pacing = pacing
        self.patience = PATIENCE
        self._busy_until = 0.0  # when the last planned step is predicted to end
        self._feasibility = Feasibility()
        self._num_infeasible = 0  # steps in a row
        self._has_warned = False

    def plan(self, view: StepView) -> Quotas:
        start = max(view.now, self._busy_until) if view.num_in_flight else view.now
        quotas: list[Quota] = []
        most_seconds = None
        if view.candidates:
            floor = min(FLOOR_TOKENS, sum(map(view.most_of, view.candidates)))
            least = view.step_time.upper(_shape(view, floor))
            self._judge_target(view, least)
            seconds = self._seconds_left(view, start)
            if self.feasible_target is not None:  # what cannot be kept should not hold prompts up for good
                seconds = max(seconds, self.feasible_target - view.overhead)
            if view.caps.sheds_rows and view.num_decodes:
                most_seconds = max(0.0, seconds)
            tokens, reason = self._largest_prefill(view, seconds, floor, least)
            own = view.tokens_of_turn
            if tokens > own:
                tokens = _most_in_time(view, MIN_FILLED * seconds, int(own), tokens)
                reason = ChunkReason.TURN
            quotas = share_out(view, tokens, reason)
        self._busy_until = start + view.step_time.predict(_shape(view, sum(quota.tokens for quota in quotas)))
        return Quotas(True, tuple(quotas), most_seconds)

    def _seconds_left(self, view: StepView, start: float) -> float:
        if not view.num_decodes:
            return IDLE_STRETCH * self.pacing.target
        deadline = view.earliest_deadline
        if view.num_in_flight or deadline is None:
            # The step in flight gives the tokens due at that deadline; this step gives the next ones.
            deadline = self.pacing.next_due(deadline or NO_DEADLINE, start, view.tightest_target or self.pacing.target)
        return deadline - start - view.overhead

    def _largest_prefill(self, view: StepView, seconds: float, floor: int, least: float) -> tuple[int, ChunkReason]:
        """Prefill tokens for this step, and what limits them. `least`: seconds with the floor alone."""
        proven = max(SLOW_START * view.step_time.largest_rows_known - view.num_decodes, floor)
        budget = max(self.max_step_tokens - view.num_decodes, floor)
        most, reason = min((proven, ChunkReason.WARM_UP), (budget, ChunkReason.BUDGET), key=lambda limit: limit[0])
        most = min(most, sum(map(view.most_of, view.candidates)))
        upper = view.step_time.upper
        if least > seconds:
            return floor, ChunkReason.FLOOR
        if upper(_shape(view, most)) <= seconds:
            return most, reason
        tokens = _most_in_time(view, seconds, floor, most)
        # Rounded down to a size that was seen, steps would never grow: margins are wide beyond the largest one.
        untried = tokens + -tokens % view.caps.chunk_alignment
        is_larger = untried > max(tokens, view.step_time.largest_rows_known - view.num_decodes)
        if is_larger and untried <= most and view.step_time.predict(_shape(view, untried)) <= seconds:
            return untried, ChunkReason.LATENCY
        ending = _without_last_chunk(view, tokens)
        if ending < tokens:
            return ending, ChunkReason.LATENCY
        whole = _in_whole_waves(view, tokens)
        return (whole, ChunkReason.ALIGNMENT) if whole < tokens else (tokens, ChunkReason.LATENCY)

    def _judge_target(self, view: StepView, least: float) -> None:
        """Is the engine's target feasible with the minimum of prefill? Without evidence, assume that it is.

        No stream's own target counts that is tighter; where all are looser, the tightest one does.
        """
        self.shortest_step = least + view.overhead if least else math.inf
        if view.tightest_target is not None and view.step_time.is_calibrated:
            self._feasibility.judge(self.shortest_step, max(view.tightest_target, self.pacing.target))
            self.feasible_target = self._feasibility.advised
            self._num_infeasible = 0 if self.feasible_target is None else self._num_infeasible + 1

    def infeasibility_warning(self) -> tuple[float, float] | None:
        if self._has_warned or self._num_infeasible < WINDOW:
            return None
        self._has_warned = True
        return self._feasibility.estimate


def _built(spec: PolicySpec) -> Target:
    assert spec.pacing is not None  # parsed with a time
    return Target(spec.budget, spec.pacing)


TARGET = PolicyKind(
    name="target",
    argument=Argument.TARGET,
    examples={
        "target:200ms": "the largest chunks that keep every stream's next token in time",
        "target:200ms,paced": "the same, by an even pace: single gaps may be longer",
    },
    build=_built,
    runs_on_hosts=True,
)


def _most_in_time(view: StepView, seconds: float, fits: int, too_long: int) -> int:
    """The most prefill tokens whose step rarely takes more than `seconds`."""
    while too_long - fits > max(1, fits // 64):  # the model's error is larger
        middle = (fits + too_long) // 2
        if view.step_time.upper(_shape(view, middle)) <= seconds:
            fits = middle
        else:
            too_long = middle
    return fits


def _without_last_chunk(view: StepView, num_tokens: int) -> int:
    """These tokens; those before the last chunk if prompts end in them that should not wait for it."""
    *others, (candidate, last) = chunks = _chunks(view, num_tokens)
    num_ending = sum(length == one.length for one, length in others)
    if not num_ending or last == candidate.length:
        return num_tokens
    together, sooner, later = (_seconds(view, part) for part in (chunks, others, [(candidate, last)]))
    gained = num_ending * (together - sooner)
    lost = (len(view.candidates) - num_ending) * (sooner + later - together)
    return num_tokens - last if gained > lost else num_tokens


def _in_whole_waves(view: StepView, num_tokens: int) -> int:
    """These tokens, or fewer if that makes prefill faster: a wave of attention takes as long if it is not full."""
    if view.caps.attention_waves is None:
        return num_tokens
    _, last = _chunks(view, num_tokens)[-1]
    fewer = num_tokens - last + view.caps.attention_waves.whole_rows(last)
    seconds, fewer_seconds = (_seconds(view, _chunks(view, tokens)) for tokens in (num_tokens, fewer))
    return fewer if fewer * seconds > num_tokens * fewer_seconds else num_tokens


def _seconds(view: StepView, chunks: _Chunks) -> float:
    return view.step_time.predict(_shape_of(view, chunks))


def _shape(view: StepView, num_tokens: int) -> StepShape:
    """The step in which the candidates, in order, get this many tokens."""
    return _shape_of(view, _chunks(view, num_tokens))


def _shape_of(view: StepView, chunks: _Chunks) -> StepShape:
    return view.caps.step_shape(
        num_decodes=view.num_decodes,
        decode_context=view.decode_context,
        chunks=[(candidate.start, length) for candidate, length in chunks],
        prefill_logit_rows=sum([length == candidate.length for candidate, length in chunks]),
    )


def _chunks(view: StepView, num_tokens: int) -> _Chunks:
    """How many of these tokens each candidate gets, in order."""
    left, chunks = num_tokens, _Chunks()
    for candidate in view.candidates:
        if not left:
            break
        length = min(view.most_of(candidate), left)
        chunks.append((candidate, length))
        left -= length
    return chunks
