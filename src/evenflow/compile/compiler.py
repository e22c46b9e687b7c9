"""Compiles transformers models ahead of time and caches the result; a model that cannot be compiled stays plain."""

from __future__ import annotations

import functools
import inspect
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from evenflow.compile.aot.artifacts import ArtifactStore, artifact_key
from evenflow.compile.aot.packages import PackageMaker, record_graph
from evenflow.compile.base_compiler import check_base_compiler, compile_elsewhere
from evenflow.compile.example_inputs import example_calls
from evenflow.compile.model_call import Model, hugging_face_module, input_shape, model_name
from evenflow.compile.model_interface import FasterModel
from evenflow.compile.monitoring import Compilation, PerformanceMonitor
from evenflow.errors import InvalidConfig, UnsupportedModel
from evenflow.host import cache_folder

logger = logging.getLogger("evenflow")

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
_CUDA_GRAPHS = "triton.cudagraphs"


class Settings:
    """Base of dataclasses that can also be given as a mapping, or as any object with the same attributes."""

    __slots__ = ()

    @classmethod
    def fields_in(cls, settings: Any) -> dict[str, Any]:
        """The fields that a mapping or an object has."""
        names = inspect.signature(cls).parameters
        if isinstance(settings, Mapping):
            return {name: settings[name] for name in names if name in settings}
        return {name: getattr(settings, name) for name in names if hasattr(settings, name)}

    @classmethod
    def of(cls, settings: Any) -> Self:
        """From any of these forms; None gives the defaults."""
        if isinstance(settings, cls):
            return settings
        fields, known = cls.fields_in(settings), ", ".join(inspect.signature(cls).parameters)
        if isinstance(settings, Mapping):
            if unknown := [str(name) for name in settings if name not in fields]:
                raise InvalidConfig(f"Got {', '.join(unknown)} but {cls.__name__} has only {known}.")
        elif settings is not None and not fields:
            raise InvalidConfig(f"Got {settings!r} but expected a {cls.__name__}, or a mapping with some of {known}.")
        return cls(**fields)


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


class EnhancedAOTModelCompiler:
    """Compiles a transformers model into a callable with the same interface.

    `base_compiler` compiles instead of evenflow if it is given: any object with `compile_model_aot(model, inputs,
    config, mode)` or `compile_model(model, example_inputs, model_id, **kwargs)`, another of these compilers included.
    `graph_config` is a GraphConfig or a mapping; alone, it may also come first.

    Packages are cached in `cache_dir` (by default beside the models that evenflow fetched), under a key of weights,
    configuration, versions, device and mode. If anything fails, the caller gets the plain model and the log says why.
    """

    def __init__(
        self,
        base_compiler: Any = None,
        graph_config: Any = None,
        *,
        cache_dir: str | Path | None = None,
        enable_performance_monitoring: bool = True,
        progress: bool | None = None,
    ) -> None:
        if isinstance(base_compiler, GraphConfig | Mapping) and graph_config is None:
            base_compiler, graph_config = None, base_compiler
        if base_compiler is not None:
            check_base_compiler(base_compiler)
            if cache_dir is not None:
                raise InvalidConfig(f"Got cache_dir={str(cache_dir)!r} with a base_compiler, which has its own cache.")
        is_own = isinstance(base_compiler, EnhancedAOTModelCompiler)
        is_foreign = base_compiler is not None and not is_own
        self.base_compiler = base_compiler
        self._given_config = graph_config
        if graph_config is None and is_own:
            self.graph_config: GraphConfig = base_compiler.graph_config
        else:  # what a foreign compiler is configured with is its own matter
            self.graph_config = GraphConfig.of(GraphConfig.fields_in(graph_config) if is_foreign else graph_config)
        self.store = ArtifactStore(Path(cache_dir) if cache_dir is not None else cache_folder() / "compiled")
        self.monitor: PerformanceMonitor = base_compiler.monitor if is_own else PerformanceMonitor()
        self._monitors_calls = enable_performance_monitoring
        self._progress = progress

    def compile_model(self, model: Model, example_inputs: Any, model_id: str, **kwargs: Any) -> Any:
        """The model compiled for any batch size, length and context, and checked on the shortest example.

        `example_inputs` is one example or several: a tuple holds the arguments of one call, a list of tensors, of
        mappings or of lists of ids holds several examples (`example_inputs.example_calls` has the whole rule).
        `kwargs` override the graph configuration for this model (`mode`, `enable_cuda_graphs`). `config` is an object
        or a mapping that may have them too; a base compiler gets it as it is.
        """
        given = GraphConfig.fields_in(kwargs.get("config")) | kwargs
        if isinstance(self.base_compiler, EnhancedAOTModelCompiler):
            given = GraphConfig.fields_in(self._given_config) | given
            return self.base_compiler.compile_model(model, example_inputs, model_id, **given)
        settings = asdict(self.graph_config) | given
        if self.base_compiler is None:
            compile_ = self._own_compilation(model, example_inputs, settings)
        else:
            compile_ = functools.partial(self._compile_elsewhere, model, example_inputs, settings["mode"], kwargs)
        compilation = Compilation(model_id, settings["mode"], self._progress)
        self.monitor.compilations.append(compilation)
        started = time.perf_counter()
        try:
            compiled = compile_(compilation)
        except Exception as error:  # the plain model still works: no failure to compile may cost an answer
            compilation.reason = f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
            logger.warning("%s runs uncompiled: %s", model_id, compilation.reason)
            return model
        finally:
            compilation.seconds = time.perf_counter() - started
        difference = compilation.largest_difference
        checked = "" if difference is None else f", logits within {difference:.1g}"
        logger.info("%s: %s in %.1f s%s.", model_id, compilation.outcome, compilation.seconds, checked)
        if self._monitors_calls and isinstance(compiled, FasterModel):
            compiled.monitor = self.monitor
        return compiled

    def compile_model_aot(self, model: Model, inputs: Any, config: Any = None, mode: str | None = None) -> Any:
        """`compile_model` under the model's own name.

        Both `config` and `mode` override the graph configuration. `config` is a mapping or any object, such as the
        model's own configuration; only its `mode` and `enable_cuda_graphs` count.
        """
        given = {"config": config, "mode": mode}
        return self.compile_model(
            model, inputs, model_name(model), **{name: value for name, value in given.items() if value is not None}
        )

    def get_performance_report(self) -> dict[str, Any]:
        """Compilations and calls so far; `str(compiler.monitor)` gives the same as text."""
        return self.monitor.report()

    def _own_compilation(
        self, model: Model, example_inputs: Any, settings: dict[str, Any]
    ) -> Callable[[Compilation], Model]:
        """Mistakes in the arguments are raised here; later ones leave the model plain."""
        config = settings.pop("config", None)
        if isinstance(config, Mapping):
            GraphConfig.of(config)  # in a mapping, unlike in an object, an unknown name is a mistake
        graph_config = GraphConfig.of(settings)
        calls = example_calls(model, example_inputs)
        example = min(calls, key=lambda call: input_shape((), call)[1])
        return functools.partial(self._compile, model, example, graph_config)

    def _compile(self, model: Model, call: dict[str, Any], config: GraphConfig, compilation: Compilation) -> Model:
        module, model_id, example = hugging_face_module(model), compilation.model_id, _step_example(call)
        if module.device.type == "cuda" and config.wants_cuda_graphs:
            try:
                return record_graph(model, example, compilation)
            except UnsupportedModel as error:
                logger.warning("%s is compiled without CUDA graphs: %s.", model_id, error)
        with compilation.stage("fingerprinting"):
            key = artifact_key(module, model_id, config.inductor_options)
        with onednn_where_supported(module):
            return PackageMaker(model, example, config.inductor_options, compilation).load_or_compile(self.store, key)

    def _compile_elsewhere(
        self, model: Model, inputs: Any, mode: str, kwargs: dict[str, Any], compilation: Compilation
    ) -> Model:
        own = self.graph_config if self._given_config is None else self._given_config
        with compilation.stage("compiling"):
            compiled = compile_elsewhere(
                self.base_compiler, model, inputs, compilation.model_id, kwargs.get("config", own), mode, kwargs
            )
        compilation.outcome = f"compiled by {type(self.base_compiler).__name__}"
        return compiled


def create_enhanced_compiler(
    enable_cuda_graphs: bool = True,
    enable_performance_monitoring: bool = True,
    mode: str | None = None,
    cache_dir: str | Path | None = None,
    progress: bool | None = None,
    *,
    graph_config: Any = None,
    base_compiler: Any = None,
) -> EnhancedAOTModelCompiler:
    """A compiler; without CUDA `enable_cuda_graphs` changes nothing.

    `mode`, and `enable_cuda_graphs=False`, win over `graph_config`. `base_compiler` compiles in evenflow's place.
    """
    overrides: dict[str, Any] = {"mode": mode} if mode is not None else {}
    if not enable_cuda_graphs:
        overrides |= {"enable_cuda_graphs": False}
    if overrides:
        graph_config = GraphConfig(**(asdict(GraphConfig.of(graph_config)) | overrides))
    return EnhancedAOTModelCompiler(
        base_compiler,
        graph_config,
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


def _step_example(call: dict[str, Any]) -> dict[str, Tensor]:
    names = ("input_ids", "attention_mask", "position_ids")
    example: dict[str, Tensor] = {name: call[name] for name in names if name in call}
    if "input_ids" not in example or example["input_ids"].ndim != 2:
        raise UnsupportedModel("the example inputs hold no input_ids of shape (batch, tokens)")
    return example
