"""Compiles transformers models ahead of time and keeps the result on disk; a model that cannot be compiled stays plain.

Must not know: chunks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from evenflow.compile.aot.artifacts import ArtifactStore
from evenflow.compile.aot.fingerprint import artifact_key
from evenflow.compile.aot.packages import CheckedModel, PackageMaker, record_graph
from evenflow.compile.model_call import Model, hugging_face_module, named_arguments
from evenflow.compile.monitoring import CompilationFigures, PerformanceMonitor
from evenflow.compile.progress import Stages
from evenflow.errors import InvalidConfig, UnsupportedModel
from evenflow.host import cache_folder

logger = logging.getLogger("evenflow")

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
_CUDA_GRAPHS = "triton.cudagraphs"


@dataclass(frozen=True, slots=True)
class GraphConfig:
    """`mode` is one of torch.compile's; CUDA graphs are recorded where the mode has them, unless they are disabled."""

    mode: str = "reduce-overhead"
    enable_cuda_graphs: bool = True

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise InvalidConfig(f"Got mode={self.mode!r} but expected one of {', '.join(MODES)}.")

    @classmethod
    def of(cls, config: GraphConfig | Mapping[str, Any] | None) -> GraphConfig:
        """From a mapping of the same names too; None stands for the defaults."""
        if isinstance(config, GraphConfig):
            return config
        known = {field.name for field in fields(cls)}
        if unknown := set(config or {}) - known:
            raise InvalidConfig(f"Got {', '.join(sorted(unknown))} but a graph is configured by {sorted(known)}.")
        return cls(**(config or {}))

    @property
    def inductor_options(self) -> dict[str, Any]:
        """What the mode tells Inductor. Graphs are recorded by us: a package holds kernels."""
        options = torch._inductor.list_mode_options(self.mode)
        return {name: value for name, value in options.items() if name != _CUDA_GRAPHS}

    @property
    def wants_cuda_graphs(self) -> bool:
        return self.enable_cuda_graphs and _CUDA_GRAPHS in torch._inductor.list_mode_options(self.mode)


class EnhancedAOTModelCompiler:
    """Turns a transformers model into a callable of the same interface, compiled ahead of time.

    Packages lie in `cache_dir` (by default with the models that evenflow fetched), under a key of weights,
    configuration, versions, device and mode. Whatever fails, the caller gets a model that answers rightly, if need be
    the plain one, and one line in the log says why.
    """

    def __init__(
        self,
        graph_config: GraphConfig | Mapping[str, Any] | None = None,
        *,
        cache_dir: str | Path | None = None,
        enable_performance_monitoring: bool = True,
        progress: bool | None = None,
    ) -> None:
        self.graph_config = GraphConfig.of(graph_config)
        self.store = ArtifactStore(Path(cache_dir) if cache_dir is not None else cache_folder() / "compiled")
        self.monitor = PerformanceMonitor()
        self._monitors_calls = enable_performance_monitoring
        self._progress = progress

    def compile_model(self, model: Model, example_inputs: Any, model_id: str, **kwargs: Any) -> Model:
        """The model compiled for any batch, length and context; `example_inputs` is what it is checked on.

        `kwargs` override the graph configuration for this model (`mode`, `enable_cuda_graphs`).
        """
        config = GraphConfig.of({**_as_dict(self.graph_config), **kwargs})
        started = time.perf_counter()
        stages = Stages(f"Compiling {model_id}", self._progress)
        done: CheckedModel | None = None
        reason: str | None = None
        try:
            done = self._compile(model, _example_call(model, example_inputs), model_id, config, stages)
        except Exception as error:  # the plain model is there: nothing that compilation does may cost an answer
            reason = f"{type(error).__name__}: {_first_line(error)}"
            logger.warning("%s runs uncompiled: %s", model_id, reason)
        self._note(model_id, config, done, reason, time.perf_counter() - started, stages)
        if done is None:
            return model
        if self._monitors_calls:
            done.model.monitor = self.monitor
        return done.model

    def compile_model_aot(
        self, model: Model, inputs: Any, config: GraphConfig | Mapping[str, Any] | None = None, mode: str | None = None
    ) -> Model:
        """The same, for a model that is called by the name in its configuration."""
        graph_config = self.graph_config if config is None else GraphConfig.of(config)
        if mode is not None:
            graph_config = replace(graph_config, mode=mode)
        name = getattr(getattr(hugging_face_module(model), "config", None), "_name_or_path", "")
        model_id = Path(name).name or type(hugging_face_module(model)).__name__
        return self.compile_model(model, inputs, model_id, **_as_dict(graph_config))

    def get_performance_report(self) -> dict[str, Any]:
        """Compilations and calls so far; `str(compiler.monitor)` is the same as text."""
        return self.monitor.report()

    def _compile(
        self, model: Model, example: dict[str, Tensor], model_id: str, config: GraphConfig, stages: Stages
    ) -> CheckedModel:
        module = hugging_face_module(model)
        if module.device.type == "cuda" and config.wants_cuda_graphs:
            try:
                with stages.stage("recording a graph"):
                    return record_graph(model, example)
            except UnsupportedModel as error:
                logger.warning("%s is compiled without CUDA graphs: %s.", model_id, error)
        with stages.stage("fingerprinting"):
            key = artifact_key(module, model_id, config.inductor_options)
        with onednn_where_supported(module):
            return PackageMaker(model, example, config.inductor_options, stages).load_or_compile(self.store, key)

    def _note(
        self,
        model_id: str,
        config: GraphConfig,
        done: CheckedModel | None,
        reason: str | None,
        seconds: float,
        stages: Stages,
    ) -> None:
        outcome = "plain" if done is None else done.outcome
        if done is not None:
            logger.info("%s: %s in %.1f s, logits within %.1g.", model_id, outcome, seconds, done.difference)
        self.monitor.compilations.append(
            CompilationFigures(
                model_id=model_id,
                mode=config.mode,
                outcome=outcome,
                reason=reason,
                seconds=seconds,
                stage_seconds=dict(stages.seconds),
                package_bytes=0 if done is None else done.package_bytes,
                largest_difference=None if done is None else done.difference,
            )
        )


def create_enhanced_compiler(
    enable_cuda_graphs: bool = True,
    enable_performance_monitoring: bool = True,
    mode: str = "reduce-overhead",
    cache_dir: str | Path | None = None,
    progress: bool | None = None,
) -> EnhancedAOTModelCompiler:
    """A compiler; without CUDA `enable_cuda_graphs` changes nothing."""
    return EnhancedAOTModelCompiler(
        GraphConfig(mode=mode, enable_cuda_graphs=enable_cuda_graphs),
        cache_dir=cache_dir,
        enable_performance_monitoring=enable_performance_monitoring,
        progress=progress,
    )


@contextmanager
def onednn_where_supported(module: Any) -> Iterator[None]:
    """oneDNN turned off for a bfloat16 model on a CPU whose oneDNN lacks bfloat16.

    There, torch on ARM tries it anyway, warns, and turns it off for the whole process; where warnings are errors no
    model would compile. The caller's own calls of the model still warn.
    """
    mkldnn: Any = torch.backends.mkldnn
    is_affected = module.device.type == "cpu" and module.dtype == torch.bfloat16 and mkldnn.is_available()
    if not is_affected or not mkldnn.enabled or torch.ops.mkldnn._is_mkldnn_bf16_supported():
        yield
        return
    mkldnn.enabled = False
    try:
        yield
    finally:
        mkldnn.enabled = True


def _as_dict(config: GraphConfig) -> dict[str, Any]:
    return {field.name: getattr(config, field.name) for field in fields(config)}


def _example_call(model: Model, inputs: Any) -> dict[str, Tensor]:
    """Example inputs by name: ids alone, a tuple of arguments in the model's order, or what a tokenizer returned."""
    args, kwargs = ((), inputs) if isinstance(inputs, Mapping) else (inputs, {})
    named = named_arguments(model, (args,) if isinstance(args, Tensor) else tuple(args), kwargs)
    names = ("input_ids", "attention_mask", "position_ids")
    example: dict[str, Tensor] = {name: named[name] for name in names if name in named}
    if "input_ids" not in example or example["input_ids"].ndim != 2:
        raise UnsupportedModel("the example inputs hold no input_ids of shape (batch, tokens)")
    return example


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "")
