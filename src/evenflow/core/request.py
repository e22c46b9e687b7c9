"""One request as the scheduler sees it: its tokens, how far they are computed, how to sample.

There are no phases. A request has tokens known and tokens computed, and the second number chases the first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum, StrEnum

from evenflow.core.deadlines import StreamDeadline
from evenflow.core.grammar import Grammar
from evenflow.errors import InvalidRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to end. Names and defaults are those that vLLM's users know."""

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
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        _require_int("max_tokens", self.max_tokens, 1, None)
        _require_int("min_tokens", self.min_tokens, 0, self.max_tokens)
        _require_float("temperature", self.temperature, 0.0, None)
        _require_int("top_k", self.top_k, 0, None)
        _require_float("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _require_float("min_p", self.min_p, 0.0, 1.0)
        _require_float("repetition_penalty", self.repetition_penalty, 0.0, None, low_open=True)
        _require_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _require_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            _require_int("seed", self.seed, 0, 2**63 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if (count := getattr(self, name)) is not None:
                _require_int(name, count, 0, 100)
        for name in ("tbt_target", "ttft_target"):
            if getattr(self, name) is not None:
                _require_float(name, getattr(self, name), 0.0, None, low_open=True)
        if not all(isinstance(text, str) and text for text in self.stop):
            raise InvalidRequest(
                f"Got stop={list(self.stop)!r} but every stop string must hold at least one character."
            )
        for token_id in self.stop_token_ids:
            _require_int("stop_token_ids", token_id, 0, None)
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise InvalidRequest(
                f"Got grammar={self.grammar!r} but expected a Grammar, such as Grammar.regex('[a-z]+')."
            )
        if self.grammar is not None and self.ignore_eos:
            raise InvalidRequest("Got ignore_eos=True with a grammar but the grammar decides where an answer ends.")


def _require_int(name: str, value: object, low: int, high: int | None) -> None:
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if not is_int or value < low or (high is not None and value > high):  # type: ignore[operator]
        allowed = f"a whole number >= {low}" if high is None else f"a whole number in [{low}, {high}]"
        raise InvalidRequest(f"Got {name}={value!r} but expected {allowed}.")


def _require_float(name: str, value: object, low: float, high: float | None, low_open: bool = False) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    too_low = is_number and (value < low or (low_open and value == low))  # type: ignore[operator]
    if not is_number or too_low or (high is not None and value > high):  # type: ignore[operator]
        sign, bracket = (">", "(") if low_open else (">=", "[")
        allowed = f"a number {sign} {low:g}" if high is None else f"a number in {bracket}{low:g}, {high:g}]"
        raise InvalidRequest(f"Got {name}={value!r} but expected {allowed}.")


class Status(Enum):
    """Where a request is. PREEMPTED waits like WAITING, but has produced tokens or computed KV before."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class FinishReason(StrEnum):
    """Why a request ended, in the words of the OpenAI API where it has one."""

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
        )


class Request:
    """A request's counters over its token positions:

        [0, committed)              KV computed, by steps whose results are in
        [committed, scheduled)      KV being computed, by steps in flight
        [scheduled, known)          ids known, not yet scheduled
        [known, known + pending)    sampled on the device by steps in flight, ids not yet seen

    committed <= scheduled <= known + pending. Leaving its slot, by preemption or for good, starts a new epoch: what
    steps of an older epoch return is dropped.
    """

    __slots__ = (
        "arrival_time",
        "block_hashes",
        "block_ids",
        "deadline",
        "epoch",
        "error",
        "finish_reason",
        "id",
        "max_known_tokens",
        "num_cached_tokens",
        "num_committed",
        "num_pending",
        "num_prompt_tokens",
        "num_scheduled",
        "rank",
        "salt",
        "sampling",
        "seed",
        "slot",
        "status",
        "stop_token_ids",
        "tokens",
    )

    def __init__(
        self,
        id: str,
        prompt_token_ids: list[int],
        sampling: SamplingParams,
        *,
        seed: int,
        max_model_len: int,
        eos_token_ids: tuple[int, ...] = (),
        salt: bytes = b"",
        block_hashes: list[bytes] | None = None,
        arrival_time: float = 0.0,
    ) -> None:
        self.id = id
        self.tokens = list(prompt_token_ids)
        self.num_prompt_tokens = len(prompt_token_ids)
        self.sampling = sampling
        self.seed = seed
        self.stop_token_ids = frozenset(sampling.stop_token_ids) | (
            frozenset() if sampling.ignore_eos else frozenset(eos_token_ids)
        )
        self.max_known_tokens = min(self.num_prompt_tokens + sampling.max_tokens, max_model_len)
        self.salt = salt
        self.arrival_time = arrival_time
        self.rank = (0.0, 0)  # place in line, given by the scheduler; lower goes first, and yields last
        self.deadline = StreamDeadline(sampling.tbt_target)
        self.status = Status.WAITING
        self.finish_reason: FinishReason | None = None
        self.error: str | None = None
        self.epoch = 0
        self.slot = -1
        self.num_scheduled = 0
        self.num_committed = 0
        self.num_pending = 0
        self.num_cached_tokens = 0
        self.block_ids: list[int] = []
        self.block_hashes: list[bytes] = block_hashes if block_hashes is not None else []

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
    def is_finished(self) -> bool:
        return self.status is Status.FINISHED

    def __repr__(self) -> str:
        return (
            f"Request({self.id!r}, {self.status.value}, epoch={self.epoch}, known={self.num_known}, "
            f"pending={self.num_pending}, scheduled={self.num_scheduled}, committed={self.num_committed})"
        )
