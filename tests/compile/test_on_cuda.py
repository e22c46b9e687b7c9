"""Recorded steps and packages on a GPU; without one nothing is recorded and nothing changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import StaticCache

from evenflow.compile import ChunkedPrefillOptimizer, GraphConfig, create_enhanced_compiler
from evenflow.compile.aot.cuda_graphs import GraphedModel
from evenflow.compile.chunks.optimizer import ChunkedPrefillWrapper
from tests.compile.architectures import padding_mask, random_tokens, small_model
from tests.compile.compilers import needs_compiler

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def on_gpu(name: str) -> Any:
    import copy

    return copy.deepcopy(small_model(name)).to("cuda")


def assert_generates_alike(compiled: Any, model: Any) -> None:
    mask = padding_mask([50, 20, 3], "left")
    call = {"attention_mask": mask.cuda(), "max_new_tokens": 12, "do_sample": False}
    tokens = (random_tokens(3, 50) * mask).cuda()
    assert torch.equal(compiled.generate(tokens, **call), model.generate(tokens, **call))


@torch.inference_mode()
def test_without_cuda_everything_runs_as_it_is() -> None:
    model, tokens = small_model("llama"), random_tokens(1, 10)
    graphed = GraphedModel(model, model)
    assert graphed.why_no_graphs == "the model is not on a CUDA device"
    cache = StaticCache(config=model.config, max_cache_len=16)
    assert torch.equal(graphed(tokens, past_key_values=cache).logits, model(tokens).logits)
    graphed(tokens[:, :1], past_key_values=cache)
    call = {"max_new_tokens": 4, "do_sample": False}
    assert torch.equal(graphed.generate(tokens, **call), model.generate(tokens, **call))
    assert graphed.num_replays == 0


@needs_cuda
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
@torch.inference_mode()
def test_generation_by_replays(name: str, tmp_path: Path) -> None:
    model = on_gpu(name)
    compiler = create_enhanced_compiler(cache_dir=tmp_path)
    graphed = compiler.compile_model(model, random_tokens(1, 20).cuda(), name)
    assert compiler.monitor.compilations[0].outcome == "recorded as CUDA graphs", compiler.monitor
    for chunked in (graphed, ChunkedPrefillWrapper(graphed, ChunkedPrefillOptimizer(16, 32, False), name)):
        before = graphed.num_replays
        assert_generates_alike(chunked, model)
        assert graphed.num_replays == before + 11


@needs_cuda
@torch.inference_mode()
def test_a_cache_of_the_callers_own() -> None:
    model = on_gpu("llama")
    graphed = GraphedModel(model, model)
    tokens = random_tokens(2, 30).cuda()
    wanted = model(tokens).logits
    for _ in range(2):
        cache = StaticCache(config=model.config, max_cache_len=32)
        graphed(tokens[:, :20], past_key_values=cache)
        for place in range(20, 30):
            step = graphed(tokens[:, place : place + 1], past_key_values=cache)
            torch.testing.assert_close(step.logits[:, -1], wanted[:, place], atol=1e-3, rtol=0)
    assert graphed.num_replays == 20


@needs_cuda
@needs_compiler
@torch.inference_mode()
def test_windows_that_move_are_compiled_without_graphs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = on_gpu("mistral-sliding")
    compiler = create_enhanced_compiler(cache_dir=tmp_path)
    compiled = compiler.compile_model(model, random_tokens(1, 20).cuda(), "sliding")
    assert compiler.monitor.compilations[0].outcome == "compiled", compiler.monitor
    assert "compiled without CUDA graphs: its cache has layers that move" in caplog.text
    assert_generates_alike(compiled, model)


@needs_cuda
@needs_compiler
@torch.inference_mode()
def test_without_graphs_a_package_is_kept_on_disk(tmp_path: Path) -> None:
    model = on_gpu("llama")
    outcomes = []
    for mode, enabled in (("default", True), ("default", True), ("reduce-overhead", False)):
        compiler = create_enhanced_compiler(mode=mode, enable_cuda_graphs=enabled, cache_dir=tmp_path)
        assert not GraphConfig(mode, enabled).wants_cuda_graphs
        compiled = compiler.compile_model(model, random_tokens(1, 20).cuda(), "llama")
        outcomes.append(compiler.monitor.compilations[0].outcome)
        assert_generates_alike(compiled, model)
        assert set(compiler.monitor.calls) == {"compiled"}
    assert outcomes == ["compiled", "loaded from the cache", "loaded from the cache"]
