"""Shared by executors that run a model: a sequence's part in a step, its sampling state, out-of-memory errors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from evenflow.core.logprobs import LogprobRows
from evenflow.core.plan import Admission, StepPlan
from evenflow.core.request import Pooling
from evenflow.errors import OutOfMemory
from evenflow.model.sampler import SampledSequence, Samples
from evenflow.model.token_rules import TokenRules

if TYPE_CHECKING:
    from evenflow.model.text.grammar import Grammars


_MEMORY_MESSAGES = ("allocate memory", "not enough memory", "out of memory")  # torch's, on CPUs and GPUs


class Slot(Protocol):
    """A running sequence. `sampled` holds its tokens, with every sample appended."""

    @property
    def sampled(self) -> SampledSequence: ...


SlotT = TypeVar("SlotT", bound=Slot)


@dataclass(slots=True)
class Part(Generic[SlotT]):
    """One sequence's part in a step: `length` rows from position `start`."""

    slot: SlotT
    start: int
    length: int
    samples: bool = True
    prompt_logprobs: bool = False

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def token_ids(self) -> list[int]:
        return self.slot.sampled.tokens[self.start : self.end]

    @property
    def num_wanted(self) -> int:
        """The number of trailing rows needed after the last layer."""
        return self.length if self.prompt_logprobs or self.pooling == "mean" else int(self.samples)

    @property
    def is_read_row_by_row(self) -> bool:
        """Whether its rows are needed for more than sampling."""
        return self.prompt_logprobs or self.pooling is not None

    @property
    def pooling(self) -> Pooling | None:
        return self.slot.sampled.params.pooling

    @property
    def predicted(self) -> list[int]:
        """The prompt's tokens at start + 1 .. end; without the last row, which predicts output."""
        sampled = self.slot.sampled
        return sampled.tokens[self.start + 1 : min(self.end + 1, sampled.num_prompt_tokens)]

    def shorten(self, length: int) -> None:
        """Compute only the first rows, and sample no token."""
        if length < self.length:
            self.length, self.samples = length, False


@dataclass(slots=True)
class SampledParts:
    """Samples by part."""

    tokens: list[tuple[int, ...]]  # empty for a part that failed or does not sample
    errors: dict[int, str] = field(default_factory=dict)
    faults: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, LogprobRows] = field(default_factory=dict)

    def take(self, numbers: Sequence[int], samples: Samples) -> None:
        """Add rows of samples for the parts with these indices."""
        self.errors |= {numbers[row]: message for row, message in samples.errors.items()}
        self.faults |= {numbers[row]: message for row, message in samples.faults.items()}
        self.logprobs |= {numbers[row]: found for row, found in samples.logprobs.items()}
        for number, token in zip(numbers, samples.tokens, strict=True):
            if number not in self.errors and number not in self.faults:
                self.tokens[number] = (token,)


def parts_of(plan: StepPlan, slots: Mapping[int, SlotT]) -> Iterator[Part[SlotT]]:
    """The plan's parts in the order of its result: decodes, then chunks."""
    for number, position in zip(plan.decodes.slots, plan.decodes.positions, strict=True):
        yield Part(slots[number], position, 1)
    for chunk in plan.chunks:
        yield Part(slots[chunk.slot], chunk.start, chunk.length, chunk.samples, chunk.prompt_logprobs)


def new_sampled(admission: Admission, vocab_size: int, grammars: Grammars | None) -> SampledSequence:
    constraint = None
    if admission.sampling.grammar is not None:
        assert grammars is not None, "a request with a grammar for an executor without grammars"
        constraint = grammars.constrain(admission.sampling.grammar)
    stops = frozenset(token for token in admission.stop_token_ids if token < vocab_size)
    return SampledSequence(
        params=admission.sampling,
        seed=admission.seed,
        tokens=list(admission.token_ids),
        num_prompt_tokens=admission.num_prompt_tokens,
        stop_token_ids=stops if len(stops) < vocab_size else frozenset(),  # else `min_tokens` would leave no token
        constraint=constraint,
        rules=TokenRules.of(admission.sampling, vocab_size),
    )


def is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError) or any(text in str(error) for text in _MEMORY_MESSAGES)


def out_of_memory(error: Exception, plan: StepPlan) -> OutOfMemory | None:
    """The user's error if memory ran out in this step; None for any other error."""
    if not is_out_of_memory(error):
        return None
    return OutOfMemory(
        f"Memory ran out in a step of {plan.num_rows} tokens for {plan.num_sequences} sequences. Lower "
        "max_num_batched_tokens or max_num_seqs, set gpu_memory_utilization to 0.7-0.8, or use a smaller model."
    )
