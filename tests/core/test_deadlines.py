"""When tokens are due, which are late, what a step's streams demand of it, and who goes first."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenflow.core.deadlines import (
    MAX_PATIENCE_S,
    NO_DEADLINE,
    OVERTAKING_SHARE,
    LateToken,
    Pacing,
    Place,
    StreamDeadline,
    Urgency,
    charge_overtaking,
    rank_time,
    rank_times,
    urgency,
)

STRICT, PACED = Pacing(0.25), Pacing(0.25, is_paced=True)  # quarters: sums of them are exact


def deadlines(pacing: Pacing, moments: list[float], own_target: float | None = None) -> list[float]:
    """When the token after each of these is due."""
    stream, found = StreamDeadline(own_target), []
    for moment in moments:
        stream.emit("a", pacing, moment)
        found.append(stream.due)
    return found


def late_tokens(pacing: Pacing, moments: list[float], own_target: float | None = None) -> list[LateToken | None]:
    stream = StreamDeadline(own_target)
    return [stream.emit("a", pacing, moment) for moment in moments]


def test_nothing_is_owed_before_the_first_token() -> None:
    stream = StreamDeadline()
    assert stream.due == NO_DEADLINE
    assert stream.emit("a", STRICT, 1000.0) is None


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
        late = stream.emit("a", pacing, now)
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
        stream.emit("a", old, moment)
    stream.restart(new)
    assert stream.due == 1.5
    own = StreamDeadline(own_target=0.75)
    own.emit("a", old, 1.0)
    own.restart(new)
    assert own.due == 1.75


def test_without_a_target_nothing_is_due_until_there_is_one_and_a_token() -> None:
    stream = StreamDeadline()
    stream.emit("a", STRICT, 1.0)
    stream.restart(None)
    assert stream.due == NO_DEADLINE
    stream.restart(STRICT)  # its last token may have come without a target: the moment is not known
    assert stream.due == NO_DEADLINE
    assert stream.emit("a", STRICT, 9.0) is None
    assert stream.due == 9.25


def test_a_stream_without_a_token_owes_nothing_by_a_new_target_either() -> None:
    stream = StreamDeadline()
    stream.restart(STRICT)
    assert stream.due == NO_DEADLINE


def emitted_at(moment: float, own_target: float | None = None) -> StreamDeadline:
    stream = StreamDeadline(own_target)
    stream.emit("a", STRICT, moment)
    return stream


def test_urgency_is_the_earliest_deadline_and_the_tightest_target() -> None:
    assert urgency([], STRICT) == Urgency(None, None)
    assert urgency([StreamDeadline()], STRICT) == Urgency(None, 0.25)
    assert urgency([StreamDeadline(0.125), StreamDeadline(2.0)], STRICT) == Urgency(None, 0.125)
    assert urgency([emitted_at(3.0), emitted_at(2.0), StreamDeadline()], STRICT) == Urgency(2.25, 0.25)
    # The earliest deadline and the tightest target may belong to different streams.
    assert urgency([emitted_at(1.0), emitted_at(3.0, own_target=0.125)], STRICT) == Urgency(1.25, 0.125)
    assert urgency([emitted_at(1.0, own_target=8.0)], STRICT) == Urgency(9.0, 8.0)


def milliseconds(start: int, length: int) -> float:
    """A prefill at a millisecond per token, wherever it starts."""
    return length / 1000


def rank(place: Place, start: int | None = None, patience: float = 4.0) -> float:
    return rank_time(place, place.num_cached_tokens if start is None else start, patience, milliseconds)


def ranks(now: float, *head: tuple[Place, int]) -> list[float]:
    return rank_times(head, now, 4.0, milliseconds)


def test_prompts_are_ranked_by_arrival_and_a_patience_in_proportion_to_their_prefill() -> None:
    assert rank(Place(10.0, 500, 0), patience=0.0) == 10.0
    assert rank(Place(10.0, 500, 0)) == 12.0
    assert rank(Place(10.0, 500, 250)) == 11.0  # cached tokens need no prefill
    assert rank(Place(10.0, 500, 500)) == 10.0


def test_patience_is_bounded() -> None:
    assert rank(Place(10.0, 1_000_000, 0)) == 10.0 + MAX_PATIENCE_S
    assert rank(Place(10.0, 500, 0, ttft_target=3.0)) == 12.0
    assert rank(Place(10.0, 500, 0, ttft_target=0.25)) == 10.25


def test_patience_grows_with_what_was_served_of_a_prefill_that_takes_a_minute() -> None:
    """Short prompts pass it in its second half as in its first, as far as its share goes."""
    place = Place(10.0, 60_000, 0)
    for start in (0, 20_000, 40_000, 59_000):
        now = 10.0 + 1.2 * start / 1000
        short = Place(now, 100, 0)
        long_rank, short_rank = ranks(now, (place, start), (short, 0))
        assert short_rank < long_rank
    assert rank(place, start=20_000) == 10.0 + MAX_PATIENCE_S + 4 * 20


def test_time_beside_decodes_is_no_waiting() -> None:
    """Where decodes take most of each step, a prefill takes many times its seconds alone: patience lasts as long."""
    place = Place(10.0, 500, 0)
    for _ in range(100):
        charge_overtaking([(place, 5)], step_tokens=5, step_seconds=0.1)
    assert place.served_s == pytest.approx(10.0)
    assert rank(place, start=500) == pytest.approx(10 + 4 * 0.5 + (10 - 0.5))
    assert rank(Place(10.0, 500, 0, ttft_target=3.0, served_s=10.0), start=500) == 13.0


def test_a_wild_prediction_of_what_is_left_lets_nobody_pass_for_long() -> None:
    place, short = Place(10.0, 1_000_000, 0), Place(12.0, 100, 0)
    most = OVERTAKING_SHARE * (2.0 + MAX_PATIENCE_S)
    place.overtaken_s = most - 0.1
    assert ranks(12.0, (place, 0), (short, 0))[0] > 12.4
    place.overtaken_s = most + 0.1
    assert ranks(12.0, (place, 0), (short, 0))[0] == 10.0


def test_patience_follows_the_prediction() -> None:
    place = Place(10.0, 500, 0)
    assert rank_time(place, 0, 4.0, lambda start, length: length / 250) == 18.0
    assert rank_time(place, 0, 4.0, milliseconds) == 12.0


def test_patience_does_not_shrink_with_what_is_left() -> None:
    """A later prompt would wait for the last part of a long one longer than for its first."""
    place = Place(10.0, 1000, 200)
    for start in (200, 500, 1000):
        assert rank(place, start=start) == pytest.approx(10 + 4 * 0.8)
        # Nor is the time served ever counted as waiting.
        assert rank(place, start=start, patience=0.0) == pytest.approx(10 + (start - 200) / 1000)


def test_a_prompt_overtaken_for_its_share_is_ranked_by_its_arrival_until_it_has_waited_longer() -> None:
    place = Place(10.0, 500, 0, overtaken_s=2 * OVERTAKING_SHARE)
    assert ranks(11.0, (place, 0)) == [10.0]  # its first token would come 1.5 s after its arrival
    assert ranks(11.5, (place, 0)) == [12.0]


def test_a_prompt_overtakes_if_all_that_it_has_left_fits_into_the_share() -> None:
    """1,200 ms of prefill and 600 that are later: 1,800 ms to the first token, of which 540 may go to others."""
    long, short = Place(10.0, 1200, 0), Place(10.0, 600, 0)
    assert ranks(10.0, (long, 0), (short, 0)) == [10.0, 12.4]
    assert ranks(10.3, (long, 0), (short, 0)) == [14.8, 12.4]  # one that has waited longer gives more
    long.overtaken_s = 0.15
    assert ranks(10.45, (long, 0), (short, 150)) == [14.8, pytest.approx(12.4)]  # and is passed to the end
    long.overtaken_s = 0.3
    assert ranks(10.6, (long, 0), (short, 300)) == [14.8, pytest.approx(12.4)]


def test_the_last_part_of_a_prefill_that_was_begun_is_not_interrupted() -> None:
    short = Place(11.9, 50, 0)
    long = Place(10.0, 2000, 0)
    assert ranks(12.0, (long, 1700), (short, 0)) == pytest.approx([18.0, 12.1])
    assert ranks(12.0, (long, 1800), (short, 0)) == pytest.approx([10.0, 12.1])
    for unbegun, start in ((Place(11.9, 200, 0), 0), (Place(11.9, 400, 200), 200)):
        assert ranks(12.0, (unbegun, start), (short, 0)) == pytest.approx([12.7, 12.1])


def test_it_is_the_next_of_the_later_prompts_that_has_to_fit() -> None:
    first, second, third = Place(10.0, 1000, 0), Place(10.1, 900, 0), Place(10.2, 100, 0)
    assert ranks(10.2, (first, 0), (second, 0), (third, 0)) == pytest.approx([14.0, 13.7, 10.6])
    # The third may not pass the second, which has given its share, so the second is next.
    second.overtaken_s = 0.35
    assert ranks(10.2, (first, 0), (second, 0), (third, 0)) == pytest.approx([10.0, 10.1, 10.6])


@given(st.lists(st.tuples(st.integers(1, 3000), st.floats(0, 3)), min_size=2, max_size=8), st.integers(10, 200))
def test_prompts_are_overtaken_for_their_share_and_served_in_few_turns(
    arrivals: list[tuple[int, float]], step: int
) -> None:
    """One prompt at a time, in steps: the share is kept to a step, and no two prompts take turns."""
    arrivals.sort(key=lambda one: one[1])
    places = [Place(at, tokens, 0) for tokens, at in arrivals]
    done, now, turns, ended = [0] * len(places), 0.0, list[int](), dict[int, float]()
    while len(ended) < len(places):
        head = [n for n, place in enumerate(places) if n not in ended and place.arrival_time <= now]
        if not head:
            now = min(place.arrival_time for n, place in enumerate(places) if n not in ended)
            continue
        found = ranks(now, *((places[n], done[n]) for n in head))
        _, chosen = min(zip(found, head, strict=True))
        tokens = min(step, places[chosen].num_tokens - done[chosen])
        charge_overtaking([(places[n], tokens if n == chosen else 0) for n in head], tokens, tokens / 1000)
        done[chosen] += tokens
        now += tokens / 1000
        turns += [chosen] if turns[-1:] != [chosen] else []
        if done[chosen] == places[chosen].num_tokens:
            ended[chosen] = now
    for number, place in enumerate(places):
        assert place.overtaken_s <= OVERTAKING_SHARE * (ended[number] - place.arrival_time) + step / 1000 + 1e-9
    assert len(turns) <= 2 * len(places)  # only one that arrives interrupts another


def test_prompts_are_charged_for_later_ones_that_are_served() -> None:
    first, second, third = (Place(float(number), 1000, 0) for number in range(3))
    charge_overtaking([(first, 0), (second, 100), (third, 200)], step_tokens=400, step_seconds=0.04)
    # 300 tokens went to prompts after the first, 100 of them to one that arrived after all three.
    assert [place.overtaken_s for place in (first, second, third)] == pytest.approx([0.04, 0.03, 0.01])
    charge_overtaking([(first, 400), (second, 0), (third, 0)], step_tokens=400, step_seconds=0.04)
    assert [place.overtaken_s for place in (first, second, third)] == pytest.approx([0.04, 0.03, 0.01])


@given(st.integers(1, 100_000), st.integers(1, 100_000), st.floats(0, 1000))
def test_a_later_prompt_passes_only_within_the_patience_of_an_earlier_one(
    tokens: int, later_tokens: int, wait: float
) -> None:
    earlier, later = rank(Place(0.0, tokens, 0)), rank(Place(wait, later_tokens, 0))
    if later < earlier:
        assert wait < 4.0 * milliseconds(0, tokens)
        assert later_tokens < tokens
