"""Chooses when a prompt is cut and into which chunks: by its length, by the memory that is free, by a time per chunk.

Must not know: generation, compilation.
"""

from __future__ import annotations

import logging
from typing import Any, TypedDict

from evenflow.advisor.decision import DEFAULT_THRESHOLD, should_enable_chunked_prefill
from evenflow.compile.chunks.chunked_run import ChunkTime, run_in_chunks
from evenflow.compile.chunks.memory import tokens_that_fit
from evenflow.compile.model_call import (
    Model,
    hugging_face_module,
    input_shape,
    last_position,
    named_arguments,
    why_not_in_chunks,
)
from evenflow.core.chunk_rules import chunk_size_for_prompt
from evenflow.core.plan import ExecutorCaps
from evenflow.core.step_time import StepTimeModel
from evenflow.errors import InvalidConfig, UnsupportedModel

logger = logging.getLogger("evenflow")

_SCORE_BYTES = 4
_FIRST_TIMED_CHUNK = 64  # tokens, while nothing is known of the machine
_CAPS = ExecutorCaps()  # steps of one chunk, as they come


class OptimizerStats(TypedDict):
    """`memory_saved_mb` is modelled: one head's scores of a whole prompt (n x n) less those of a chunk (chunk x n)."""

    total_sequences: int
    chunked_sequences: int
    chunks_processed: int
    memory_saved_mb: float


class ChunkedPrefillOptimizer:
    """Runs prompts over `enable_threshold` tokens in chunks.

    A chunk has `chunk_size` tokens, or with `adaptive_chunking` 512, 1,024 or 2,048 by the prompt's length; fewer where
    memory is short, and fewer where `target_seconds` is given and measured chunks say that more would take longer.
    """

    def __init__(
        self,
        chunk_size: int = 512,
        enable_threshold: int = DEFAULT_THRESHOLD,
        adaptive_chunking: bool = True,
        target_seconds: float | None = None,
    ) -> None:
        if type(chunk_size) is bool or not isinstance(chunk_size, int) or chunk_size < 1:
            raise InvalidConfig(f"Got chunk_size={chunk_size!r} but expected a whole number >= 1.")
        if type(enable_threshold) is bool or not isinstance(enable_threshold, int) or enable_threshold < 0:
            raise InvalidConfig(f"Got enable_threshold={enable_threshold!r} but expected a whole number >= 0.")
        if target_seconds is not None and not 0 < target_seconds < float("inf"):
            raise InvalidConfig(f"Got target_seconds={target_seconds!r} but expected a number of seconds above 0.")
        self.chunk_size = chunk_size
        self.enable_threshold = enable_threshold
        self.adaptive_chunking = adaptive_chunking
        self.target_seconds = target_seconds
        self.step_times = StepTimeModel()
        self.stats: OptimizerStats = {
            "total_sequences": 0,
            "chunked_sequences": 0,
            "chunks_processed": 0,
            "memory_saved_mb": 0.0,
        }
        self._reasons_told: set[str] = set()

    def should_chunk(self, input_length: int) -> bool:
        """Whether an input of so many tokens is over the threshold."""
        return should_enable_chunked_prefill(input_length, self.enable_threshold)

    def get_optimal_chunk_size(self, input_length: int) -> int:
        """Tokens of a chunk by the prompt's length alone."""
        return chunk_size_for_prompt(max(1, input_length)) if self.adaptive_chunking else self.chunk_size

    def process_chunked(self, model: Model, input_tokens: Any = None, **kwargs: Any) -> Any:
        """The output of `model(input_tokens, **kwargs)`, computed in chunks where that is possible.

        Where it is not, the call runs whole and the reason is logged once.
        """
        call = named_arguments(model, () if input_tokens is None else (input_tokens,), kwargs)
        batch_size, _ = input_shape((), call)
        self.stats["total_sequences"] += batch_size
        if (reason := why_not_in_chunks(model, call)) is None:
            try:
                return self._run(model, call, batch_size)
            except UnsupportedModel as error:
                if "past_key_values" in call:
                    raise  # the caller's cache already holds a chunk: running it again would be a wrong answer
                reason = str(error)
        self._tell_once(reason)
        return model(**call)

    def _run(self, model: Model, call: dict[str, Any], batch_size: int) -> Any:
        (_, length), end = input_shape((), call), last_position(call)
        all_logits = not isinstance(call.get("logits_to_keep"), int) or not call["logits_to_keep"]
        fitting = tokens_that_fit(hugging_face_module(model), batch_size, end, all_logits)
        most = min(self.get_optimal_chunk_size(length), fitting)
        chunks: list[ChunkTime] = []

        def choose_length(start: int, left: int) -> int:
            return self._within_target(start, min(most, left))

        def on_chunk(chunk: ChunkTime) -> None:
            chunks.append(chunk)
            self.step_times.observe(_CAPS.prefill_shape(chunk.start, chunk.length), chunk.seconds)

        output = run_in_chunks(model, call, choose_length, on_chunk)
        self._count(batch_size, end, chunks)
        return output

    def _within_target(self, start: int, most: int) -> int:
        """The longest chunk from `start` that measured chunks say takes at most the target; at first a small one."""
        if self.target_seconds is None:
            return most
        # Never more than twice what was seen: costs beyond it are a guess.
        most = min(most, 2 * self.step_times.largest_rows_seen or _FIRST_TIMED_CHUNK)
        low, high = 1, most
        while low < high:
            middle = (low + high + 1) // 2
            fits = self.step_times.upper(_CAPS.prefill_shape(start, middle)) <= self.target_seconds
            low, high = (middle, high) if fits else (low, middle - 1)
        return max(low, min(most, _FIRST_TIMED_CHUNK // 4))

    def _count(self, batch_size: int, context: int, chunks: list[ChunkTime]) -> None:
        rows = sum(chunk.length for chunk in chunks)
        largest = max(chunk.length for chunk in chunks)
        self.stats["chunked_sequences"] += batch_size
        self.stats["chunks_processed"] += len(chunks)
        self.stats["memory_saved_mb"] += batch_size * (rows - largest) * context * _SCORE_BYTES / 1e6

    def _tell_once(self, reason: str) -> None:
        if reason not in self._reasons_told:
            self._reasons_told.add(reason)
            logger.warning("A long input runs whole, not in chunks: %s.", reason)
