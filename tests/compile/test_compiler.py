"""Models compiled for real, and every way that can fail: with a reason in the log and the right answer."""

from __future__ import annotations

import copy
import errno
import importlib
import inspect
import os
import resource
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaForCausalLM, StaticCache

from evenflow.compile import (
    EnhancedAOTModelCompiler,
    GraphConfig,
    create_enhanced_compiler,
    create_enhanced_compiler_with_chunking,
)
from evenflow.compile.aot.checking import WrongAnswer, largest_difference
from evenflow.compile.aot.compiled_model import CompiledModel
from evenflow.compile.chunks.optimizer import ChunkedPrefillWrapper
from evenflow.compile.compiler import onednn_where_supported
from evenflow.errors import InvalidConfig, InvalidInput
from tests.compile.architectures import ARCHITECTURES, padding_mask, random_tokens, small_model
from tests.compile.compilers import compile_library, needs_compiler

pytestmark = [needs_compiler, pytest.mark.slow]

TOLERANCE = 1e-4


def tiny_model() -> Any:
    return small_model("llama", num_hidden_layers=1)


def example() -> torch.Tensor:
    return random_tokens(1, 20)


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that holds the tiny model, compiled once for all tests."""
    folder = tmp_path_factory.mktemp("compiled")
    compiler = create_enhanced_compiler(cache_dir=folder)
    compiler.compile_model(tiny_model(), example(), "tiny")
    assert compiler.monitor.compilations[0].outcome == "compiled", compiler.monitor
    return folder


def load(cache_dir: Path, **settings: Any) -> tuple[EnhancedAOTModelCompiler, Any]:
    compiler = create_enhanced_compiler(cache_dir=cache_dir, **settings)
    return compiler, compiler.compile_model(tiny_model(), example(), "tiny")


@pytest.fixture
def compiled_before(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling copies the package made before: these tests are about what happens to it."""
    (package,) = cache_dir.glob("*.pt2")
    monkeypatch.setattr("evenflow.compile.aot.packages.compile_step", lambda _, path, __: shutil.copy2(package, path))


def outcome(compiler: EnhancedAOTModelCompiler) -> str:
    return compiler.monitor.compilations[-1].outcome


def reasons(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage() for record in caplog.records if record.name == "evenflow" and record.levelname != "INFO"
    ]


def assert_right(model: Any, plain: Any | None = None) -> None:
    tokens = random_tokens(2, 30)
    with torch.inference_mode():
        got, wanted = model(tokens).logits, (plain or tiny_model())(tokens).logits
    torch.testing.assert_close(got, wanted, atol=TOLERANCE, rtol=0)


@torch.inference_mode()
def test_the_second_start_loads_and_answers_alike(cache_dir: Path) -> None:
    compiler, compiled = load(cache_dir)
    assert outcome(compiler) == "loaded from the cache"
    plain = tiny_model()
    for batch_size, length in ((1, 1), (1, 2), (3, 17), (2, 64)):
        tokens = random_tokens(batch_size, length)
        got, wanted = compiled(tokens), plain(tokens)
        assert type(got) is type(wanted)
        torch.testing.assert_close(got.logits, wanted.logits, atol=TOLERANCE, rtol=0)
        step = random_tokens(batch_size, 1, seed=1)
        got = compiled(step, past_key_values=got.past_key_values)
        wanted = plain(step, past_key_values=wanted.past_key_values)
        torch.testing.assert_close(got.logits, wanted.logits, atol=TOLERANCE, rtol=0)
        assert got.past_key_values.get_seq_length() == length + 1
    assert compiler.get_performance_report()["calls"]["compiled"]["calls"] == 8


@torch.inference_mode()
def test_generation_is_the_plain_models(cache_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    compiler, compiled = load(cache_dir)
    plain, mask = tiny_model(), padding_mask([50, 20, 3], "left")
    tokens = random_tokens(3, 50) * mask
    for settings in ({"do_sample": False}, {"do_sample": False, "num_beams": 2}):
        call = {"attention_mask": mask, "max_new_tokens": 10, **settings}
        assert torch.equal(compiled.generate(tokens, **call), plain.generate(tokens, **call))
    assert "plain" not in compiler.monitor.calls
    assert reasons(caplog) == []


@torch.inference_mode()
def test_in_bfloat16_fused_operations_round_as_the_models_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also if oneDNN lacks bfloat16: torch then warns at the first product, and warnings are errors here."""
    plain, onednn_enabled = copy.deepcopy(tiny_model()).to(torch.bfloat16), torch.backends.mkldnn.enabled
    compiler = create_enhanced_compiler(cache_dir=tmp_path)
    compiled = compiler.compile_model(plain, example(), "tiny")
    assert outcome(compiler) == "compiled", compiler.monitor
    assert reasons(caplog) == []
    assert torch.backends.mkldnn.enabled == onednn_enabled
    tokens = random_tokens(2, 30)
    with onednn_where_supported(plain):
        got, wanted = compiled(tokens).logits, plain(tokens).logits
    # Older versions of Inductor's C++ backend do not round between fused operations.
    is_exact = "emulate_precision_casts" in inspect.getsource(importlib.import_module("torch._inductor.codegen.cpp"))
    torch.testing.assert_close(got, wanted, atol=0 if is_exact else 0.05 * float(wanted.abs().max()), rtol=0)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch has no oneDNN")
@pytest.mark.parametrize("has_bfloat16", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_onednn_is_turned_off_for_a_bfloat16_model_where_it_lacks_bfloat16(
    dtype: torch.dtype, has_bfloat16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: has_bfloat16)
    model, before = torch.nn.Module(), torch.backends.mkldnn.enabled
    monkeypatch.setattr(model, "device", torch.device("cpu"), raising=False)
    monkeypatch.setattr(model, "dtype", dtype, raising=False)
    with onednn_where_supported(model):
        assert torch.backends.mkldnn.enabled == (before and (has_bfloat16 or dtype == torch.float32))
    assert torch.backends.mkldnn.enabled == before


@torch.inference_mode()
def test_what_the_graph_does_not_hold_runs_plain(cache_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, compiled = load(cache_dir)
    plain, tokens = tiny_model(), random_tokens(1, 10)
    for _ in range(2):
        assert compiled(tokens, output_hidden_states=True).hidden_states is not None
    cache = StaticCache(config=plain.config, max_cache_len=16)
    torch.testing.assert_close(compiled(tokens, past_key_values=cache).logits, plain(tokens).logits)
    embeddings = plain.get_input_embeddings()(tokens)
    assert torch.equal(compiled(inputs_embeds=embeddings).logits, plain(inputs_embeds=embeddings).logits)
    assert [reason.rpartition(": ")[2] for reason in reasons(caplog)] == [
        "output_hidden_states is not supported.",
        "StaticCache is not the kind of cache that the model makes itself.",
        "it is not called with input_ids of shape (batch, tokens) on the model's device.",
    ]


@torch.inference_mode()
def test_arguments_that_the_graph_honours(cache_dir: Path) -> None:
    compiler, compiled = load(cache_dir)
    plain, tokens = tiny_model(), random_tokens(2, 12)
    cases: list[dict[str, Any]] = [
        {"logits_to_keep": 1},
        {"logits_to_keep": torch.tensor([3, 0, -1])},
        {"use_cache": False},
        {"attention_mask": padding_mask([12, 7], "right")},
        {"position_ids": torch.arange(5, 17)[None]},
        {"past_key_values": DynamicCache(config=plain.config)},
    ]
    for call in cases:
        wanted = plain(tokens, **{**call, "past_key_values": None})
        got = compiled(tokens, **call)
        torch.testing.assert_close(got.logits, wanted.logits, atol=TOLERANCE, rtol=0)
        assert (got.past_key_values is None) == (call.get("use_cache") is False)
    logits, cache = compiled(tokens, return_dict=False)
    assert logits.shape == (2, 12, 160)
    assert cache.get_seq_length() == 12
    assert "plain" not in compiler.monitor.calls


@torch.inference_mode()
def test_with_chunks(cache_dir: Path) -> None:
    compiler = create_enhanced_compiler_with_chunking(True, 16, 32, cache_dir=cache_dir)
    model = compiler.compile_model(tiny_model(), example(), "tiny")
    assert isinstance(model, ChunkedPrefillWrapper)
    tokens = random_tokens(2, 70)
    call = {"max_new_tokens": 8, "do_sample": False}
    assert torch.equal(model.generate(tokens, **call), tiny_model().generate(tokens, **call))
    report = compiler.get_performance_report()
    assert report["chunking"]["chunks_processed"] == 5
    assert report["calls"]["compiled"]["calls"] == 5 + 7


def test_weights_in_memory_are_those_that_run(cache_dir: Path) -> None:
    """A package holds no weights: changing a weight in place changes both answers."""
    _, compiled = load(cache_dir)
    weight = tiny_model().lm_head.weight
    with torch.no_grad():
        weight.mul_(2)
        try:
            assert_right(compiled)
        finally:
            weight.div_(2)


@pytest.mark.usefixtures("compiled_before")
def test_a_damaged_package_is_made_anew(cache_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = shutil.copytree(cache_dir, tmp_path / "copy")
    (package,) = folder.glob("*.pt2")
    content = bytearray(package.read_bytes())
    content[len(content) // 2] ^= 0xFF
    package.write_bytes(content)
    compiler, compiled = load(folder)
    assert outcome(compiler) == "compiled"
    assert len(reasons(caplog)) == 1
    assert "hashes to" in reasons(caplog)[0]
    assert_right(compiled)
    compiler, _ = load(folder)
    assert outcome(compiler) == "loaded from the cache"


def test_a_package_of_another_model_under_its_key_is_not_used(
    cache_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only its answers show that it is the wrong one. It cannot be compiled again here, so the model is plain."""
    folder = shutil.copytree(cache_dir, tmp_path / "copy")
    monkeypatch.setattr("evenflow.compile.compiler.artifact_key", lambda *_: next(folder.glob("*.pt2")).stem)
    monkeypatch.setattr("evenflow.compile.aot.packages.compile_step", _no_compiler)
    other = small_model("llama", num_hidden_layers=1, rms_norm_eps=0.5)
    compiler = create_enhanced_compiler(cache_dir=folder)
    model = compiler.compile_model(other, example(), "tiny")
    assert "differ by" in reasons(caplog)[0]
    assert model is other


def _no_compiler(*_: Any) -> None:
    raise RuntimeError("C++ compile error: no compiler found\nand a hundred lines more")


def test_a_compiler_that_fails(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evenflow.compile.aot.packages.compile_step", _no_compiler)
    compiler, model = load(tmp_path)
    assert model is tiny_model()
    assert reasons(caplog) == ["tiny runs uncompiled: RuntimeError: C++ compile error: no compiler found"]
    assert compiler.monitor.compilations[0].reason == "RuntimeError: C++ compile error: no compiler found"


@pytest.mark.usefixtures("compiled_before")
def test_a_folder_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A file in the folder's place, which stops even root; for other users also a read-only folder."""
    in_the_way = tmp_path / "in the way"
    in_the_way.write_text("")
    read_only = tmp_path / "read-only"
    read_only.mkdir(mode=0o500)
    for folder in (in_the_way, read_only) if os.geteuid() else (in_the_way,):
        caplog.clear()
        compiler, compiled = load(folder)
        assert outcome(compiler) == "compiled"
        assert len(reasons(caplog)) == 1
        assert "not kept" in reasons(caplog)[0]
        assert_right(compiled)


def test_a_package_that_kills_its_process_is_not_loaded_into_this_one(
    cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Like those of a compiler that links its own C++ library."""
    (package,) = cache_dir.glob("*.pt2")
    crashing = _crashing(package, tmp_path)
    monkeypatch.setattr("evenflow.compile.aot.packages.compile_step", lambda _, path, __: shutil.copy2(crashing, path))
    compiler, model = load(tmp_path / "cache")
    assert outcome(compiler) == "plain"
    (reason,) = reasons(caplog)
    assert "loading the compiled package ends a process with SIGSEGV" in reason
    assert not (tmp_path / "cache").exists()
    assert_right(model)


def _crashing(package: Path, folder: Path) -> Path:
    library, crashing = folder / "crash.so", folder / "crashing.pt2"
    compile_library("#include <csignal>\n__attribute__((constructor)) void crash() { raise(SIGSEGV); }\n", library)
    with zipfile.ZipFile(package) as whole, zipfile.ZipFile(crashing, "w") as changed:
        for entry in whole.infolist():
            is_code = entry.filename.endswith(".so")
            changed.writestr(entry.filename, library.read_bytes() if is_code else whole.read(entry))
    return crashing


@pytest.mark.usefixtures("compiled_before")
def test_a_disk_that_fills_up_while_a_package_is_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = shutil.copyfile

    def full(source: Path, target: Path, **settings: Any) -> Any:
        if tmp_path in Path(target).parents:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return copy(source, target, **settings)

    monkeypatch.setattr(shutil, "copyfile", full)
    compiler, compiled = load(tmp_path)
    assert outcome(compiler) == "compiled"
    assert len(reasons(caplog)) == 1
    assert "No space left" in reasons(caplog)[0]
    assert list(tmp_path.iterdir()) == []
    assert_right(compiled)


@pytest.mark.slow
def test_no_room_for_any_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No file may grow beyond 16 KiB, as if all disks were full: compilation cannot even write its source."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16384, hard))
    try:
        compiler, model = load(tmp_path / "kept")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert outcome(compiler) == "plain"
    assert len(reasons(caplog)) == 1
    assert_right(model)


class BranchesOnValues(LlamaForCausalLM):
    def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        if int(input_ids.sum()) % 2:
            kwargs["logits_to_keep"] = 0
        return super().forward(input_ids, **kwargs)


def test_a_model_that_cannot_be_exported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = BranchesOnValues(tiny_model().config).eval()
    compiler = create_enhanced_compiler(cache_dir=tmp_path)
    compiled = compiler.compile_model(model, example(), "branches")
    assert compiled is model
    assert len(reasons(caplog)) == 1
    assert reasons(caplog)[0].startswith("branches runs uncompiled: ")


@pytest.mark.parametrize("what", ["no ids", "no model"])
def test_what_cannot_be_compiled_at_all(what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    compiler = create_enhanced_compiler(cache_dir=tmp_path)
    model = tiny_model() if what == "no ids" else torch.nn.Linear(2, 2)
    inputs = {"inputs_embeds": torch.zeros(1, 4, 64)} if what == "no ids" else example()
    assert compiler.compile_model(model, inputs, "odd") is model
    assert len(reasons(caplog)) == 1


@torch.no_grad()
def test_a_wrong_answer_is_not_let_through(cache_dir: Path) -> None:
    _, compiled = load(cache_dir)
    assert largest_difference(tiny_model(), compiled, {"input_ids": example()}) < TOLERANCE
    other = small_model("llama", num_hidden_layers=1, rms_norm_eps=0.5)
    with pytest.raises(WrongAnswer, match="logits of the example differ by"):
        largest_difference(other, compiled, {"input_ids": example()})


def test_other_ways_to_ask(cache_dir: Path) -> None:
    compiler = EnhancedAOTModelCompiler(cache_dir=cache_dir)
    mask = torch.ones_like(example())
    for inputs in (
        example(),
        (example(), mask),
        {"input_ids": example(), "attention_mask": mask},
        example()[0].tolist(),
        [random_tokens(1, 40), example()],
        [example()[0].tolist(), {"input_ids": random_tokens(2, 40)}],
    ):
        assert isinstance(compiler.compile_model(tiny_model(), inputs, "tiny"), CompiledModel)
    assert isinstance(compiler.compile_model(tiny_model(), example(), "tiny", mode="default"), CompiledModel)
    assert {figures.outcome for figures in compiler.monitor.compilations} == {"loaded from the cache"}
    assert "tiny, mode default: loaded from the cache" in str(compiler.monitor)


def test_modes_are_those_of_torch() -> None:
    assert GraphConfig("default").inductor_options == {}
    assert not GraphConfig("default").wants_cuda_graphs
    assert GraphConfig("reduce-overhead").wants_cuda_graphs
    assert not GraphConfig("reduce-overhead", enable_cuda_graphs=False).wants_cuda_graphs
    assert GraphConfig("max-autotune").inductor_options["max_autotune"]
    with pytest.raises(InvalidConfig, match="fastest"):
        create_enhanced_compiler(mode="fastest")
    with pytest.raises(InvalidConfig, match="colour"):
        create_enhanced_compiler(graph_config={"colour": 1})


@pytest.mark.slow
def test_kernels_can_be_tuned(tmp_path: Path) -> None:
    compiler, model = load(tmp_path, mode="max-autotune")
    assert outcome(compiler) == "compiled", compiler.monitor
    assert_right(model)
    again, model = load(tmp_path, mode="max-autotune")
    assert outcome(again) == "loaded from the cache"
    assert_right(model)
    other, _ = load(tmp_path, mode="default")
    assert outcome(other) == "compiled"  # each mode has its own packages


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
@torch.inference_mode()
def test_every_architecture_compiles(name: str, tmp_path: Path) -> None:
    plain = small_model(name, num_hidden_layers=2) if "gemma" not in name else small_model(name)
    compiler = create_enhanced_compiler(cache_dir=tmp_path)
    compiled = compiler.compile_model(plain, example(), name)
    assert outcome(compiler) == "compiled", compiler.monitor
    mask = padding_mask([60, 40, 9], "left")
    call = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    tokens = random_tokens(3, 60) * mask
    assert torch.equal(compiled.generate(tokens, **call), plain.generate(tokens, **call))
    assert "plain" not in compiler.monitor.calls


@pytest.mark.parametrize("model", ["HuggingFaceTB/SmolLM2-135M", None, {}])
def test_what_cannot_be_called_is_refused_with_what_to_give(model: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"Got .* but expected a model to call, such as .*from_pretrained\(NAME\)"):
        create_enhanced_compiler(cache_dir=tmp_path).compile_model(model, torch.tensor([[1, 2]]), "small")
