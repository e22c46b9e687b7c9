"""The load of the live page and of `evenflow demo --live`: chats, and long prompts beside them.

Both get it from the server's /live/load, which sizes it for that server, and then send it as ordinary requests.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from evenflow.bench.endpoints import Answer, Ask, Endpoint
from evenflow.bench.figures import Spread
from evenflow.bench.long_texts import HARBOUR_LOG
from evenflow.counts import counted

SEND_S = 24.0  # nothing is sent later, so that all ends after about half a minute
_STOP_AFTER_S = 60.0  # what is open then is stopped
# A browser opens six connections to a server: these, a prompt, the page's feed, a chat and a change of the target.
_NUM_CHATS = 2
_CHAT_TOKENS = 96
_CHAT_PAUSE_S = 4.0  # at least, between the starts of two chats of a session; likewise of prompts
_PROMPT_PAUSE_S = 3.0
_PROMPT_ANSWER_TOKENS = 16
_PROMPT_S = 2.0  # of prefill, for one prompt: a stall that nobody overlooks if it is not cut
_MIN_PROMPT_TOKENS, _MAX_PROMPT_TOKENS = 512, 16_384
_TEMPLATE_TOKENS = 64  # room for the chat template and the prompt's first line
USUAL_RATE = 350.0  # prefill tokens per second of a small model on two slow cores, before any is measured
_QUESTIONS = (
    "Tell me a story about a fox.",
    "How does rain form?",
    "How do I bake bread at home?",
    "Describe a walk along the sea.",
    "Why do leaves turn red in autumn?",
)

Kind = Literal["chat", "prompt"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadLimits:
    """What a server allows. The texts' tokens are counted by `count_tokens`, or estimated if it is None."""

    max_model_len: int | None  # None: not known
    max_prompt_tokens: int = 0  # 0: no limit besides the context
    max_requests: int | None = None  # that may run at a time; None: not known
    count_tokens: Callable[[str], int] | None = None


@dataclass(frozen=True, slots=True)
class LoadRequest:
    at: float  # seconds since the load began; later if the session's previous answer has not ended
    content: str  # of the one message
    max_tokens: int


@dataclass(frozen=True, slots=True)
class LoadSession:
    """Requests of one kind, one after the other."""

    kind: Kind
    requests: Sequence[LoadRequest]


@dataclass(frozen=True, slots=True)
class Load:
    title: str
    send_s: float  # no request begins later
    stop_after_s: float  # the requests that are open then are stopped
    sessions: Sequence[LoadSession]


def make_load(limits: LoadLimits, prefill_rate: float, nonce: str, send_s: float = SEND_S) -> Load:
    """A load for a server that prefills this many tokens a second. The nonce keeps prompts out of prefix caches."""
    context = limits.max_model_len or 2 * _MAX_PROMPT_TOKENS
    num_chats = max(1, min(_NUM_CHATS, (limits.max_requests or _NUM_CHATS + 1) - 1))
    text = _long_text(limits, context, prefill_rate)
    chats = [
        LoadSession("chat", [_chat(session, at, context) for at in _times(0.5 * session, _CHAT_PAUSE_S, send_s)])
        for session in range(num_chats)
    ]
    prompts = [
        LoadRequest(at, f"[{nonce}-{number}]\n{text}", _PROMPT_ANSWER_TOKENS)
        for number, at in enumerate(_times(min(1.0, send_s / 2), _PROMPT_PAUSE_S, send_s))
    ]
    about = (limits.count_tokens or _estimate_tokens)(text)
    title = f"{counted(num_chats, 'chat')} at a time, and beside them prompts of {about:,} tokens"
    return Load(title, send_s, send_s + _STOP_AFTER_S - SEND_S, [*chats, LoadSession("prompt", prompts)])


def _times(first: float, pause: float, end: float) -> list[float]:
    return [first + pause * number for number in range(1 + max(0, int((end - first) / pause)))]


def _chat(session: int, at: float, context: int) -> LoadRequest:
    question = _QUESTIONS[(session + int(at / _CHAT_PAUSE_S)) % len(_QUESTIONS)]
    return LoadRequest(at, question, max(1, min(_CHAT_TOKENS, context // 4)))


def _long_text(limits: LoadLimits, context: int, prefill_rate: float) -> str:
    most = min(_MAX_PROMPT_TOKENS, context - _PROMPT_ANSWER_TOKENS - _TEMPLATE_TOKENS)
    if limits.max_prompt_tokens:
        most = min(most, limits.max_prompt_tokens - _TEMPLATE_TOKENS)
    if limits.count_tokens is None:
        most //= 2  # an estimate may be far off
    wanted = min(most, max(_MIN_PROMPT_TOKENS, int(_PROMPT_S * prefill_rate)))
    return HARBOUR_LOG.of_length(wanted, limits.count_tokens or _estimate_tokens)


def _estimate_tokens(text: str) -> int:
    return len(text) // 4


@dataclass(slots=True)
class LoadRun:
    """Runs a load on an open endpoint. Its figures can be read at any time."""

    load: Load
    endpoint: Endpoint
    answers: dict[Kind, list[Answer]] = field(default_factory=lambda: {"chat": [], "prompt": []})
    num_open: int = 0
    num_stopped: int = 0  # when the time was over
    error: str | None = None  # why the load ended early
    began: float = field(default_factory=time.perf_counter)

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.began

    def gaps(self) -> Spread:
        """Seconds between two pieces of a chat's answer."""
        return Spread.of(gap for answer in self.answers["chat"] for gap in answer.gaps_s)

    def progress(self) -> str:
        """Where it stands, in a few words."""
        longest = f", longest gap so far {1000 * gaps.max:.0f} ms" if (gaps := self.gaps()).count else ""
        return f"{self.seconds:.0f} s: {counted(self.num_open, 'request')} open{longest}"

    def summary(self) -> str:
        """What was sent and what the chats felt, in one or two sentences."""
        chats, prompts = (len(self.answers[kind]) for kind in ("chat", "prompt"))
        sent = f"Sent {counted(chats, 'chat')} and {counted(prompts, 'long prompt')} in {self.seconds:.0f} s."
        if not (gaps := self.gaps()).count:
            return sent
        p50, p99, longest = (f"{1000 * gap:.0f} ms" for gap in (gaps.p50, gaps.p99, gaps.max))
        return f"{sent} Between two tokens of a chat: {p50} (p50), {p99} (p99), {longest} at most."

    async def run(self) -> None:
        """Send all; return when the answers have ended. The first error ends the load: a server may have no room."""
        self.began = time.perf_counter()
        try:
            async with asyncio.timeout(self.load.stop_after_s):
                await self._run_sessions()
        except TimeoutError:
            self.num_stopped = self.num_open

    async def _run_sessions(self) -> None:
        try:
            async with asyncio.TaskGroup() as sessions:
                for session in self.load.sessions:
                    sessions.create_task(self._run_session(session))
        except* _Refused as refusals:
            self.error = str(refusals.exceptions[0])

    async def _run_session(self, session: LoadSession) -> None:
        for request in session.requests:
            await asyncio.sleep(request.at - self.seconds)
            if self.seconds > self.load.send_s:
                return
            await self._send(session.kind, request)

    async def _send(self, kind: Kind, request: LoadRequest) -> None:
        messages = [{"role": "user", "content": request.content}]
        self.answers[kind].append(answer := Answer())
        self.num_open += 1
        await self.endpoint.stream(Ask("", request.max_tokens, messages=messages, ignore_eos=False), answer)
        self.num_open -= 1
        if answer.error is not None:
            raise _Refused(answer.error)


class _Refused(Exception):
    """A request ended with this error."""
