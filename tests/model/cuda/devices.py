"""The devices and types that the GPU's decoder is tested in, and how exact each must be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from evenflow.model.config import ModelConfig
from evenflow.model.cuda.backends import choose_attention, choose_operations
from evenflow.model.cuda.decoder import PagedDecoder


class Place(NamedTuple):
    device: torch.device
    dtype: torch.dtype
    tolerance: float  # of logits, relative to their size
    gain: float = 1.0  # of the layers: with more, transformers in 16 bits is further off than the tolerance

    def decoder(self, config: ModelConfig, tensors: Mapping[str, Tensor]) -> PagedDecoder:
        here = {name: tensor.to(self.device, self.dtype) for name, tensor in tensors.items()}
        attention = choose_attention(config, self.dtype, self.device)
        return PagedDecoder(config, here, attention, choose_operations(self.device))


needs_cuda = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
CPU = Place(torch.device("cpu"), torch.float32, 1e-5)
CUDA_FLOAT32 = Place(torch.device("cuda"), torch.float32, 1e-4)
CUDA_BFLOAT16 = Place(torch.device("cuda"), torch.bfloat16, 1e-2, gain=0.25)
PLACES: list[Any] = [
    pytest.param(CPU, id="cpu"),
    pytest.param(CUDA_FLOAT32, id="cuda, float32", marks=needs_cuda),
    pytest.param(CUDA_BFLOAT16, id="cuda, bfloat16", marks=needs_cuda),
]
