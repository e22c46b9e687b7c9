"""Events by time, and what follows from them."""

from __future__ import annotations

from collections.abc import Callable

from evenflow.simulation.loop import Event, Loop, Timed


def noted(log: list[tuple[str, float]], name: str, *later: tuple[float, Event]) -> Event:
    def happen(now: float) -> tuple[Timed, ...]:
        log.append((name, now))
        return later

    return happen


def ticking(log: list[float], every: float) -> Callable[[float], list[Timed]]:
    def tick(now: float) -> list[Timed]:
        log.append(now)
        assert len(log) < 100, "no end"
        return [(now + every, tick)]

    return tick


def test_events_happen_by_time_and_those_of_one_time_in_order() -> None:
    log: list[tuple[str, float]] = []
    after = noted(log, "after")
    Loop([(2.0, noted(log, "b")), (1.0, noted(log, "a", (2.0, after), (1.0, after))), (2.0, noted(log, "c"))]).run()
    assert log == [("a", 1.0), ("after", 1.0), ("b", 2.0), ("c", 2.0), ("after", 2.0)]


def test_what_was_begun_before_the_end_still_happens_and_nothing_follows() -> None:
    log: list[float] = []
    Loop([(0.0, ticking(log, 0.4))], until=1.0).run()
    assert log == [0.0, 0.4, 0.8, 0.8 + 0.4]


def test_an_event_may_end_the_run() -> None:
    log: list[float] = []
    loop = Loop([(0.0, ticking(log, 0.5))])

    def end(now: float) -> list[Timed]:
        loop.until = now
        return []

    loop.add([(1.1, end)])
    loop.run()
    assert log == [0.0, 0.5, 1.0, 1.5]


def test_a_loop_that_is_asked_again_goes_on() -> None:
    log: list[float] = []
    loop = Loop([(0.0, ticking(log, 0.5))])
    loop.run(by=1.0)
    assert log == [0.0, 0.5, 1.0]
    assert loop.next_at == 1.5
    loop.run(by=1.5)
    assert log[3:] == [1.5]
