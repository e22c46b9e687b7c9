"""A transformers model that takes long inputs in chunks and short ones as ever.

Must not know: how a chunk is sized or run.
"""

from __future__ import annotations

from typing import Any, TypedDict

from evenflow.compile.chunks.optimizer import ChunkedPrefillOptimizer, OptimizerStats
from evenflow.compile.model_call import Model, input_shape, named_arguments
from evenflow.compile.model_interface import ModelInterface


class ExecutionStats(TypedDict):
    """Calls of the model, each decoding step of `generate` included."""

    total_calls: int
    chunked_calls: int
    traditional_calls: int


class ChunkingStats(ExecutionStats):
    """The same, with the share of calls that ran in chunks and what the optimizer counted."""

    chunking_rate: float
    optimizer_stats: OptimizerStats


class ChunkedPrefillWrapper(ModelInterface):
    """Called as the model is; inputs over the optimizer's threshold run in chunks over the model's own KV cache.

    `chunked_calls` counts calls given to the optimizer, which runs one whole where chunks cannot honour it.
    """

    def __init__(self, compiled_model: Model, chunked_optimizer: ChunkedPrefillOptimizer, model_id: str) -> None:
        super().__init__(compiled_model)
        self.compiled_model = compiled_model
        self.chunked_optimizer = chunked_optimizer
        self.model_id = model_id
        self.execution_stats: ExecutionStats = {"total_calls": 0, "chunked_calls": 0, "traditional_calls": 0}

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

    forward = __call__

    def prepares_own_mask(self, num_new_tokens: int) -> bool:
        return self.chunked_optimizer.should_chunk(num_new_tokens)

    def get_chunking_stats(self) -> ChunkingStats:
        """How often inputs were long enough to be cut, and what that came to."""
        calls = self.execution_stats
        rate = calls["chunked_calls"] / calls["total_calls"] if calls["total_calls"] else 0.0
        return {**calls, "chunking_rate": rate, "optimizer_stats": self.chunked_optimizer.stats.copy()}
