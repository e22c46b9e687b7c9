"""Compiles with a compiler supplied by the user, and wraps the result in the model's own interface."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from evenflow.compile.model_call import Model, forward_parameters, hugging_face_module
from evenflow.compile.model_interface import ModelInterface
from evenflow.errors import InvalidConfig, UnsupportedModel

_METHODS = "compile_model_aot(model, inputs, config, mode) or compile_model(model, example_inputs, model_id, **kwargs)"


class CompiledElsewhere(ModelInterface):
    """A bare function that another compiler made of a model, with the model's own interface around it."""

    def __init__(self, compiled: Model, model: Model) -> None:
        super().__init__(model)
        self.compiled = compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.compiled(*args, **kwargs)

    @property
    def call_parameters(self) -> Mapping[str, inspect.Parameter]:
        """The model's, as far as the function takes them: a KV cache may not be among them."""
        own = forward_parameters(self.compiled)
        takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in own.values())
        return forward_parameters(self.wrapped_module) if takes_any else own


def check_base_compiler(base: Any) -> None:
    """Refuse an object that cannot compile."""
    if not any(callable(getattr(base, name, None)) for name in ("compile_model_aot", "compile_model")):
        raise InvalidConfig(f"Got base_compiler={base!r} but expected an object with {_METHODS}.")


def compile_elsewhere(
    base: Any, model: Model, inputs: Any, model_id: str, config: Any, mode: str, kwargs: Mapping[str, Any]
) -> Model:
    """What `base` makes of a model. Its `compile_model_aot` comes first; `compile_model` gets the caller's `kwargs`."""
    if callable(getattr(base, "compile_model_aot", None)):
        compiled = base.compile_model_aot(model, inputs, config, mode)
    else:
        compiled = base.compile_model(model, inputs, model_id, **kwargs)
    if not callable(compiled):
        raise UnsupportedModel(f"{type(base).__name__} returned {compiled!r}, which cannot be called")
    lacks_interface = hasattr(hugging_face_module(model), "config") and not hasattr(compiled, "config")
    return CompiledElsewhere(compiled, model) if lacks_interface else compiled
