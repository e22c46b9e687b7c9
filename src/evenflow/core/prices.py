"""What each account is charged for a step: its part of the seconds that the step is predicted to take."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from evenflow.core.account import Account
from evenflow.core.plan import ExecutorCaps
from evenflow.core.step_time import StepTimeModel

# Seconds of a row before the first step was measured: only the ratios of prices matter.
_NOMINAL_ROW_S = 1e-4


def prefill_price(step_time: StepTimeModel, caps: ExecutorCaps, start: int, length: int) -> float:
    """Seconds of a chunk by itself."""
    return step_time.predict(caps.prefill_shape(start, length)) or _NOMINAL_ROW_S * length


def step_prices(
    step_time: StepTimeModel,
    caps: ExecutorCaps,
    decodes: Iterable[tuple[Account, int]],  # with the positions that each attends to
    chunks: Sequence[tuple[Account, int, int]],  # with start and length
    predicted: float,
) -> dict[Account, float]:
    """Seconds charged to each account; they add up to the step's.

    Streams share what the decodes alone would take: what it would be without context by number, the rest by context.
    Chunks share what they add.
    """
    prices: dict[Account, float] = {}
    streams: dict[Account, tuple[int, int]] = {}
    for account, context in decodes:
        num_streams, total = streams.get(account, (0, 0))
        streams[account] = num_streams + 1, total + context
    num_decodes = sum(count for count, _ in streams.values())
    all_context = sum(context for _, context in streams.values())
    by_number = step_time.predict(caps.step_shape(num_decodes=num_decodes)) or _NOMINAL_ROW_S * num_decodes
    by_context = max(
        0.0, step_time.predict(caps.step_shape(num_decodes=num_decodes, decode_context=all_context)) - by_number
    )
    for account, (count, context) in streams.items():
        prices[account] = by_number * count / num_decodes + by_context * context / all_context
    alone = [prefill_price(step_time, caps, start, length) for _, start, length in chunks]
    decode_seconds = by_number + by_context if num_decodes else 0.0
    added = max(predicted - decode_seconds, 0.0) or sum(alone)
    for (account, _, _), seconds in zip(chunks, alone, strict=True):
        prices[account] = prices.get(account, 0.0) + added * seconds / sum(alone)
    return prices
