"""Decides which calls of a model run in chunks and how long each chunk is.

A chunk's length depends on the prompt's, on free memory, and on a time target.
"""

from __future__ import annotations

from typing import Any

from evenflow.advisor.decision import DEFAULT_THRESHOLD, should_enable_chunked_prefill
from evenflow.compile.chunks.chunked_run import run_in_chunks
from evenflow.compile.chunks.memory import tokens_that_fit
from evenflow.compile.model_call import (
    Model,
    hugging_face_module,
    input_shape,
    named_arguments,
    num_known_tokens,
    why_not_in_chunks,
)
from evenflow.compile.model_interface import ModelInterface
from evenflow.compile.monitoring import warn_once_about
from evenflow.core.chunk_rules import chunk_size_for_prompt
from evenflow.core.plan import ExecutorCaps
from evenflow.core.step_time import StepTimeModel
from evenflow.errors import InvalidConfig, UnsupportedModel

_SCORE_BYTES = 4
_FIRST_TIMED_CHUNK = 64  # tokens, before any chunk has been timed
_CAPS = ExecutorCaps()


class ChunkedPrefillOptimizer:
    """Runs prompts over `enable_threshold` tokens in chunks.

    A chunk has `chunk_size` tokens, or with `adaptive_chunking` 512, 1,024 or 2,048 by the prompt's length. It has
    fewer if memory is short, or if measured chunks predict that it would take longer than `target_seconds`.

    In `stats`, `memory_saved_mb` is modelled: one head's scores of a whole prompt (n x n) minus those of a chunk
    (chunk x n).
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
        self.stats: dict[str, float] = {
            "total_sequences": 0,
            "chunked_sequences": 0,
            "chunks_processed": 0,
            "memory_saved_mb": 0.0,
        }
        self._warn_of_whole_call = warn_once_about("A long input runs whole, not in chunks")

    def should_chunk(self, input_length: int) -> bool:
        """Whether an input of this many tokens is over the threshold."""
        return should_enable_chunked_prefill(input_length, self.enable_threshold)

    def get_optimal_chunk_size(self, input_length: int) -> int:
        """Tokens per chunk by the prompt's length alone."""
        return chunk_size_for_prompt(max(1, input_length)) if self.adaptive_chunking else self.chunk_size

    def process_chunked(self, model: Model, input_tokens: Any = None, **kwargs: Any) -> Any:
        """The output of `model(input_tokens, **kwargs)`, computed in chunks if possible.

        Otherwise the call runs whole, and each reason is logged once.
        """
        call = named_arguments(model, () if input_tokens is None else (input_tokens,), kwargs)
        batch_size, _ = input_shape((), call)
        self.stats["total_sequences"] += batch_size
        if (reason := why_not_in_chunks(model, call)) is None:
            try:
                return self._run(model, call, batch_size)
            except UnsupportedModel as error:
                if "past_key_values" in call:
                    raise  # the caller's cache already holds a chunk: a second run would give a wrong answer
                reason = str(error)
        self._warn_of_whole_call(reason)
        return model(**call)

    def _run(self, model: Model, call: dict[str, Any], batch_size: int) -> Any:
        (_, length), end = input_shape((), call), num_known_tokens(call)
        all_logits = not isinstance(call.get("logits_to_keep"), int) or not call["logits_to_keep"]
        fitting = tokens_that_fit(hugging_face_module(model), batch_size, end, all_logits)
        longest = min(self.get_optimal_chunk_size(length), fitting)
        lengths: list[int] = []

        def choose_length(start: int, left: int) -> int:
            return self._within_target(start, min(longest, left))

        def on_chunk(start: int, length: int, seconds: float) -> None:
            lengths.append(length)
            self.step_times.observe(_CAPS.prefill_shape(start, length), seconds)

        output = run_in_chunks(model, call, choose_length, on_chunk)
        self.stats["chunked_sequences"] += batch_size
        self.stats["chunks_processed"] += len(lengths)
        saved_scores = batch_size * (sum(lengths) - max(lengths)) * end
        self.stats["memory_saved_mb"] += saved_scores * _SCORE_BYTES / 1e6
        return output

    def _within_target(self, start: int, longest: int) -> int:
        """The longest chunk from `start` predicted to stay within the target; a small one until chunks were timed."""
        if self.target_seconds is None:
            return longest
        # At most twice the longest seen: predictions beyond that are guesses.
        longest = min(longest, 2 * self.step_times.largest_rows_known or _FIRST_TIMED_CHUNK)
        low, high = 1, longest
        while low < high:
            middle = (low + high + 1) // 2
            fits = self.step_times.upper(_CAPS.prefill_shape(start, middle)) <= self.target_seconds
            low, high = (middle, high) if fits else (low, middle - 1)
        return max(low, min(longest, _FIRST_TIMED_CHUNK // 4))


class ChunkedPrefillWrapper(ModelInterface):
    """Called like the model; inputs over the optimizer's threshold run in chunks over the model's own KV cache.

    `execution_stats` counts calls, each decoding step of `generate` included; its `chunked_calls` are those given to
    the optimizer, including those that it had to run whole.
    """

    def __init__(self, compiled_model: Model, chunked_optimizer: ChunkedPrefillOptimizer, model_id: str) -> None:
        super().__init__(compiled_model)
        self.compiled_model = compiled_model
        self.chunked_optimizer = chunked_optimizer
        self.model_id = model_id
        self.execution_stats: dict[str, int] = {"total_calls": 0, "chunked_calls": 0, "traditional_calls": 0}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.execution_stats["total_calls"] += 1
        num_sequences, length = input_shape(args, kwargs)
        if not self.chunked_optimizer.should_chunk(length):
            self.execution_stats["traditional_calls"] += 1
            self.chunked_optimizer.stats["total_sequences"] += num_sequences
            return self.compiled_model(*args, **kwargs)
        self.execution_stats["chunked_calls"] += 1
        return self.chunked_optimizer.process_chunked(
            self.compiled_model, **named_arguments(self.compiled_model, args, kwargs)
        )

    def prepares_own_mask(self, num_new_tokens: int) -> bool:
        return self.chunked_optimizer.should_chunk(num_new_tokens)

    def get_chunking_stats(self) -> dict[str, Any]:
        """`execution_stats`, the share of calls that ran in chunks, and the optimizer's own counts."""
        calls = self.execution_stats
        rate = calls["chunked_calls"] / calls["total_calls"] if calls["total_calls"] else 0.0
        return {**calls, "chunking_rate": rate, "optimizer_stats": self.chunked_optimizer.stats.copy()}
