"""What each account is charged for a step: its share of the step's predicted time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from evenflow.core.account import Account
from evenflow.core.plan import ExecutorCaps
from evenflow.core.step_time import StepTimeModel

# Seconds of a row before the first step was measured: only the ratios of prices matter.
_NOMINAL_ROW_S = 1e-4
# Prefill rows of a step in which a GPU computes for as long as it reads the weights, or longer.
_FULL_STEP_ROWS = 512


def nominal_price(num_rows: int) -> float:
    """Seconds of these rows before the first step was measured."""
    return _NOMINAL_ROW_S * num_rows


def prefill_price(step_time: StepTimeModel, caps: ExecutorCaps, start: int, length: int) -> float:
    """Seconds of a chunk by itself."""
    return step_time.predict(caps.prefill_shape(start, length)) or nominal_price(length)


def context_price(step_time: StepTimeModel, caps: ExecutorCaps, num_streams: int, positions: int) -> float:
    """The part of a step's seconds that is due to the context of streams."""
    whole, plain = (caps.step_shape(num_decodes=num_streams, decode_context=size) for size in (positions, 0))
    return max(0.0, step_time.predict(whole) - step_time.predict(plain))


def stream_price(step_time: StepTimeModel, caps: ExecutorCaps, num_streams: int, positions: int) -> float:
    """The seconds that streams add to a step full of prefill: for their rows and their contexts."""
    fill = [(0, _FULL_STEP_ROWS)]
    with_streams = caps.step_shape(num_decodes=num_streams, decode_context=positions, chunks=fill)
    return max(0.0, step_time.predict(with_streams) - step_time.predict(caps.step_shape(chunks=fill)))


def step_prices(
    step_time: StepTimeModel,
    caps: ExecutorCaps,
    decodes: Iterable[tuple[Account, int]],  # with the positions that each attends to
    chunks: Sequence[tuple[Account, int, int]],  # with start and length
    predicted: float,
) -> dict[Account, float]:
    """Seconds charged to each account; they add up to the step's.

    Those that depend on context are charged to the accounts that have it, the rest by rows: all share reading weights.
    """
    rows: dict[Account, int] = {}
    contexts: dict[Account, int] = {}
    for account, context in decodes:
        rows[account] = rows.get(account, 0) + 1
        contexts[account] = contexts.get(account, 0) + context
    num_decodes, all_context = sum(rows.values()), sum(contexts.values())
    of_position = context_price(step_time, caps, num_decodes, all_context) / max(1, all_context)
    prices = {account: of_position * context for account, context in contexts.items()}
    for account, start, length in chunks:
        rows[account] = rows.get(account, 0) + length
        whole, plain = caps.prefill_shape(start, length), caps.prefill_shape(0, length)
        prices[account] = prices.get(account, 0.0) + max(0.0, step_time.predict(whole) - step_time.predict(plain))
    num_rows = sum(rows.values())
    of_row = max(0.0, predicted - sum(prices.values())) / num_rows or _NOMINAL_ROW_S
    return {account: prices[account] + of_row * count for account, count in rows.items()}
