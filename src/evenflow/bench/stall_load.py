"""Chats that decode, and long prompts that arrive beside them at a fixed interval: the load, and one run of it.

A run is a function of the engine and its clock, so that tests run it in virtual time. Must not know: what is compared,
how figures are shown.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, islice
from typing import NamedTuple

from evenflow.bench.long_texts import GARDEN_DIARY, HARBOUR_LOG, LongText
from evenflow.core.request import Request, SamplingParams
from evenflow.core.scheduler import Committed, Late
from evenflow.engine.engine import Engine
from evenflow.engine.outputs import Delta
from evenflow.engine.stalls import Stall
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


class ChunkSeen(NamedTuple):
    """A step that held prefill of a long prompt."""

    start: float
    end: float
    num_tokens: int


@dataclass(slots=True)
class StallRun:
    """All that one run showed. Times are seconds since it began."""

    tokens: list[TokenSeen] = field(default_factory=list)
    chunks: list[ChunkSeen] = field(default_factory=list)
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
        joined.chunks += [chunk._replace(start=began + chunk.start, end=began + chunk.end) for chunk in run.chunks]
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
        self._answers: dict[str, Delta] = {}
        self._worst: list[tuple[float, int, Stall]] = []

    def run(self) -> StallRun:
        engine, load = self._engine, self._load
        answer = SamplingParams(temperature=0.0, max_tokens=load.long_answer_tokens, ignore_eos=True)
        arrivals = [
            engine.prepare(prompt, answer, request_id=f"long-{number}")
            for number, prompt in enumerate(load.long_prompts, start=load.first_number)
        ]
        self._start_chats()
        while any(not chat.num_output_tokens for chat in self._chats.values()):
            engine.step()
        self._began = self._last_commit = engine.clock()
        self._last_token = dict.fromkeys(self._chats, self._began)
        for number, request in enumerate(arrivals):
            request.arrival_time = self._began + number * load.interval
        engine.watch_step = self._watch
        try:
            self._answer_all(arrivals)
        finally:
            engine.watch_step = lambda committed, now: None
            for chat_id in self._chats:
                engine.abort(chat_id)
            while engine.has_work:
                engine.step()
        return self._summary(arrivals)

    def _answer_all(self, arrivals: Sequence[Request]) -> None:
        waiting = list(reversed(arrivals))
        while len(self._answers) < len(arrivals):
            while waiting and waiting[-1].arrival_time <= self._engine.clock():
                request = waiting.pop()
                self._engine.add(request)
                self._pending.add(request.id)
            self._start_chats()
            for delta in self._engine.step():
                if delta.finish_reason == "error":
                    raise EngineFailed(f"{delta.request_id}: {delta.output.error}")
                if delta.finish_reason is not None and self._chats.pop(delta.request_id, None) is None:
                    self._answers[delta.request_id] = delta

    def _start_chats(self) -> None:
        while len(self._chats) < self._load.num_chats:
            number = next(self._chat_numbers)
            prompt = self._load.chat_prompts[number % len(self._load.chat_prompts)]
            sampling = SamplingParams(temperature=0.0, max_tokens=self._load.longest_chat(number), ignore_eos=True)
            chat = self._engine.prepare(prompt, sampling, request_id=f"chat-{number + 1}")
            self._engine.add(chat)
            self._chats[chat.id] = chat

    def _watch(self, committed: Committed, now: float) -> None:
        shape, seconds, seen = committed.shape, committed.result.seconds, self._seen
        counts = bool(self._pending)
        if counts:
            seen.pending_s += now - self._last_commit
        self._last_commit = now
        if shape.prefill_rows and shape.decode_sequences and not committed.result.errors:
            seen.step_errors.append(abs(committed.predicted_seconds - seconds) / seconds)
        long_rows = sum(chunk.length for chunk in committed.plan.chunks if chunk.request_id in self._pending)
        if long_rows:
            end = now - self._began
            seen.chunks.append(ChunkSeen(end - seconds, end, long_rows))
        self._watch_tokens(committed, now, counts)

    def _watch_tokens(self, committed: Committed, now: float, counts: bool) -> None:
        late = {request.id: late for request, late, _ in committed.late}
        longest: Late | None = None
        for request, _, tokens in committed.emissions:
            if not tokens:
                continue
            self._seen.output_tokens += len(tokens)
            self._pending.discard(request.id)
            if (before := self._last_token.get(request.id)) is not None:
                gap, is_late = now - before, request.id in late
                token = TokenSeen(now - self._began, gap, committed.plan.step_id, counts, is_late)
                self._seen.tokens.append(token)
                if longest is None or gap > longest.gap:
                    longest = Late(request, late.get(request.id, 0.0), gap)
            self._last_token[request.id] = now
        if counts and longest is not None:
            self._keep_worst(committed, longest, now)

    def _keep_worst(self, committed: Committed, longest: Late, now: float) -> None:
        if len(self._worst) < NUM_WORST_GAPS or longest.gap > self._worst[0][0]:
            stall = self._engine.stalls.explain(committed, longest, now)
            heapq.heappush(self._worst, (longest.gap, committed.plan.step_id, stall))
            if len(self._worst) > NUM_WORST_GAPS:
                heapq.heappop(self._worst)

    def _summary(self, arrivals: Sequence[Request]) -> StallRun:
        outputs = [self._answers[request.id].output for request in arrivals]
        seen = self._seen
        seen.long_ttft_s = [output.token_times_s[0] for output in outputs]
        seen.long_answers = [output.token_ids for output in outputs]
        seen.total_s = max(
            request.arrival_time + output.token_times_s[-1] - self._began
            for request, output in zip(arrivals, outputs, strict=True)
        )
        seen.worst = [stall for *_, stall in sorted(self._worst, reverse=True)]
        return seen
