"""Rules that choose the size of a prefill chunk from a few figures, without a model of the machine.

They make the policies `load`, `adaptive` and `prompt-length`; `evenflow.minimal` shows the first two.
"""

from __future__ import annotations

import math
from collections import deque

from evenflow.errors import InvalidConfig

HIGH_DECODE_PRESSURE = 0.8  # share of decoding slots above which chunks shrink


def select_optimal_chunk_size(
    sequence_length: int, available_memory: float, active_decode_requests: int, batch_size: int = 5
) -> int:
    """64 when over 80% of the slots decode, else 256 for prompts over 2,048 tokens, else 128.

    `available_memory` is the number of tokens whose KV still fits. The result never exceeds it, and may be 0.
    """
    _require("sequence_length", sequence_length, sequence_length >= 1, "at least 1 token")
    _require("available_memory", available_memory, available_memory >= 0, "at least 0 tokens")
    _require("active_decode_requests", active_decode_requests, active_decode_requests >= 0, "at least 0")
    _require("batch_size", batch_size, batch_size >= 1, "at least 1")
    if active_decode_requests / batch_size > HIGH_DECODE_PRESSURE:
        chunk_size = 64
    elif sequence_length > 2048:
        chunk_size = 256
    else:
        chunk_size = 128
    return int(min(chunk_size, available_memory))


def chunk_size_for_prompt(prompt_length: int) -> int:
    """Larger chunks for longer prompts keep the number of chunks moderate."""
    _require("prompt_length", prompt_length, prompt_length >= 1, "at least 1 token")
    if prompt_length < 4096:
        return 512
    if prompt_length < 16384:
        return 1024
    return 2048


class AdaptiveChunker:
    """Smaller chunks while most slots decode, larger ones while chunks take less time than the target.

    The caller appends each chunk's seconds to `recent_chunk_times`.
    """

    SMALLEST = 32
    LARGEST = 512
    HISTORY = 16  # chunks in the average

    def __init__(self, decode_latency_target: float = 0.05) -> None:
        is_valid = 0 < decode_latency_target < math.inf
        _require("decode_latency_target", decode_latency_target, is_valid, "a number of seconds above 0")
        self.decode_latency_target = decode_latency_target
        self.recent_chunk_times: deque[float] = deque(maxlen=self.HISTORY)

    def select_chunk_size(self, base_chunk_size: int, decode_pressure: float) -> int:
        """`decode_pressure` is the share of decoding slots. Without a history, chunks do not grow."""
        _require("base_chunk_size", base_chunk_size, base_chunk_size >= 1, "at least 1 token")
        _require("decode_pressure", decode_pressure, decode_pressure >= 0, "at least 0")
        if decode_pressure > HIGH_DECODE_PRESSURE:
            return max(self.SMALLEST, base_chunk_size // 2)
        times = self.recent_chunk_times
        if times and sum(times) / len(times) < self.decode_latency_target:
            return min(self.LARGEST, base_chunk_size * 2)
        return base_chunk_size


def _require(name: str, value: object, holds: bool, allowed: str) -> None:
    if not holds:
        raise InvalidConfig(f"Got {name}={value!r} but expected {allowed}.")
