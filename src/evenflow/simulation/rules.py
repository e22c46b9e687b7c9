"""Rules of other engines, as policies of the simulator: what a user runs today beside what they could run.

They take the place of the policy only. Admission, KV blocks and the prefix cache stay evenflow's, with one difference
that shows: a decode is never left out because prompts that were admitted before it took the whole budget.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from evenflow.core.plan import ChunkReason, StepShape
from evenflow.core.policies import forget_policy, register_policy
from evenflow.core.policy import Argument, Policy, PolicyKind, Quota, Quotas, StepView, share_out

DEFAULT_BUDGET = 8192  # of vLLM's server and SGLang's chunked_prefill_size, on large GPUs
_SHARE_HALF_LIFE = 0.5  # seconds after which what prefill took counts half


class Vllm(Policy):
    """A fixed budget: decodes first, then prompts in order of admission. With an interval, prompts in every n-th step.

    In vLLM 0.32 the interval acts only with data parallelism; without it, the flag does nothing.
    """

    def __init__(self, budget: int, interval: int = 1) -> None:
        super().__init__(budget)
        self.heeds_decodes = interval > 1
        self._interval = interval
        self._step = 0

    def plan(self, view: StepView) -> Quotas:
        self._step += 1
        is_held = self._step % self._interval != 0 and view.num_decodes > 0
        return Quotas(True, () if is_held else _chunks(view, self.max_step_tokens - view.num_decodes))


class Sglang(Policy):
    """Prompts before decodes, in steps of their own up to a budget. The interval counts decode steps between."""

    def __init__(self, budget: int, interval: int = 0) -> None:
        super().__init__(budget)
        self.heeds_decodes = interval > 0
        self._interval = interval
        self._steps_left = 0  # in which prompts wait

    def plan(self, view: StepView) -> Quotas:
        if self._steps_left and view.num_decodes:
            self._steps_left -= 1
            return Quotas(True, ())
        chunks = _chunks(view, self.max_step_tokens)
        if chunks:
            self._steps_left = self._interval
        return Quotas(not chunks, chunks)


class PrefillShare(Policy):
    """Steps of prompts and steps of decodes in turn, so that prompts get this share of the time while both wait."""

    def __init__(self, budget: int, share: float) -> None:
        super().__init__(budget)
        self._share = share
        self._seconds = {True: 0.0, False: 0.0}  # of steps with prompts, and without; recent ones count more

    def plan(self, view: StepView) -> Quotas:
        total = sum(self._seconds.values())
        is_due = not view.num_decodes or self._seconds[True] <= self._share * total
        chunks = _chunks(view, self.max_step_tokens) if is_due else ()
        return Quotas(not chunks, chunks)

    def observe(self, shape: StepShape, seconds: float) -> None:
        fading = 0.5 ** (seconds / _SHARE_HALF_LIFE)
        for kind in self._seconds:
            self._seconds[kind] *= fading
        self._seconds[shape.prefill_rows > 0] += seconds


def _chunks(view: StepView, budget: int) -> tuple[Quota, ...]:
    return tuple(share_out(view, budget, ChunkReason.BUDGET))


def _kinds() -> tuple[PolicyKind, ...]:
    return (
        PolicyKind(
            name="vllm",
            argument=Argument.BUDGET,
            examples={"vllm:8192": "vLLM's rule with this max_num_batched_tokens"},
            build=lambda spec: Vllm(spec.budget),
        ),
        PolicyKind(
            name="vllm-interval",
            argument=Argument.INTERVAL,
            examples={"vllm-interval:4": "the same, with prompts in every 4th step (prefill_schedule_interval)"},
            build=lambda spec: Vllm(spec.max_num_batched_tokens or DEFAULT_BUDGET, spec.number or 1),
        ),
        PolicyKind(
            name="sglang",
            argument=Argument.BUDGET,
            examples={"sglang:8192": "SGLang's rule with this chunked_prefill_size: prompts before decodes"},
            build=lambda spec: Sglang(spec.budget),
        ),
        PolicyKind(
            name="sglang-mixed",
            argument=Argument.BUDGET,
            examples={"sglang-mixed:8192": "the same with --enable-mixed-chunk: decodes take part of the budget"},
            build=lambda spec: Vllm(spec.budget),
        ),
        PolicyKind(
            name="sglang-interval",
            argument=Argument.INTERVAL,
            examples={"sglang-interval:4": "SGLang's rule with prefill_decode_interval"},
            build=lambda spec: Sglang(spec.max_num_batched_tokens or DEFAULT_BUDGET, spec.number or 0),
        ),
        PolicyKind(
            name="prefill-share",
            argument=Argument.SHARE,
            examples={"prefill-share:40": "prompts get 40% of the time while streams decode"},
            build=lambda spec: PrefillShare(spec.max_num_batched_tokens or DEFAULT_BUDGET, (spec.number or 100) / 100),
        ),
    )


@contextmanager
def other_rules() -> Iterator[None]:
    """Let users choose them by name while the block runs."""
    registered = [register_policy(kind) for kind in _kinds()]
    try:
        yield
    finally:
        for kind in registered:
            forget_policy(kind)
