"""What a step did: one report for callers, metrics, the live page, benchmarks and host engines alike.

`StepReport` is a plain tuple, so that it can be sent over a socket. `Attribution` says where a step's time went.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import StrEnum
from itertools import pairwise
from typing import NamedTuple

from evenflow.core.deadlines import LateToken
from evenflow.core.logprobs import LogprobRows
from evenflow.core.plan import ChunkReason, StepShape, TierResult
from evenflow.core.step_time import StepTimeModel

LOG_INTERVAL_S = 10.0  # between the lines that sum up steps


class ChunkReport(NamedTuple):
    """A chunk of a prompt, as it ran."""

    request_id: str
    start: int
    length: int
    reason: ChunkReason
    seconds: float  # its share of the step
    gave_token: bool
    num_shed: int = 0  # rows that the step was to compute after these, and left out


class AdmissionReport(NamedTuple):
    """A request that took a slot, for the first time or again."""

    request_id: str
    num_tokens: int  # looked up in the prefix cache
    num_cached_tokens: int
    was_preempted: bool


class Ended(NamedTuple):
    reason: str
    error: str | None


class CauseKind(StrEnum):
    """What delays a stream."""

    DECODES = "decodes"  # the step without its chunks
    PREFILL = "prefill"  # what a chunk added
    UNEXPLAINED = "unexplained"  # the step took longer than predicted
    HOST = "host"  # between steps: planning, commits, text, callers
    GARBAGE_COLLECTION = "garbage_collection"
    KV_MEMORY = "kv_memory"  # steps without the stream, for lack of blocks


class Cause(NamedTuple):
    kind: CauseKind
    seconds: float
    request_id: str | None = None  # of the chunk
    num_tokens: int = 0  # in the chunk


class Stall(NamedTuple):
    """A gap before a token, explained."""

    step_id: int
    at: float  # when the token was committed
    request_id: str
    num_late_streams: int  # in the same step
    gap_s: float
    late_s: float
    causes: tuple[Cause, ...]  # largest first; they add up to the gap


class TierReport(NamedTuple):
    """KV blocks that moved between the pool and the tier, since the last report of a step with rows."""

    num_stored: int = 0  # now
    num_saved: int = 0
    saved_bytes: int = 0  # as encoded, like `restored_bytes`
    save_seconds: float = 0.0
    num_restored: int = 0
    restored_bytes: int = 0
    restore_seconds: float = 0.0
    num_lost: int = 0  # were to be restored
    num_recomputed: int = 0  # were computed although the tier had them

    def then(self, result: TierResult, num_recomputed: int, num_stored: int) -> TierReport:
        """This report plus what the next step moved."""
        num_restored = len(result.restored)
        return TierReport(
            num_stored,
            self.num_saved + result.num_saved,
            self.saved_bytes + result.saved_bytes,
            self.save_seconds + result.save_seconds * result.num_saved,
            self.num_restored + num_restored,
            self.restored_bytes + result.restored_bytes,
            self.restore_seconds + result.restore_seconds * num_restored,
            self.num_lost + len(result.lost),
            self.num_recomputed + num_recomputed,
        )


NOTHING_MOVED = TierReport()


class StepReport(NamedTuple):
    """One committed step. Times are of the engine's clock.

    The engine and host engines describe the step; `Attribution.split` fills in where its time went.
    """

    step_id: int
    at: float  # when it was committed
    seconds: float
    predicted_seconds: float  # 0: nothing was known yet
    decode_seconds: float  # the rest of `seconds` is the chunks'
    num_decodes: int  # rows
    chunks: list[ChunkReport]
    admissions: list[AdmissionReport]
    causes: tuple[Cause, ...]  # of the time since the previous step
    late: list[LateToken]
    policy: str
    budget: int  # upper bound of a step's tokens
    target_s: float | None  # None: the policy has none
    feasible_target_s: float | None  # the lowest feasible one, while the target is infeasible
    num_running: int
    num_waiting: int
    kv_cache_usage: float  # 0 to 1
    # The tokens of each request, as columns. Values that few rows have are keyed by row.
    ids: list[str]
    tokens: list[tuple[int, ...]]
    num_decoded: int  # the first rows are decodes
    ended: dict[int, Ended]
    logprobs: dict[int, LogprobRows] = {}  # noqa: RUF012 (never changed)
    prompt_logprobs: dict[int, LogprobRows] = {}  # noqa: RUF012 (by place among the chunks)
    embeddings: dict[int, bytes] = {}  # noqa: RUF012 (by row; float32 values, of unit length)
    is_own_time: bool = True  # False: `seconds` may include part of another step's
    retried: tuple[str, ...] = ()  # requests that are computed again after a fault
    admission_failure: str | None = None  # what is wrong if nothing is admitted although it could be
    tier: TierReport | None = None  # None: there is none, or the step has no rows

    @property
    def started_at(self) -> float:
        return self.at - self.seconds

    @property
    def num_prefill_tokens(self) -> int:
        return sum([chunk.length for chunk in self.chunks])

    @property
    def num_output_tokens(self) -> int:
        return sum(map(len, self.tokens))

    @property
    def decoded(self) -> list[str]:
        """Requests that got a token by decoding."""
        return self.ids[: self.num_decoded]

    @property
    def is_empty(self) -> bool:
        """Did it only move KV blocks?"""
        return not self.num_decodes and not self.chunks

    @property
    def is_mixed(self) -> bool:
        return bool(self.num_decodes and self.chunks)

    @property
    def prediction_error(self) -> float | None:
        """Relative to the actual seconds; None if the step cannot be judged."""
        if not (self.predicted_seconds and self.seconds and self.is_own_time):
            return None
        return abs(self.predicted_seconds / self.seconds - 1)

    @property
    def stall(self) -> Stall | None:
        """The longest late gap of this step."""
        return self.explain(max(self.late, key=lambda late: late.gap)) if self.late else None

    def explain(self, token: LateToken) -> Stall:
        """The causes of the gap before a token of this step."""
        waited = token.gap - sum(cause.seconds for cause in self.causes)
        causes = [*self.causes, Cause(CauseKind.KV_MEMORY, waited)] if waited > 1e-9 else self.causes
        largest_first = tuple(sorted(causes, key=lambda cause: -cause.seconds))
        return Stall(self.step_id, self.at, token.request_id, len(self.late), token.gap, token.seconds, largest_first)


class Attribution:
    """Splits each step's seconds among its decodes and chunks, as the step-time model weighs them."""

    def __init__(self, step_time: StepTimeModel) -> None:
        self._step_time = step_time
        self._last_at: float | None = None

    def split(self, report: StepReport, shapes: Sequence[StepShape], gc_seconds: float = 0.0) -> StepReport:
        """The report with the seconds of its decodes and of each chunk, and the causes of the time since the last one.

        `shapes` are those of the step without chunks, with the first one, with the first two, and so on;
        `gc_seconds` were spent collecting garbage since the last step.
        """
        at, seconds, chunks = report.at, report.seconds, report.chunks
        parts = [1.0]
        if chunks:
            predicted = [self._step_time.predict(shape) for shape in shapes]
            parts = [predicted[0], *(max(0.0, after - before) for before, after in pairwise(predicted))]
            if not any(parts):
                parts = [float(shapes[0].total_rows), *(float(chunk.length) for chunk in chunks)]
            if not shapes[0].total_rows:  # without decodes, the fixed cost of a step is its chunks'
                parts = [0.0, parts[0] + parts[1], *parts[2:]]
        total = sum(parts)
        shares = [part / total for part in parts]
        since_last = seconds if self._last_at is None else at - self._last_at
        self._last_at = at
        in_step = min(seconds, since_last)
        explained = min(report.predicted_seconds, in_step)
        rest = in_step - explained, since_last - in_step
        return report._replace(
            decode_seconds=seconds * shares[0],
            chunks=[chunk._replace(seconds=seconds * share) for chunk, share in zip(chunks, shares[1:], strict=True)],
            causes=tuple(_causes([explained * share for share in shares], chunks, *rest, gc_seconds)),
        )


def _causes(
    parts: list[float], chunks: Sequence[ChunkReport], unexplained: float, host: float, gc_seconds: float
) -> Iterator[Cause]:
    # It is not known when the collector ran: assume the time that nothing else explains.
    gc_in_step = min(gc_seconds, unexplained)
    gc_outside = min(gc_seconds - gc_in_step, host)
    found = [
        Cause(CauseKind.DECODES, parts[0]),
        *(
            Cause(CauseKind.PREFILL, part, chunk.request_id, chunk.length)
            for part, chunk in zip(parts[1:], chunks, strict=True)
        ),
        Cause(CauseKind.UNEXPLAINED, unexplained - gc_in_step),
        Cause(CauseKind.HOST, host - gc_outside),
        Cause(CauseKind.GARBAGE_COLLECTION, gc_in_step + gc_outside),
    ]
    return (cause for cause in found if cause.seconds > 0)
