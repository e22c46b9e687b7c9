"""Where the tests of Triton kernels run: on the GPU if there is one, else in Triton's interpreter."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

HAS_CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_CUDA else "cpu")
DTYPES = (torch.float32, torch.bfloat16)
HALF = torch.bfloat16 if HAS_CUDA else torch.float16  # the interpreter multiplies the bits of bfloat16 as integers
# On a GPU these tests belong to `pytest -m cuda`; the interpreter runs them in the normal suite.
on_cuda = [pytest.mark.cuda] if HAS_CUDA else []

if not HAS_CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported
pytest.importorskip("triton", reason="Triton is not installed: pip install triton==3.6.0 (600 MB)")


def _let_numpy_index() -> None:
    """Triton 3.6's interpreter calls int() on an array of one element, which numpy 2.4 refuses."""
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch


if not HAS_CUDA:
    _let_numpy_index()
