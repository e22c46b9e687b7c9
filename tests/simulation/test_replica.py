"""A host that does one thing at a time, and a device beside it: literal times of launches and commits."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from evenflow.simulation.devices import Ran, StepWork
from evenflow.simulation.loop import Loop, Timed
from evenflow.simulation.replica import Replica

Entry = tuple[str, float]


class ListedEngine:
    """Plans the work that it was given, up to two steps at a time, and logs what is asked of it."""

    def __init__(self, log: list[Entry]) -> None:
        self.log = log
        self.work: deque[int] = deque()  # rows
        self.num_in_flight = 0

    def read(self, rows: int, now: float) -> None:
        self.log.append((f"read {rows}", now))
        self.work.append(rows)

    def schedule(self, now: float) -> StepWork | None:
        if not self.work or self.num_in_flight == 2:
            return None
        self.num_in_flight += 1
        self.log.append((f"schedule {self.work[0]}", now))
        return StepWork(self.work.popleft(), 0, ())

    def launched(self, now: float) -> None:
        self.log.append(("launched", now))

    def commit(self, ran: Ran, now: float) -> float:
        self.num_in_flight -= 1
        self.log.append(("commit", now))
        return ran.seconds


class Rows:
    """A second a row, and a launch time for all steps."""

    def __init__(self, launch_s: float) -> None:
        self.launch_s = launch_s
        self.begins: list[float] = []

    def launch_seconds(self, work: StepWork, at: float) -> float:
        return self.launch_s

    def run(self, work: StepWork, at: float) -> Ran:
        self.begins.append(at)
        return Ran(float(work.num_rows))


def trace(
    messages: Iterable[tuple[float, int]], launch_s: float = 0.0, schedule_s: float = 0.0, output_s: float = 0.0
) -> tuple[list[Entry], list[float], list[float]]:
    """What the host did, when steps began on the device, and their own seconds."""
    log, own = list[Entry](), list[float]()
    engine, device = ListedEngine(log), Rows(launch_s)

    def on_commit(seconds: float, now: float) -> list[Timed]:
        own.append(seconds)
        return []

    replica = Replica(engine, device, on_commit, schedule_s=schedule_s, output_s=output_s)

    def arrive(rows: int, now: float) -> Iterable[Timed]:
        return replica.receive(lambda read_at: engine.read(rows, read_at), now)

    Loop((at, lambda now, rows=rows: arrive(rows, now)) for at, rows in messages).run()  # type: ignore[misc]
    return log, device.begins, own


def test_a_second_step_is_launched_while_the_first_runs() -> None:
    log, begins, own = trace([(1.0, 4), (1.0, 2), (1.0, 3)], launch_s=0.5, schedule_s=0.25, output_s=0.125)
    assert log == [
        ("read 4", 1.0),
        ("read 2", 1.0),
        ("read 3", 1.0),
        ("schedule 4", 1.0),
        ("launched", 1.75),
        ("schedule 2", 1.75),
        ("launched", 2.5),
        ("commit", 5.375),  # began at 1.25, ended at 5.25
        ("schedule 3", 5.375),
        ("launched", 6.125),
        ("commit", 7.375),
        ("commit", 10.375),
    ]
    assert begins == [1.25, 5.25, 7.25]
    assert own == [4.0, 2.0, 3.0]


def test_messages_that_arrive_while_the_host_waits_are_read_afterwards() -> None:
    log, _, _ = trace([(0.0, 4), (1.0, 2)])
    assert log == [
        *(("read 4", 0.0), ("schedule 4", 0.0), ("launched", 0.0), ("commit", 4.0)),
        *(("read 2", 4.0), ("schedule 2", 4.0), ("launched", 4.0), ("commit", 6.0)),
    ]


def test_a_step_ends_no_sooner_than_its_launch() -> None:
    log, begins, own = trace([(0.0, 1)], launch_s=3.0, output_s=0.5)
    assert log[-2:] == [("launched", 3.0), ("commit", 3.5)]
    assert begins == [0.0]
    assert own == [3.0]


def test_an_idle_host_wakes_up_for_a_message() -> None:
    log, _, _ = trace([(0.0, 1), (5.0, 1)])
    assert [entry for entry in log if entry[0] == "commit"] == [("commit", 1.0), ("commit", 6.0)]
