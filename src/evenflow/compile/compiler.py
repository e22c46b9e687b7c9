"""Compiles transformers models ahead of time and caches the result; a model that cannot be compiled stays plain."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from evenflow.compile.aot.artifacts import ArtifactStore, artifact_key
from evenflow.compile.aot.packages import PackageMaker, record_graph
from evenflow.compile.model_call import Model, check_model, example_calls, hugging_face_module, input_shape, model_name
from evenflow.compile.model_interface import FasterModel
from evenflow.compile.monitoring import Compilation, PerformanceMonitor
from evenflow.errors import InvalidConfig, UnsupportedModel
from evenflow.host import cache_folder

logger = logging.getLogger("evenflow")

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
_CUDA_GRAPHS = "triton.cudagraphs"

Settings = TypeVar("Settings")


def settings_of(kind: type[Settings], given: Any) -> Settings:
    """Settings given as an object of their class or as a mapping; None gives the defaults."""
    if isinstance(given, kind):
        return given
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    if given is not None and not isinstance(given, Mapping):
        raise InvalidConfig(f"Got {given!r} but expected a {kind.__name__}, or a mapping of {', '.join(names)}.")
    if unknown := [str(name) for name in given or {} if name not in names]:
        raise InvalidConfig(f"Got {', '.join(unknown)} but {kind.__name__} has only {', '.join(names)}.")
    return kind(**(given or {}))


@dataclass(frozen=True, slots=True)
class GraphConfig:
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

    `graph_config` is a GraphConfig or a mapping; alone, it may also come first. `base_compiler` compiles in evenflow's
    place: another of these compilers, or any object with `compile_model_aot(model, inputs, config, mode)`.

    Packages are cached in `cache_dir` (by default beside the models that evenflow fetched), under a key of weights,
    configuration, versions, device and mode. If anything fails, the caller gets the plain model and the log says why.
    """

    def __init__(
        self,
        base_compiler: Any = None,
        graph_config: GraphConfig | Mapping[str, Any] | None = None,
        *,
        cache_dir: str | Path | None = None,
        enable_performance_monitoring: bool = True,
        progress: bool | None = None,
    ) -> None:
        if isinstance(base_compiler, GraphConfig | Mapping) and graph_config is None:
            base_compiler, graph_config = None, base_compiler
        if base_compiler is not None:
            if not callable(getattr(base_compiler, "compile_model_aot", None)):
                wanted = "compile_model_aot(model, inputs, config, mode)"
                raise InvalidConfig(f"Got base_compiler={base_compiler!r} but expected an object with {wanted}.")
            if cache_dir is not None:
                raise InvalidConfig(f"Got cache_dir={str(cache_dir)!r} with a base_compiler, which has its own cache.")
        is_own = isinstance(base_compiler, EnhancedAOTModelCompiler)
        self.base_compiler = base_compiler
        inherited = base_compiler.graph_config if is_own and graph_config is None else graph_config
        self.graph_config = settings_of(GraphConfig, inherited)
        self.store = ArtifactStore(Path(cache_dir) if cache_dir is not None else cache_folder() / "compiled")
        self.monitor: PerformanceMonitor = base_compiler.monitor if is_own else PerformanceMonitor()
        self._monitors_calls = enable_performance_monitoring
        self._progress = progress

    def compile_model(self, model: Model, example_inputs: Any, model_id: str, **kwargs: Any) -> Any:
        """The model compiled for any batch size, length and context, and checked on the shortest example.

        `example_inputs` is one example or several: a tuple holds the arguments of one call, a list of tensors, of
        mappings or of lists of ids holds several examples. `kwargs` override the graph configuration for this model:
        `mode`, `enable_cuda_graphs`, and `config`, a GraphConfig or a mapping.
        """
        check_model(model)
        config = kwargs.pop("config", None)
        overrides = asdict(config) if isinstance(config, GraphConfig) else config
        settings = {**asdict(self.graph_config), **(overrides if isinstance(overrides, Mapping) else {}), **kwargs}
        if isinstance(self.base_compiler, EnhancedAOTModelCompiler):
            config = self.graph_config if config is None else config
            return self.base_compiler.compile_model(model, example_inputs, model_id, config=config, **settings)
        if self.base_compiler is None:  # mistakes in the arguments are raised here; later ones leave the model plain
            example = min(example_calls(model, example_inputs), key=lambda call: input_shape((), call)[1])
            compile_ = functools.partial(self._compile, model, example, settings_of(GraphConfig, settings))
        else:
            own = self.graph_config if config is None else config
            compile_ = functools.partial(self._compile_by_base, model, example_inputs, own)
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

        Both `config` and `mode` override the graph configuration. A `config` that is neither a GraphConfig nor a
        mapping, such as the model's own, is for base compilers alone.
        """
        given = {"config": config, "mode": mode}
        return self.compile_model(
            model, inputs, model_name(model), **{name: value for name, value in given.items() if value is not None}
        )

    def get_performance_report(self) -> dict[str, Any]:
        """Compilations and calls so far; `str(compiler.monitor)` gives the same as text."""
        return self.monitor.report()

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

    def _compile_by_base(self, model: Model, inputs: Any, config: Any, compilation: Compilation) -> Model:
        base = type(self.base_compiler).__name__
        with compilation.stage("compiling"):
            compiled = self.base_compiler.compile_model_aot(model, inputs, config, compilation.mode)
        if not callable(compiled):
            raise UnsupportedModel(f"{base} returned {compiled!r}, which cannot be called")
        compilation.outcome = f"compiled by {base}"
        return compiled  # type: ignore[no-any-return]


def create_enhanced_compiler(
    enable_cuda_graphs: bool = True,
    enable_performance_monitoring: bool = True,
    mode: str | None = None,
    cache_dir: str | Path | None = None,
    progress: bool | None = None,
    *,
    graph_config: GraphConfig | Mapping[str, Any] | None = None,
    base_compiler: Any = None,
) -> EnhancedAOTModelCompiler:
    """A compiler; without CUDA `enable_cuda_graphs` changes nothing.

    `mode`, and `enable_cuda_graphs=False`, win over `graph_config`. `base_compiler` compiles in evenflow's place.
    """
    overrides: dict[str, Any] = {"mode": mode} if mode is not None else {}
    if not enable_cuda_graphs:
        overrides |= {"enable_cuda_graphs": False}
    if overrides:
        graph_config = replace(settings_of(GraphConfig, graph_config), **overrides)
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
