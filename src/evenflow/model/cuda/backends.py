"""Chooses the kernels that a decoder runs on: the first attention backend that is installed, and the operations."""

from __future__ import annotations

import importlib
import os
from types import ModuleType
from typing import cast

import torch

from evenflow.errors import InvalidConfig, MissingDependency
from evenflow.model.config import ModelConfig
from evenflow.model.cuda.attention import AttentionBackend
from evenflow.model.cuda.operations import Operations

BACKEND_VARIABLE = "EVENFLOW_ATTENTION_BACKEND"
# By name: the module, which can be imported only where its package is installed, and the class. Fastest first.
_GPU_BACKENDS = {
    "flashinfer": ("flashinfer_attention", "FlashInferAttention"),
    "triton": ("triton_attention", "TritonAttention"),
}
_REFERENCE = "reference"


def choose_attention(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> AttentionBackend:
    """The backend that the variable names, else the fastest that can be imported. A CPU has only the reference."""
    asked = os.environ.get(BACKEND_VARIABLE)
    names = [*_GPU_BACKENDS, _REFERENCE] if device.type == "cuda" else [_REFERENCE]
    if asked is not None and asked not in names:
        raise InvalidConfig(f"Got {BACKEND_VARIABLE}={asked!r} but expected {' or '.join(names)} on this device.")
    for name in [asked] if asked else names:
        if name == _REFERENCE:
            from evenflow.model.cuda.reference import ReferenceAttention

            return ReferenceAttention(config)
        module, class_name = _GPU_BACKENDS[name]
        if (found := _import(module)) is not None:
            return cast(AttentionBackend, getattr(found, class_name)(config, dtype, device))
    raise MissingDependency(f"{BACKEND_VARIABLE}={asked} needs a package that is not installed: pip install {asked}")


def choose_operations(device: torch.device) -> Operations:
    """Fused kernels on a GPU with Triton, which comes with torch there."""
    name = "kernels" if device.type == "cuda" and _import("kernels") is not None else "reference_ops"
    return cast(Operations, _import(name))


def _import(module: str) -> ModuleType | None:
    try:
        return importlib.import_module(f"evenflow.model.cuda.{module}")
    except ImportError:
        return None
