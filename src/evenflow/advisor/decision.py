"""Whether chunked prefill pays for inputs of these lengths (in tokens), from which length on, and why."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from numbers import Real

from evenflow.errors import InvalidInput

SHORT_TOKENS = 1000  # if no input is longer, there is nothing to cut
DEFAULT_THRESHOLD = 2048
LONG_CONTEXT_TOKENS = 8000

_BANDS = ((SHORT_TOKENS, "skip"), (2000, "optional"), (4000, "consider"), (LONG_CONTEXT_TOKENS, "recommended"))


class Chunking(StrEnum):
    """Which inputs to cut."""

    DISABLED = "disabled"
    SELECTIVE = "selective"
    ALWAYS = "always"


@dataclass(frozen=True, slots=True)
class Decision:
    """`threshold` is the length from which cutting pays; None if all inputs are short."""

    decision: Chunking
    threshold: int | None
    band: str
    reason: str


@dataclass(frozen=True, slots=True)
class Trigger:
    """A cause to turn chunking on, whether it applies, and why."""

    name: str
    active: bool
    reason: str


def should_enable_chunked_prefill(input_length: int, threshold: int = DEFAULT_THRESHOLD) -> bool:
    """Whether one input is long enough to cut: over the threshold, not at it."""
    for name, value in {"input_length": input_length, "threshold": threshold}.items():
        if isinstance(value, bool) or not isinstance(value, Real):
            hint = "" if name == "threshold" else "; `evenflow.advisor.analyze` reads files and texts"
            raise InvalidInput(f"Got {name}={repr(value)[:100]} but expected a number of tokens{hint}.")
    return input_length > threshold


def automatic_threshold(longest: int, p95: int) -> int | None:
    """None if all inputs are short; 2,048 if the 95th percentile is below that; else 80% of it."""
    if longest < SHORT_TOKENS:
        return None
    return DEFAULT_THRESHOLD if p95 < DEFAULT_THRESHOLD else 4 * p95 // 5


def band_of(longest: int) -> str:
    """How strongly the longest input calls for chunking."""
    return next((band for limit, band in _BANDS if longest < limit), "required")


def decide(longest: int, p95: int, shortest: int | None = None) -> Decision:
    """The decision for a set of inputs.

    Without the shortest, no figure proves that every input is long. ALWAYS then needs inputs that look alike: a 95th
    percentile equal to the longest, at a length where sets of short and long inputs are rare.
    """
    threshold = automatic_threshold(longest, p95)
    look_alike = p95 == longest > LONG_CONTEXT_TOKENS
    if threshold is None:
        chunking = Chunking.DISABLED
        reason = f"the longest input has {longest:,} tokens, under {SHORT_TOKENS:,}: no step is long enough to stall"
    elif not should_enable_chunked_prefill(longest, threshold):
        chunking = Chunking.DISABLED
        reason = f"no input is over the threshold of {threshold:,} tokens; the longest has {longest:,}"
    elif shortest is not None and should_enable_chunked_prefill(shortest):
        chunking = Chunking.ALWAYS
        reason = f"every input is over {DEFAULT_THRESHOLD:,} tokens; the shortest has {shortest:,}"
    elif shortest is None and look_alike:
        chunking = Chunking.ALWAYS
        reason = (
            f"the 95th percentile and the longest input are both {longest:,} tokens, over {LONG_CONTEXT_TOKENS:,}, so "
            "all inputs are assumed to be that long; the shortest input is not known"
        )
    else:
        chunking = Chunking.SELECTIVE
        others = "whether all are long is unknown" if shortest is None else f"the shortest has {shortest:,}"
        reason = f"some inputs are over the threshold of {threshold:,} tokens (the longest has {longest:,}); {others}"
    return Decision(chunking, threshold, band_of(longest), reason)
