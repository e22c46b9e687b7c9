"""Chooses a decoder's kernels: the fastest attention backend that works here, and the operations.

Backends are imported only when chosen: their packages may not be installed.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import cast

import torch

from evenflow.errors import InvalidConfig, MissingDependency, UnsupportedModel
from evenflow.model.config import ModelConfig
from evenflow.model.cuda.attention.backend import AttentionBackend
from evenflow.model.cuda.operations import Operations

logger = logging.getLogger("evenflow")

BACKEND_VARIABLE = "EVENFLOW_ATTENTION_BACKEND"
_LARGEST_TRITON_HEAD = 256


class _Unusable(Exception):
    """This backend does not support the model or the machine. The message: "reason", or "reason; what to do"."""


def choose_attention(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, deterministic: bool = False
) -> AttentionBackend:
    """The backend named by the environment variable, else the fastest that works. A CPU has only the reference."""
    if deterministic and device.type != "cuda":
        raise InvalidConfig(f"Got device {device.type} but deterministic attention over paged memory needs cuda.")
    makers = _makers(device, deterministic)
    asked = os.environ.get(BACKEND_VARIABLE)
    if asked is not None:
        if asked not in makers:
            mode = " in deterministic mode" if deterministic else ""
            allowed = " or ".join(makers)
            raise InvalidConfig(f"Got {BACKEND_VARIABLE}={asked!r} but expected {allowed} on this device{mode}.")
        makers = {asked: makers[asked]}
    reasons = []
    for name, make in makers.items():
        try:
            return make(config, dtype, device)
        except _Unusable as error:
            reasons.append(f"{name}: {error}")
            logger.info("Attention does not run on %s: %s.", name, error)
    raise UnsupportedModel(f"No attention backend works here ({'; '.join(reasons)}): unset {BACKEND_VARIABLE}.")


def choose_operations(device: torch.device, deterministic: bool = False) -> Operations:
    """Fused kernels on a GPU with Triton, which torch installs there."""
    if device.type == "cuda":
        try:
            return cast(Operations, _import("deterministic" if deterministic else "kernels", "Triton", "triton"))
        except _Unusable as error:
            if deterministic:
                raise MissingDependency(f"The deterministic mode does not work here: {error}.") from error
            logger.warning("A layer's operations run unfused, which is slow: %s.", error)
    return cast(Operations, importlib.import_module("evenflow.model.cuda.reference_ops"))


def can_capture(attention: AttentionBackend, operations: Operations) -> bool:
    """Whether graphs can replay them: the plain torch versions read values on the host."""
    names = (getattr(operations, "__name__", ""), attention.name)
    return not any("reference" in name for name in names)


def usable_backends(dtype: torch.dtype, device: torch.device) -> dict[str, str | None]:
    """GPU backends, fastest first, with the reasons why they cannot run usual models here, or None. Builds nothing."""
    found: dict[str, str | None] = {}
    for name, check in (("flashinfer", _checked_flashinfer), ("triton", _checked_triton)):
        try:
            check(dtype, device, None)
            found[name] = None
        except _Unusable as error:
            found[name] = str(error)
    return found


_Maker = Callable[[ModelConfig, torch.dtype, torch.device], AttentionBackend]


def _makers(device: torch.device, deterministic: bool) -> dict[str, _Maker]:
    """Constructors by name, fastest first."""
    if device.type != "cuda":
        return {"reference": _reference}
    makers: dict[str, _Maker] = {
        "flashinfer": partial(_flashinfer, deterministic),
        "triton": partial(_triton, deterministic),
    }
    return makers if deterministic else makers | {"reference": _reference}


def _flashinfer(deterministic: bool, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> AttentionBackend:
    module = _checked_flashinfer(dtype, device, config.head_dim)
    if deterministic and torch.cuda.get_device_capability(device)[0] != 9:
        raise _Unusable("its kernels for this GPU sum in an order that depends on the chunks")
    try:
        return cast(AttentionBackend, module.FlashInferAttention(config, dtype, device, deterministic))
    except (RuntimeError, OSError) as error:  # building its kernels needs CUDA's compiler
        raise _Unusable(f"its kernels cannot be built: {str(error).strip().splitlines()[0]}") from error


def _triton(deterministic: bool, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> AttentionBackend:
    module = _checked_triton(dtype, device, config.head_dim)
    return cast(AttentionBackend, module.TritonAttention(config, dtype, device, deterministic))


def _reference(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> AttentionBackend:
    from evenflow.model.cuda.attention.reference import ReferenceAttention

    if device.type == "cuda":
        logger.warning("Attention runs on plain torch, one sequence after another, which is slow.")
    return ReferenceAttention(config)


def _checked_flashinfer(dtype: torch.dtype, device: torch.device, head_dim: int | None) -> ModuleType:
    module = _import("attention.flashinfer", "FlashInfer", "'evenflow[cuda]'")
    reason = module.why_unsupported(dtype, device, head_dim)
    if reason is not None:
        raise _Unusable(reason)
    return module


def _checked_triton(dtype: torch.dtype, device: torch.device, head_dim: int | None) -> ModuleType:
    module = _import("attention.triton_chunks", "Triton", "triton")
    if head_dim is not None and head_dim > _LARGEST_TRITON_HEAD:
        raise _Unusable(f"heads of {head_dim} are larger than {_LARGEST_TRITON_HEAD}")
    return module


def _import(module: str, package: str, install: str) -> ModuleType:
    try:
        return importlib.import_module(f"evenflow.model.cuda.{module}")
    except ImportError as error:
        raise _Unusable(f"{package} cannot be imported ({error}); pip install {install}") from error
