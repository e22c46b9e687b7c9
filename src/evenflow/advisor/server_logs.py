"""Finds facts in a server's log: of vLLM 0.10 to 0.32, SGLang 0.5, or evenflow.

The log is read once, line by line; it may have any size and hold any bytes. It may also be pasted from a document.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Set
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from evenflow.advisor.log_pieces import Block, Message, bare
from evenflow.core.policies import PolicySpec
from evenflow.errors import InvalidConfig, InvalidInput

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
        """Does the text hold a log? A model's name alone may come from a program that asks a server."""
        return bool(self.settings.keys() - {"model"} or self.ranks or self.problems or self.last)

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

    def matches(self, line: str, ending_after: int = -1) -> Iterator[tuple[str, re.Match[str]]]:
        """The first match of each pattern that ends after this position."""
        for text, patterns in self._by_text.items():
            if text in line:
                for name, pattern in patterns:
                    if match := next((match for match in pattern.finditer(line) if match.end() > ending_after), None):
                        yield name, match


_NO_TARGET = "no latency target"
# A setting's name, a text in its line, and the pattern of its value.
_SETTINGS = _Patterns(
    ("written_by", "evenflow: Chunked prefill", r"(evenflow): Chunked prefill is"),  # first: it ends earlier policies
    ("version", "with config", r"LLM engine \(v([^)\s]+)\) with config"),
    ("version", "version", r"(?:API server|█ ) *version (\d+\.\d+\S*)"),
    ("model", "with config", r" model='([^']+)'"),
    ("max_model_len", "with config", r"max_seq_len=(\d+)"),
    ("max_model_len", "max model len", r"Using max model len (\d+)"),
    ("tensor_parallel_size", "with config", r"tensor_parallel_size=(\d+)"),
    ("pipeline_parallel_size", "with config", r"pipeline_parallel_size=(\d+)"),
    ("data_parallel_size", "with config", r"data_parallel_size=(\d+)"),
    ("device", "with config", r"device_config=(\w+)"),
    ("prefix_caching", "with config", r"enable_prefix_caching=(True|False)"),
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
    ("latency_target", "from now on", r"evenflow: latency target ([\d.e+]+ ms) from now on"),
    ("policy", "no latency target", rf"evenflow: ({_NO_TARGET}) (?:on|from now on|is kept)\b"),
    ("policy", "The policy is now", r"The policy is now ([a-z-]+(?::\S+?)?)\.(?!\w)"),
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

# Settings on a line of their own, as `name=value` or `name: value`, and what each is called here.
_PLAIN = ("model", "max_model_len", "max_num_seqs", "long_prefill_token_threshold")
_PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
_LONE_NAMES = {name: name for name in (*_PLAIN, *_PARALLEL)} | {
    "max_seq_len": "max_model_len",
    "max_num_batched_tokens": "chunk_budget",
    "enable_prefix_caching": "prefix_caching",
    "enable_chunked_prefill": "chunked_prefill",
    "chunked_prefill_enabled": "chunked_prefill",
}
# As logs and JSON quote it: `model="default"` is a program's.
_LONE_SETTING = re.compile(rf"""(['"]?)({"|".join(_LONE_NAMES)})\1\s*[=:|]\s*(?:'|\1)?(?!None)([\w./-]*\w)['"]?""")

# Real messages, not prose: an allocator, an error or one of SGLang's stages says it; a target has its figure.
_NO_MEMORY = r"(?:[A-Z]{3,}(?: backend)?|Decode|Prefill|[Ee]rror[^:]{0,20}:|[Ff]ailure(?: \d+)?) '?out of memory"
_TARGET = r"(?:Policy target:\S+|evenflow: a target of \S+ ms)"
_PROBLEMS = _Patterns(
    ("out of memory", "emory", rf"({_NO_MEMORY}|OutOfMemoryError|Memory ran out\. From now on)"),
    ("no memory for the KV cache", "No available memory", r"No available memory for the cache blocks"),
    ("context over the KV cache", "max seq len", r"To serve at least one request.*max seq len \((\d+)\)"),
    ("budget under the context", "is smaller than max_model_len", r"max_num_batched_tokens \((\d+)\) is smaller"),
    ("budget under max_num_seqs", "must be greater", r"max_num_batched_tokens \((\d+)\) must be greater"),
    ("threshold over the context", "cannot be greater", r"long_prefill_token_threshold \((\d+)\) cannot be"),
    ("unknown flags", "unrecognized arguments", r"unrecognized arguments: (.+)"),
    ("partial prefills", "Concurrent", r"Concurrent (?:Partial Prefill|partial prefills enabled)"),
    ("chunking off is not supported", "disabling chunked", r"does not officially support disabling chunked"),
    ("target too low", "is infeasible", rf"{_TARGET} is infeasible"),
    ("target too low", "cannot be kept", rf"{_TARGET} cannot be kept"),
    ("preemption", "preempted by", r"Sequence group \S+ is preempted by"),
    ("preemption", "Retract requests", r"Retract requests"),
)

# Of a line that vLLM and evenflow log periodically, or of a document's list or table of its figures.
_FIGURES = _Patterns(
    ("prompt_tokens_per_s", "throughput", r"[Pp]rompt throughput\W{1,6}([\d.,]+) ?tok(?:en)?s?/s"),
    ("generation_tokens_per_s", "throughput", r"[Gg]eneration throughput\W{1,6}([\d.,]+) ?tok(?:en)?s?/s"),
    ("running", "req", r"Running\W{1,6}(\d+) req"),
    ("waiting", "req", r"(?:Waiting|Pending)\W{1,6}(\d+) req"),
    ("kv_cache_usage", "KV cache", r"KV cache usage\W{1,6}([\d.]+ ?%)"),
    ("prefix_hit_rate", "hit rate", r"(?<!External )[Pp]refix cache hit rate\W{1,6}(?:GPU\W{1,3})?([\d.]+ ?%)"),
    ("preemptions", "Preemptions", r"Preemptions\W{1,6}(\d+)"),
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
_NUM_DECODE_FIGURES = 4
_WHOLE_LINE = {"prompt_tokens_per_s", "generation_tokens_per_s", "running", "waiting"}

_TEXTS = ("version", "model", "policy")  # even if they look like numbers
# Earlier settings that a setting or a start ends: a log may hold several starts, and policies that follow each other.
_START = "non-default args"
_OF_POLICY = ("policy", "latency_target", "unchunked_budget")
_ENDS = {
    _START: (*BUDGET_SOURCES, "max_num_seqs", "long_prefill_token_threshold", "chunking_asked_for"),
    "written_by": ("chunk_budget", *_OF_POLICY),
    "latency_target": _OF_POLICY,
    "policy": _OF_POLICY,
}

_RANKS = _Patterns(
    ("rank", "in world size", r"rank (?P<rank>\d+) in world size (?P<world_size>\d+) is assigned as "
     r"DP rank (?P<dp_rank>\d+), PP rank (?P<pp_rank>\d+),(?: PCP rank \d+,)? TP rank (?P<tp_rank>\d+)"),
)  # fmt: skip


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
    reader = _Reader()
    for number, line in enumerate(lines, 1):
        reader.read(_plain((_COLOURS.sub("", line) if "\x1b" in line else line).rstrip()), number)
    return reader.finish()


def _plain(line: str) -> str:
    """A line of JSON, as evenflow writes with --log-format json, in the form of text."""
    if not (line.startswith("{") and '"message"' in line):
        return line
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return line
    message = found.get("message") if isinstance(found, dict) else None
    if not isinstance(message, str):
        return line
    time, level, logger = (found.get(name, "") for name in ("time", "level", "logger"))
    return f"{time} {level} {logger}: {' '.join(message.split())}"


class _Reader:
    """Takes the lines of a log one by one, with the message and the block of figures that each may continue."""

    def __init__(self) -> None:
        self._found = LogFacts()
        self._message = Message()
        self._block = Block()

    def finish(self) -> LogFacts:
        self._end_block()
        return self._found

    def read(self, line: str, number: int) -> None:
        found = self._found
        found.is_sglang = found.is_sglang or any(text in line for text in _SGLANG_LINES)
        if "Decode batch" in line:
            if len(matches := dict(_DECODE_FIGURES.matches(line))) == _NUM_DECODE_FIGURES:
                figures = {name: _value(name, match[1]) for name, match in matches.items()}
                _add_figures(figures, _excerpt(line, matches["generation_tokens_per_s"]), number, found)
            return
        joined = self._message.take(line)
        names = self._read_figures(line, line, number)
        if not names >= _WHOLE_LINE:  # which says nothing else
            _read_counts(line, found)
            names |= self._read_facts(line, number)
            for text, start in joined:
                names |= self._read_figures(text, line, number, start, names)
                names |= self._read_facts(text, number, start, names)

    def _read_figures(
        self, text: str, line: str, number: int, start: int = -1, known: Set[str] = frozenset()
    ) -> set[str]:
        """Figures in a text that ends with this line, from `start` on; the names of those found."""
        names = set()
        for name, match in _FIGURES.matches(text, start):
            if name in known:
                continue
            if not self._block.takes(name, number):
                self._end_block()
            self._block.add(name, _value(name, match[1]), _excerpt(line, match), number)
            names.add(name)
        return names

    def _end_block(self) -> None:
        block, self._block = self._block, Block()
        if block.figures:
            _add_figures(block.figures, block.text, block.first_line_number, self._found)

    def _read_facts(self, text: str, number: int, start: int = -1, known: Set[str] = frozenset()) -> set[str]:
        """Settings, ranks and problems in a text that ends with this line; the names of the settings found."""
        found, names = self._found, set()
        for name, match in _RANKS.matches(text, start):
            ranks = {rank_name: int(digits) for rank_name, digits in match.groupdict().items()}
            found.ranks[ranks["rank"]] = Fact(name, ranks, number, _excerpt(text, match))
        settings = [(name, match[1], match) for name, match in _SETTINGS.matches(text, start)]
        if start < 0 and len(text) <= _CONTEXT and (alone := _LONE_SETTING.fullmatch(bare(text).rstrip(",;."))):
            settings.append((_LONE_NAMES[alone[2]], alone[3], alone))
        for name, value, match in settings:
            if name not in known:
                _set(Fact(name, _value(name, value), number, _excerpt(text, match)), found)
                names.add(name)
        for name, match in _PROBLEMS.matches(text, start):
            problem = Fact(name, match[1] if match.re.groups else None, number, _excerpt(text, match))
            found.problems.setdefault(name, problem)
        return names


def _set(fact: Fact, found: LogFacts) -> None:
    """The last line about a setting counts."""
    policy = None
    if fact.name == "policy" and fact.value not in ("none", _NO_TARGET):
        try:
            policy = PolicySpec.parse(fact.value)
        except InvalidConfig:  # prose
            return
    _end(found, fact.name)
    if policy is not None and policy.target is not None:
        fact = replace(fact, name="latency_target", value=fact.value.removeprefix("target:"))
    elif policy is not None and policy.names_budget:
        found.settings["chunk_budget"] = replace(fact, name="chunk_budget", value=policy.budget)
    found.settings[fact.name] = fact


def _end(found: LogFacts, by: str) -> None:
    for name in _ENDS.get(by, ()):
        found.settings.pop(name, None)


def _read_counts(line: str, found: LogFacts) -> None:
    """What adds up over the lines, and a start, which ends what an earlier one has set."""
    if "Prefill batch" in line and (batch := _PREFILL.search(line)):
        found.num_cached_tokens += int(batch[2])
        found.num_prompt_tokens += int(batch[1]) + int(batch[2])
    if "Retract requests" in line and (retracted := _RETRACTED.search(line)):
        found.num_preemptions += int(retracted[1])
    if _START in line:
        _end(found, _START)


def _add_figures(figures: dict[str, Any], line: str, number: int, found: LogFacts) -> None:
    found.num_preemptions += figures.pop("preemptions", 0)
    if found.num_prompt_tokens:
        figures["prefix_hit_rate"] = found.num_cached_tokens / found.num_prompt_tokens
    found.last = fact = Fact("figures", figures, number, line)
    for name in figures:
        if name != "prefix_hit_rate" and _height(fact, name) > _height(found.highest.setdefault(name, fact), name):
            found.highest[name] = fact


def _height(fact: Fact, figure: str) -> tuple[float, float]:
    """Of lines with an equal figure, the one that generated most says most."""
    return fact.value[figure], fact.value.get("generation_tokens_per_s", 0.0)


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
        return float(text.rstrip(" %")) / 100 if text.endswith("%") else json.loads(text.replace(",", "").lower())
    except ValueError:
        return text
