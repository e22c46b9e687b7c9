"""A compiler whose models also run long inputs in chunks, if enabled or if a trigger fires."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from evenflow.advisor.analysis import Analysis, DatasetTally
from evenflow.advisor.decision import DEFAULT_THRESHOLD, Trigger
from evenflow.advisor.recommendation import decide_for, find_triggers
from evenflow.advisor.token_counts import EstimatedTokens
from evenflow.compile.chunks.memory import memory_pressure
from evenflow.compile.chunks.optimizer import ChunkedPrefillOptimizer, ChunkedPrefillWrapper
from evenflow.compile.compiler import (
    EnhancedAOTModelCompiler,
    GraphConfig,
    ModelCompiler,
    Settings,
    create_enhanced_compiler,
)
from evenflow.compile.model_call import Model, input_shape, named_example
from evenflow.errors import InvalidConfig
from evenflow.workload.inputs import TraceRequest

logger = logging.getLogger("evenflow")


class _Default(int):
    """A default that differs from the same number given explicitly."""


_DEFAULT_CHUNK_SIZE = _Default(512)


@dataclass(frozen=True, slots=True)
class ChunkedPrefillConfig(Settings):
    """`enable_chunked_prefill` None decides by the triggers and logs those that fired.

    `num_streams` is the number of inputs that run at the same time, if known.
    """

    enable_chunked_prefill: bool | None = True
    chunk_size: int = 512
    chunking_threshold: int = DEFAULT_THRESHOLD
    adaptive_chunking: bool = True
    target_seconds: float | None = None
    num_streams: int | None = None


class EnhancedAOTWithChunking(ModelCompiler):
    """Compiles with `base_compiler`, then wraps the model for chunks unless they are off."""

    def __init__(
        self,
        base_compiler: EnhancedAOTModelCompiler | None = None,
        graph_config: GraphConfig | Mapping[str, Any] | None = None,
        chunked_prefill_config: ChunkedPrefillConfig | Mapping[str, Any] | None = None,
        dataset_analysis: Analysis | None = None,
    ) -> None:
        if base_compiler is not None and graph_config is not None:
            raise InvalidConfig("Got both base_compiler and graph_config: a compiler brings its own configuration.")
        self.base_compiler = base_compiler or EnhancedAOTModelCompiler(graph_config)
        self.chunked_prefill_config = config = ChunkedPrefillConfig.of(chunked_prefill_config)
        self.dataset_analysis = dataset_analysis
        self.chunked_optimizer = ChunkedPrefillOptimizer(
            config.chunk_size, config.chunking_threshold, config.adaptive_chunking, config.target_seconds
        )

    def compile_model(self, model: Model, example_inputs: Any, model_id: str, **kwargs: Any) -> Model:
        """The compiled model, wrapped if chunks are on."""
        compiled = self.base_compiler.compile_model(model, example_inputs, model_id, **kwargs)
        return self._wrapped(compiled, example_inputs, model_id)

    def get_performance_report(self) -> dict[str, Any]:
        """The base compiler's report, and the optimizer's counts."""
        return {**self.base_compiler.get_performance_report(), "chunking": self.chunked_optimizer.stats.copy()}

    def find_triggers(self, model: Model, example_inputs: Any) -> list[Trigger]:
        """All triggers for inputs like these, active or not, each with its reason."""
        analysis = self.dataset_analysis or analysis_of_example(model, example_inputs)
        return find_triggers(
            analysis,
            decide_for(analysis),
            streams=self.chunked_prefill_config.num_streams,
            memory_pressure=memory_pressure(model, analysis.tokens.max),
        )

    def _wrapped(self, compiled: Model, example_inputs: Any, model_id: str) -> Model:
        enabled = self.chunked_prefill_config.enable_chunked_prefill
        if enabled is None:
            fired = [trigger for trigger in self.find_triggers(compiled, example_inputs) if trigger.active]
            for trigger in fired:
                logger.info("%s: chunked prefill is on: %s: %s.", model_id, trigger.name, trigger.reason)
            enabled = bool(fired)
        return ChunkedPrefillWrapper(compiled, self.chunked_optimizer, model_id) if enabled else compiled


def create_enhanced_compiler_with_chunking(
    enable_chunked_prefill: bool | None = False,
    chunk_size: int = _DEFAULT_CHUNK_SIZE,
    chunking_threshold: int = DEFAULT_THRESHOLD,
    **other_kwargs: Any,
) -> EnhancedAOTWithChunking:
    """`chunk_size` by default depends on the prompt's length. `other_kwargs` go to `create_enhanced_compiler`."""
    is_adaptive = isinstance(chunk_size, _Default)
    config = ChunkedPrefillConfig(enable_chunked_prefill, int(chunk_size), chunking_threshold, is_adaptive)
    return EnhancedAOTWithChunking(create_enhanced_compiler(**other_kwargs), chunked_prefill_config=config)


def analysis_of_example(model: Model, example_inputs: Any) -> Analysis:
    """A dataset of inputs as long as these."""
    return analysis_of_lengths([input_shape((), named_example(model, example_inputs))[1]])


def analysis_of_lengths(lengths: list[int]) -> Analysis:
    """A dataset of inputs whose lengths in tokens are all that is known."""
    tally = DatasetTally("example inputs", EstimatedTokens())
    for num_tokens in lengths:
        tally.add(TraceRequest(num_tokens))
    return Analysis.of([tally.analysis({})])
