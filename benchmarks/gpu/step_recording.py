"""Recorded steps of an engine, and the file that holds them: gzipped JSON lines.

The first line describes the run, each further line one load and its steps, as columns of small integers. Every line is
a gzip member of its own, so that an interrupted run loses at most the load it was in.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

VERSION = 1


class Chunk(NamedTuple):
    start: int
    length: int
    ends_prompt: bool


@dataclass(slots=True)
class Step:
    """One step as the engine ran it. Times are microseconds since the load's reference event on the GPU: `gpu_*` on
    the GPU's clock, the others on the host's, which the load's `reference_us` and `end_reference` relate to it."""

    schedule_us: int = 0  # schedule() began
    scheduled_us: int = 0  # schedule() returned
    launched_us: int = 0  # the host had launched the forward pass
    sampled_us: int = 0  # the host had launched the sampling
    seen_us: int = 0  # the host had the output: update_from_output() began
    gpu_begin_us: int = 0  # the step before had ended on the GPU, and this one's launch had begun
    gpu_forward_us: int = 0  # the forward pass ended
    gpu_end_us: int = 0  # the sampling ended
    num_in_flight: int = 0  # steps launched and not seen when this one was scheduled
    budget: int = 0
    padded_rows: int = 0  # of the forward pass; 0: unknown
    num_decodes: int = 0
    decode_context: int = 0  # sum over the decodes, their new tokens included
    longest_decode_context: int = 0
    chunks: list[Chunk] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        return self.num_decodes + sum(chunk.length for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class RecordedLoad:
    header: dict[str, Any]  # seed, load, is_cold, reference_us, end_reference, num_preempted
    steps: list[Step]


@dataclass(frozen=True, slots=True)
class Recording:
    header: dict[str, Any]  # capture_sizes (a step with more rows than the largest runs without a graph), versions
    loads: list[RecordedLoad]


# A time is stored as the difference from the one before it in the same step, the first as that from its predecessor's.
_HOST_TIMES = ("schedule_us", "scheduled_us", "launched_us", "sampled_us", "seen_us")
_GPU_TIMES = ("gpu_begin_us", "gpu_forward_us", "gpu_end_us")
_COUNTS = ("num_in_flight", "budget", "padded_rows", "num_decodes", "decode_context", "longest_decode_context")


def encode_steps(steps: Sequence[Step]) -> dict[str, list[int]]:
    columns = {name: _differences(getattr(step, name) for step in steps) for name in _COUNTS}
    for times, previous in ((_HOST_TIMES, "schedule_us"), (_GPU_TIMES, "gpu_end_us")):
        first = [getattr(step, times[0]) for step in steps]
        before = [0, *(getattr(step, previous) for step in steps)]
        columns[times[0]] = [now - then for now, then in zip(first, before, strict=False)]
        for then_name, name in pairwise(times):
            columns[name] = [getattr(step, name) - getattr(step, then_name) for step in steps]
    chunks = [chunk for step in steps for chunk in step.chunks]
    columns["num_chunks"] = [len(step.chunks) for step in steps]
    ends = [0, *(chunk.start + chunk.length for chunk in chunks)]  # where a prompt that is alone goes on
    columns["chunk_start"] = [chunk.start - end for chunk, end in zip(chunks, ends, strict=False)]
    columns["chunk_length"] = _differences(chunk.length for chunk in chunks)
    columns["chunk_ends_prompt"] = [int(chunk.ends_prompt) for chunk in chunks]
    return columns


def decode_steps(columns: Mapping[str, Sequence[int]]) -> list[Step]:
    steps = [Step() for _ in columns["num_chunks"]]
    for name in _COUNTS:
        for step, value in zip(steps, accumulate(columns[name]), strict=True):
            setattr(step, name, value)
    for times, previous in ((_HOST_TIMES, "schedule_us"), (_GPU_TIMES, "gpu_end_us")):
        before = 0
        for index, step in enumerate(steps):
            now = before
            for name in times:
                now += columns[name][index]
                setattr(step, name, now)
            before = getattr(step, previous)
    chunks = zip(columns["chunk_start"], accumulate(columns["chunk_length"]), columns["chunk_ends_prompt"], strict=True)
    end = 0
    for step, num_chunks in zip(steps, columns["num_chunks"], strict=True):
        for _ in range(num_chunks):
            offset, length, ends_prompt = next(chunks)
            step.chunks.append(Chunk(end + offset, length, bool(ends_prompt)))
            end += offset + length
    return steps


def _differences(values: Iterable[int]) -> list[int]:
    return [now - then for then, now in pairwise([0, *values])]


def append_line(path: Path, content: Mapping[str, Any]) -> None:
    with path.open("ab") as file:
        file.write(gzip.compress(json.dumps(content, separators=(",", ":")).encode() + b"\n"))


def read_recording(path: Path) -> Recording:
    """Everything up to the end of the file, or up to where its writer was interrupted."""
    lines = [json.loads(member) for member in _gzip_members(path.read_bytes())]
    if not lines or lines[0].get("version") != VERSION:
        raise ValueError(f"{path} is not a recording of version {VERSION}")
    return Recording(lines[0], [RecordedLoad(line, decode_steps(line.pop("columns"))) for line in lines[1:]])


def _gzip_members(content: bytes) -> Iterator[bytes]:
    while content:
        member = zlib.decompressobj(wbits=31)
        text = member.decompress(content)
        if not member.eof:
            return
        yield text
        content = member.unused_data
