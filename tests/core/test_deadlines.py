"""When tokens are due, which are late, what a step's streams demand of it, and who goes first."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenflow.core.deadlines import (
    NO_DEADLINE,
    LateToken,
    Pacing,
    Place,
    StreamDeadline,
    Urgency,
    emit,
    urgency,
)

STRICT, PACED = Pacing(0.25), Pacing(0.25, is_paced=True)  # quarters: sums of them are exact


class Given(NamedTuple):
    deadline: StreamDeadline
    id: str = "a"


def emitted(stream: StreamDeadline, pacing: Pacing, now: float) -> LateToken | None:
    """A token of this stream alone."""
    late = emit([Given(stream)], pacing, now)
    return late[0] if late else None


def urgency_of(*streams: StreamDeadline) -> Urgency:
    return urgency(map(Given, streams), STRICT)


def deadlines(pacing: Pacing, moments: list[float], own_target: float | None = None) -> list[float]:
    """When the token after each of these is due."""
    stream, found = StreamDeadline(own_target), []
    for moment in moments:
        emitted(stream, pacing, moment)
        found.append(stream.due)
    return found


def late_tokens(pacing: Pacing, moments: list[float], own_target: float | None = None) -> list[LateToken | None]:
    stream = StreamDeadline(own_target)
    return [emitted(stream, pacing, moment) for moment in moments]


def test_nothing_is_owed_before_the_first_token() -> None:
    stream = StreamDeadline()
    assert stream.due == NO_DEADLINE
    assert emitted(stream, STRICT, 1000.0) is None


def test_strict_tokens_are_due_a_target_after_the_last() -> None:
    assert deadlines(STRICT, [1.0, 1.125, 1.25, 2.0]) == [1.25, 1.375, 1.5, 2.25]


def test_paced_tokens_earn_slack_by_being_early_up_to_two_targets() -> None:
    # Due at 1.25: four tokens long before that move the deadline on by one target each, until 2 targets are earned.
    assert deadlines(PACED, [1.0, 1.0, 1.0, 1.0]) == [1.25, 1.5, 1.75, 1.75]


def test_a_paced_stream_lends_its_slack_and_then_has_none() -> None:
    assert deadlines(PACED, [1.0, 1.0, 1.0, 1.75]) == [1.25, 1.5, 1.75, 2.0]
    assert late_tokens(PACED, [1.0, 1.0, 1.0, 1.75]) == [None] * 4


def test_a_late_token_says_its_gap_and_by_how_much() -> None:
    assert late_tokens(STRICT, [1.0, 1.25, 2.0]) == [None, None, LateToken("a", gap=0.75, seconds=0.5)]
    assert late_tokens(PACED, [1.0, 1.0, 2.0]) == [None, None, LateToken("a", gap=1.0, seconds=0.5)]


@pytest.mark.parametrize("pacing", [STRICT, PACED])
def test_a_late_token_reanchors(pacing: Pacing) -> None:
    assert deadlines(pacing, [1.0, 9.0]) == [1.25, 9.25]


def test_a_streams_own_target_goes_before_the_engines() -> None:
    assert deadlines(STRICT, [1.0, 1.25], own_target=0.5) == [1.5, 1.75]
    assert deadlines(PACED, [1.0, 1.0, 1.0, 1.0], own_target=0.5) == [1.5, 2.0, 2.5, 2.5]
    assert late_tokens(STRICT, [1.0, 1.5, 1.75], own_target=0.5) == [None] * 3


def test_a_target_that_cannot_be_kept_is_the_engines() -> None:
    pacing = Pacing(0.25, feasible=0.1)
    assert [pacing.target_of(own) for own in (None, 0.05, 0.1, 0.2, 0.5)] == [0.25, 0.25, 0.1, 0.2, 0.5]
    assert Pacing(0.25, feasible=0.4).target_of(0.3) == 0.3  # looser than the engine's
    assert late_tokens(pacing, [1.0, 1.25, 1.75], own_target=0.05) == [None, None, LateToken("a", 0.5, 0.25)]


@given(
    st.lists(st.floats(0, 5), min_size=1, max_size=30),
    st.floats(0.01, 2),
    st.none() | st.floats(0.01, 2),
    st.booleans(),
)
def test_deadlines_follow_the_formula(
    waits: list[float], engine_target: float, own_target: float | None, is_paced: bool
) -> None:
    """d[k+1] = clamp(d[k] + T, e[k] + T, e[k] + T + C)"""
    pacing, stream = Pacing(engine_target, is_paced), StreamDeadline(own_target)
    target = own_target or engine_target
    slack = 2 * target if is_paced else 0.0
    now, due, last = 100.0, -math.inf, math.nan
    for wait in waits:
        now += wait
        late = emitted(stream, pacing, now)
        assert late == (LateToken("a", now - last, now - due) if -math.inf < due < now else None)
        due = min(max(due + target, now + target), now + target + slack)
        last = now
        assert stream.due == due
        assert stream.last_token_time == now


@pytest.mark.parametrize("old", [STRICT, PACED])
@pytest.mark.parametrize("new", [Pacing(0.5), Pacing(0.5, is_paced=True)])
def test_a_new_target_counts_from_the_last_token_and_forgets_slack(old: Pacing, new: Pacing) -> None:
    stream = StreamDeadline()
    for moment in (1.0, 1.0, 1.0):
        emitted(stream, old, moment)
    stream.restart(new)
    assert stream.due == 1.5
    own = StreamDeadline(own_target=0.75)
    emitted(own, old, 1.0)
    own.restart(new)
    assert own.due == 1.75


def test_without_a_target_nothing_is_due_until_there_is_one_and_a_token() -> None:
    stream = StreamDeadline()
    emitted(stream, STRICT, 1.0)
    stream.restart(None)
    assert stream.due == NO_DEADLINE
    stream.restart(STRICT)  # its last token may have come without a target: the moment is not known
    assert stream.due == NO_DEADLINE
    assert emitted(stream, STRICT, 9.0) is None
    assert stream.due == 9.25


def test_a_stream_without_a_token_owes_nothing_by_a_new_target_either() -> None:
    stream = StreamDeadline()
    stream.restart(STRICT)
    assert stream.due == NO_DEADLINE


def emitted_at(moment: float, own_target: float | None = None) -> StreamDeadline:
    stream = StreamDeadline(own_target)
    emitted(stream, STRICT, moment)
    return stream


def test_all_streams_of_a_step_get_their_deadlines_and_the_late_ones_are_named() -> None:
    streams = [Given(emitted_at(1.0), "a"), Given(emitted_at(1.5, own_target=0.5), "b"), Given(StreamDeadline(), "c")]
    assert emit(streams, STRICT, 2.0) == [LateToken("a", gap=1.0, seconds=0.75)]
    assert [one.deadline.due for one in streams] == [2.25, 2.5, 2.25]


def test_urgency_is_the_earliest_deadline_and_the_tightest_target() -> None:
    assert urgency_of() == Urgency(None, None)
    assert urgency_of(StreamDeadline()) == Urgency(None, 0.25)
    assert urgency_of(StreamDeadline(0.125), StreamDeadline(2.0)) == Urgency(None, 0.125)
    assert urgency_of(emitted_at(3.0), emitted_at(2.0), StreamDeadline()) == Urgency(2.25, 0.25)
    # The earliest deadline and the tightest target may belong to different streams.
    assert urgency_of(emitted_at(1.0), emitted_at(3.0, own_target=0.125)) == Urgency(1.25, 0.125)
    assert urgency_of(emitted_at(1.0, own_target=8.0)) == Urgency(9.0, 8.0)


def test_a_first_token_is_due_some_time_after_the_arrival_or_when_the_request_hopes_for_it() -> None:
    assert Place(10.0, 500, 0).due(2.0) == 12.0
    assert Place(10.0, 500, 0, ttft_target=3.0).due(2.0) == 12.0
    assert Place(10.0, 500, 0, ttft_target=0.25).due(2.0) == 10.25
