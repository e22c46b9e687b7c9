"""Loads a model's compiled step from disk; compiles it if it is missing, damaged or wrong."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from evenflow.compile.aot.artifacts import Artifact, ArtifactStore, DamagedArtifact
from evenflow.compile.aot.checking import WrongAnswer, largest_difference, largest_step_difference, why_not_loadable
from evenflow.compile.aot.compiled_model import CompiledModel, StepRunner
from evenflow.compile.aot.cuda_graphs import GraphedModel
from evenflow.compile.aot.step_graph import StepGraph, compile_step, export_step, layers_are_sliding, lifted_constants
from evenflow.compile.model_call import Model, hugging_face_module
from evenflow.compile.monitoring import Compilation
from evenflow.errors import UnsupportedModel

logger = logging.getLogger("evenflow")

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


class PackageMaker:
    """Compiles one model for calls like `example`, and notes in `compilation` what came of it."""

    def __init__(
        self, model: Model, example: dict[str, Tensor], options: dict[str, Any], compilation: Compilation
    ) -> None:
        self._model = model
        self._example = example
        self._options = options
        self._compilation = compilation
        with compilation.stage("running the plain model"), torch.no_grad():
            output = model(**example, use_cache=True, logits_to_keep=1)
        self._output_class, self._cache = type(output), output.past_key_values
        self._graph = StepGraph(hugging_face_module(model), layers_are_sliding(self._cache))

    def load_or_compile(self, store: ArtifactStore, key: str) -> CompiledModel:
        try:
            artifact = store.find(key)
            if artifact is not None:
                return self._checked(artifact, "loaded from the cache")
        except (DamagedArtifact, WrongAnswer, RuntimeError, OSError, ValueError) as error:
            logger.warning("A compiled model in the cache cannot be used and is compiled again: %s.", error)
        with tempfile.TemporaryDirectory(prefix="evenflow-compile-", ignore_cleanup_errors=True) as scratch:
            return self._checked(self._compile(store, key, Path(scratch) / "step.pt2"), "compiled")

    def _compile(self, store: ArtifactStore, key: str, package: Path) -> Artifact:
        with self._compilation.stage("exporting"):
            program = export_step(self._graph, self._cache)
        notes = {"constants": _to_plain(lifted_constants(self._graph, program))}
        with self._compilation.stage("compiling"):
            compile_step(program, package, self._options)
        with self._compilation.stage("trying the package"):
            if (reason := why_not_loadable(package)) is not None:
                raise UnsupportedModel(reason)
        try:
            return store.put(key, package, notes)
        except OSError as error:  # a full disk, a read-only folder: this process can still use it
            logger.warning("The compiled model is not kept for the next start: %s.", error)
            return Artifact(package, notes)

    def _checked(self, artifact: Artifact, outcome: str) -> CompiledModel:
        with self._compilation.stage("loading"):
            lifted = read_constants(artifact.notes.get("constants"), self._cache.layers[0].keys.device)
            runner = StepRunner(self._graph, artifact.package, lifted, self._cache)
        with self._compilation.stage("checking"):
            try:
                model = CompiledModel(self._model, runner, self._output_class, counts_padding=True)
                difference = largest_difference(self._model, model, self._example)
            except WrongAnswer:
                model = CompiledModel(self._model, runner, self._output_class, counts_padding=False)
                difference = largest_difference(self._model, model, self._example)
        self._compilation.outcome, self._compilation.largest_difference = outcome, difference
        self._compilation.package_bytes = artifact.package.stat().st_size
        return model


def record_graph(model: Model, example: dict[str, Tensor], compilation: Compilation) -> GraphedModel:
    """The model with its decoding steps recorded as CUDA graphs, which last as long as the process."""
    with compilation.stage("recording a graph"):
        graphed = GraphedModel(model, hugging_face_module(model))
        difference = largest_step_difference(model, graphed, example)
    if graphed.why_no_graphs is not None:
        raise UnsupportedModel(graphed.why_no_graphs)
    compilation.outcome, compilation.largest_difference = "recorded as CUDA graphs", difference
    return graphed


def _to_plain(tensors: dict[str, Tensor]) -> dict[str, Any]:
    return {name: [str(tensor.dtype).removeprefix("torch."), tensor.tolist()] for name, tensor in tensors.items()}


def read_constants(constants: Any, device: torch.device) -> dict[str, Tensor]:
    try:
        return {
            name: torch.tensor(values, dtype=_DTYPES[dtype], device=device)
            for name, (dtype, values) in constants.items()
        }
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise DamagedArtifact(f"the constants noted with it cannot be read ({error!r})") from error
