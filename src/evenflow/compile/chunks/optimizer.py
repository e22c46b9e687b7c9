"""Decides which calls of a model run in chunks, and wraps models in that decision."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, cast

from torch import Tensor

from evenflow.advisor.decision import DEFAULT_THRESHOLD, should_enable_chunked_prefill
from evenflow.compile.chunks.chunked_run import run_in_chunks, run_own_chunks
from evenflow.compile.chunks.memory import SMALLEST_CHUNK, tokens_that_fit
from evenflow.compile.chunks.out_of_memory import RanOut, attempt
from evenflow.compile.chunks.sizes import ChunkSizes
from evenflow.compile.model_call import (
    Model,
    hugging_face_module,
    input_shape,
    is_transformers_model,
    named_arguments,
    num_known_tokens,
    why_not_in_chunks,
    with_token_tensors,
)
from evenflow.compile.model_interface import ModelInterface
from evenflow.compile.monitoring import warn_once_about
from evenflow.core.chunk_rules import chunk_size_for_prompt
from evenflow.errors import InvalidConfig, UnsupportedModel

_CALLS = ("total_calls", "chunked_calls", "traditional_calls")
_SCORE_BYTES = 4


class Run(NamedTuple):
    """What a call returned, and the number of chunks that it ran in; 1 if it was not cut."""

    output: Any
    num_chunks: int


class ChunkedPrefillOptimizer:
    """Runs prompts over `enable_threshold` tokens in chunks.

    A chunk has `chunk_size` tokens, or with `adaptive_chunking` 512, 1,024 or 2,048 by the prompt's length. It has
    fewer if memory is short, or if measured chunks predict that it would take longer than `target_seconds`. A call
    that runs out of memory goes on in chunks of half the size, and later calls start with that size.

    In `stats`, `memory_saved_mb` is modelled: one head's scores of a whole prompt (n x n) minus those of a chunk
    (chunk x n). `whole_calls` counts the calls over the threshold that were not cut, by reason.
    """

    def __init__(
        self,
        chunk_size: int = 512,
        enable_threshold: int = DEFAULT_THRESHOLD,
        adaptive_chunking: bool = True,
        target_seconds: float | None = None,
    ) -> None:
        for name, value, low in (("chunk_size", chunk_size, 1), ("enable_threshold", enable_threshold, 0)):
            if type(value) is bool or not isinstance(value, int) or value < low:
                raise InvalidConfig(f"Got {name}={value!r} but expected a whole number >= {low}.")
        if target_seconds is not None and not 0 < target_seconds < float("inf"):
            raise InvalidConfig(f"Got target_seconds={target_seconds!r} but expected a number of seconds above 0.")
        self.chunk_size = chunk_size
        self.enable_threshold = enable_threshold
        self.adaptive_chunking = adaptive_chunking
        self.sizes = ChunkSizes(target_seconds)
        self.stats: dict[str, float] = {
            "total_sequences": 0,
            "chunked_sequences": 0,
            "chunks_processed": 0,
            "memory_saved_mb": 0.0,
        }
        self.whole_calls: Counter[str] = Counter()
        self._warn_of_whole_call = warn_once_about("A long input runs whole, not in chunks")

    def should_chunk(self, input_length: int) -> bool:
        """Whether an input of this many tokens is over the threshold."""
        return should_enable_chunked_prefill(input_length, self.enable_threshold)

    def get_optimal_chunk_size(self, input_length: int) -> int:
        """Tokens per chunk by the prompt's length alone."""
        return chunk_size_for_prompt(max(1, input_length)) if self.adaptive_chunking else self.chunk_size

    def process_chunked(self, model: Model, input_tokens: Any = None, **kwargs: Any) -> Any:
        """The output of `model(input_tokens, **kwargs)`, computed in chunks if the input is over the threshold.

        `input_tokens` are ids in a tensor or in lists; their last dimension is the length. A model with a method
        `process_chunk(chunk_tokens, **kwargs)` gets its chunks there, and keeps its own state between them. Others run
        over the KV cache of transformers. A long call that cannot be cut runs whole, and each reason is logged once.
        """
        return self.run(model, () if input_tokens is None else (input_tokens,), kwargs).output

    def run(self, model: Model, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Run:
        """`process_chunked` for arguments in any order, with the number of chunks."""
        tokens = args[0] if args else kwargs.get("input_ids")
        if type(tokens) is Tensor and tokens.ndim == 2:
            num_sequences, length = tokens.shape
        else:
            args, kwargs = with_token_tensors(model, args, kwargs)
            num_sequences, length = input_shape(args, kwargs)
        can_shrink = length > SMALLEST_CHUNK  # decoding steps cannot
        if self.should_chunk(length) or (can_shrink and num_sequences * length > self.sizes.max_rows):
            run = self._run_long(model, args, kwargs)
        elif not can_shrink:
            run = Run(_whole(model)(*args, **kwargs), 1)
        else:
            run = self._run_short(model, args, kwargs)
        self.stats["total_sequences"] += num_sequences
        if run.num_chunks > 1:
            self.stats["chunked_sequences"] += num_sequences
            self.stats["chunks_processed"] += run.num_chunks
        return run

    def _run_short(self, model: Model, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Run:
        """Whole, and in chunks only if that runs out of memory."""

        def why_final() -> str | None:
            if hasattr(model, "process_chunk"):
                return "only the model's own process_chunk could take back what the call left in its state"
            return why_not_in_chunks(model, named_arguments(model, args, kwargs))

        output = attempt(_whole(model), args, kwargs, why_final)
        if not isinstance(output, RanOut):
            return Run(output, 1)
        call = named_arguments(model, args, kwargs)
        self.sizes.halve(*input_shape((), call), output)
        return self._run_in_chunks(model, call)

    def _run_long(self, model: Model, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Run:
        """In chunks if possible, else whole."""
        if hasattr(model, "process_chunk"):
            return self._run_own_chunks(model, args, kwargs)
        call = named_arguments(model, args, kwargs)
        if (reason := why_not_in_chunks(model, call)) is None:
            try:
                return self._run_in_chunks(model, call)
            except UnsupportedModel as error:
                if "past_key_values" in call:
                    raise  # the caller's cache already holds a chunk: a second run would give a wrong answer
                reason = str(error)
        self._warn_of_whole_call(reason)
        self.whole_calls[reason] += 1
        return Run(model(*args, **kwargs), 1)

    def _run_in_chunks(self, model: Model, call: Mapping[str, Any]) -> Run:
        keep, context = call.get("logits_to_keep"), num_known_tokens(call)
        longest = self._longest_chunk(model, call, context, all_logits=not isinstance(keep, int) or not keep)
        output, lengths = run_in_chunks(model, call, longest, self.sizes)
        return self._counted(output, lengths, input_shape((), call)[0], context)

    def _run_own_chunks(self, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Run:
        rest = dict(kwargs)
        tokens = args[0] if args else rest.pop("input_ids")
        num_sequences, length = input_shape((tokens,), {})
        longest = self._longest_chunk(model, {"input_ids": tokens}, length, all_logits=True)
        output, lengths = run_own_chunks(model, tokens, args[1:], rest, longest, self.sizes)
        return self._counted(output, lengths, num_sequences, length)

    def _longest_chunk(self, model: Model, call: Mapping[str, Any], context: int, all_logits: bool) -> int:
        num_sequences, length = input_shape((), call)
        longest = self.get_optimal_chunk_size(length)
        if is_transformers_model(module := hugging_face_module(model)):
            longest = min(longest, tokens_that_fit(module, num_sequences, context, all_logits))
        return longest

    def _counted(self, output: Any, lengths: list[int], num_sequences: int, context: int) -> Run:
        if len(lengths) == 1:
            self.whole_calls["one chunk holds it"] += 1
        saved_scores = num_sequences * (sum(lengths) - max(lengths)) * context
        self.stats["memory_saved_mb"] += saved_scores * _SCORE_BYTES / 1e6
        return Run(output, len(lengths))


def _whole(model: Any) -> Model:
    """What runs an input that is not cut: a model may have `process_chunk` alone."""
    return model if callable(model) else cast(Model, model.process_chunk)


class ChunkedPrefillWrapper(ModelInterface):
    """Called like the model; inputs over the optimizer's threshold run in chunks over the model's own KV cache.

    `execution_stats` counts calls that were answered, each decoding step of `generate` included; its `chunked_calls`
    are those that were cut. Without an optimizer nothing is cut.
    """

    def __init__(self, compiled_model: Model, chunked_optimizer: ChunkedPrefillOptimizer | None, model_id: str) -> None:
        super().__init__(compiled_model)
        self.compiled_model = compiled_model
        self.chunked_optimizer = chunked_optimizer
        self.model_id = model_id
        self.execution_stats: dict[str, int] = dict.fromkeys(_CALLS, 0)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.chunked_optimizer is None:
            run = Run(self.compiled_model(*args, **kwargs), 1)
        else:
            run = self.chunked_optimizer.run(self.compiled_model, args, kwargs)
        self._count(run.num_chunks > 1)
        return run.output

    def _count(self, was_cut: bool) -> None:
        self.execution_stats["total_calls"] += 1
        self.execution_stats["chunked_calls" if was_cut else "traditional_calls"] += 1

    def prepares_own_mask(self, num_new_tokens: int) -> bool:
        return self.chunked_optimizer is not None and self.chunked_optimizer.should_chunk(num_new_tokens)

    def get_chunking_stats(self) -> dict[str, Any]:
        """`execution_stats`, the share of calls that ran in chunks, and the optimizer's own counts.

        `whole_calls` has the reasons for which long calls were not cut, and `out_of_memory` how often chunks became
        smaller for lack of memory.
        """
        return chunking_stats([self.execution_stats], self.chunked_optimizer)


def summed_calls(execution_stats: Collection[Mapping[str, Any]]) -> dict[str, float]:
    """Calls of several models together, and the share of them that ran in chunks."""
    total, chunked, whole = (sum(counts[name] for counts in execution_stats) for name in _CALLS)
    return {
        **dict(zip(_CALLS, (total, chunked, whole), strict=True)),
        "chunking_rate": chunked / total if total else 0.0,
    }


def chunking_stats(
    execution_stats: Collection[Mapping[str, int]], optimizer: ChunkedPrefillOptimizer | None
) -> dict[str, Any]:
    """The statistics of models that share an optimizer, summed."""
    if optimizer is None:
        return summed_calls(execution_stats)
    return {
        **summed_calls(execution_stats),
        "whole_calls": dict(optimizer.whole_calls),
        "out_of_memory": optimizer.sizes.num_out_of_memory,
        "optimizer_stats": optimizer.stats.copy(),
    }
