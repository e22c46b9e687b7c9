"""What work costs, in predicted seconds: a chunk, the streams beside it, and each account's part of a step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from evenflow.core.account import Account
from evenflow.core.plan import ExecutorCaps
from evenflow.core.step_time import StepTimeModel

# Seconds of a row before the first step was measured: only the ratios of prices matter.
_NOMINAL_ROW_S = 1e-4


class Prices:
    """The prices of one model on one executor, which follow its step times."""

    def __init__(self, step_time: StepTimeModel, caps: ExecutorCaps) -> None:
        self.step_time = step_time
        self.caps = caps

    def seconds(self, start: int, length: int) -> float:
        """Of a chunk by itself; 0 before anything is known."""
        return self.step_time.predict(self.caps.prefill_shape(start, length))

    def prefill(self, start: int, length: int) -> float:
        """The same, or what its rows are worth nominally."""
        return self.seconds(start, length) or self.nominal(length)

    @staticmethod
    def nominal(num_rows: int) -> float:
        """Seconds of these rows before the first step was measured."""
        return _NOMINAL_ROW_S * num_rows

    def streams(self, num_streams: int, positions: int) -> float:
        """The seconds that streams add to a step whose rows are not free: for their rows and their contexts."""
        fill = [(0, self.step_time.knee + 1)]
        with_streams = self.caps.step_shape(num_decodes=num_streams, decode_context=positions, chunks=fill)
        without = self.caps.step_shape(chunks=fill)
        return max(0.0, self.step_time.predict(with_streams) - self.step_time.predict(without))

    def of_accounts(
        self,
        decodes: Iterable[tuple[Account, int]],  # with the positions that each attends to
        chunks: Sequence[tuple[Account, int, int]],  # with start and length
        step_seconds: float,
    ) -> dict[Account, float]:
        """Seconds of a step charged to each account; they add up to the step's.

        Those that depend on context are charged to the accounts that have it, the rest by rows: all share reading
        weights.
        """
        rows: dict[Account, int] = {}
        contexts: dict[Account, int] = {}
        for account, context in decodes:
            rows[account] = rows.get(account, 0) + 1
            contexts[account] = contexts.get(account, 0) + context
        num_decodes, all_context = sum(rows.values()), sum(contexts.values())
        of_position = self._context(num_decodes, all_context) / max(1, all_context)
        prices = {account: of_position * context for account, context in contexts.items()}
        for account, start, length in chunks:
            rows[account] = rows.get(account, 0) + length
            beyond = max(0.0, self.seconds(start, length) - self.seconds(0, length))
            prices[account] = prices.get(account, 0.0) + beyond
        num_rows = sum(rows.values())
        of_row = max(0.0, step_seconds - sum(prices.values())) / num_rows or _NOMINAL_ROW_S
        return {account: prices[account] + of_row * count for account, count in rows.items()}

    def _context(self, num_streams: int, positions: int) -> float:
        """The part of a step's seconds that is due to the context of streams."""
        shapes = (self.caps.step_shape(num_decodes=num_streams, decode_context=size) for size in (positions, 0))
        whole, plain = map(self.step_time.predict, shapes)
        return max(0.0, whole - plain)
