"""Which compilers wrap a model for chunks, by which threshold, and why."""

from __future__ import annotations

import inspect
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from evenflow.compile import (
    ChunkedPrefillWrapper,
    EnhancedAOTWithChunking,
    VLLMChunkedModelWrapper,
    create_enhanced_compiler_with_chunking,
    create_vllm_enhanced_compiler,
)
from evenflow.compile.chunks import memory
from evenflow.compile.with_chunking import analysis_of_lengths
from evenflow.errors import InvalidConfig
from tests.compile.architectures import random_tokens, small_model


@pytest.fixture(autouse=True)
def _without_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling takes a while and does not matter here."""

    def refuse(*_: Any) -> None:
        raise RuntimeError("not in this test")

    monkeypatch.setattr("evenflow.compile.aot.packages.compile_step", refuse)
    monkeypatch.setattr("evenflow.compile.aot.packages.export_step", refuse)


def test_signatures() -> None:
    parameters = inspect.signature(create_enhanced_compiler_with_chunking).parameters
    assert [parameters[name].default for name in ("enable_chunked_prefill", "chunk_size", "chunking_threshold")] == [
        False,
        512,
        2048,
    ]
    parameters = inspect.signature(create_vllm_enhanced_compiler).parameters
    assert [parameters[name].default for name in list(parameters)[:3]] == [True, True, None]


def test_without_chunks_nothing_is_wrapped(tmp_path: Path) -> None:
    compiler = create_enhanced_compiler_with_chunking(cache_dir=tmp_path)
    assert compiler.compile_model(small_model("llama"), random_tokens(1, 20), "small") is small_model("llama")


def test_a_chunk_size_that_is_given_wins_over_the_rule(tmp_path: Path) -> None:
    default = create_enhanced_compiler_with_chunking(True, cache_dir=tmp_path)
    given = create_enhanced_compiler_with_chunking(True, chunk_size=512, cache_dir=tmp_path)
    assert default.chunked_optimizer.get_optimal_chunk_size(30000) == 2048
    assert given.chunked_optimizer.get_optimal_chunk_size(30000) == 512


@torch.inference_mode()
def test_compile_model_aot_wraps_too(tmp_path: Path) -> None:
    compiler = create_enhanced_compiler_with_chunking(True, 16, 32, cache_dir=tmp_path)
    model = compiler.compile_model_aot(small_model("llama"), random_tokens(1, 20), None, "default")
    assert isinstance(model, ChunkedPrefillWrapper)
    model(random_tokens(1, 40))
    assert compiler.get_performance_report()["chunking"]["chunks_processed"] == 3


def triggers(compiler: EnhancedAOTWithChunking, length: int) -> dict[str, bool]:
    found = compiler.find_triggers(small_model("llama", "eager"), random_tokens(1, length))
    assert all(trigger.reason for trigger in found)
    return {trigger.name: trigger.active for trigger in found}


def test_each_trigger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calm = {
        "input over the threshold": False,
        "memory pressure": False,
        "long-context tasks": False,
        "parallel processing": False,
    }
    compiler = create_enhanced_compiler_with_chunking(None, cache_dir=tmp_path)
    assert triggers(compiler, 47) == calm
    assert triggers(compiler, 4000) == {**calm, "input over the threshold": True}
    compiler.dataset_analysis = analysis_of_lengths([47, 12000])
    assert triggers(compiler, 47) == {**calm, "input over the threshold": True, "long-context tasks": True}
    compiler.dataset_analysis = None
    parallel = EnhancedAOTWithChunking(compiler.base_compiler, chunked_prefill_config={"num_streams": 8})
    assert triggers(parallel, 47) == {**calm, "parallel processing": True}
    monkeypatch.setattr(memory, "available_memory", lambda: 1 << 20)
    assert triggers(compiler, 900) == {**calm, "memory pressure": True}


def test_chunks_are_on_where_a_trigger_fires(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "evenflow")
    for length, wrapped in ((20, False), (4000, True)):
        compiler = create_enhanced_compiler_with_chunking(None, cache_dir=tmp_path)
        model = compiler.compile_model(small_model("llama"), random_tokens(1, length), "small")
        assert isinstance(model, ChunkedPrefillWrapper) == wrapped
    told = [record.getMessage() for record in caplog.records if "chunked prefill is on" in record.getMessage()]
    assert told == [
        "small: chunked prefill is on: input over the threshold: 100.0% of the inputs are over 2,048 tokens."
    ]


def test_bad_configurations() -> None:
    with pytest.raises(InvalidConfig, match="size_of_chunk"):
        EnhancedAOTWithChunking(chunked_prefill_config={"size_of_chunk": 1})
    with pytest.raises(InvalidConfig, match="fastest"):
        EnhancedAOTWithChunking(create_enhanced_compiler_with_chunking().base_compiler, {"mode": "fastest"})


# ---- vLLM ----


@torch.inference_mode()
def test_without_vllm_the_local_model_generates(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "evenflow")
    compiler = create_vllm_enhanced_compiler(chunking_threshold=32, cache_dir=tmp_path)
    plain, tokens = small_model("llama"), random_tokens(1, 600)
    model = compiler.compile_model(plain, random_tokens(1, 20), "small")
    assert isinstance(model, VLLMChunkedModelWrapper)
    assert model.backend == "local"
    call = {"max_new_tokens": 5, "do_sample": False}
    assert torch.equal(model.generate(tokens, **call), plain.generate(tokens, **call))
    assert model.stats["calls"] == 5
    assert model.stats["chunked_calls"] == 1
    assert model.stats["tokens"] == 600 + 4
    assert model.stats["seconds"] > 0
    assert "small generates in the local model." in [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(
    ("lengths", "wanted"), [([47], 2048), ([1500], 2048), ([24000], 19200), ([47, 8000], 6400)], ids=str
)
def test_the_threshold_from_lengths(lengths: list[int], wanted: int, tmp_path: Path) -> None:
    analysis = analysis_of_lengths(lengths)
    compiler = create_vllm_enhanced_compiler(dataset_analysis=analysis, cache_dir=tmp_path)
    assert compiler.compile_model(small_model("llama"), random_tokens(1, 20), "small").chunking_threshold == wanted
