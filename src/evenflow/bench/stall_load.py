"""Chats that decode, and long prompts that arrive beside them at a fixed interval: the load, and one run of it.

A run is a function of the engine and its clock, so that tests run it in virtual time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, islice
from typing import NamedTuple

from evenflow.bench.long_texts import GARDEN_DIARY, HARBOUR_LOG, LongText
from evenflow.core.deadlines import LateToken
from evenflow.core.report import Stall, StepReport
from evenflow.core.request import Request, SamplingParams
from evenflow.engine.engine import Engine
from evenflow.engine.intake import Intake
from evenflow.errors import EngineFailed, InvalidRequest

NUM_WORST_GAPS = 5  # of a run

_QUESTIONS = (
    "Could you tell me how rain forms, and why it falls in drops of such different sizes?",
    "Write a short poem about the sea in winter, and mention a lighthouse and its keeper.",
    "What is a computer made of, and what does each of these parts do while a program runs?",
    "I would like to bake bread at home. Which flour should I buy, and how long does it rise?",
    "Tell me a story about a fox who wanted to learn how to swim across the wide river.",
    "Why do leaves change their color in autumn, and why do some trees keep them in winter?",
    "Explain to a child how a bicycle stays upright while it moves, and why it falls at rest.",
    "Which three places should one visit in a small town by a lake, and at what time of day?",
)
_MANNER = " Please answer in simple words, in three or four sentences."
_ENTRIES_APART = 37  # so that no two long prompts tell of the same days


@dataclass(frozen=True, slots=True)
class StallLoad:
    """What arrives when. Chats are replaced as they end, until the last long prompt has its answer."""

    num_chats: int
    chat_prompts: Sequence[Sequence[int]]  # taken in turn
    chat_tokens: int  # of a chat's answer; the chats' lengths differ a little, so that they do not end together
    long_prompts: Sequence[Sequence[int]]
    long_answer_tokens: int
    interval: float  # seconds from one long prompt to the next
    first_number: int = 1  # of the long prompts, by which they are called

    def __post_init__(self) -> None:
        if not (self.num_chats and self.long_prompts):
            raise InvalidRequest(
                f"Got {self.num_chats} chats and {len(self.long_prompts)} long prompts but expected some of both."
            )

    def parts(self, num_prompts: int) -> list[StallLoad]:
        """The same load in several, each with so many of the long prompts."""
        return [
            replace(self, long_prompts=self.long_prompts[start : start + num_prompts], first_number=1 + start)
            for start in range(0, len(self.long_prompts), num_prompts)
        ]

    def longest_chat(self, number: int) -> int:
        return self.chat_tokens + 7 * (number % self.num_chats)


class Prompts(NamedTuple):
    chats: list[list[int]]
    long: list[list[int]]


def english_prompts(encode: Callable[[str], list[int]], num_long: int, long_tokens: int) -> Prompts:
    """Real text: questions for the chats; logs and diaries of exactly `long_tokens`, each ending in a question."""
    texts = (HARBOUR_LOG, GARDEN_DIARY)
    long = [_long_prompt(texts[number % 2], number, encode, long_tokens) for number in range(num_long)]
    return Prompts([encode(question + _MANNER) for question in _QUESTIONS], long)


def _long_prompt(text: LongText, number: int, encode: Callable[[str], list[int]], num_tokens: int) -> list[int]:
    question = encode("\n\n" + text.question)
    ids = encode(f"Volume {number + 1}. {text.opening}")
    for entry in islice(text.entries(), _ENTRIES_APART * number, None):
        if len(ids) >= num_tokens:
            break
        ids += encode(entry + "\n")
    return (ids[: max(0, num_tokens - len(question))] + question)[-num_tokens:]


class TokenSeen(NamedTuple):
    """A token that has one before it in its stream."""

    at: float  # seconds since the run began
    gap: float
    step_id: int
    counts: bool  # a long prompt was waiting for its first token
    is_late: bool


class PrefillSpan(NamedTuple):
    """A step that held prefill of a long prompt."""

    start: float
    end: float
    num_tokens: int


@dataclass(slots=True)
class StallRun:
    """All that one run showed. Times are seconds since it began."""

    tokens: list[TokenSeen] = field(default_factory=list)
    prefills: list[PrefillSpan] = field(default_factory=list)
    step_errors: list[float] = field(default_factory=list)  # |predicted - actual| / actual of mixed steps
    pending_s: float = 0.0  # while a long prompt waited for its first token
    output_tokens: int = 0
    total_s: float = 0.0
    long_ttft_s: list[float] = field(default_factory=list)
    long_answers: list[list[int]] = field(default_factory=list)  # in the order of the prompts
    worst: list[Stall] = field(default_factory=list)  # the longest gaps that count, longest first, one a step


def join(runs: Iterable[StallRun]) -> StallRun:
    """Runs of the parts of one load, as if each had begun when the one before ended."""
    joined = StallRun()
    for run in runs:
        began = joined.total_s
        joined.tokens += [token._replace(at=began + token.at) for token in run.tokens]
        joined.prefills += [one._replace(start=began + one.start, end=began + one.end) for one in run.prefills]
        joined.step_errors += run.step_errors
        joined.pending_s += run.pending_s
        joined.output_tokens += run.output_tokens
        joined.total_s += run.total_s
        joined.long_ttft_s += run.long_ttft_s
        joined.long_answers += run.long_answers
        joined.worst = longest_gaps([*joined.worst, *run.worst])
    return joined


def longest_gaps(gaps: Iterable[Stall]) -> list[Stall]:
    """As many as are kept of a run, longest first."""
    return sorted(gaps, key=lambda gap: -gap.gap_s)[:NUM_WORST_GAPS]


def run_load(engine: Engine, load: StallLoad) -> StallRun:
    """Run the load once on an engine without other work, which is left without work."""
    return _Runner(engine, load).run()


class _Runner:
    def __init__(self, engine: Engine, load: StallLoad) -> None:
        self._engine = engine
        self._load = load
        self._seen = StallRun()
        self._began = self._last_commit = engine.clock()
        self._chats: dict[str, Request] = {}
        self._chat_numbers = count()
        self._pending: set[str] = set()  # long prompts that wait for their first token
        self._last_token: dict[str, float] = {}
        self._first_token: dict[str, float] = {}  # of long prompts
        self._intake = Intake(engine.limits, engine.scheduler.block_size, clock=engine.clock)

    def run(self) -> StallRun:
        engine, load = self._engine, self._load
        answer = SamplingParams(temperature=0.0, max_tokens=load.long_answer_tokens, ignore_eos=True)
        arrivals = [
            self._prepare(prompt, answer, f"long-{number}")
            for number, prompt in enumerate(load.long_prompts, start=load.first_number)
        ]
        self._start_chats()
        while any(not chat.num_output_tokens for chat in self._chats.values()):
            engine.step()
        self._began = self._last_commit = engine.clock()
        self._last_token = dict.fromkeys(self._chats, self._began)
        for number, request in enumerate(arrivals):
            request.arrival_time = self._began + number * load.interval
        try:
            self._run_all(arrivals)
        finally:
            for chat_id in self._chats:
                engine.abort(chat_id)
            while engine.has_work:
                engine.step()
        return self._summary(arrivals)

    def _run_all(self, arrivals: Sequence[Request]) -> None:
        waiting = list(reversed(arrivals))
        unfinished = {request.id for request in arrivals}
        while unfinished:
            while waiting and waiting[-1].arrival_time <= self._engine.clock():
                request = waiting.pop()
                self._engine.add(request)
                self._pending.add(request.id)
            self._start_chats()
            report = self._engine.step()
            if report is None:
                continue
            self._observe(report)
            for row, (_, error) in report.ended.items():
                if error is not None:
                    raise EngineFailed(f"{report.ids[row]}: {error}")
                self._chats.pop(report.ids[row], None)
                unfinished.discard(report.ids[row])

    def _prepare(self, prompt: Sequence[int], sampling: SamplingParams, request_id: str) -> Request:
        return self._intake.prepare(prompt, sampling, policy=self._engine.policy, request_id=request_id)

    def _start_chats(self) -> None:
        while len(self._chats) < self._load.num_chats:
            number = next(self._chat_numbers)
            prompt = self._load.chat_prompts[number % len(self._load.chat_prompts)]
            sampling = SamplingParams(temperature=0.0, max_tokens=self._load.longest_chat(number), ignore_eos=True)
            chat = self._prepare(prompt, sampling, f"chat-{number + 1}")
            self._engine.add(chat)
            self._chats[chat.id] = chat

    def _observe(self, report: StepReport) -> None:
        seen = self._seen
        counts = bool(self._pending)
        if counts:
            seen.pending_s += report.at - self._last_commit
        self._last_commit = report.at
        if report.is_mixed and report.seconds:  # a step that failed took none
            seen.step_errors.append(abs(report.predicted_seconds - report.seconds) / report.seconds)
        long_rows = sum(chunk.length for chunk in report.chunks if chunk.request_id in self._pending)
        if long_rows:
            seen.prefills.append(PrefillSpan(report.started_at - self._began, report.at - self._began, long_rows))
        self._observe_tokens(report, counts)

    def _observe_tokens(self, report: StepReport, counts: bool) -> None:
        now, late = report.at, {late.request_id: late.seconds for late in report.late}
        longest: LateToken | None = None
        for request_id, tokens in zip(report.ids, report.tokens, strict=True):
            self._seen.output_tokens += len(tokens)
            if request_id in self._pending:
                self._pending.discard(request_id)
                self._first_token[request_id] = now
            if (before := self._last_token.get(request_id)) is not None:
                gap, is_late = now - before, request_id in late
                self._seen.tokens.append(TokenSeen(now - self._began, gap, report.step_id, counts, is_late))
                if longest is None or gap > longest.gap:
                    longest = LateToken(request_id, gap, late.get(request_id, 0.0))
            self._last_token[request_id] = now
        if counts and longest is not None:
            self._seen.worst = longest_gaps([*self._seen.worst, report.explain(longest)])

    def _summary(self, arrivals: Sequence[Request]) -> StallRun:
        seen = self._seen
        seen.long_ttft_s = [self._first_token[request.id] - request.arrival_time for request in arrivals]
        seen.long_answers = [request.output_token_ids for request in arrivals]
        seen.total_s = max(self._last_token[request.id] for request in arrivals) - self._began
        return seen
