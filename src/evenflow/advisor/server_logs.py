"""Finds facts in a server's log: of vLLM 0.10 to 0.32, SGLang 0.5, or evenflow.

The log is read once, line by line; it may have any size and hold any bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import IO, Any

from evenflow.errors import InvalidInput

BUDGET_SOURCES = ("chunk_budget", "budget_asked_for", "compiled_tokens")  # settings that reveal a step's budget
_MAX_LINE_BYTES = 1 << 20
_CONTEXT = 100  # characters of a long line that an excerpt shows on either side
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, slots=True)
class Fact:
    """Something that a line of the log says."""

    name: str
    value: Any
    line_number: int
    line: str


@dataclass(slots=True)
class LogFacts:
    """What a log says. The last line about a setting counts, because a log may hold several starts."""

    settings: dict[str, Fact] = field(default_factory=dict)
    ranks: dict[int, Fact] = field(default_factory=dict)
    problems: dict[str, Fact] = field(default_factory=dict)  # the first line of each kind
    num_preemptions: int = 0
    is_sglang: bool = False
    num_prompt_tokens: int = 0  # that SGLang's lines about prefill count
    num_cached_tokens: int = 0  # of these
    last: Fact | None = None  # the last periodic line: a dict of its figures
    highest: dict[str, Fact] = field(default_factory=dict)  # for each figure, the periodic line of its peak

    def __bool__(self) -> bool:
        return bool(self.settings or self.ranks or self.problems or self.last)

    def value(self, name: str) -> Any:
        """The value of a setting, or None if the log does not say."""
        return self.settings[name].value if name in self.settings else None

    def peak(self, figure: str) -> Any:
        """The highest value of a periodic figure, or None if the log has none."""
        return self.highest[figure].value[figure] if figure in self.highest else None

    @property
    def budget_fact(self) -> Fact | None:
        """The most tokens of a step. vLLM does not log 2,048, but the sizes that it compiles for show it."""
        return next((self.settings[name] for name in BUDGET_SOURCES if name in self.settings), None)

    @property
    def budget(self) -> int | None:
        return None if self.budget_fact is None else int(self.budget_fact.value)

    @property
    def hit_rate(self) -> float | None:
        return None if self.last is None else self.last.value.get("prefix_hit_rate")


class _Patterns:
    """Named patterns, each with a text that a line must hold: checking that first is far faster."""

    def __init__(self, *forms: tuple[str, str, str]) -> None:
        self._by_text: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
        for name, text, pattern in forms:
            self._by_text.setdefault(text, []).append((name, re.compile(pattern)))

    def matches(self, line: str) -> Iterator[tuple[str, re.Match[str]]]:
        for text, patterns in self._by_text.items():
            if text in line:
                yield from ((name, match) for name, pattern in patterns if (match := pattern.search(line)))


# A setting's name, a text in its line, and the pattern of its value.
_SETTINGS = _Patterns(
    ("version", "with config", r"LLM engine \(v([^)\s]+)\) with config"),
    ("version", "version", r"(?:API server|█ ) *version (\d+\.\d+\S*)"),
    ("model", "with config", r" model='([^']+)'"),
    ("max_model_len", "max_seq_len", r"max_seq_len=(\d+)"),
    ("max_model_len", "max model len", r"Using max model len (\d+)"),
    ("tensor_parallel_size", "with config", r"tensor_parallel_size=(\d+)"),
    ("pipeline_parallel_size", "with config", r"pipeline_parallel_size=(\d+)"),
    ("data_parallel_size", "with config", r"data_parallel_size=(\d+)"),
    ("device", "with config", r"device_config=(\w+)"),
    ("prefix_caching", "enable_prefix_caching", r"enable_prefix_caching=(True|False)"),
    ("chunked_prefill", "with config", r"chunked_prefill(?:_enabled)?=(True|False)"),
    ("chunk_budget", "Chunked prefill is enabled", r"max_num_batched_tokens=(\d+)"),
    ("compiled_tokens", "compile_ranges", r"'compile_ranges_(?:endpoints|split_points)': \[(?:\d+, )*(\d+)\]"),
    ("budget_asked_for", "non-default args", r"'max_num_batched_tokens': (\d+)"),
    ("max_num_seqs", "non-default args", r"'max_num_seqs': (\d+)"),
    ("long_prefill_token_threshold", "non-default args", r"'long_prefill_token_threshold': (\d+)"),
    ("chunking_asked_for", "non-default args", r"'enable_chunked_prefill': (True|False)"),
    ("latency_target", "Chunked prefill is enabled", r"with tbt_target=(\S+?)\.?$"),
    ("latency_target", "latency target", r"evenflow: latency target ([\d.]+ ms) on (?:vLLM|SGLang)"),
    ("version", "latency target", r"evenflow: latency target [\d.]+ ms on SGLang (\S+)"),
    ("model", "server_args", r"ServerArgs\(model_path='([^']+)'"),
    ("tensor_parallel_size", "server_args", r"\btp_size=(\d+)"),
    ("pipeline_parallel_size", "server_args", r"\bpp_size=(\d+)"),
    ("data_parallel_size", "server_args", r"\bdp_size=(\d+)"),
    ("attention_backend", "server_args", r"\battention_backend='(\w+)'"),
    ("radix_cache_off", "server_args", r"disable_radix_cache=(True|False)"),
    ("mixed_chunks", "server_args", r"enable_mixed_chunk=(True|False)"),
    ("kv_cache_tokens", "max_total_num_tokens", r"max_total_num_tokens=(\d+)"),
    ("chunk_budget", "max_total_num_tokens", r"chunked_prefill_size=(\d+)"),
    ("max_num_seqs", "max_total_num_tokens", r"max_running_requests=(\d+)"),
    ("max_model_len", "max_total_num_tokens", r"context_len=(\d+)"),
    ("late_tokens", "tokens later than", r"([\d.]+% of \d+ tokens later than \d+ ms, longest gap of these \d+ ms)"),
    ("written_by", "evenflow: Chunked prefill", r"(evenflow): Chunked prefill is"),
    ("unchunked_budget", "Chunked prefill is disabled", r"in one step of up to (\d+) tokens"),
    ("attention_backend", "ackend", r"Using (?:AttentionBackendEnum\.)?([A-Z][\w ]*?) (?:attention )?backend"
     r"(?: on V1 engine| out of potential| \(selected|\.?$)"),
    ("kv_cache_tokens", "KV cache size", r"KV cache size: ([\d,]+) tokens"),
    ("kv_cache_tokens", "The KV cache holds", r"The KV cache holds (\d+) tokens"),
    ("max_concurrency", "Maximum concurrency", r"tokens per request: ([\d.]+)x"),
    ("kv_cache_gib", "Available KV cache memory", r"Available KV cache memory: ([\d.]+) GiB"),
    ("scheduler_class", "custom scheduler class", r"Using custom scheduler class (\S+?)\.? "),
    ("async_scheduling", "Asynchronous scheduling", r"Asynchronous scheduling is (enabled|disabled)"),
)  # fmt: skip

_PROBLEMS = _Patterns(
    ("out of memory", "emory", r"(out of memory|OutOfMemoryError|Memory ran out)"),
    ("no memory for the KV cache", "No available memory", r"No available memory for the cache blocks"),
    ("context over the KV cache", "max seq len", r"To serve at least one request.*max seq len \((\d+)\)"),
    ("budget under the context", "is smaller than max_model_len", r"max_num_batched_tokens \((\d+)\) is smaller"),
    ("budget under max_num_seqs", "must be greater", r"max_num_batched_tokens \((\d+)\) must be greater"),
    ("threshold over the context", "cannot be greater", r"long_prefill_token_threshold \((\d+)\) cannot be"),
    ("unknown flags", "unrecognized arguments", r"unrecognized arguments: (.+)"),
    ("partial prefills", "oncurrent", r"[Cc]oncurrent [Pp]artial [Pp]refill"),
    ("chunking off is not supported", "disabling chunked", r"does not officially support disabling chunked"),
    ("target too low", "is infeasible", r"(?:target|Policy) .*is infeasible"),
    ("target too low", "cannot be kept", r"(?:target|Policy) .*cannot be kept"),
    ("preemption", "preempted by", r"is preempted by"),
    ("preemption", "Retract requests", r"Retract requests"),
)

# Of a line that vLLM and evenflow log periodically.
_FIGURES = _Patterns(
    ("prompt_tokens_per_s", "tokens/s", r"Avg prompt throughput: ([\d.]+) tokens/s"),
    ("generation_tokens_per_s", "tokens/s", r"Avg generation throughput: ([\d.]+) tokens/s"),
    ("running", "reqs", r"Running: (\d+) reqs"),
    ("waiting", "reqs", r"(?:Waiting|Pending): (\d+) reqs"),
    ("kv_cache_usage", "KV cache", r"KV cache usage: ([\d.]+%)"),
    ("prefix_hit_rate", "hit rate", r"(?<!External )[Pp]refix cache hit rate: (?:GPU: )?([\d.]+%)"),
    ("preemptions", "Preemptions", r"Preemptions: (\d+)"),
)
# Of SGLang's lines about batches of decodes.
_DECODE_FIGURES = _Patterns(
    ("generation_tokens_per_s", "token/s", r"gen throughput \(token/s\): ([\d.]+)"),
    ("running", "#running-req", r"#running-req: (\d+)"),
    ("waiting", "#queue-req", r"#queue-req: (\d+)"),
    ("kv_cache_usage", "token usage", r"token usage: ([\d.]+)"),
)
_SGLANG_LINES = ("server_args=ServerArgs(", "max_total_num_tokens=", "Decode batch", "Prefill batch")
_PREFILL = re.compile(r"Prefill batch.*#new-token: (\d+), #cached-token: (\d+)")
_RETRACTED = re.compile(r"Retract requests.*#retracted_reqs: (\d+)")
_ALWAYS_LOGGED = {"prompt_tokens_per_s", "generation_tokens_per_s", "running", "waiting"}
_NUM_DECODE_FIGURES = 4

_TEXTS = ("version", "model")  # even if they look like numbers
# A start does not always log these: those of an earlier start in the same log must not remain.
_START = "non-default args"
_RESET_BY_START = (*BUDGET_SOURCES, "max_num_seqs", "long_prefill_token_threshold", "chunking_asked_for")

_RANK = re.compile(
    r"rank (?P<rank>\d+) in world size (?P<world_size>\d+) is assigned as DP rank (?P<dp_rank>\d+), "
    r"PP rank (?P<pp_rank>\d+),(?: PCP rank \d+,)? TP rank (?P<tp_rank>\d+)"
)


def read_facts(log: str | Path | IO[bytes]) -> LogFacts:
    """The facts in a file or a stream."""
    try:
        with Path(log).open("rb") if isinstance(log, str | Path) else nullcontext(log) as file:
            # The limit keeps a file without line ends from being read whole.
            lines = iter(lambda: file.readline(_MAX_LINE_BYTES), b"")
            return find_facts(line.decode("utf-8", "replace") for line in lines)
    except OSError as error:
        raise InvalidInput(f"Got the log {str(log)!r} but it cannot be read: {error.strerror}.") from error


def find_facts(lines: Iterable[str]) -> LogFacts:
    found = LogFacts()
    for number, line in enumerate(lines, 1):
        _read_line((_COLOURS.sub("", line) if "\x1b" in line else line).rstrip(), number, found)
    return found


def _read_line(line: str, number: int, found: LogFacts) -> None:
    found.is_sglang = found.is_sglang or any(text in line for text in _SGLANG_LINES)
    if "Avg prompt throughput" in line:
        if (matches := dict(_FIGURES.matches(line))).keys() >= _ALWAYS_LOGGED:
            _add_figures(line, number, matches, found)
        return
    if "Decode batch" in line:
        if len(matches := dict(_DECODE_FIGURES.matches(line))) == _NUM_DECODE_FIGURES:
            _add_figures(line, number, matches, found)
        return
    if "Prefill batch" in line and (batch := _PREFILL.search(line)):
        found.num_cached_tokens += int(batch[2])
        found.num_prompt_tokens += int(batch[1]) + int(batch[2])
    if "Retract requests" in line and (retracted := _RETRACTED.search(line)):
        found.num_preemptions += int(retracted[1])
    if "in world size" in line and (rank := _RANK.search(line)):
        value = {name: int(number) for name, number in rank.groupdict().items()}
        found.ranks[value["rank"]] = Fact("rank", value, number, _excerpt(line, rank))
    if _START in line:
        for name in _RESET_BY_START:
            found.settings.pop(name, None)
    for name, match in _SETTINGS.matches(line):
        found.settings[name] = Fact(name, _value(name, match[1]), number, _excerpt(line, match))
    for name, match in _PROBLEMS.matches(line):
        problem = Fact(name, match[1] if match.re.groups else None, number, _excerpt(line, match))
        found.problems.setdefault(name, problem)


def _add_figures(line: str, number: int, matches: dict[str, re.Match[str]], found: LogFacts) -> None:
    figures = {name: _value(name, match[1]) for name, match in matches.items()}
    found.num_preemptions += figures.pop("preemptions", 0)
    if found.num_prompt_tokens:
        figures["prefix_hit_rate"] = found.num_cached_tokens / found.num_prompt_tokens
    found.last = fact = Fact("figures", figures, number, _excerpt(line, matches["generation_tokens_per_s"]))
    for name in figures:
        # Of lines with an equal figure, the one that generated most says most.
        key = itemgetter(name, "generation_tokens_per_s")
        if name != "prefix_hit_rate" and key(figures) > key(found.highest.setdefault(name, fact).value):
            found.highest[name] = fact


def _excerpt(line: str, match: re.Match[str]) -> str:
    """The line; of a very long one, its start and the text around the match."""
    if len(line) <= 4 * _CONTEXT:
        return line
    start = max(_CONTEXT, match.start() - _CONTEXT)
    return f"{line[:_CONTEXT]} ... {line[start : start + 2 * _CONTEXT]} ..."


def _value(name: str, text: str) -> Any:
    """Numbers, percentages (as shares) and booleans as such, anything else as text."""
    if name in _TEXTS:
        return text
    try:
        return float(text[:-1]) / 100 if text.endswith("%") else json.loads(text.replace(",", "").lower())
    except ValueError:
        return text
