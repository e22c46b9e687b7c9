"""A run of an evaluation, with an endpoint that only counts: what is written when, and what a resumed run asks."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from evenflow.bench.endpoints import Answer, Ask, Scores
from evenflow.evals import run
from evenflow.evals.journal import Header, Journal
from evenflow.evals.report import make_report
from evenflow.evals.run import Evaluation
from evenflow.evals.sandbox import Ran, run_program
from evenflow.evals.scorers import CORRECT
from evenflow.evals.tasks import CodeTask

TASKS = [CodeTask(id=str(n), prompt=f"task {n}", reference="f()", time_limit_s=5.0) for n in range(4)]
HEADER = Header(tasks="a.jsonl", digest="abc", sides=["x"], settings={"seed": 0, "concurrency": 2})


class Counting:
    """Answers at once, and keeps what it was asked."""

    name = "counting"
    max_model_len = None

    def __init__(self) -> None:
        self.asked: list[str] = []

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        self.asked.append("open")
        yield

    async def begin_round(self) -> None:
        pass

    async def stream(self, ask: Ask, answer: Answer) -> None:
        if ask.max_tokens > 2:  # not to warm up
            self.asked.append(str(ask.prompt))
        answer.add_piece("def f(): pass", 1)

    async def score(self, prompt: str, continuations: Sequence[str]) -> Scores:
        raise NotImplementedError


def die_at_the_third(*_: object, **__: object) -> Ran:
    """Instead of the third program, the run is killed."""
    if len(_FINISHED) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    _FINISHED.append(1)
    return Ran(CORRECT, "none")


_FINISHED: list[int] = []


def evaluate(journal: Journal, endpoint: Counting) -> None:
    asyncio.run(Evaluation(TASKS, journal, concurrency=2, seed=0).run([endpoint]))


def texts(journal: Path) -> list[str]:
    return journal.read_text().splitlines()[1:]


def test_a_killed_run_loses_only_the_verdict_that_it_was_at(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    script = (
        "import sys\nfrom pathlib import Path\nfrom tests.evals import test_run as own\n"
        "own.run.run_program = own.die_at_the_third\n"
        "own.evaluate(own.Journal.create(Path(sys.argv[1]), own.HEADER), own.Counting())"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    killed = subprocess.run([sys.executable, "-c", script, path], env=environment, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(texts(path)) == 4 + 2  # all answers, and two verdicts
    with Journal.resume(path, HEADER) as journal:
        assert make_report(TASKS, journal).sides[0].num_missing == 2
        evaluate(journal, endpoint := Counting())
        [side] = make_report(TASKS, journal).sides
    assert endpoint.asked == []  # not even opened
    assert (side.num_correct, side.num_scored, side.num_missing) == (4, 4, 0)
    assert len(texts(path)) == 4 + 4


def test_an_interrupt_ends_the_program_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    endless = [msgspec.structs.replace(task, reference="while True: f()", time_limit_s=600.0) for task in TASKS]

    async def interrupted(journal: Journal) -> None:
        task = asyncio.ensure_future(Evaluation(endless, journal, concurrency=2, seed=0).run([Counting()]))
        loop = asyncio.get_running_loop()

        def start(*arguments: object, on_start: Callable[[object], None], **options: object) -> Ran:
            def started(process: object) -> None:
                on_start(process)
                loop.call_soon_threadsafe(task.cancel)

            return run_program(*arguments, on_start=started, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(run, "run_program", start)
        with pytest.raises(asyncio.CancelledError):
            await task

    with Journal.create(tmp_path / "journal", HEADER) as journal:
        asyncio.run(interrupted(journal))  # waits for its threads
        assert make_report(TASKS, journal).sides[0].num_missing == 4
    assert len(texts(tmp_path / "journal")) == 4


def test_no_answer_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = "import os\nfor _ in range(1500):\n    os.mkdir('a'); os.chdir('a')\ndef f(): pass"

    async def stream(self: Counting, ask: Ask, answer: Answer) -> None:
        answer.add_piece(deep if ask.prompt == "task 0" else "def f(): pass", 1)

    monkeypatch.setattr(Counting, "stream", stream)
    with Journal.create(tmp_path / "journal", HEADER) as journal:
        evaluate(journal, Counting())
        [side] = make_report(TASKS, journal).sides
    assert (side.num_correct, side.num_scored) == (3, 4)


def test_a_program_that_cannot_be_run_is_a_failure_and_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> Ran:
        raise OSError("no more processes")

    with Journal.create(tmp_path / "journal", HEADER) as journal:
        monkeypatch.setattr(run, "run_program", fail)
        evaluate(journal, Counting())
        report = make_report(TASKS, journal)
        assert report.errors == ["the program could not be judged: no more processes"] * 4
        monkeypatch.setattr(run, "run_program", lambda *_, **__: Ran(CORRECT, "none"))
        evaluate(journal, endpoint := Counting())
        assert len(endpoint.asked) == 1 + 4
        assert make_report(TASKS, journal).sides[0].num_correct == 4
