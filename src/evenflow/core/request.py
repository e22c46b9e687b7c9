"""The public `SamplingParams`, and a request as the scheduler sees it: its tokens, and how many are computed.

There are no phases. A request has known tokens and computed tokens, and the second number chases the first.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field, replace
from enum import Enum, StrEnum
from typing import Literal, get_args

from evenflow.core.account import NOBODY, Account
from evenflow.core.deadlines import Place, StreamDeadline
from evenflow.core.grammar import Grammar
from evenflow.duration import parse_target
from evenflow.errors import InvalidRequest

MAX_TOP_K = 2**31 - 1  # more than any vocabulary has
MAX_LOGIT_BIASES = 1024
NUM_SEEDS = 2**63
MAX_BIAS = 100.0  # OpenAI's bound: enough to force or forbid a token
MAX_TEMPERATURE = 100.0  # all tokens are then about as likely
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0  # beyond, logits would overflow
MAX_ALLOWED_TOKEN_IDS = 1 << 16
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARACTERS = 1000
_LARGEST = sys.float_info.max
Pooling = Literal["last", "mean"]  # of a prompt's rows into one vector: that of its last token, or their mean
ALL_LOGPROBS = -1  # as `prompt_logprobs`: every token of the vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop. Names and defaults follow vLLM's, but for the temperature: 0."""

    n: int = 1  # outputs for the prompt, each sampled on its own
    max_tokens: int = 16
    min_tokens: int = 0  # neither a stop token nor a stop string ends the output among these
    temperature: float = 0.0  # 0 always takes the likeliest token; 1 samples from the model's own distribution
    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None  # None: the engine draws one, and keeps it for the request's life
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False  # the text ends with the stop string or token, not before it
    skip_special_tokens: bool = True  # False: control tokens have their text in the output
    ignore_eos: bool = False
    logprobs: int | None = None  # alternatives for each output token
    prompt_logprobs: int | None = None  # the same for the prompt's tokens; -1: all, for short prompts
    logit_bias: dict[int, float] | None = None  # added to the logits of these tokens
    allowed_token_ids: tuple[int, ...] | None = None  # only these are generated, an end only if it is one of them
    bad_words: tuple[str, ...] = ()  # the token that would complete one of them is not generated
    bad_word_ids: tuple[tuple[int, ...], ...] = ()  # the same as tokens; `bad_words` are added to them
    pooling: Pooling | None = None  # the output is an embedding of the prompt; max_tokens is then 1
    grammar: Grammar | None = None  # the whole answer matches it, unless max_tokens or a stop string cuts it short
    tbt_target: float | str | None = None  # seconds between tokens, or 50ms; None: the engine's target
    ttft_target: float | str | None = None  # desired time to the first token, likewise: moves the request up in line
    deadline: float | str | None = None  # time after its arrival at which a request ends, complete or not, likewise

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        _check_token_rules(self)
        _require_int("n", self.n, 1)
        _require_int("max_tokens", self.max_tokens, 1)
        _require_int("min_tokens", self.min_tokens, 0, self.max_tokens)
        _require_int("top_k", self.top_k, 0, MAX_TOP_K)
        _require_number("temperature", self.temperature, 0, MAX_TEMPERATURE)
        if self.n > 1 and self.temperature == 0:
            raise InvalidRequest(f"Got n={self.n} with temperature=0: all outputs would be equal. Set temperature=0.8.")
        _require_number("top_p", self.top_p, 0, 1, above=True)
        _require_number("min_p", self.min_p, 0, 1)
        _require_number("repetition_penalty", self.repetition_penalty, MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY)
        _require_number("presence_penalty", self.presence_penalty, -2, 2)
        _require_number("frequency_penalty", self.frequency_penalty, -2, 2)
        ranges = {"seed": (0, NUM_SEEDS - 1), "logprobs": (0, 100), "prompt_logprobs": (ALL_LOGPROBS, 100)}
        for name, (least, most) in ranges.items():
            if (value := getattr(self, name)) is not None:
                _require_int(name, value, least, most)
        for name in ("tbt_target", "ttft_target", "deadline"):
            _seconds(self, name)
        for name in ("include_stop_str_in_output", "skip_special_tokens", "ignore_eos"):
            if not isinstance(value := getattr(self, name), bool):
                raise InvalidRequest(f"Got {name}={value!r} but expected True or False.")
        for token_id in self.stop_token_ids:
            _require_int("stop_token_ids", token_id, 0)
        if not all(isinstance(text, str) and text for text in self.stop):
            raise InvalidRequest(f"Got stop={list(self.stop)!r} but expected stop strings of at least one character.")
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise InvalidRequest(
                f"Got grammar={self.grammar!r} but expected a Grammar, such as Grammar.regex('[a-z]+')."
            )
        if self.pooling not in (None, *get_args(Pooling)):
            raise InvalidRequest(f"Got pooling={self.pooling!r} but expected 'last' or 'mean'.")
        if self.pooling is not None and self.max_tokens != 1:
            raise InvalidRequest(f"Got pooling with max_tokens={self.max_tokens} but expected max_tokens=1.")
        if self.grammar is not None and self.ignore_eos:
            raise InvalidRequest("Got ignore_eos=True with a grammar but the grammar decides where an answer ends.")

    def choices(self) -> list[SamplingParams]:
        """The same for each of the `n` outputs, with seeds of their own."""
        seeds = [None if self.seed is None else (self.seed + index) % NUM_SEEDS for index in range(self.n)]
        return [replace(self, n=1, seed=seed) for seed in seeds] if self.n > 1 else [self]

    @property
    def tbt_seconds(self) -> float | None:
        return _seconds(self, "tbt_target")

    @property
    def ttft_seconds(self) -> float | None:
        return _seconds(self, "ttft_target")

    @property
    def deadline_seconds(self) -> float | None:
        return _seconds(self, "deadline")

    @property
    def needs_every_row(self) -> bool:
        """Whether the output depends on all of the prompt's rows, so that none can come from a prefix cache."""
        return self.prompt_logprobs is not None or self.pooling == "mean"


def _seconds(params: SamplingParams, name: str) -> float | None:
    value = getattr(params, name)
    return None if value is None else parse_target(value, InvalidRequest, name=name)


def _check_token_rules(params: SamplingParams) -> None:
    """Check `logit_bias`, `allowed_token_ids` and `bad_words`, and keep copies: later changes are not checked."""
    bad_words = (params.bad_words,) if isinstance(params.bad_words, str) else tuple(params.bad_words)
    object.__setattr__(params, "bad_words", bad_words)
    object.__setattr__(params, "bad_word_ids", tuple(map(tuple, params.bad_word_ids)))
    biases = dict(params.logit_bias or {})
    object.__setattr__(params, "logit_bias", biases or None)
    _require_few("logit_bias", len(biases), MAX_LOGIT_BIASES)
    for token_id, bias in biases.items():
        _require_int("logit_bias's token id", token_id, 0)
        _require_number(f"logit_bias[{token_id}]", bias, -MAX_BIAS, MAX_BIAS)
    if params.allowed_token_ids is not None:
        object.__setattr__(params, "allowed_token_ids", tuple(params.allowed_token_ids))
        if not params.allowed_token_ids:
            raise InvalidRequest("Got allowed_token_ids=[] but expected at least one token id.")
        _require_few("allowed_token_ids", len(params.allowed_token_ids), MAX_ALLOWED_TOKEN_IDS)
        for token_id in params.allowed_token_ids:
            _require_int("allowed_token_ids", token_id, 0)
    _require_few("bad_words", len(bad_words), MAX_BAD_WORDS)
    for word in bad_words:
        if not isinstance(word, str) or not 0 < len(word) <= MAX_BAD_WORD_CHARACTERS:
            raise InvalidRequest(
                f"Got {str(word)[:40]!r} in bad_words but expected texts of 1 to {MAX_BAD_WORD_CHARACTERS} characters."
            )
    for token_ids in params.bad_word_ids:
        if not token_ids:
            raise InvalidRequest("Got an empty list in bad_word_ids but expected at least one token id.")
        for token_id in token_ids:
            _require_int("bad_word_ids", token_id, 0)


def _require_few(name: str, count: int, most: int) -> None:
    if count > most:
        raise InvalidRequest(f"Got {count} entries in {name} but expected at most {most}.")


def _require_int(name: str, value: object, low: int, high: int | None = None) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= (value if high is None else high):
        allowed = f">= {low}" if high is None else f"in [{low}, {high}]"
        raise InvalidRequest(f"Got {name}={value!r} but expected a whole number {allowed}.")


def _require_number(name: str, value: object, low: float, high: float = _LARGEST, *, above: bool = False) -> None:
    """At most `high`, and at least `low` or above it: neither infinite nor an int that no float holds."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not low <= value <= high or (above and value == low):  # type: ignore[operator]
        allowed = f"{'>' if above else '>='} {low}" if high == _LARGEST else f"in {'(' if above else '['}{low}, {high}]"
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
            block_hashes=list(self.block_hashes),
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
    has_failed: bool = False  # a fault that was its own, or may have been: a second one ends it
    epoch: int = 0
    restored_epoch: int = -1  # the last in which it waited for blocks from the tier
    slot: int = -1
    block_ids: list[int] = field(default_factory=list)
    num_scheduled: int = 0
    num_committed: int = 0
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
        self.deadline = StreamDeadline()

    def record(self) -> RequestRecord:
        return RequestRecord(
            self.id,
            self.tokens[: self.num_prompt_tokens],
            self.sampling,
            self.seed,
            self.max_known_tokens,
            sorted(self.stop_token_ids),
            self.salt,
            list(self.block_hashes),  # it grows with the output
            self.arrival_time,
            self.tenant,
            self.service_class,
        )

    @property
    def expires_at(self) -> float:
        """When its deadline passes; never, if it has none."""
        seconds = self.sampling.deadline_seconds
        return self.arrival_time + (math.inf if seconds is None else seconds)

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
    def num_pending(self) -> int:
        return max(0, self.num_scheduled + 1 - len(self.tokens))

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
