"""A callable that stands in for a model and has all of its interface, `generate` included."""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable, Mapping
from typing import Any, Self

import torch

from evenflow.compile.model_call import Model, hugging_face_module, named_arguments
from evenflow.compile.monitoring import PerformanceMonitor


class ModelInterface:
    """Has the interface of the transformers model in `wrapped_module`; subclasses define `__call__`.

    Attributes are the model's. `generate` runs the model's own on a shallow copy of the model whose forward pass is
    this call: the model itself never changes.
    """

    def __init__(self, model: Model) -> None:
        self.inner_model = model
        self.wrapped_module = hugging_face_module(model)
        self._view: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "wrapped_module":  # not set yet: asking the model would recurse
            raise AttributeError(name)
        return getattr(self.wrapped_module, name)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own `generate`."""
        if self._view is None:
            self._view = self._make_view()
        self._view.training = self.wrapped_module.training
        return self._view.generate(*args, **{**self.generation_defaults(kwargs), **kwargs})

    def eval(self) -> Self:
        """Like the model's own, which would return the model instead of this object."""
        self.wrapped_module.eval()
        return self

    def generation_defaults(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of `generate` that its caller can override."""
        inner = self.inner_model
        return inner.generation_defaults(kwargs) if isinstance(inner, ModelInterface) else {}

    def prepares_own_mask(self, num_new_tokens: int) -> bool:
        """Whether a call of this length needs the mask as given, not one expanded for the whole call."""
        inner = self.inner_model
        return isinstance(inner, ModelInterface) and inner.prepares_own_mask(num_new_tokens)

    def _make_view(self) -> Any:
        view = copy.copy(self.wrapped_module)  # a new module over the same parameters and submodules
        plain_forward = self.wrapped_module.forward

        @functools.wraps(plain_forward)  # generate() checks its arguments against the signature
        def forward(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return plain_forward(*args, **kwargs)
            return self(*args, **kwargs)

        view.forward = forward
        view.prepare_inputs_for_generation = self._prepare_inputs(view.prepare_inputs_for_generation)
        return view

    def _prepare_inputs(self, plain: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        @functools.wraps(plain)
        def prepare(input_ids: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
            cache = kwargs.get("past_key_values")
            num_new_tokens = kwargs.get("next_sequence_length") or input_ids.shape[-1]
            if cache is None or not cache.is_compileable or not self.prepares_own_mask(num_new_tokens):
                return plain(input_ids, *args, **kwargs)
            # With a static cache the masks would be made for the whole prompt, which cannot be cut into chunks.
            inputs = plain(input_ids, *args, **{**kwargs, "past_key_values": None})
            return {**inputs, "past_key_values": cache}

        return prepare


class FasterModel(ModelInterface):
    """Runs calls by `run_faster` where it supports them, else in `inner_model`. `monitor` records both."""

    faster_kind: str
    monitor: PerformanceMonitor | None = None

    def run_faster(self, call: dict[str, Any]) -> Any:
        """The output of a call, given by its named arguments; None if it must run in the inner model."""
        raise NotImplementedError

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = named_arguments(self.wrapped_module, args, kwargs)
        started = time.perf_counter()
        output, kind = self.run_faster(call), self.faster_kind
        if output is None:
            output, kind = self.inner_model(**call), "plain"
        if self.monitor is not None:
            self.monitor.record(kind, call, time.perf_counter() - started)
        return output
