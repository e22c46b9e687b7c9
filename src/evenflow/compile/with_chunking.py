"""A compiler whose models also take long inputs in chunks, where that is asked for or called for.

Must not know: vLLM, how models are compiled.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from evenflow.advisor.analysis import Analysis, DatasetAnalysis, DatasetTally, EstimatedTokens
from evenflow.advisor.decision import DEFAULT_THRESHOLD, Trigger, decide
from evenflow.advisor.recommendation import find_triggers
from evenflow.compile.compiler import EnhancedAOTModelCompiler, GraphConfig, create_enhanced_compiler
from evenflow.compile.memory import tokens_that_fit
from evenflow.compile.model_call import Model, hugging_face_module, input_shape
from evenflow.compile.optimizer import ChunkedPrefillOptimizer
from evenflow.compile.wrapper import ChunkedPrefillWrapper
from evenflow.errors import InvalidConfig
from evenflow.workload.inputs import TraceRequest

logger = logging.getLogger("evenflow")


class _Default(int):
    """A default that can be told from the same number given on purpose."""


_DEFAULT_CHUNK_SIZE = _Default(512)


@dataclass(frozen=True, slots=True)
class ChunkedPrefillConfig:
    """`enable_chunked_prefill` None decides by the triggers and logs those that fired.

    `num_streams` is how many inputs run at the same time, where that is known.
    """

    enable_chunked_prefill: bool | None = True
    chunk_size: int = 512
    chunking_threshold: int = DEFAULT_THRESHOLD
    adaptive_chunking: bool = True
    target_seconds: float | None = None
    num_streams: int | None = None

    @classmethod
    def of(cls, config: ChunkedPrefillConfig | Mapping[str, Any] | None) -> ChunkedPrefillConfig:
        """From a mapping of the same names too; None stands for the defaults."""
        if isinstance(config, ChunkedPrefillConfig):
            return config
        known = {field.name for field in fields(cls)}
        if unknown := set(config or {}) - known:
            raise InvalidConfig(f"Got {', '.join(sorted(unknown))} but chunks are configured by {sorted(known)}.")
        return cls(**(config or {}))

    def make_optimizer(self) -> ChunkedPrefillOptimizer:
        return ChunkedPrefillOptimizer(
            chunk_size=int(self.chunk_size),
            enable_threshold=self.chunking_threshold,
            adaptive_chunking=self.adaptive_chunking,
            target_seconds=self.target_seconds,
        )


class EnhancedAOTWithChunking:
    """Compiles with `base_compiler`, then wraps for chunks. Where chunks are off, nothing is wrapped."""

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
        self.chunked_prefill_config = ChunkedPrefillConfig.of(chunked_prefill_config)
        self.dataset_analysis = dataset_analysis
        self.chunked_optimizer = self.chunked_prefill_config.make_optimizer()

    def compile_model(self, model: Model, example_inputs: Any, model_id: str, **kwargs: Any) -> Model:
        """The compiled model, wrapped where chunks are on."""
        compiled = self.base_compiler.compile_model(model, example_inputs, model_id, **kwargs)
        return self._wrapped(compiled, example_inputs, model_id)

    def compile_model_aot(
        self, model: Model, inputs: Any, config: GraphConfig | Mapping[str, Any] | None = None, mode: str | None = None
    ) -> Model:
        """As the base compiler's, wrapped where chunks are on."""
        compiled = self.base_compiler.compile_model_aot(model, inputs, config, mode)
        return self._wrapped(compiled, inputs, type(hugging_face_module(model)).__name__)

    def get_performance_report(self) -> dict[str, Any]:
        """The base compiler's report, and what the optimizer counted."""
        return {**self.base_compiler.get_performance_report(), "chunking": self.chunked_optimizer.stats.copy()}

    def find_triggers(self, model: Model, example_inputs: Any) -> list[Trigger]:
        """What would switch chunking on for inputs like these, whether it holds or not, each with its reason."""
        analysis = self.dataset_analysis or analysis_of_lengths([num_example_tokens(example_inputs)])
        decision = decide(analysis.tokens.max, analysis.tokens.p95, analysis.tokens.min)
        pressure = memory_pressure(model, analysis.tokens.max)
        return find_triggers(
            analysis, decision, streams=self.chunked_prefill_config.num_streams, memory_pressure=pressure
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
    """Chunks by the prompt's length unless `chunk_size` is given. `other_kwargs` go to `create_enhanced_compiler`."""
    config = ChunkedPrefillConfig(
        enable_chunked_prefill=enable_chunked_prefill,
        chunk_size=int(chunk_size),
        chunking_threshold=chunking_threshold,
        adaptive_chunking=isinstance(chunk_size, _Default),
    )
    return EnhancedAOTWithChunking(create_enhanced_compiler(**other_kwargs), chunked_prefill_config=config)


def analysis_of_lengths(lengths: list[int]) -> Analysis:
    """Inputs of which only the number of tokens is known, as a dataset."""
    tally = DatasetTally("example inputs", EstimatedTokens())
    for num_tokens in lengths:
        tally.add(TraceRequest(num_tokens))
    dataset: DatasetAnalysis = tally.analysis({})
    return Analysis.of([dataset])


def memory_pressure(model: Model, num_tokens: int) -> str | None:
    """How it is seen that an input of so many tokens does not fit in one piece, or None."""
    module = hugging_face_module(model)
    if not hasattr(module, "config"):
        return None
    fitting = tokens_that_fit(module, batch_size=1, context=num_tokens, all_logits=False)
    if num_tokens <= fitting:
        return None
    return f"of an input of {num_tokens:,} tokens, {fitting:,} at a time fit into the memory that is free"


def num_example_tokens(example_inputs: Any) -> int:
    """Length of example inputs in any of the forms that compilers take."""
    if isinstance(example_inputs, Mapping):
        return input_shape((), example_inputs)[1]
    args = tuple(example_inputs) if isinstance(example_inputs, tuple | list) else (example_inputs,)
    return input_shape(args, {})[1]
