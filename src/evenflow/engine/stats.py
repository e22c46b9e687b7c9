"""Throughput, queue and cache figures, derived from step reports, and the line that logs them."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from evenflow.core.report import LOG_INTERVAL_S, StepReport

logger = logging.getLogger("evenflow")


@dataclass(slots=True)
class Totals:
    """Counts since the engine started."""

    steps: int = 0
    prefill_tokens: int = 0  # computed, without cached ones
    output_tokens: int = 0
    looked_up_tokens: int = 0  # in the prefix cache, by admitted requests
    cached_tokens: int = 0

    @property
    def prefix_hit_rate(self) -> float:
        return self.cached_tokens / self.looked_up_tokens if self.looked_up_tokens else 0.0


class Stats:
    """Totals of one engine, and a log line every 10 s of activity."""

    def __init__(self) -> None:
        self.totals = Totals()
        self._logged_at: float | None = None
        self._logged = Totals()  # the totals at the last log line

    def observe(self, report: StepReport) -> None:
        totals = self.totals
        totals.steps += 1
        totals.prefill_tokens += report.num_prefill_tokens
        totals.output_tokens += report.num_output_tokens
        totals.looked_up_tokens += sum(admission.num_tokens for admission in report.admissions)
        totals.cached_tokens += sum(admission.num_cached_tokens for admission in report.admissions)
        if self._logged_at is None:
            self._logged_at = report.started_at
        if report.at - self._logged_at >= LOG_INTERVAL_S:
            self._log(report, report.at - self._logged_at)

    def idle(self) -> None:
        """Call when no work is left: the next interval starts with the next step."""
        self._logged_at, self._logged = None, replace(self.totals)

    def _log(self, report: StepReport, seconds: float) -> None:
        totals, logged = self.totals, self._logged
        logger.info(
            "Avg prompt throughput: %.1f tokens/s, Avg generation throughput: %.1f tokens/s, Running: %d reqs, "
            "Waiting: %d reqs, KV cache usage: %.1f%%, Prefix cache hit rate: %.1f%%",
            (totals.prefill_tokens - logged.prefill_tokens) / seconds,
            (totals.output_tokens - logged.output_tokens) / seconds,
            report.num_running,
            report.num_waiting,
            100 * report.kv_cache_usage,
            100 * totals.prefix_hit_rate,
        )
        self._logged_at, self._logged = report.at, replace(totals)
