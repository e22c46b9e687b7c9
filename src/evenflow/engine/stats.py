"""Throughput, queue and cache figures, derived from committed steps; and the line that reports them.

Must not know: how steps are planned or run.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from evenflow.core.scheduler import Committed, Scheduler

logger = logging.getLogger("evenflow")

LOG_INTERVAL_S = 10.0


@dataclass(slots=True)
class Totals:
    """Counts since the engine started."""

    steps: int = 0
    prefill_tokens: int = 0  # computed; cached ones are not among them
    output_tokens: int = 0
    looked_up_tokens: int = 0  # of admitted requests
    cached_tokens: int = 0

    @property
    def prefix_hit_rate(self) -> float:
        return self.cached_tokens / self.looked_up_tokens if self.looked_up_tokens else 0.0


class Stats:
    """Follows one scheduler."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.totals = Totals()
        self._scheduler = scheduler
        self._logged_at: float | None = None
        self._logged_prefill = 0
        self._logged_output = 0

    def observe(self, committed: Committed, now: float) -> None:
        plan, totals = committed.plan, self.totals
        totals.steps += 1
        totals.prefill_tokens += sum(chunk.length for chunk in plan.chunks)
        totals.output_tokens += sum(len(tokens) for _, _, tokens in committed.emissions)
        totals.looked_up_tokens += sum(len(admission.token_ids) for admission in plan.admissions)
        totals.cached_tokens += sum(admission.num_cached_tokens for admission in plan.admissions)
        if self._logged_at is None:
            self._logged_at = now - committed.result.seconds
        if now - self._logged_at >= LOG_INTERVAL_S:
            self._log(now)

    def idle(self) -> None:
        """No work is left: the next interval starts with the next step."""
        self._logged_at = None
        self._logged_prefill, self._logged_output = self.totals.prefill_tokens, self.totals.output_tokens

    @property
    def kv_cache_usage(self) -> float:
        pool = self._scheduler.pool
        return 1 - pool.num_free / pool.num_blocks

    def _log(self, now: float) -> None:
        assert self._logged_at is not None
        seconds = now - self._logged_at
        totals = self.totals
        logger.info(
            "Avg prompt throughput: %.1f tokens/s, Avg generation throughput: %.1f tokens/s, Running: %d reqs, "
            "Waiting: %d reqs, KV cache usage: %.1f%%, Prefix cache hit rate: %.1f%%",
            (totals.prefill_tokens - self._logged_prefill) / seconds,
            (totals.output_tokens - self._logged_output) / seconds,
            self._scheduler.num_running,
            len(self._scheduler.waiting),
            100 * self.kv_cache_usage,
            100 * totals.prefix_hit_rate,
        )
        self._logged_at = now
        self._logged_prefill, self._logged_output = totals.prefill_tokens, totals.output_tokens
