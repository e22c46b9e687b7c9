"""The figures of datasets, of each one and of all together.

Inputs come one at a time and are forgotten at once. Must not know: files, what is decided by the figures.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from evenflow.advisor.lengths import LengthFigures, Lengths
from evenflow.advisor.prefixes import PrefixFigures, PrefixTally
from evenflow.advisor.tokens import TokenCounter
from evenflow.workload.inputs import Input, TraceRequest

THRESHOLDS = (1000, 2048, 4096, 8192, 16384, 32768)
LONG_CHARACTERS = 8000


@dataclass(frozen=True, slots=True)
class ArrivalFigures:
    """How fast a trace's requests come."""

    seconds: float
    requests_per_s: float
    most_in_a_second: int


@dataclass(frozen=True, slots=True)
class DatasetAnalysis:
    """One dataset. What a dataset does not say is None: traces have no characters, texts no arrivals."""

    name: str
    tokens_from: str
    tokens: LengthFigures
    characters: LengthFigures | None
    output_tokens: LengthFigures | None
    share_over: Mapping[int, float]  # of the sequences, by threshold
    prefixes: PrefixFigures | None
    arrivals: ArrivalFigures | None
    lengths: Lengths
    unusable: Mapping[str, int]
    is_cut_short: bool = False  # only its first inputs were read

    @property
    def has_long_characters(self) -> bool:
        return self.characters is not None and self.characters.max > LONG_CHARACTERS


@dataclass(frozen=True, slots=True)
class Analysis:
    """All datasets together."""

    datasets: tuple[DatasetAnalysis, ...]
    tokens: LengthFigures
    characters_total: int | None  # None where a dataset does not say
    mean_of_maxima: float
    num_with_long_characters: int
    share_over: Mapping[int, float]
    lengths: Lengths

    @classmethod
    def of(cls, datasets: Iterable[DatasetAnalysis]) -> Analysis:
        parts = tuple(datasets)
        whole = Lengths.union([part.lengths for part in parts])
        characters = [part.characters.total for part in parts if part.characters is not None]
        return cls(
            datasets=parts,
            tokens=whole.figures(),
            characters_total=sum(characters) if len(characters) == len(parts) else None,
            mean_of_maxima=sum(part.tokens.max for part in parts) / len(parts),
            num_with_long_characters=sum(part.has_long_characters for part in parts),
            share_over={threshold: whole.share_over(threshold) for threshold in THRESHOLDS},
            lengths=whole,
        )


class DatasetTally:
    """Takes in the inputs of one dataset."""

    def __init__(self, name: str, counter: TokenCounter) -> None:
        self._name = name
        self._counter = counter
        self._tokens, self._characters, self._output_tokens = Lengths(), Lengths(), Lengths()
        self._prefixes = PrefixTally()
        self._arrivals: Counter[int] = Counter()  # by second
        self._first_s, self._last_s = float("inf"), float("-inf")

    @property
    def count(self) -> int:
        return self._tokens.count

    def add(self, item: Input) -> None:
        if isinstance(item, TraceRequest):
            self._add_traced(item)
            return
        self._characters.add(len(item.text))
        self._tokens.add(self._counter.count(item))

    def _add_traced(self, request: TraceRequest) -> None:
        self._tokens.add(request.num_prompt_tokens)
        self._prefixes.add(request.block_ids, request.num_prompt_tokens)
        if request.num_output_tokens is not None:
            self._output_tokens.add(request.num_output_tokens)
        if request.arrival_s is not None:
            self._arrivals[int(request.arrival_s)] += 1
            self._first_s, self._last_s = min(self._first_s, request.arrival_s), max(self._last_s, request.arrival_s)

    def analysis(self, unusable: Mapping[str, int], *, is_cut_short: bool = False) -> DatasetAnalysis:
        """The figures; there must have been an input."""
        num_counted = self._characters.count
        return DatasetAnalysis(
            name=self._name,
            tokens_from=self._counter.description if num_counted else "given with the data",
            tokens=self._tokens.figures(),
            characters=self._characters.figures() if num_counted == self.count else None,
            output_tokens=self._output_tokens.figures() if self._output_tokens.count else None,
            share_over={threshold: self._tokens.share_over(threshold) for threshold in THRESHOLDS},
            prefixes=self._prefixes.figures(),
            arrivals=self._arrival_figures(),
            lengths=self._tokens,
            unusable=unusable,
            is_cut_short=is_cut_short,
        )

    def _arrival_figures(self) -> ArrivalFigures | None:
        seconds = self._last_s - self._first_s
        if seconds <= 0:
            return None
        return ArrivalFigures(seconds, self._arrivals.total() / seconds, max(self._arrivals.values()))
