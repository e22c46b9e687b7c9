"""Targets are called infeasible on evidence, and the advised one stays where it is unless the load changes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice, pairwise

import pytest

from evenflow.core.feasibility import Feasibility, round_up
from evenflow.core.plan import ExecutorCaps
from evenflow.core.policies import PolicySpec
from evenflow.core.policy import Candidate, StepView
from evenflow.core.step_time import StepTimeModel
from evenflow.core.target_policy import Target
from tests.core.target_load import max_type

NUM_STREAMS, PROMPT = 16, 2000
INFEASIBLE_S = 0.009  # a step of decodes alone takes 10 ms


class NoisyMachine:
    """The policy and its model, in virtual time: streams of a steady length beside prompts that keep coming.

    Every step is off by about a tenth, and one in two hundred takes two to four times as long.
    """

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self._step_time = StepTimeModel()
        self._now = 0.0

    def steps(self, target_s: float, num_steps: int) -> Iterator[tuple[float, float | None]]:
        """Seconds of each step, and the advice after it."""
        policy = PolicySpec.for_target(target_s).build()
        assert isinstance(policy, Target)
        caps, place = ExecutorCaps(), 0
        for number in range(num_steps):
            context = NUM_STREAMS * (64 + number % 200)
            [quota] = policy.plan(self._view(target_s, caps, context, place)).chunks
            chunk = (place, quota.tokens)
            shape = caps.step_shape(num_decodes=NUM_STREAMS, decode_context=context, chunks=[chunk])
            slowness = self._draw.uniform(2, 4) if self._draw.random() < 0.005 else 1.0
            seconds = max_type(shape) * slowness * self._draw.lognormvariate(0, 0.1)
            self._step_time.observe(shape, seconds)
            self._now += seconds
            place = (place + quota.tokens) % PROMPT
            yield seconds, policy.feasible_target

    def _view(self, target_s: float, caps: ExecutorCaps, context: int, place: int) -> StepView:
        return StepView(
            now=self._now,
            num_in_flight=0,
            num_decodes=NUM_STREAMS,
            decode_context=context,
            earliest_deadline=self._now + target_s,
            tightest_target=target_s,
            overhead=0.0,
            step_time=self._step_time,
            max_num_seqs=64,
            candidates=[Candidate("prompt", place, PROMPT - place, PROMPT)],
            free_tokens=1 << 20,
            long_prefill_token_threshold=0,
            caps=caps,
            turn=1,
        )


@pytest.mark.slow
def test_the_advice_hardly_changes_in_ten_thousand_noisy_steps() -> None:
    advice = [advised for _, advised in NoisyMachine(1).steps(INFEASIBLE_S, 10_000)]
    assert advice[0] is None  # there is no evidence yet
    known = advice[600:]
    assert None not in known
    assert sum(a != b for a, b in pairwise(known)) < len(known) / 50


def test_the_advice_is_not_below_what_the_least_steps_take() -> None:
    steps = list(NoisyMachine(3).steps(INFEASIBLE_S, 2000))[100:]
    late = sum(seconds > (advised or 0.0) for (_, advised), (seconds, _) in pairwise(steps))
    assert late <= 0.05 * len(steps)  # the margin covers 95%


def test_the_advised_target_is_kept_once_it_is_set() -> None:
    machine = NoisyMachine(3)
    *_, (_, advised) = machine.steps(INFEASIBLE_S, 1000)
    assert advised is not None
    steps = list(machine.steps(advised, 1000))
    assert {advice for _, advice in steps} == {None}
    assert sum(seconds > advised for seconds, _ in steps) <= 0.05 * len(steps)  # the margin covers 95%


def test_a_load_that_shrinks_lowers_the_advice_and_then_withdraws_it() -> None:
    found = Feasibility()

    def judge(needed: Iterator[float] | list[float]) -> None:
        for seconds in needed:
            found.judge(seconds, 0.1)

    judge([0.31] * 15)
    assert found.advised is None
    judge([0.31])
    assert found.advised == 0.31
    judge([0.31] * 600)
    judge([0.202] * 63)
    assert found.advised == 0.31
    judge([0.202])
    assert found.advised == 0.21
    judge([0.05, 0.05, 0.15] * 50)
    assert found.advised is not None  # a few good steps prove nothing
    judge([0.05] * 16)
    assert found.advised is None


def test_a_target_at_the_edge_is_not_called_infeasible_by_noise() -> None:
    found, draw = Feasibility(), random.Random(4)
    for needed in islice(iter(lambda: draw.gauss(0.1, 0.02), None), 10_000):
        found.judge(needed, 0.105)
        assert found.advised is None


@pytest.mark.parametrize(
    ("seconds", "rounded"), [(0.134, 0.14), (0.14, 0.14), (0.0991, 0.1), (1.201, 1.3), (0.001, 0.001), (12.1, 13.0)]
)
def test_figures_are_rounded_up_to_two_digits(seconds: float, rounded: float) -> None:
    assert round_up(seconds) == pytest.approx(rounded, abs=1e-12)
