"""One request as the scheduler sees it: its tokens, how far they are computed, how to sample.

There are no phases. A request has tokens known and tokens computed, and the second number chases the first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field
from enum import Enum, StrEnum

from evenflow.core.account import NOBODY, Account
from evenflow.core.deadlines import Place, StreamDeadline
from evenflow.core.grammar import Grammar
from evenflow.errors import InvalidRequest

MAX_TOP_K = 2**31 - 1  # more than any vocabulary has


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop. Names and defaults follow vLLM."""

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None  # None: the engine draws one, and keeps it for the request's life
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # alternatives for each output token
    prompt_logprobs: int | None = None  # the same for the prompt's tokens
    grammar: Grammar | None = None  # the whole answer matches it, unless max_tokens or a stop string cuts it short
    tbt_target: float | None = None  # seconds between tokens, for this stream; None: the engine's target
    ttft_target: float | None = None  # desired seconds to the first token: moves the request up in line

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        _require_int("max_tokens", self.max_tokens, 1)
        _require_int("min_tokens", self.min_tokens, 0, self.max_tokens)
        _require_int("top_k", self.top_k, 0, MAX_TOP_K)
        _require_number("temperature", self.temperature, 0)
        _require_number("top_p", self.top_p, 0, 1, above=True)
        _require_number("min_p", self.min_p, 0, 1)
        _require_number("repetition_penalty", self.repetition_penalty, 0, above=True)
        _require_number("presence_penalty", self.presence_penalty, -2, 2)
        _require_number("frequency_penalty", self.frequency_penalty, -2, 2)
        for name, most in (("seed", 2**63 - 1), ("logprobs", 100), ("prompt_logprobs", 100)):
            if (value := getattr(self, name)) is not None:
                _require_int(name, value, 0, most)
        for name in ("tbt_target", "ttft_target"):
            if (value := getattr(self, name)) is not None:
                _require_number(name, value, 0, above=True)
        for token_id in self.stop_token_ids:
            _require_int("stop_token_ids", token_id, 0)
        if not all(isinstance(text, str) and text for text in self.stop):
            raise InvalidRequest(f"Got stop={list(self.stop)!r} but expected stop strings of at least one character.")
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise InvalidRequest(
                f"Got grammar={self.grammar!r} but expected a Grammar, such as Grammar.regex('[a-z]+')."
            )
        if self.grammar is not None and self.ignore_eos:
            raise InvalidRequest("Got ignore_eos=True with a grammar but the grammar decides where an answer ends.")


def _require_int(name: str, value: object, low: int, high: int | None = None) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= (value if high is None else high):
        allowed = f">= {low}" if high is None else f"in [{low}, {high}]"
        raise InvalidRequest(f"Got {name}={value!r} but expected a whole number {allowed}.")


def _require_number(name: str, value: object, low: float, high: float = math.inf, *, above: bool = False) -> None:
    """Finite, at most `high`, and at least `low` or above it."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or not low <= value <= high or (above and value == low):  # type: ignore[operator]
        allowed = f"{'>' if above else '>='} {low}" if high == math.inf else f"in {'(' if above else '['}{low}, {high}]"
        raise InvalidRequest(f"Got {name}={value!r} but expected a number {allowed}.")


class Status(Enum):
    """Where a request is. PREEMPTED waits like WAITING, but has produced tokens or computed KV before."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class FinishReason(StrEnum):
    """Why a request ended, in the words of the OpenAI API if it has one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """A request as it is added: what crosses to an engine elsewhere, and goes into recordings."""

    id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    seed: int
    max_known_tokens: int
    stop_token_ids: list[int]
    salt: bytes
    block_hashes: list[bytes]
    arrival_time: float  # of `time.perf_counter`, which all processes of a machine share
    tenant: str = ""
    service_class: str = ""

    def request(self) -> Request:
        return Request(
            self.id,
            self.prompt_token_ids,
            self.sampling,
            seed=self.seed,
            max_model_len=self.max_known_tokens,
            eos_token_ids=tuple(self.stop_token_ids),
            salt=self.salt,
            block_hashes=self.block_hashes,
            arrival_time=self.arrival_time,
            tenant=self.tenant,
            service_class=self.service_class,
        )


@dataclass(slots=True, eq=False, repr=False)
class Request:
    """A request's counters over its token positions:

        [0, committed)              KV computed, by steps whose results are in
        [committed, scheduled)      KV being computed, by steps in flight
        [scheduled, known)          ids known, not yet scheduled
        [known, known + pending)    sampled on the device by steps in flight, ids not yet seen

    committed <= scheduled <= known + pending. A request that leaves its slot, by preemption or for good, starts a new
    epoch: results of steps of an older epoch are dropped.
    """

    id: str
    prompt_token_ids: InitVar[Sequence[int]]
    sampling: SamplingParams
    _: KW_ONLY
    seed: int
    max_model_len: InitVar[int]
    eos_token_ids: InitVar[tuple[int, ...]] = ()
    salt: bytes = b""
    block_hashes: list[bytes] = field(default_factory=list)
    arrival_time: float = 0.0
    tenant: str = ""  # whose share it is served from
    service_class: str = ""  # the name of a ServiceClass; "": the scheduler's default

    tokens: list[int] = field(init=False)  # the prompt, then the output
    num_prompt_tokens: int = field(init=False)
    max_known_tokens: int = field(init=False)
    stop_token_ids: frozenset[int] = field(init=False)
    deadline: StreamDeadline = field(init=False)
    place: Place = field(init=False)  # in line, set by the scheduler
    rank: tuple[float, int] = (0.0, 0)  # place in line, set by the scheduler: the lowest goes first and yields last
    account: Account = NOBODY  # whose turn it is served in, set by the scheduler
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    error: str | None = None
    epoch: int = 0
    slot: int = -1
    block_ids: list[int] = field(default_factory=list)
    num_scheduled: int = 0
    num_committed: int = 0
    num_pending: int = 0
    num_cached_tokens: int = 0

    def __post_init__(
        self, prompt_token_ids: Sequence[int], max_model_len: int, eos_token_ids: tuple[int, ...]
    ) -> None:
        self.tokens = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.tokens)
        self.max_known_tokens = min(self.num_prompt_tokens + self.sampling.max_tokens, max_model_len)
        self.stop_token_ids = frozenset(self.sampling.stop_token_ids).union(
            () if self.sampling.ignore_eos else eos_token_ids
        )
        self.deadline = StreamDeadline(self.sampling.tbt_target)

    def record(self) -> RequestRecord:
        return RequestRecord(
            self.id,
            self.tokens[: self.num_prompt_tokens],
            self.sampling,
            self.seed,
            self.max_known_tokens,
            sorted(self.stop_token_ids),
            self.salt,
            self.block_hashes,
            self.arrival_time,
            self.tenant,
            self.service_class,
        )

    @property
    def num_known(self) -> int:
        return len(self.tokens)

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.tokens[self.num_prompt_tokens :]

    @property
    def num_unscheduled(self) -> int:
        """Work left. The last token that `max_tokens` allows is never fed back."""
        reachable = min(len(self.tokens) + self.num_pending, self.max_known_tokens - 1)
        return reachable - self.num_scheduled

    @property
    def is_running(self) -> bool:
        return self.status is Status.RUNNING

    @property
    def is_prompt(self) -> bool:
        """Is more than the next token of a stream left to compute?"""
        if self.status is not Status.RUNNING or self.num_scheduled < self.num_prompt_tokens:
            return True
        return len(self.tokens) - self.num_scheduled > 1

    @property
    def is_finished(self) -> bool:
        return self.status is Status.FINISHED

    def __repr__(self) -> str:
        return (
            f"Request({self.id!r}, {self.status.value}, epoch={self.epoch}, known={self.num_known}, "
            f"pending={self.num_pending}, scheduled={self.num_scheduled}, committed={self.num_committed})"
        )
