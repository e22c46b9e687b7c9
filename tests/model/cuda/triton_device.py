"""Where the tests of Triton kernels run: on the GPU if there is one, else in Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch

HAS_CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_CUDA else "cpu")
if not HAS_CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, so before its module is imported
pytest.importorskip("triton", reason="Triton is not installed: pip install triton")

# Tests with this mark also run on a GPU; without one, the interpreter runs them as part of the normal suite.
on_cuda = pytest.mark.cuda if HAS_CUDA else pytest.mark.filterwarnings("default")
DTYPES = (torch.float32, torch.bfloat16)
