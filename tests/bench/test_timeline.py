"""The picture of streams in lines of text: times in, lines out."""

from __future__ import annotations

import pytest

from evenflow.bench.timeline import ASCII_MARKS, StreamTimes, Timeline, draw
from evenflow.core.policies import PolicySpec
from evenflow.core.request import SamplingParams
from tests.engine.fakes import fake_engine, prepare


def stall() -> Timeline:
    """A chat decodes from 0.15 s on; a long prompt arrives at 0.25 s and is prefilled from 0.35 s to 0.85 s."""
    chat = StreamTimes("chat", 0.0, [(0.0, 0.15)], [0.15, 0.25, 0.35, 0.85, 0.95], is_finished=True)
    long = StreamTimes("long", 0.25, [(0.35, 0.85)], [0.85, 0.95, 1.05], is_finished=True)
    return Timeline("unchunked", 100.0, {"a": chat, "b": long})


def test_a_mark_for_each_token_and_a_blank_for_each_gap() -> None:
    assert draw([stall()], now=500.0, width=5 + 12, marks=ASCII_MARKS) == [
        "unchunked: longest gap 0.50 s, 1.1 s in all",
        "chat #ooo    oo",
        "long   .#####ooo",
        "     0 s",
    ]


def test_runs_share_one_scale_that_fits_the_width() -> None:
    short, long = stall(), stall()
    long.streams["b"].tokens.append(9.9)
    lines = draw([short, long], now=0.0, width=5 + 20, marks=ASCII_MARKS)
    assert lines[1] == "chat oo"  # half a second per cell
    assert lines[2] == "long #oo"
    assert lines[5] == "long #oo" + 16 * " " + "o"
    assert lines[-1] == "     0 s       5 s"
    assert max(map(len, lines[1:3] + lines[4:6])) <= 25
    assert lines[3].startswith("unchunked: longest gap 8.85 s, 9.9 s")


def test_a_run_in_progress_is_drawn_up_to_now() -> None:
    timeline = Timeline("fixed:8", 10.0, {"a": StreamTimes("a", 0.0), "b": StreamTimes("b")})
    lines = draw([timeline], now=10.55, width=2 + 10, marks=ASCII_MARKS)
    assert lines == [
        "fixed:8: longest gap 0.00 s, 0.6 s in all",
        "a ......",  # waits for its first token
        "b",  # has not arrived
        "  0 s",
    ]


def test_nothing_has_begun() -> None:
    assert draw([], now=1.0, width=40) == [" 0 s       0.1 s     0.2 s"]


@pytest.mark.parametrize("seconds", [0.001, 0.39, 0.4, 0.41, 7.0, 19.99, 20.0, 555.5])
@pytest.mark.parametrize("width", [3, 40, 200])
def test_every_length_fits(seconds: float, width: int) -> None:
    timeline = Timeline("x", 0.0, {"a": StreamTimes("a", 0.0, [], [0.0, seconds], is_finished=True)})
    row = draw([timeline], now=0.0, width=width, marks=ASCII_MARKS)[1]
    assert row.endswith("o")
    assert len(row) <= max(width, 12)


def test_it_is_filled_from_the_reports_of_an_engine() -> None:
    engine = fake_engine("unchunked")
    engine.set_policy(PolicySpec("unchunked", 400))
    requests = [
        prepare(engine, [token] * length, SamplingParams(max_tokens=2), name)
        for token, length, name in ((1, 10, "a"), (2, 300, "b"))
    ]
    timeline = Timeline("unchunked", engine.clock(), {name: StreamTimes(name, 0.0) for name in "ab"})
    for request in requests:
        engine.add(request)
    while not timeline.is_finished:
        report = engine.step()
        assert report is not None
        timeline.take(report)
    # A millisecond for each row: 310 rows of prefill, then two decodes.
    for name in "ab":
        assert timeline.streams[name].prefills == [pytest.approx((0.0, 0.310))]
        assert timeline.streams[name].tokens == pytest.approx([0.310, 0.312])
    assert timeline.longest_gap_s == pytest.approx(0.002)
    assert timeline.seconds(now=99.0) == timeline.last_token_s
