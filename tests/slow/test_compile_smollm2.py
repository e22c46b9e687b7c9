"""SmolLM2-135M in transformers: wrapped, and compiled, it gives the plain model's logits and tokens."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from evenflow.compile import ChunkedPrefillOptimizer, ChunkedPrefillWrapper, create_enhanced_compiler
from tests.compile.compilers import needs_compiler
from tests.models import default_model_path

pytestmark = pytest.mark.slow

THRESHOLD, CHUNK = 256, 128
LENGTHS = (255, 256, 257, 383, 384, 385, 512, 700)


@cache
def reference() -> Any:
    from transformers import AutoModelForCausalLM

    path = default_model_path()
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()


def tokens(batch_size: int, length: int) -> torch.Tensor:
    return torch.randint(3, 49152, (batch_size, length), generator=torch.Generator().manual_seed(length))


@torch.inference_mode()
def test_chunks() -> None:
    model = reference()
    wrapped = ChunkedPrefillWrapper(model, ChunkedPrefillOptimizer(CHUNK, THRESHOLD, False), "SmolLM2")
    for length in LENGTHS:
        prompt = tokens(1, length)
        got, wanted = wrapped(prompt, logits_to_keep=8).logits, model(prompt, logits_to_keep=8).logits
        torch.testing.assert_close(got, wanted, atol=1e-4 * float(wanted.abs().max()), rtol=0)
    for length in (257, 700):
        prompt = tokens(1, length)
        call = {"max_new_tokens": 24, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
        assert torch.equal(wrapped.generate(prompt, **call), model.generate(prompt, **call))
    assert wrapped.execution_stats["chunked_calls"] == 6 + 2


@needs_compiler
@torch.inference_mode()
def test_compiled(tmp_path: Path) -> None:
    model, prompt = reference(), tokens(2, 40)
    for outcome in ("compiled", "loaded from the cache"):
        compiler = create_enhanced_compiler(cache_dir=tmp_path)
        compiled = compiler.compile_model(model, prompt, "SmolLM2")
        assert compiler.monitor.compilations[0].outcome == outcome, compiler.monitor
    call = {"max_new_tokens": 24, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    assert torch.equal(compiled.generate(prompt, **call), model.generate(prompt, **call))
