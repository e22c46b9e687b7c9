"""Drives the stall load step by step on an engine, and so in virtual time if its clock is virtual."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import count, groupby

from evenflow.bench.endpoints import Ask
from evenflow.bench.stall_load import StallLoad
from evenflow.bench.stall_run import PrefillSpan, StallRun, longest_gaps, observe
from evenflow.core.deadlines import LateToken
from evenflow.core.report import StepReport
from evenflow.core.request import Request
from evenflow.engine.engine import Engine
from evenflow.engine.intake import Intake
from evenflow.errors import EngineFailed


def run_load(engine: Engine, load: StallLoad, on_progress: Callable[[float], None] = lambda share: None) -> StallRun:
    """Run the load once on an idle engine, which is left idle. `on_progress` gets the share that is done, in steps.

    After an error or an interrupt it is not: a step may be half done, and no other can follow it.
    """
    runner = _Runner(engine, load, on_progress)
    run = runner.run()
    runner.stop()
    return run


class _Runner:
    def __init__(self, engine: Engine, load: StallLoad, on_progress: Callable[[float], None]) -> None:
        self._engine = engine
        self._load = load
        self._on_progress = on_progress
        self._long_ids = frozenset(load.long_asks())
        self._num_prefilled = 0  # tokens of long prompts
        self._intake = Intake(engine.limits, engine.scheduler.block_size, clock=engine.clock)
        self._chats: dict[str, Request] = {}
        self._chat_numbers = count()
        self._reports: list[StepReport] = []

    def run(self) -> StallRun:
        engine, asks = self._engine, self._load.long_asks()
        requests = [self._prepare(ask, name) for name, ask in asks.items()]
        self._start_chats()
        while any(not chat.num_output_tokens for chat in self._chats.values()):
            self._step()
        began, sent = engine.clock(), dict[str, float]()
        for request, ask in zip(requests, asks.values(), strict=True):
            request.arrival_time = began + ask.at
        waiting = deque(requests)
        while not all(request.is_finished for request in requests):
            while waiting and waiting[0].arrival_time <= engine.clock():
                request = waiting.popleft()
                sent[request.id] = engine.clock()
                engine.add(request)
            self._start_chats()
            self._step()
        times: dict[str, list[float]] = {}
        for report in self._reports:
            for request_id, tokens in zip(report.ids, report.tokens, strict=True):
                if tokens:
                    times.setdefault(request_id, []).append(report.at)
        run = observe(self._load, began, times, sent)
        run.long_answers = [request.output_token_ids for request in requests]
        _add_reports(run, [report for report in self._reports if report.at > began], list(asks))
        return run

    def stop(self) -> None:
        for chat_id in self._chats:
            self._engine.abort(chat_id)
        while self._engine.has_work:
            self._engine.step()

    def _prepare(self, ask: Ask, name: str) -> Request:
        return self._intake.prepare(ask.prompt, ask.sampling, policy=self._engine.policy, request_id=name)

    def _start_chats(self) -> None:
        while len(self._chats) < self._load.num_chats:
            number = next(self._chat_numbers)
            chat = self._prepare(self._load.chat(number), f"chat-{number + 1}")
            self._engine.add(chat)
            self._chats[chat.id] = chat

    def _step(self) -> None:
        report = self._engine.step()
        if report is None:
            return
        self._reports.append(report)
        self._num_prefilled += sum(chunk.length for chunk in report.chunks if chunk.request_id in self._long_ids)
        # Preempted prompts are prefilled again.
        self._on_progress(min(1.0, self._num_prefilled / sum(map(len, self._load.long_prompts))))
        for row, (_, error) in report.ended.items():
            if error is not None:
                raise EngineFailed(f"{report.ids[row]}: {error}")
            self._chats.pop(report.ids[row], None)


def _add_reports(run: StallRun, reports: Sequence[StepReport], long_ids: Sequence[str]) -> None:
    waits = dict(zip(long_ids, run.waits, strict=True))
    counted = {at: list(tokens) for at, tokens in groupby(run.counted, key=lambda token: token.at)}
    run.output_tokens = sum(report.num_output_tokens for report in reports)
    for report in reports:
        at = report.at - run.began
        if report.is_mixed and (error := report.prediction_error) is not None:
            run.step_errors.append(error)
        chunks = [chunk for chunk in report.chunks if chunk.request_id in waits and waits[chunk.request_id].covers(at)]
        if chunks:
            run.prefills.append(PrefillSpan(at - report.seconds, at, sum(chunk.length for chunk in chunks)))
        if tokens := counted.get(at):
            late = {token.request_id: token.seconds for token in report.late}
            run.num_late += sum(token.request_id in late for token in tokens)
            request_id, _, gap, _ = max(tokens, key=lambda token: token.gap)
            stall = report.explain(LateToken(request_id, gap, late.get(request_id, 0.0)))
            run.worst = longest_gaps([*run.worst, stall])
