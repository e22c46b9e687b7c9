"""The compiler's promises, called as users of `engines.shared` call them: one section for each."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from evenflow.advisor import preset_dataset
from evenflow.compile import (
    ChunkedPrefillOptimizer,
    ChunkedPrefillWrapper,
    EnhancedAOTModelCompiler,
    EnhancedAOTWithChunking,
    EnhancedAOTWithVLLMChunking,
    GraphConfig,
    VLLMChunkedModelWrapper,
    create_enhanced_compiler,
    create_enhanced_compiler_with_chunking,
    create_vllm_enhanced_compiler,
)
from evenflow.compile.chunks import memory
from evenflow.errors import InvalidConfig, InvalidInput
from tests.compile.architectures import random_tokens, small_model

SOURCE_CONFIG = {"chunk_size": 512, "enable_threshold": 2048, "adaptive_chunking": True}
SMALL_CONFIG = {"chunk_size": 16, "enable_threshold": 32, "adaptive_chunking": False}


def assert_same_logits(got: Any, model: Any, tokens: torch.Tensor) -> None:
    torch.testing.assert_close(got.logits, model(tokens).logits, atol=1e-4, rtol=0)


# ---- Chunked prefill optimizer ----


def test_the_optimizer_has_the_sources_defaults_and_forms() -> None:
    for optimizer in (
        ChunkedPrefillOptimizer(),
        ChunkedPrefillOptimizer(512, 2048, True),
        ChunkedPrefillOptimizer(**SOURCE_CONFIG),
    ):
        assert not optimizer.should_chunk(2048)
        assert optimizer.should_chunk(input_length=2049)
        assert [optimizer.get_optimal_chunk_size(length) for length in (4095, 4096, 16383, 16384)] == [
            *(512, 1024, 1024, 2048)
        ]
        assert optimizer.stats == {
            "total_sequences": 0,
            "chunked_sequences": 0,
            "chunks_processed": 0,
            "memory_saved_mb": 0.0,
        }
    assert ChunkedPrefillOptimizer(300, adaptive_chunking=False).get_optimal_chunk_size(input_length=30000) == 300


@pytest.mark.parametrize("form", ["tensor", "tensor of one dimension", "list", "list of lists", "by name"])
@torch.inference_mode()
def test_process_chunked_takes_tensors_and_lists(form: str) -> None:
    model, optimizer = small_model("llama"), ChunkedPrefillOptimizer(**SMALL_CONFIG)
    batch = random_tokens(1 if form in ("list", "tensor of one dimension") else 2, 70)
    forms = {
        "tensor": batch,
        "tensor of one dimension": batch[0],
        "list": batch[0].tolist(),
        "list of lists": batch.tolist(),
    }
    if form == "by name":
        output = optimizer.process_chunked(model=model, input_tokens=batch, attention_mask=torch.ones_like(batch))
    else:
        output = optimizer.process_chunked(model, forms[form])
    assert_same_logits(output, model, batch)
    assert optimizer.stats["chunked_sequences"] == len(batch)
    assert optimizer.stats["chunks_processed"] == 5
    assert optimizer.stats["memory_saved_mb"] == pytest.approx(len(batch) * (70 - 16) * 70 * 4 / 1e6)


@pytest.mark.parametrize("as_list", [False, True])
@torch.inference_mode()
def test_process_chunked_runs_whole_below_its_threshold(as_list: bool) -> None:
    model, optimizer, tokens = small_model("llama"), ChunkedPrefillOptimizer(**SMALL_CONFIG), random_tokens(1, 32)
    assert_same_logits(optimizer.process_chunked(model, tokens.tolist() if as_list else tokens), model, tokens)
    assert optimizer.stats == {
        "total_sequences": 1,
        "chunked_sequences": 0,
        "chunks_processed": 0,
        "memory_saved_mb": 0.0,
    }


def test_rows_of_different_lengths_are_refused() -> None:
    with pytest.raises(InvalidInput, match="rows of 1 to 2 tokens"):
        ChunkedPrefillOptimizer().process_chunked(small_model("llama"), [[1, 2], [3]])


class Counting:
    """A model that takes chunks itself: it numbers the tokens, over all chunks."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.asked: list[Any] = []

    def process_chunk(self, chunk_tokens: Any, **kwargs: Any) -> Any:
        self.asked.append(kwargs)
        length = chunk_tokens.shape[-1] if isinstance(chunk_tokens, torch.Tensor) else len(chunk_tokens)
        start = sum(self.seen)
        self.seen.append(length)
        numbers = torch.arange(start, start + length)
        if isinstance(chunk_tokens, list):
            return [token + number for token, number in zip(chunk_tokens, numbers.tolist(), strict=True)]
        return {"numbered": chunk_tokens + numbers, "last": chunk_tokens[..., -1], "name": "counting"}

    def __call__(self, tokens: Any, **kwargs: Any) -> Any:
        return "whole"


def test_a_model_with_process_chunk_is_called_by_it() -> None:
    optimizer = ChunkedPrefillOptimizer(**SMALL_CONFIG)
    model, tokens = Counting(), random_tokens(2, 70)
    output = optimizer.process_chunked(model, tokens, temperature=0)
    assert model.seen == [16, 16, 16, 16, 6]
    assert model.asked == [{"temperature": 0}] * 5
    assert torch.equal(output["numbered"], tokens + torch.arange(70))
    assert torch.equal(
        output["last"], tokens[:, -1]
    )  # one entry for each sequence, not for each token: the last chunk's
    assert output["name"] == "counting"
    assert optimizer.stats["chunks_processed"] == 5

    ids = list(range(40))
    assert optimizer.process_chunked(Counting(), ids) == [2 * number for number in ids]
    assert optimizer.process_chunked(Counting(), ids[:32]) == "whole"
    assert optimizer.process_chunked(SimpleNamespace(process_chunk=len), ids[:20]) == 20  # it need not be callable
    wrapped = ChunkedPrefillWrapper(Counting(), optimizer, "counting")
    assert torch.equal(wrapped(input_ids=tokens)["numbered"], output["numbered"])
    assert wrapped.execution_stats["chunked_calls"] == 1


def test_a_plain_function_runs_whole_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    optimizer = ChunkedPrefillOptimizer(**SMALL_CONFIG)

    def double(tokens: list[int]) -> list[int]:
        return [2 * token for token in tokens]

    def with_cache(input_ids: Any, past_key_values: Any = None) -> Any:
        return len(input_ids)

    assert optimizer.process_chunked(double, list(range(40))) == double(list(range(40)))
    assert optimizer.process_chunked(with_cache, list(range(40))) == 40
    assert optimizer.process_chunked(len, list(range(40))) == 40
    assert optimizer.whole_calls == {
        "double takes no past_key_values": 1,
        "with_cache has no configuration of transformers": 1,
        "len takes no past_key_values": 1,
    }
    assert "double takes no past_key_values" in caplog.text
    assert optimizer.stats["chunked_sequences"] == 0


# ---- Compilers ----


class AOT:
    """A user's compiler: notes what it is asked and returns the model as it is."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    def compile_model_aot(self, model: Any, inputs: Any, config: Any, mode: Any) -> Any:
        self.asked.append((inputs, config, mode))
        return model


@pytest.fixture
def tokens() -> torch.Tensor:
    return random_tokens(1, 20)


def test_a_base_compiler_and_a_graph_config_positional_and_by_keyword(tokens: torch.Tensor) -> None:
    model = small_model("llama")
    graph_config = GraphConfig(mode="default")
    for base in (AOT(), AOT()):
        for compiler in (
            EnhancedAOTModelCompiler(base, graph_config),
            EnhancedAOTModelCompiler(base_compiler=base, graph_config=graph_config),
        ):
            assert compiler.compile_model(model, tokens, "small") is model
            assert compiler.get_performance_report()["compilations"][0]["outcome"] == "compiled by AOT"
        assert [asked[1:] for asked in base.asked] == [(graph_config, "default")] * 2
        assert all(asked[0] is tokens for asked in base.asked)


def test_a_graph_config_alone_may_come_first() -> None:
    for given in (GraphConfig("default"), {"mode": "default"}):
        for compiler in (EnhancedAOTModelCompiler(given), EnhancedAOTModelCompiler(graph_config=given)):
            assert compiler.base_compiler is None
            assert compiler.graph_config == GraphConfig("default")
    assert EnhancedAOTModelCompiler().graph_config == GraphConfig()


def test_a_configuration_for_a_base_compiler_reaches_it(tokens: torch.Tensor) -> None:
    """Names that evenflow does not know are the base's own matter."""
    base = AOT()
    for compiler in (EnhancedAOTModelCompiler(base), create_enhanced_compiler_with_chunking(base_compiler=base)):
        compiler.compile_model(small_model("llama"), tokens, "small", mode="default")
        compiler.compile_model_aot(small_model("llama"), tokens, {"passes": 4}, "fastest")
    assert [asked[1:] for asked in base.asked] == [(GraphConfig(), "default"), ({"passes": 4}, "fastest")] * 2


def test_a_base_compiler_that_fails_leaves_the_plain_model(
    tokens: torch.Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    class Fails:
        def compile_model_aot(self, *_: Any) -> Any:
            raise OSError("no compiler found")

    class ReturnsNothing:
        def compile_model_aot(self, *_: Any) -> None: ...

    model = small_model("llama")
    for base in (Fails(), ReturnsNothing()):
        assert EnhancedAOTModelCompiler(base).compile_model(model, tokens, "small") is model
    assert "small runs uncompiled: OSError: no compiler found" in caplog.text
    assert "ReturnsNothing returned None, which cannot be called" in caplog.text


@pytest.mark.slow
@torch.inference_mode()
def test_chunks_over_what_torch_compiled(tokens: torch.Tensor) -> None:
    class Torch:
        def compile_model_aot(self, model: Any, inputs: Any, config: Any, mode: Any) -> Any:
            return torch.compile(model, backend="eager")

    model = small_model("llama")
    compiled = EnhancedAOTWithChunking(Torch(), None, SMALL_CONFIG).compile_model(model, tokens, "small")
    assert compiled.config is model.config
    assert_same_logits(compiled(random_tokens(1, 70)), model, random_tokens(1, 70))
    assert compiled.execution_stats["chunked_calls"] == 1


def test_what_is_no_compiler_is_refused() -> None:
    with pytest.raises(InvalidConfig, match=r"base_compiler=3 but expected an object with compile_model_aot\(model"):
        EnhancedAOTModelCompiler(3)
    with pytest.raises(InvalidConfig, match="cache_dir='there' with a base_compiler"):
        EnhancedAOTModelCompiler(AOT(), cache_dir="there")
    for given in (3, SimpleNamespace(mode="default")):
        with pytest.raises(InvalidConfig, match="expected a GraphConfig"):
            EnhancedAOTModelCompiler(None, given)  # type: ignore[arg-type]


class SourceStyle(EnhancedAOTModelCompiler):
    """The chunking compiler as the source writes it."""

    def __init__(self, base_compiler: Any = None, graph_config: Any = None, chunked_prefill_config: Any = None) -> None:
        super().__init__(base_compiler, graph_config)
        self.chunked_optimizer = ChunkedPrefillOptimizer(**chunked_prefill_config) if chunked_prefill_config else None

    def compile_model(self, model: Any, example_inputs: Any, model_id: str, **kwargs: Any) -> Any:
        compiled_model = super().compile_model(model, example_inputs, model_id, **kwargs)
        if self.chunked_optimizer:
            return ChunkedPrefillWrapper(compiled_model, self.chunked_optimizer, model_id)
        return compiled_model


@torch.inference_mode()
def test_a_subclass_as_the_source_writes_it(tokens: torch.Tensor) -> None:
    base, model = AOT(), small_model("llama")
    compiler = SourceStyle(base, {"mode": "default"}, SMALL_CONFIG)
    wrapped = compiler.compile_model(model, tokens, "small")
    aot = compiler.compile_model_aot(model, tokens, None, "max-autotune")
    assert isinstance(wrapped, ChunkedPrefillWrapper)
    assert isinstance(aot, ChunkedPrefillWrapper)
    assert [asked[2] for asked in base.asked] == ["default", "max-autotune"]
    assert_same_logits(wrapped(random_tokens(2, 70)), model, random_tokens(2, 70))
    assert wrapped.get_chunking_stats()["chunking_rate"] == 1.0
    assert SourceStyle(base).compile_model(model, tokens, "small") is model


@torch.inference_mode()
def test_chunks_with_the_sources_keys(tokens: torch.Tensor) -> None:
    base, model = AOT(), small_model("llama")
    for compiler in (
        EnhancedAOTWithChunking(base, GraphConfig("default"), SOURCE_CONFIG),
        EnhancedAOTWithChunking(
            base_compiler=base, graph_config={"mode": "default"}, chunked_prefill_config=SOURCE_CONFIG
        ),
    ):
        wrapped = compiler.compile_model(model, tokens, "small")
        assert isinstance(wrapped, ChunkedPrefillWrapper)
        optimizer = wrapped.chunked_optimizer
        assert (optimizer.chunk_size, optimizer.enable_threshold, optimizer.adaptive_chunking) == (512, 2048, True)
    assert [asked[2] for asked in base.asked] == ["default", "default"]


def test_no_chunked_prefill_config_means_off(tokens: torch.Tensor) -> None:
    model = small_model("llama")
    for compiler in (EnhancedAOTWithChunking(AOT()), EnhancedAOTWithChunking(AOT(), None, None)):
        assert compiler.compile_model(model, tokens, "small") is model


def test_a_chunked_prefill_config_with_mistakes() -> None:
    with pytest.raises(InvalidConfig, match="Got size, threshold but ChunkedPrefillConfig has only enable_chunked"):
        EnhancedAOTWithChunking(chunked_prefill_config={"size": 512, "threshold": 2048})
    with pytest.raises(InvalidConfig, match="chunk_size=0"):
        EnhancedAOTWithChunking(chunked_prefill_config={"chunk_size": 0})


@pytest.mark.parametrize(
    "create", [create_enhanced_compiler, create_enhanced_compiler_with_chunking, create_vllm_enhanced_compiler]
)
def test_the_factories_take_a_base_compiler_and_a_graph_config(create: Any, tokens: torch.Tensor) -> None:
    base = AOT()
    compiler = create(base_compiler=base, graph_config={"mode": "max-autotune"})
    assert isinstance(compiler, EnhancedAOTModelCompiler)
    compiler.compile_model(small_model("llama"), tokens, "small")
    compiler.compile_model_aot(small_model("llama"), tokens, None, "default")
    assert [asked[2] for asked in base.asked] == ["max-autotune", "default"]
    assert compiler.get_performance_report()["compilations"][0]["outcome"] == "compiled by AOT"


def test_arguments_of_a_factory_win_over_its_graph_config() -> None:
    compiler = create_enhanced_compiler(False, mode="default", graph_config={"mode": "max-autotune"})
    assert compiler.graph_config == GraphConfig("default", enable_cuda_graphs=False)
    assert create_enhanced_compiler(graph_config={"enable_cuda_graphs": False}).graph_config == GraphConfig(
        enable_cuda_graphs=False
    )


def test_compilers_over_each_other(tokens: torch.Tensor) -> None:
    """The inner one compiles; a configuration that is given outside wins."""
    base, model = AOT(), small_model("llama")
    inner = create_enhanced_compiler(base_compiler=base, mode="default")
    outer = EnhancedAOTWithChunking(inner, None, SMALL_CONFIG)
    assert isinstance(outer.compile_model(model, tokens, "small"), ChunkedPrefillWrapper)
    EnhancedAOTWithChunking(inner, {"mode": "max-autotune"}).compile_model(model, tokens, "small")
    assert [asked[2] for asked in base.asked] == ["default", "max-autotune"]
    assert outer.monitor is inner.monitor


@pytest.mark.parametrize(
    "config",
    [None, {}, {"mode": "default"}, GraphConfig("default"), SimpleNamespace(batch_size=1), object()],
    ids=lambda config: type(config).__name__,
)
def test_a_config_may_be_any_object(config: Any, tokens: torch.Tensor) -> None:
    base = AOT()
    model = small_model("llama")
    for given in (config, model.config):
        assert EnhancedAOTModelCompiler(base).compile_model_aot(model, tokens, given, "default") is model
        assert EnhancedAOTModelCompiler(base).compile_model_aot(model=model, inputs=tokens, config=given, mode=None)
    assert [asked[1] for asked in base.asked[2:]] == [model.config] * 2


def test_a_config_without_a_base_compiler(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tokens: torch.Tensor
) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("not in this test")

    monkeypatch.setattr("evenflow.compile.aot.packages.export_step", refuse)
    compiler, model = create_enhanced_compiler(cache_dir=tmp_path), small_model("llama")
    for config in (model.config, SimpleNamespace(batch_size=1), GraphConfig("default"), {"mode": "default"}):
        assert compiler.compile_model_aot(model, tokens, config) is model
    modes = [compilation.mode for compilation in compiler.monitor.compilations]
    assert modes == ["reduce-overhead", "reduce-overhead", "default", "default"]
    with pytest.raises(InvalidConfig, match="colour"):
        compiler.compile_model_aot(model, tokens, {"colour": 1})


# ---- Several example inputs ----


def ids(length: int) -> torch.Tensor:
    return random_tokens(1, length)


SEVERAL = {
    "tensors": [ids(47), ids(3000)],
    "tensors of one dimension": [ids(47)[0], ids(3000)[0]],
    "mappings": [{"input_ids": ids(47)}, {"input_ids": ids(3000), "attention_mask": torch.ones(1, 3000)}],
    "lists of ids": [ids(47)[0].tolist(), ids(3000)[0].tolist()],
    "batches in lists": [ids(47).tolist(), ids(3000).tolist()],
    "tuples": [(ids(47),), (ids(3000), torch.ones(1, 3000))],
}


@pytest.mark.parametrize("form", SEVERAL)
def test_several_examples_of_different_lengths_all_count(form: str) -> None:
    """The threshold comes from both: 80% of 3,000."""
    model = small_model("llama")
    compiler = create_vllm_enhanced_compiler(base_compiler=AOT())
    assert compiler.compile_model(model, SEVERAL[form], "small").chunking_threshold == 2400
    chunking = create_enhanced_compiler_with_chunking(None, base_compiler=AOT())
    assert isinstance(chunking.compile_model(model, SEVERAL[form], "small"), ChunkedPrefillWrapper)
    (over, *_) = chunking.find_triggers(model, SEVERAL[form])
    assert over.reason == "50.0% of the inputs are over 2,048 tokens"


@pytest.mark.parametrize(
    "one",
    [
        (ids(47), torch.ones(1, 47)),
        {"input_ids": ids(47), "attention_mask": torch.ones(1, 47)},
        ids(47),
        ids(47)[0].tolist(),
        {"input_ids": ids(47)[0].tolist()},
    ],
    ids=["tuple", "mapping", "tensor", "list", "mapping of lists"],
)
def test_one_example(one: Any) -> None:
    compiler = create_enhanced_compiler_with_chunking(None, chunking_threshold=40)
    (over, *_) = compiler.find_triggers(small_model("llama"), one)
    assert over.reason == "100.0% of the inputs are over 40 tokens"


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([], "Got list"),
        ((1, 2, 3), "Got tuple"),
        ("a text", "Got str"),
        ([ids(47), "a text"], "Got str"),
        ([[1, 2], 3], "Got int"),
        (None, "Got NoneType"),
    ],
    ids=str,
)
def test_other_example_inputs_are_refused(inputs: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=message):
        create_enhanced_compiler(cache_dir=tmp_path).compile_model(small_model("llama"), inputs, "small")


# ---- Wrapper ----


@torch.inference_mode()
def test_the_wrapper_counts_what_was_cut() -> None:
    model = small_model("llama")
    wrapped = ChunkedPrefillWrapper(model, ChunkedPrefillOptimizer(**SMALL_CONFIG), "small")
    by_keyword = ChunkedPrefillWrapper(
        compiled_model=model, chunked_optimizer=ChunkedPrefillOptimizer(**SMALL_CONFIG), model_id="small"
    )
    for wrapper in (wrapped, by_keyword):
        wrapper(random_tokens(1, 20))
        wrapper(input_ids=random_tokens(1, 70))
        assert wrapper.execution_stats == {"total_calls": 2, "chunked_calls": 1, "traditional_calls": 1}
        stats = wrapper.get_chunking_stats()
        assert stats["chunking_rate"] == 0.5
        assert stats["optimizer_stats"]["chunked_sequences"] == 1


def test_what_was_not_cut_is_not_counted_as_cut() -> None:
    """Outside `no_grad` every activation is kept for the gradients: chunks would save nothing."""
    model = small_model("llama")
    wrapped = ChunkedPrefillWrapper(model, ChunkedPrefillOptimizer(**SMALL_CONFIG), "small")
    assert wrapped(random_tokens(1, 70)).logits.requires_grad
    stats = wrapped.get_chunking_stats()
    assert wrapped.execution_stats == {"total_calls": 1, "chunked_calls": 0, "traditional_calls": 1}
    assert stats["optimizer_stats"]["chunked_sequences"] == stats["optimizer_stats"]["chunks_processed"] == 0
    ((reason, count),) = stats["whole_calls"].items()
    assert (count, "gradients are recorded" in reason) == (1, True)
    with torch.no_grad():
        wrapped(random_tokens(1, 70))
    assert wrapped.execution_stats["chunked_calls"] == 1


@torch.inference_mode()
def test_one_chunk_is_not_cut() -> None:
    optimizer = ChunkedPrefillOptimizer(chunk_size=128, enable_threshold=32, adaptive_chunking=False)
    wrapped = ChunkedPrefillWrapper(small_model("llama"), optimizer, "small")
    wrapped(random_tokens(1, 70))
    assert wrapped.execution_stats["chunked_calls"] == 0
    assert optimizer.stats["chunks_processed"] == 0
    assert wrapped.get_chunking_stats()["whole_calls"] == {"one chunk holds it": 1}


@torch.inference_mode()
def test_a_call_that_fails_is_not_counted() -> None:
    wrapped = ChunkedPrefillWrapper(small_model("llama"), ChunkedPrefillOptimizer(**SMALL_CONFIG), "small")
    with pytest.raises(IndexError):
        wrapped(torch.full((1, 70), 10_000))
    assert wrapped.execution_stats["total_calls"] == 0


@torch.inference_mode()
def test_a_compiler_sums_over_its_models(tokens: torch.Tensor) -> None:
    compiler = create_enhanced_compiler_with_chunking(True, 16, 32, base_compiler=AOT())
    models = [compiler.compile_model(small_model(name), tokens, name) for name in ("llama", "gpt2")]
    for model in models:
        model(random_tokens(1, 70))
    models[0](tokens)
    stats = compiler.get_chunking_stats()
    assert (stats["total_calls"], stats["chunked_calls"], stats["traditional_calls"]) == (3, 2, 1)
    assert stats["chunking_rate"] == pytest.approx(2 / 3)
    assert stats["optimizer_stats"] == compiler.get_performance_report()["chunking"]


@torch.inference_mode()
def test_without_an_engine_vllms_compiler_counts_the_local_model(tokens: torch.Tensor) -> None:
    for compiler in (
        create_vllm_enhanced_compiler(True, True, 32, base_compiler=AOT()),
        EnhancedAOTWithVLLMChunking(AOT(), chunking_threshold=32),
    ):
        model = compiler.compile_model(small_model("llama"), tokens, "small")
        assert isinstance(model, VLLMChunkedModelWrapper)
        assert model.backend == "local"
        model.generate(random_tokens(1, 600), max_new_tokens=3, do_sample=False)
        stats = compiler.get_chunking_stats()
        assert (stats["total_calls"], stats["chunked_calls"], stats["traditional_calls"]) == (3, 1, 2)
        assert stats["models"]["small"] == model.get_chunking_stats()
        assert model.get_chunking_stats()["optimizer_stats"]["chunks_processed"] == 2
        report = compiler.get_performance_report()
        assert report["models"]["small"]["tokens"] == 602
        assert report["models"]["small"]["tokens_per_s"] > 0
        assert report["compilations"][0]["outcome"] == "compiled by AOT"
    off = create_vllm_enhanced_compiler(enable_chunked_prefill=False, base_compiler=AOT())
    model = off.compile_model(small_model("llama"), tokens, "small")
    model(random_tokens(1, 70))
    assert model.get_chunking_stats()["chunked_calls"] == 0


# ---- Triggers ----


@pytest.mark.parametrize(
    ("settings", "length", "name", "reason"),
    [
        ({"chunking_threshold": 40}, 47, "input over the threshold", "100.0% of the inputs are over 40 tokens"),
        ({}, 900, "memory pressure", "of an input of 900 tokens, 16 at a time fit into free memory"),
        (
            {"dataset_analysis": preset_dataset("document"), "chunking_threshold": 20_000},
            *(47, "long-context tasks", "preset document (p95 12,000 tokens)"),
        ),
        ({"num_streams": 8}, 47, "parallel processing", "concurrent requests: 8"),
    ],
    ids=["threshold", "memory", "tasks", "parallel"],
)
def test_each_trigger_switches_chunks_on_with_its_reason(
    settings: dict[str, Any],
    length: int,
    name: str,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "evenflow")
    if name == "memory pressure":
        monkeypatch.setattr(memory, "available_memory", lambda: 1 << 16)
    compiler = create_enhanced_compiler_with_chunking(None, base_compiler=AOT(), **settings)
    model = compiler.compile_model(small_model("llama", "eager"), ids(length), "small")
    assert isinstance(model, ChunkedPrefillWrapper)
    found = compiler.get_performance_report()["triggers"]["small"]
    assert [(trigger["name"], trigger["reason"]) for trigger in found if trigger["active"]] == [(name, reason)]
    assert f"small: chunked prefill is on: {name}: {reason}." in caplog.messages


def test_without_a_trigger_chunks_stay_off(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "evenflow")
    compiler = create_enhanced_compiler_with_chunking(None, base_compiler=AOT())
    assert compiler.compile_model(small_model("llama"), ids(47), "small") is small_model("llama")
    assert "small: chunked prefill is off: no trigger fired." in caplog.messages
    reasons = {trigger["name"]: trigger["reason"] for trigger in compiler.get_performance_report()["triggers"]["small"]}
    assert reasons["memory pressure"] == "an input of 47 tokens fits into free memory"
