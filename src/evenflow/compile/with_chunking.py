"""A compiler whose models also run long inputs in chunks, if enabled or if a trigger fires."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from evenflow.advisor.analysis import Analysis, DatasetAnalysis, DatasetTally
from evenflow.advisor.decision import DEFAULT_THRESHOLD, Trigger
from evenflow.advisor.recommendation import decide_for, find_triggers
from evenflow.advisor.token_counts import EstimatedTokens
from evenflow.compile.chunks.memory import memory_pressure
from evenflow.compile.chunks.optimizer import ChunkedPrefillOptimizer, ChunkedPrefillWrapper, chunking_stats
from evenflow.compile.compiler import EnhancedAOTModelCompiler, GraphConfig, create_enhanced_compiler, settings_of
from evenflow.compile.model_call import Model, example_calls, input_shape
from evenflow.workload.inputs import TraceRequest

logger = logging.getLogger("evenflow")


class _Default(int):
    """A default that differs from the same number given explicitly."""


_DEFAULT_CHUNK_SIZE = _Default(512)


@dataclass(frozen=True, slots=True)
class ChunkedPrefillConfig:
    """The optimizer's settings, and when to use it.

    `enable_chunked_prefill` None decides by the triggers and logs those that fired. `num_streams` is the number of
    inputs that run at the same time, if known.
    """

    enable_chunked_prefill: bool | None = True
    chunk_size: int = 512
    enable_threshold: int = DEFAULT_THRESHOLD
    adaptive_chunking: bool = True
    target_seconds: float | None = None
    num_streams: int | None = None


class EnhancedAOTWithChunking(EnhancedAOTModelCompiler):
    """Also wraps models for chunks. `chunked_prefill_config` None leaves them as they were compiled.

    `dataset_analysis` says how long the inputs are; without one, the example inputs do.
    """

    def __init__(
        self,
        base_compiler: Any = None,
        graph_config: GraphConfig | Mapping[str, Any] | None = None,
        chunked_prefill_config: ChunkedPrefillConfig | Mapping[str, Any] | None = None,
        dataset_analysis: Analysis | DatasetAnalysis | None = None,
        **compiler_settings: Any,
    ) -> None:
        super().__init__(base_compiler, graph_config, **compiler_settings)
        given = {"enable_chunked_prefill": False} if chunked_prefill_config is None else chunked_prefill_config
        self.chunked_prefill_config = config = settings_of(ChunkedPrefillConfig, given)
        self.dataset_analysis = dataset_analysis
        self.triggers: dict[str, list[Trigger]] = {}
        self.chunked_optimizer = ChunkedPrefillOptimizer(
            config.chunk_size, config.enable_threshold, config.adaptive_chunking, config.target_seconds
        )
        self._execution_stats: list[dict[str, int]] = []  # of all models that it wrapped

    def compile_model(self, model: Model, example_inputs: Any, model_id: str, **kwargs: Any) -> Any:
        """The compiled model, wrapped if chunks are on."""
        compiled = super().compile_model(model, example_inputs, model_id, **kwargs)
        enabled = self.chunked_prefill_config.enable_chunked_prefill
        if enabled is None:
            self.triggers[model_id] = found = self.find_triggers(compiled, example_inputs)
            fired = [trigger for trigger in found if trigger.active]
            for trigger in fired:
                logger.info("%s: chunked prefill is on: %s: %s.", model_id, trigger.name, trigger.reason)
            enabled = bool(fired)
            if not enabled:
                logger.info("%s: chunked prefill is off: no trigger fired.", model_id)
        if not enabled:
            return compiled
        wrapper = ChunkedPrefillWrapper(compiled, self.chunked_optimizer, model_id)
        self._execution_stats.append(wrapper.execution_stats)
        return wrapper

    def get_performance_report(self) -> dict[str, Any]:
        """The compiler's report, the triggers that decided, by model, and the optimizer's counts."""
        triggers = {model_id: [asdict(trigger) for trigger in found] for model_id, found in self.triggers.items()}
        return {
            **super().get_performance_report(),
            "triggers": triggers,
            "chunking": self.chunked_optimizer.stats.copy(),
        }

    def get_chunking_stats(self) -> dict[str, Any]:
        """As a wrapped model's own, summed over all models of this compiler."""
        return chunking_stats(self._execution_stats, self.chunked_optimizer)

    def find_triggers(self, model: Model, example_inputs: Any) -> list[Trigger]:
        """All triggers for inputs like these, active or not, each with its reason."""
        analysis = self.dataset_analysis or analysis_of_examples(model, example_inputs)
        if isinstance(analysis, DatasetAnalysis):
            analysis = Analysis.of([analysis])
        longest = analysis.tokens.max
        return find_triggers(
            analysis,
            replace(decide_for(analysis), threshold=self.chunked_prefill_config.enable_threshold),
            streams=self.chunked_prefill_config.num_streams,
            memory_pressure=memory_pressure(model, longest),
            no_memory_pressure=f"an input of {longest:,} tokens fits into free memory",
        )


def create_enhanced_compiler_with_chunking(
    enable_chunked_prefill: bool | None = False,
    chunk_size: int = _DEFAULT_CHUNK_SIZE,
    chunking_threshold: int = DEFAULT_THRESHOLD,
    *,
    num_streams: int | None = None,
    dataset_analysis: Analysis | DatasetAnalysis | None = None,
    **other_kwargs: Any,
) -> EnhancedAOTWithChunking:
    """`chunk_size` by default depends on the prompt's length. `other_kwargs` go to `create_enhanced_compiler`."""
    config = ChunkedPrefillConfig(
        enable_chunked_prefill,
        int(chunk_size),
        chunking_threshold,
        adaptive_chunking=isinstance(chunk_size, _Default),
        num_streams=num_streams,
    )
    base_compiler = create_enhanced_compiler(**other_kwargs)
    return EnhancedAOTWithChunking(base_compiler, chunked_prefill_config=config, dataset_analysis=dataset_analysis)


def analysis_of_examples(model: Model, example_inputs: Any) -> Analysis:
    """A dataset of inputs as long as these."""
    shapes = [input_shape((), call) for call in example_calls(model, example_inputs)]
    return analysis_of_lengths([length for num_sequences, length in shapes for _ in range(num_sequences)])


def analysis_of_lengths(lengths: list[int]) -> Analysis:
    """A dataset of inputs whose lengths in tokens are all that is known."""
    tally = DatasetTally("example inputs", EstimatedTokens())
    for num_tokens in lengths:
        tally.add(TraceRequest(num_tokens))
    return Analysis.of([tally.analysis({})])
