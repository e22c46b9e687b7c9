"""Chooses the default latency target from measured step times, for an engine started without one."""

from __future__ import annotations

from evenflow.core.feasibility import round_up
from evenflow.core.plan import ExecutorCaps
from evenflow.core.policy import FLOOR_TOKENS
from evenflow.core.step_time import StepTimeModel

READER_S = 0.1  # between tokens: faster than people read, so that less would only slow prefill down
_ROOM = 1.5  # above the least feasible target: at that one, prefill would run at its minimum
_NUM_STREAMS = 8  # that the target is meant to be kept for


def default_target(
    step_time: StepTimeModel, caps: ExecutorCaps, max_num_seqs: int, *, is_disturbed: bool = False
) -> float:
    """Seconds between tokens that this machine keeps with some streams and room for prefill beside them.

    If other programs disturb its steps: with the slower ones of them.
    """
    shape = caps.step_shape(num_decodes=min(_NUM_STREAMS, max_num_seqs), chunks=[(0, FLOOR_TOKENS)])
    least_feasible = step_time.upper(shape) if is_disturbed else step_time.predict(shape)
    return max(READER_S, round_up(_ROOM * least_feasible)) if least_feasible else READER_S


def target_reason(target_s: float, is_disturbed: bool = False) -> str:
    """Why this default was chosen, as the end of "this is ..."."""
    if target_s <= READER_S:
        return "as fast as people read"
    when = "beside the other programs that run now" if is_disturbed else "while it does nothing else"
    return f"{_ROOM:g} times the least that this machine can keep {when}"
