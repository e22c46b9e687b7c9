"""The agents benchmark: runs agent traffic on servers or policies in rounds, and measures how long turns wait."""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import pairwise

from evenflow.bench.agents_load import AgentRequest, Load, Segment, Session, fit
from evenflow.bench.comparison import Comparison, in_turns
from evenflow.bench.endpoints import Answer, Ask, Endpoint, answer_of, check_endpoint
from evenflow.bench.figures import Spread
from evenflow.bench.stall_run import Wait, is_pending
from evenflow.errors import EndpointFailed

Encode = Callable[[AgentRequest, str], str | list[int]]  # a request's prompt, for a nonce


@dataclass(slots=True)
class AgentsRound:
    """One round on one side."""

    turns: list[Answer] = field(default_factory=list)
    misses: list[Answer] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def waits(self) -> list[Wait]:
        """When misses waited for their first tokens."""
        return [Wait(one.sent_at, one.sent_at, one.sent_at + one.piece_times_s[0]) for one in _good(self.misses)]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentFigures:
    """All rounds of one side. A turn is beside a miss if it is sent while one waits for its first token."""

    name: str
    turn_ttft_s: Spread
    turn_ttft_beside_miss_s: Spread
    miss_ttft_s: Spread
    gap_s: Spread  # between pieces of the turns' answers
    gap_beside_miss_s: Spread
    cached_share: float | None  # of all prompts' tokens; None: the server does not say
    cached_turn_share: float | None  # of the turns' prompts
    requests_per_s: float
    num_requests: int  # answered without an error
    errors: tuple[str, ...]

    @classmethod
    def of(cls, name: str, rounds: Sequence[AgentsRound]) -> AgentFigures:
        turns = [(answer, waits) for one in rounds for waits in [one.waits] for answer in _good(one.turns)]
        misses = [answer for one in rounds for answer in _good(one.misses)]
        gaps = [
            (later - earlier, is_pending(waits, answer.sent_at + later))
            for answer, waits in turns
            for earlier, later in pairwise(answer.piece_times_s)
        ]
        answers = [*misses, *(answer for answer, _ in turns)]
        return cls(
            name=name,
            turn_ttft_s=Spread.of(answer.piece_times_s[0] for answer, _ in turns),
            turn_ttft_beside_miss_s=Spread.of(
                answer.piece_times_s[0] for answer, waits in turns if is_pending(waits, answer.sent_at)
            ),
            miss_ttft_s=Spread.of(answer.piece_times_s[0] for answer in misses),
            gap_s=Spread.of(gap for gap, _ in gaps),
            gap_beside_miss_s=Spread.of(gap for gap, is_beside in gaps if is_beside),
            cached_share=_cached_share(answers),
            cached_turn_share=_cached_share([answer for answer, _ in turns]),
            requests_per_s=len(answers) / sum(one.seconds for one in rounds),
            num_requests=len(answers),
            errors=tuple(answer.error for one in rounds for answer in [*one.turns, *one.misses] if answer.error),
        )


@dataclass(frozen=True, slots=True)
class AgentsReport:
    load: Load  # as it ran
    scale: float
    figures: list[AgentFigures]
    text_only: list[str]  # sides that take no token ids


def _good(answers: Iterable[Answer]) -> list[Answer]:
    return [answer for answer in answers if answer.error is None and answer.piece_times_s]


def _cached_share(answers: Sequence[Answer]) -> float | None:
    num_tokens = sum(answer.num_prompt_tokens for answer in answers)
    if not num_tokens or all(answer.num_cached_tokens is None for answer in answers):
        return None
    # A server that counts cached tokens may leave the figure out where it is 0.
    return sum(answer.num_cached_tokens or 0 for answer in answers) / num_tokens


async def compare(
    endpoints: Sequence[Endpoint],
    load: Load,
    *,
    scale: float | None,
    repeat: int,
    seed: int = 0,
    on_progress: Callable[[str], None] = lambda text: None,
) -> AgentsReport:
    """Run the load `repeat` times on each side, in random order. Without a scale, lengths shrink to fit the context."""
    order, run_nonce = random.Random(seed), secrets.token_hex(8)
    async with AsyncExitStack() as stack:
        for endpoint in endpoints:
            await stack.enter_async_context(endpoint.open())
        contexts = [endpoint.max_model_len for endpoint in endpoints]
        load, scale = fit(load, scale, min((context for context in contexts if context), default=None))
        encodes = [await _choose_encoding(endpoint, run_nonce) for endpoint in endpoints]
        sides = range(len(endpoints))
        comparison = Comparison[int, AgentsRound](in_turns(sides, repeat, order))
        for side, number, _ in comparison:
            title = f"{endpoints[side].name}, round {number + 1} of {repeat}"
            runner = _Runner(endpoints[side], encodes[side], f"{run_nonce}/{number}/{side}", title, on_progress)
            comparison.add(await runner.run(load))
    figures = [AgentFigures.of(endpoints[side].name, comparison.of(side)) for side in sides]
    text_only = [end.name for end, encode in zip(endpoints, encodes, strict=True) if encode is AgentRequest.text]
    return AgentsReport(load, scale, figures, text_only)


async def _choose_encoding(endpoint: Endpoint, nonce: str) -> Encode:
    """Token ids if the endpoint takes them, else text."""
    request = AgentRequest((Segment("first", 16),), max_tokens=2, pause=0.0)
    errors = []
    for encode in (AgentRequest.token_ids, AgentRequest.text):
        try:
            await check_endpoint(endpoint, Ask(encode(request, nonce), request.max_tokens))
        except EndpointFailed as error:
            errors.append(error)
        else:
            return encode
    raise errors[0]


class _Runner:
    """One round on one endpoint."""

    def __init__(
        self, endpoint: Endpoint, encode: Encode, nonce: str, title: str, on_progress: Callable[[str], None]
    ) -> None:
        self._endpoint = endpoint
        self._encode = encode
        self._nonce = nonce  # no other round has the same tokens
        self._title = title
        self._on_progress = on_progress
        self._round = AgentsRound()
        self._began = 0.0
        self._is_over = False

    async def run(self, load: Load) -> AgentsRound:
        await self._endpoint.begin_round()
        background = load.background()
        for number, session in enumerate(background, start=1):
            self._on_progress(f"{self._title}: filling the cache for agent {number} of {len(background)}")
            await check_endpoint(self._endpoint, self._encoded(next(session)))
        self._began = time.perf_counter()
        await asyncio.gather(self._run_to_the_end(load.sessions()), *map(self._run_session, background))
        return self._round

    async def _run_to_the_end(self, sessions: Sequence[Session]) -> None:
        await asyncio.gather(*map(self._run_session, sessions))
        self._is_over = True

    async def _run_session(self, session: Session) -> None:
        for request in session:
            await asyncio.sleep(request.pause)
            if self._is_over:
                break
            answer = await answer_of(self._endpoint, self._encoded(request))
            (self._round.misses if request.is_miss else self._round.turns).append(answer)
            self._round.seconds = time.perf_counter() - self._began
            num_turns, num_misses = len(self._round.turns), len(self._round.misses)
            self._on_progress(f"{self._title}: {num_turns} turns and {num_misses} misses answered")

    def _encoded(self, request: AgentRequest) -> Ask:
        return Ask(self._encode(request, self._nonce), request.max_tokens)
