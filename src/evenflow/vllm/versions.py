"""What vLLM's releases from 0.26 to 0.33 call differently. Imports no vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

from evenflow.advisor.vllm_flags import parse_version

# Settings of the scheduler that defer or cap prefill by counts: under a target they have these values instead.
_PACED_BY_COUNTS = {
    "local_prefill_interval": 1,  # since 0.33, of --prefill-schedule-interval; before, only the argument of `schedule`
    "adaptive_long_prefill_threshold": False,  # since 0.31
}


@contextmanager
def without_pacing_by_counts(scheduler: Any) -> Iterator[None]:
    """Within this, vLLM holds back none of the prefill that was planned."""
    before = {name: getattr(scheduler, name) for name in _PACED_BY_COUNTS if hasattr(scheduler, name)}
    try:
        for name in before:
            setattr(scheduler, name, _PACED_BY_COUNTS[name])
        yield
    finally:
        for name, value in before.items():
            setattr(scheduler, name, value)


def waiting_requests(scheduler: Any) -> Iterator[Any]:
    """Blocked ones too: vLLM looks at those only in steps that have tokens to give.

    Until 0.30 these had a queue of their own, `skipped_waiting`; requests that hold blocks have one since 0.31.
    """
    names = ("kv_holding_waiting", "skipped_waiting", "waiting")
    return chain.from_iterable(getattr(scheduler, name, ()) for name in names)


def max_running(scheduler: Any) -> int:
    """Requests that may run at a time: since 0.31, `--max-num-active-seqs` lowers it."""
    most: int = getattr(scheduler, "max_num_active_reqs", scheduler.max_num_running_reqs)
    waiting: int = scheduler.num_waiting_for_streaming_input
    return most - waiting  # these keep their places


def long_prefill_threshold(scheduler: Any, num_requests: int) -> int:
    """The user's upper bound of a prompt's tokens in a step; 0: none."""
    threshold: int = scheduler.scheduler_config.long_prefill_token_threshold
    is_adaptive: bool | None = getattr(scheduler, "adaptive_long_prefill_threshold", None)  # since 0.31
    if not threshold or is_adaptive is None:
        return threshold
    if num_requests <= 1:
        return 0
    fair_share: int = scheduler.scheduler_config.max_num_batched_tokens // num_requests
    return max(threshold, fair_share) if is_adaptive else threshold


def splits_blocks(version: str) -> bool:
    """Does vLLM compute part of a block of a recurrent state where a step has no more tokens for it?

    Since 0.27; before, such a prompt made no progress.
    """
    return parse_version(version) >= (0, 27, 0)


def settings_against_a_target(scheduler_config: Any) -> Iterator[str]:
    """What to tell a user whose settings do not go with a target."""
    if scheduler_config.prefill_schedule_interval > 1:
        yield (
            f"evenflow: prefill_schedule_interval={scheduler_config.prefill_schedule_interval} has no effect beside a "
            "target, which decides when prompts are computed"
        )
    if scheduler_config.stream_interval > 1:
        yield (
            f"evenflow: stream_interval={scheduler_config.stream_interval} delivers tokens that many at a time: the "
            "target holds for steps, and clients see longer gaps"
        )
