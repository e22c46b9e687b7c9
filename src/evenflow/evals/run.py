"""Asks every task on every side, and writes each answer to a journal as it comes, and again with its verdict.

Two sides take turns, a round of tasks at a time and in random order, so that a machine that slows down affects both.
"""

from __future__ import annotations

import asyncio
import random
import subprocess
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

import msgspec

from evenflow.bench.comparison import in_turns
from evenflow.bench.endpoints import Ask, Endpoint, answer_of, check_endpoint
from evenflow.errors import EndpointFailed, InvalidInput
from evenflow.evals.journal import Entry, Journal
from evenflow.evals.sandbox import Limits, run_program
from evenflow.evals.scorers import judge, program_of
from evenflow.evals.tasks import AnyTask, ChoiceTask, CodeTask

_LONG_ROUND = 8  # tasks for each request in flight: verdicts on programs come no later than that


def rounds_of(tasks: Sequence[AnyTask], num_sides: int, concurrency: int) -> list[Sequence[AnyTask]]:
    """The tasks that run on one side before the other has its turn, and before the programs among the answers run."""
    has_programs = any(isinstance(task, CodeTask) for task in tasks)
    size = concurrency if num_sides > 1 else _LONG_ROUND * concurrency if has_programs else len(tasks)
    return [tasks[start : start + size] for start in range(0, len(tasks), size)]


def missing_tasks(tasks: Sequence[AnyTask], journal: Journal, side: int) -> list[AnyTask]:
    """Those without a judged answer of this side. A request that failed is asked again."""
    done = {
        task for (at, task), entry in journal.entries.items() if at == side and entry.error is None and entry.is_judged
    }
    return [task for task in tasks if task.id not in done]


@dataclass(slots=True)
class Evaluation:
    """One start of the command: asks what the journal has no answer to, until `time_limit_s` is over."""

    tasks: Sequence[AnyTask]
    journal: Journal
    concurrency: int
    seed: int
    time_limit_s: float | None = None
    on_start: Callable[[], None] = lambda: None  # every endpoint that is needed works
    on_answer: Callable[[], None] = lambda: None

    async def run(self, endpoints: Sequence[Endpoint]) -> None:
        missing = [missing_tasks(self.tasks, self.journal, side) for side in range(len(endpoints))]
        async with AsyncExitStack() as stack:
            for side, (endpoint, left) in enumerate(zip(endpoints, missing, strict=True)):
                if asked := [task for task in left if self._unjudged(side, task) is None]:
                    await stack.enter_async_context(endpoint.open())
                    await _warm_up(endpoint, asked[0])
            self.on_start()
            start = _Start(time.perf_counter(), self.journal.num_starts)
            order = random.Random(self.seed)
            wanted = [{task.id for task in left} for left in missing]
            rounds = rounds_of(self.tasks, len(endpoints), self.concurrency)
            for side, number, _ in in_turns(range(len(endpoints)), len(rounds), order):
                left = [task for task in rounds[number] if task.id in wanted[side]]
                if left and not self._is_over(start):
                    await self._run_round(endpoints[side], side, left, start)

    async def _run_round(self, endpoint: Endpoint, side: int, tasks: Sequence[AnyTask], start: _Start) -> None:
        waiting = deque(task for task in tasks if self._unjudged(side, task) is None)
        if waiting:
            await endpoint.begin_round()

        async def work() -> None:
            while waiting and not self._is_over(start):
                self._keep(await _answer(endpoint, side, waiting.popleft(), start))

        await asyncio.gather(*(work() for _ in range(min(self.concurrency, len(waiting)))))
        # Programs wait until no request is in flight: they would take processor time from the engine.
        for task in tasks:
            entry = self._unjudged(side, task)
            if isinstance(task, CodeTask) and entry is not None:
                self._keep(await _judged(task, entry))

    def _unjudged(self, side: int, task: AnyTask) -> Entry | None:
        """An answer that is in the journal, also from an earlier start, without a verdict."""
        entry = self.journal.entries.get((side, task.id))
        return None if entry is None or entry.is_judged or entry.error is not None else entry

    def _is_over(self, start: _Start) -> bool:
        return self.time_limit_s is not None and start.seconds() >= self.time_limit_s

    def _keep(self, entry: Entry) -> None:
        self.journal.add(entry)
        if entry.is_judged:
            self.on_answer()


@dataclass(frozen=True, slots=True)
class _Start:
    at: float
    number: int

    def seconds(self) -> float:
        return time.perf_counter() - self.at


async def _judged(task: CodeTask, entry: Entry) -> Entry:
    """A program that could not be run is neither right nor wrong. An interrupt ends the one that runs."""
    program, limits = program_of(task, entry.text), Limits(wall_s=task.time_limit_s)
    running: list[subprocess.Popen[bytes]] = []
    try:
        verdict, guards = await asyncio.to_thread(
            run_program, program, task.reference, limits, prefix=task.prefix, on_start=running.append
        )
    except asyncio.CancelledError:
        for process in running:
            process.kill()
        raise
    except OSError as error:
        return msgspec.structs.replace(entry, is_judged=True, error=f"the program could not be judged: {error}")
    return msgspec.structs.replace(
        entry, is_judged=True, is_correct=verdict.is_correct, note=verdict.note, guards=guards
    )


async def _warm_up(endpoint: Endpoint, task: AnyTask) -> None:
    """A first short answer, which is not counted. It shows whether the endpoint works at all."""
    chat = None if task.messages is None else [{"role": "user", "content": "Hello"}]
    await endpoint.begin_round()
    await check_endpoint(endpoint, Ask("Hello", max_tokens=2, messages=chat, ignore_eos=False))


async def _answer(endpoint: Endpoint, side: int, task: AnyTask, start: _Start) -> Entry:
    """A failure of this one request becomes the entry's error; a failure of the whole engine is raised."""
    entry = Entry(side=side, task=task.id, start=start.number, began_s=(began_s := start.seconds()), ended_s=began_s)
    try:
        changes = await (_choose(endpoint, task) if isinstance(task, ChoiceTask) else _generate(endpoint, task))
    except (InvalidInput, EndpointFailed) as error:
        changes = {"error": str(error)}
    return msgspec.structs.replace(entry, ended_s=start.seconds(), **changes)


async def _choose(endpoint: Endpoint, task: ChoiceTask) -> dict[str, object]:
    assert task.prompt is not None  # checked when it was read
    scores = await endpoint.score(task.prompt, task.choices)
    chosen = task.choices[max(range(len(task.choices)), key=scores.logprobs.__getitem__)]
    is_correct = chosen == task.reference
    return {
        "text": chosen,
        "is_correct": is_correct,
        "note": "" if is_correct else f"got {chosen!r} but expected {task.reference!r}",
        "logprobs": scores.logprobs,
        "num_prompt_tokens": scores.num_prompt_tokens,
    }


async def _generate(endpoint: Endpoint, task: AnyTask) -> dict[str, object]:
    ask = Ask(task.prompt or "", task.max_tokens, messages=task.conversation, stop=tuple(task.stop), ignore_eos=False)
    answer = await answer_of(endpoint, ask)
    if answer.error is not None:
        raise EndpointFailed(answer.error)
    found: dict[str, object] = {
        "text": answer.text,
        "ttft_s": answer.ttft_s,
        "num_tokens": answer.num_tokens,
        "num_prompt_tokens": answer.num_prompt_tokens,
        "num_chunks": answer.num_chunks,
    }
    if isinstance(task, CodeTask):
        found["is_judged"] = False
    elif not isinstance(task, ChoiceTask):
        verdict = judge(task, answer.text)
        found |= {"is_correct": verdict.is_correct, "note": verdict.note}
    return found
