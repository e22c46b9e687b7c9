"""Compiles transformers models ahead of time and caches the result; a model that cannot be compiled stays plain."""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from evenflow.compile.aot.artifacts import ArtifactStore, artifact_key
from evenflow.compile.aot.compiled_model import CompiledModel
from evenflow.compile.aot.cuda_graphs import GraphedModel
from evenflow.compile.aot.packages import PackageMaker, record_graph
from evenflow.compile.model_call import Model, hugging_face_module, model_name, named_example
from evenflow.compile.monitoring import Compilation, PerformanceMonitor
from evenflow.errors import InvalidConfig, UnsupportedModel
from evenflow.host import cache_folder

logger = logging.getLogger("evenflow")

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
_CUDA_GRAPHS = "triton.cudagraphs"


class Settings:
    """Base of dataclasses that can also be given as a mapping."""

    __slots__ = ()

    @classmethod
    def of(cls, settings: Self | Mapping[str, Any] | None) -> Self:
        """From a mapping with the names of the fields too; None gives the defaults."""
        if settings is None or isinstance(settings, Mapping):
            known = list(inspect.signature(cls).parameters)
            if unknown := [name for name in settings or {} if name not in known]:
                raise InvalidConfig(f"Got {', '.join(unknown)} but {cls.__name__} has only {', '.join(known)}.")
            return cls(**(settings or {}))
        return settings


@dataclass(frozen=True, slots=True)
class GraphConfig(Settings):
    """`mode` is one of torch.compile's; CUDA graphs are recorded if the mode has them and they are enabled."""

    mode: str = "reduce-overhead"
    enable_cuda_graphs: bool = True

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise InvalidConfig(f"Got mode={self.mode!r} but expected one of {', '.join(MODES)}.")

    @property
    def inductor_options(self) -> dict[str, Any]:
        """The mode's options, without CUDA graphs: a package holds kernels, and evenflow records graphs itself."""
        options = torch._inductor.list_mode_options(self.mode)
        return {name: value for name, value in options.items() if name != _CUDA_GRAPHS}

    @property
    def wants_cuda_graphs(self) -> bool:
        return self.enable_cuda_graphs and _CUDA_GRAPHS in torch._inductor.list_mode_options(self.mode)


class ModelCompiler:
    """What all compilers offer; subclasses define `compile_model`."""

    def compile_model(self, model: Model, example_inputs: Any, model_id: str, **kwargs: Any) -> Any:
        raise NotImplementedError

    def compile_model_aot(
        self, model: Model, inputs: Any, config: GraphConfig | Mapping[str, Any] | None = None, mode: str | None = None
    ) -> Any:
        """`compile_model` under the model's own name; `config` and `mode` override the graph configuration."""
        overrides = asdict(config) if isinstance(config, GraphConfig) else dict(config or {})
        if mode is not None:
            overrides["mode"] = mode
        return self.compile_model(model, inputs, model_name(model), **overrides)


class EnhancedAOTModelCompiler(ModelCompiler):
    """Compiles a transformers model into a callable with the same interface.

    Packages are cached in `cache_dir` (by default beside the models that evenflow fetched), under a key of weights,
    configuration, versions, device and mode. If anything fails, the caller gets the plain model and the log says why.
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
        """The model compiled for any batch size, length and context, and checked on `example_inputs`.

        `kwargs` override the graph configuration for this model (`mode`, `enable_cuda_graphs`).
        """
        config = GraphConfig.of({**asdict(self.graph_config), **kwargs})
        compilation = Compilation(model_id, config.mode, self._progress)
        self.monitor.compilations.append(compilation)
        started = time.perf_counter()
        try:
            compiled = self._compile(model, _example_call(model, example_inputs), config, compilation)
        except Exception as error:  # the plain model still works: no failure to compile may cost an answer
            compilation.reason = f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
            logger.warning("%s runs uncompiled: %s", model_id, compilation.reason)
            return model
        finally:
            compilation.seconds = time.perf_counter() - started
        done = compilation.outcome, compilation.seconds, compilation.largest_difference
        logger.info("%s: %s in %.1f s, logits within %.1g.", model_id, *done)
        if self._monitors_calls:
            compiled.monitor = self.monitor
        return compiled

    def get_performance_report(self) -> dict[str, Any]:
        """Compilations and calls so far; `str(compiler.monitor)` gives the same as text."""
        return self.monitor.report()

    def _compile(
        self, model: Model, example: dict[str, Tensor], config: GraphConfig, compilation: Compilation
    ) -> CompiledModel | GraphedModel:
        module, model_id = hugging_face_module(model), compilation.model_id
        if module.device.type == "cuda" and config.wants_cuda_graphs:
            try:
                return record_graph(model, example, compilation)
            except UnsupportedModel as error:
                logger.warning("%s is compiled without CUDA graphs: %s.", model_id, error)
        with compilation.stage("fingerprinting"):
            key = artifact_key(module, model_id, config.inductor_options)
        with onednn_where_supported(module):
            return PackageMaker(model, example, config.inductor_options, compilation).load_or_compile(self.store, key)


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
    """Turns oneDNN off for a bfloat16 model on a CPU whose oneDNN lacks bfloat16.

    Torch on ARM would try it anyway, warn, and turn it off for the whole process; where warnings are errors, no model
    would compile. The caller's own calls of the model still warn.
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


def _example_call(model: Model, inputs: Any) -> dict[str, Tensor]:
    named = named_example(model, inputs)
    names = ("input_ids", "attention_mask", "position_ids")
    example: dict[str, Tensor] = {name: named[name] for name in names if name in named}
    if "input_ids" not in example or example["input_ids"].ndim != 2:
        raise UnsupportedModel("the example inputs hold no input_ids of shape (batch, tokens)")
    return example
