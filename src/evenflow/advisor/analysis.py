"""Statistics of datasets, of each one and of all together. Inputs are taken one at a time and not kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from evenflow.advisor.decision import Decision
from evenflow.advisor.lengths import LengthFigures, Lengths
from evenflow.advisor.recommendation import Recommendation, decide_for, recommend
from evenflow.advisor.token_counts import EstimatedTokens, TokenCounter
from evenflow.advisor.vllm_flags import NEWEST_VERSION
from evenflow.counts import counted
from evenflow.errors import InvalidInput
from evenflow.workload.inputs import BLOCK_TOKENS, Input, TraceRequest

THRESHOLDS = (1000, 2048, 4096, 8192, 16384, 32768)
LONG_CHARACTERS = 8000
PRESET_TOKENS = {"code": 4000, "document": 12000, "retrieval": 24000, "evaluation": 47}


@dataclass(frozen=True, slots=True)
class ArrivalFigures:
    """How fast the requests of a trace arrive."""

    seconds: float
    requests_per_s: float
    most_in_a_second: int


@dataclass(frozen=True, slots=True)
class PrefixFigures:
    """What an unlimited prefix cache would hold: an upper bound for a real one.

    `hit_rate` is a share of all prompt tokens; `uncached` are the tokens of each prompt left to compute.
    """

    block_tokens: int
    num_blocks: int
    num_distinct_blocks: int
    hit_rate: float
    uncached: LengthFigures


@dataclass(frozen=True, slots=True)
class DatasetAnalysis:
    """One dataset. What it does not have is None: traces have no characters, texts no arrivals."""

    name: str
    tokens_from: str
    tokens: LengthFigures
    characters: LengthFigures | None
    output_tokens: LengthFigures | None
    prefixes: PrefixFigures | None
    arrivals: ArrivalFigures | None
    lengths: Lengths  # in tokens
    character_lengths: Lengths | None
    unusable: Mapping[str, int]
    is_cut_short: bool = False  # only its first inputs were read
    fields: Mapping[str, int] = field(default_factory=dict)  # of the records: how many prompts are made of which
    unused_fields: tuple[str, ...] = ()

    @property
    def fields_used(self) -> str:
        """Which fields became prompts, for a report; "" if that is plain."""
        if not self.fields or (list(self.fields) == ["prompt"] and not self.unused_fields):
            return ""
        ways = list(self.fields.items())
        used = ways[0][0] if len(ways) == 1 else ", ".join(f"{name} ({count:,})" for name, count in ways)
        return f"prompts from {used}; " + (
            f"not used: {', '.join(self.unused_fields)}" * bool(self.unused_fields) or "no other fields"
        )

    def __str__(self) -> str:
        tokens = self.tokens
        fields = f" {self.fields_used.capitalize()}." if self.fields_used else ""
        return (
            f"{self.name}: {counted(tokens.count, 'input')}, tokens {self.tokens_from}: median {tokens.p50:,}, "
            f"p95 {tokens.p95:,}, longest {tokens.max:,}.{fields}"
        )

    @property
    def has_long_characters(self) -> bool | None:
        return None if self.characters is None else self.characters.max > LONG_CHARACTERS


@dataclass(frozen=True, slots=True)
class Analysis:
    """All datasets together. The figures in characters are those of the datasets that have texts; None if none has."""

    datasets: tuple[DatasetAnalysis, ...]
    tokens: LengthFigures
    characters: LengthFigures | None
    mean_of_maxima: float  # of the datasets' longest inputs, in tokens
    mean_of_maxima_characters: float | None
    num_with_long_characters: int | None
    lengths: Lengths  # in tokens

    @property
    def decision(self) -> Decision:
        """Whether to chunk prefill, and why."""
        return decide_for(self)

    @property
    def recommendation(self) -> Recommendation:
        """The settings that follow, as `evenflow analyze` gives them without options."""
        return recommend(self, self.decision)

    def __str__(self) -> str:
        """The advice, then the data that it rests on."""
        decision, advice = self.decision, self.recommendation
        settings = [f"  {name}={value!r}: {advice.reasons[name]}." for name, value in advice.settings.items()]
        return "\n".join(
            [
                f"Chunked prefill: {decision.decision.capitalize()}. {decision.reason.capitalize()}.",
                f"Settings for vLLM {NEWEST_VERSION}:",
                *settings,
                *map(str, self.datasets),
            ]
        )

    @classmethod
    def of(cls, datasets: Iterable[DatasetAnalysis]) -> Analysis:
        parts = tuple(datasets)
        whole = Lengths(sum((part.lengths for part in parts), Counter()))
        texts = [part.character_lengths for part in parts if part.character_lengths is not None]
        return cls(
            datasets=parts,
            tokens=whole.figures(),
            characters=Lengths(sum(texts, Counter())).figures() if texts else None,
            mean_of_maxima=fmean(part.tokens.max for part in parts),
            mean_of_maxima_characters=fmean(map(max, texts)) if texts else None,
            num_with_long_characters=sum(max(text) > LONG_CHARACTERS for text in texts) if texts else None,
            lengths=whole,
        )


class PrefixTally:
    """Takes the prompts of one trace in order."""

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._num_blocks = 0
        self._num_tokens = 0
        self._uncached = Lengths()
        self._block_tokens = BLOCK_TOKENS

    def add(self, block_ids: Sequence[int], num_tokens: int, block_tokens: int = BLOCK_TOKENS) -> None:
        num_leading = next((i for i, block_id in enumerate(block_ids) if block_id not in self._seen), len(block_ids))
        # A prompt's last token is always computed: the first output token is sampled from its logits.
        num_hit = min(num_leading * block_tokens, num_tokens - 1)
        self._block_tokens = block_tokens
        self._seen.update(block_ids)
        self._num_blocks += len(block_ids)
        self._num_tokens += num_tokens
        self._uncached[num_tokens - num_hit] += 1

    def figures(self) -> PrefixFigures | None:
        """None if the trace has no block ids."""
        if not self._num_blocks:
            return None
        uncached = self._uncached.figures()
        hit_rate = (self._num_tokens - uncached.total) / self._num_tokens
        return PrefixFigures(self._block_tokens, self._num_blocks, len(self._seen), hit_rate, uncached)


class DatasetTally:
    """Takes the inputs of one dataset."""

    def __init__(self, name: str, counter: TokenCounter) -> None:
        self._name = name
        self._counter = counter
        self._tokens, self._characters, self._output_tokens = Lengths(), Lengths(), Lengths()
        self._prefixes = PrefixTally()
        self._arrivals: Counter[int] = Counter()  # by second
        self._fields: Counter[str] = Counter()
        self._first_s, self._last_s = float("inf"), float("-inf")

    @property
    def count(self) -> int:
        return self._tokens.total()

    def add(self, item: Input) -> None:
        if item.fields:
            self._fields[" + ".join(item.fields)] += 1
        if not isinstance(item, TraceRequest):
            self._characters[len(item.text)] += 1
            self._tokens[self._counter.count(item)] += 1
            return
        self._tokens[item.num_prompt_tokens] += 1
        self._prefixes.add(item.block_ids, item.num_prompt_tokens, item.block_tokens)
        if item.num_output_tokens is not None:
            self._output_tokens[item.num_output_tokens] += 1
        if item.arrival_s is not None:
            self._arrivals[int(item.arrival_s)] += 1
            self._first_s, self._last_s = min(self._first_s, item.arrival_s), max(self._last_s, item.arrival_s)

    def analysis(
        self, unusable: Mapping[str, int], *, is_cut_short: bool = False, other_fields: Iterable[str] = ()
    ) -> DatasetAnalysis:
        """The statistics; needs at least one input."""
        num_texts, seconds = self._characters.total(), self._last_s - self._first_s
        characters = self._characters if num_texts == self.count else None
        arrivals = None
        if seconds > 0:
            arrivals = ArrivalFigures(seconds, self._arrivals.total() / seconds, max(self._arrivals.values()))
        return DatasetAnalysis(
            name=self._name,
            tokens_from=self._counter.description if num_texts else "given with the data",
            tokens=self._tokens.figures(),
            characters=None if characters is None else characters.figures(),
            output_tokens=self._output_tokens.figures() if self._output_tokens else None,
            prefixes=self._prefixes.figures(),
            arrivals=arrivals,
            lengths=self._tokens,
            character_lengths=characters,
            unusable=unusable,
            is_cut_short=is_cut_short,
            fields=dict(self._fields.most_common()),
            unused_fields=tuple(sorted(other_fields)),
        )


def preset_dataset(name: str) -> DatasetAnalysis:
    """A dataset with one typical input of this kind of work."""
    if name not in PRESET_TOKENS:
        raise InvalidInput(f"Got the preset {name!r} but expected one of {', '.join(PRESET_TOKENS)}.")
    tally = DatasetTally(f"preset {name}", EstimatedTokens())
    tally.add(TraceRequest(PRESET_TOKENS[name]))
    return tally.analysis({})
