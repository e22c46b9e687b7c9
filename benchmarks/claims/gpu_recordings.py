"""What the recorded steps of vLLM on an H200 say about the claims: the GPU's own times, eight billion weights."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "gpu"))

from recorded_device import RECORDINGS
from step_recording import Step, read_recording

from evenflow.bench.figures import percentile

_CHUNK = 2048
_FEW_DECODES = 8  # beside a chunk: what its step takes is the chunk's
_FEWEST_STEPS = 5
_LONGEST_WAIT_MS = 50.0  # between two steps: beyond it there was nothing to run


def experiments() -> dict[str, Any]:
    steps = [
        step
        for path in sorted(RECORDINGS.glob("h200*.gz"))
        for load in read_recording(path).loads
        for step in load.steps
    ]
    return {
        "chunk_times": _chunk_times(steps),
        "speeds": _speeds(steps),
        "stalls": _stalls(steps),
        "step_parts": _step_parts(steps),
    }


def _seconds(step: Step) -> float:
    return (step.gpu_end_us - step.gpu_begin_us) / 1e6


def _lone_chunks(steps: Iterable[Step], low: int, high: int) -> list[Step]:
    return [
        step
        for step in steps
        if len(step.chunks) == 1 and step.num_decodes <= _FEW_DECODES and low <= step.chunks[0].length <= high
    ]


def _chunk_times(steps: list[Step]) -> dict[str, Any]:
    """Chunks of about one size, by the context before them."""
    chunks = _lone_chunks(steps, int(0.9 * _CHUNK), int(1.1 * _CHUNK))
    rows = []
    for context in (0, 8192, 16_384, 32_768, 57_344):
        near = [_seconds(step) for step in chunks if abs(step.chunks[0].start - context) <= 2 * _CHUNK]
        if len(near) >= _FEWEST_STEPS:
            rows.append({"context": context, "seconds": median(near), "num_steps": len(near)})
    return {"chunk": _CHUNK, "chunks": rows}


def _speeds(steps: list[Step]) -> dict[str, Any]:
    prefill = [step.num_rows / _seconds(step) for step in _lone_chunks(steps, 1024, 8192)]
    decode = [1 / _seconds(step) for step in steps if step.num_decodes and not step.chunks]
    return {"prefill_tokens_per_s": median(prefill), "decode_tokens_per_s": median(decode), "num_steps": len(steps)}


def _stalls(steps: list[Step]) -> dict[str, Any]:
    """Steps that decode beside chunks, by their rows: what a stream waits. Prefix caching was off."""
    rows = []
    for name, low, high in (("over 4,096 rows", 4096, 1 << 20), ("2,048 rows", 1900, 2048), ("512 rows", 480, 512)):
        mixed = [step for step in steps if step.num_decodes and step.chunks and low < step.num_rows <= high]
        seconds = sorted(map(_seconds, mixed))
        figures = {"gap_p50_s": percentile(seconds, 50), "gap_max_s": percentile(seconds, 99)}
        rows.append({"policy": name, "hit_rate": 0.0, "num_steps": len(mixed), **figures})
    return {"runs": rows}


def _step_parts(steps: list[Step]) -> dict[str, Any]:
    """vLLM's own scheduler, on the host; and how long the GPU waits after a step with chunks for the next one."""
    scheduling = [(step.scheduled_us - step.schedule_us) / 1e3 for step in steps if step.chunks]
    idle = [(after.gpu_begin_us - before.gpu_end_us) / 1e3 for before, after in pairwise(steps) if before.chunks]
    waits = [wait for wait in idle if 0 <= wait < _LONGEST_WAIT_MS]
    return {"scheduling_ms": median(scheduling), "coordination_ms": median(waits)}
