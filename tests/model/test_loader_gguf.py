"""GGUF files: every architecture, every tensor type, and error messages for broken ones."""

import contextlib
import dataclasses
import math
import struct
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evenflow.errors import BrokenModel, ModelError, ModelNotFound, UnsupportedModel
from evenflow.model.config import FrequencyFactors, LinearScaling, YarnScaling
from evenflow.model.formats.gguf_file import GgufFile
from evenflow.model.loader import load_model
from tests.gguf_files import write_gguf
from tests.models import ARCHITECTURES, byte_level_tokenizer, default_model_path, reference_model, tiny_hf_folder

QUANTISABLE = (Kind.F32, Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q8_0)
K_QUANTS = (Kind.Q4_K, Kind.Q5_K, Kind.Q6_K)


@cache
def tokenizer() -> Any:
    return byte_level_tokenizer()


def write(path: Path, architecture: str = "LlamaForCausalLM", **options: Any) -> Path:
    return write_gguf(path, reference_model(architecture), tokenizer(), **options)


@pytest.fixture(scope="module")
def llama_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write(tmp_path_factory.mktemp("gguf") / "model.gguf").read_bytes()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_same_model_as_from_a_folder(architecture: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"sliding_window": None} if architecture == "MistralForCausalLM" else {}
    folder = load_model(tiny_hf_folder(tmp_path / "folder", architecture, **changes))
    file = load_model(write(tmp_path / "model.gguf", architecture))
    assert file.weights.keys() == folder.weights.keys()
    for name, tensor in folder.weights.items():
        assert torch.equal(file.weights[name], tensor), name
    assert file.config == dataclasses.replace(
        folder.config,
        architecture=file.config.architecture,
        rms_norm_eps=file.config.rms_norm_eps,  # a float32 in the file
        eos_token_ids=file.config.eos_token_ids,  # by name too
    )
    assert file.config.rms_norm_eps == pytest.approx(folder.config.rms_norm_eps)


def test_tied_embeddings(tmp_path: Path) -> None:
    model = load_model(write(tmp_path / "model.gguf", leave_out=("output.weight",)))
    assert model.config.tie_embeddings
    assert "lm_head.weight" not in model.weights


def test_biases(tmp_path: Path) -> None:
    reference = reference_model("LlamaForCausalLM", attention_bias=True, mlp_bias=True)
    model = load_model(write_gguf(tmp_path / "model.gguf", reference, tokenizer()))
    assert (model.config.qkv_bias, model.config.output_bias, model.config.mlp_bias) == (True, True, True)
    for name, tensor in reference.state_dict().items():
        assert torch.equal(model.weights[name.removeprefix("model.")], tensor), name


@pytest.mark.parametrize("kind", QUANTISABLE)
def test_quantised_weights(kind: Kind, tmp_path: Path) -> None:
    model = load_model(write(tmp_path / "model.gguf", kind=kind))
    tolerance = {Kind.F32: 0.0, Kind.F16: 1e-3, Kind.BF16: 1e-2, Kind.Q8_0: 1e-2}.get(kind, 0.12)
    for name, tensor in reference_model("LlamaForCausalLM").state_dict().items():
        difference = (model.weights[name.removeprefix("model.")] - tensor).abs().max() / tensor.abs().max()
        assert difference <= tolerance, name


def k_quant_bytes(kind: Kind, num_blocks: int) -> np.ndarray[Any, Any]:
    """Random blocks whose scales are sound numbers; the scales come first, in Q6_K last."""
    generator = np.random.default_rng(0)
    _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = generator.integers(0, 256, (num_blocks, block_bytes), dtype=np.uint8)
    scales = generator.uniform(0.01, 0.1, (num_blocks, 2)).astype(np.float16).view(np.uint8)
    if kind == Kind.Q6_K:
        blocks[:, -2:] = scales[:, :2]
    else:
        blocks[:, :4] = scales
    return blocks


@pytest.mark.parametrize("kind", K_QUANTS)
def test_k_quants(kind: Kind, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tensor("before", np.ones((3, 5), dtype=np.float32))
    stored = k_quant_bytes(kind, num_blocks=6)
    writer.add_tensor("rows", stored.reshape(3, -1), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensor = GgufFile(tmp_path / "model.gguf").read("rows")
    assert tensor.shape == (3, 512)
    assert torch.equal(tensor.flatten(), torch.from_numpy(gguf.quants.dequantize(stored, kind)).flatten())
    assert tensor.isfinite().all()


def test_read_tensors_are_writable_memory_of_their_own(tmp_path: Path) -> None:
    file = GgufFile(write(tmp_path / "model.gguf"))
    first = file.read("output_norm.weight")
    first.zero_()
    assert file.read("output_norm.weight").abs().sum() > 0


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({}, None),
        ({"llama.rope.scaling.type": "none"}, None),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}, LinearScaling(4.0)),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 64,
            },
            YarnScaling(4.0, 64, 32.0, 1.0, 0.1 * math.log(4.0) + 1.0, True),
        ),
        (
            {"rope_freqs.weight": np.arange(1, 9, dtype=np.float32)},
            FrequencyFactors((1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0), 1.0),
        ),
    ],
)
def test_rope_scaling(extra: dict[str, Any], expected: object, tmp_path: Path) -> None:
    model = load_model(write(tmp_path / "model.gguf", extra=extra))
    assert model.config.rope.scaling == expected
    assert "rope_freqs.weight" not in model.weights


def test_sliding_window_and_attention_scale(tmp_path: Path) -> None:
    extra = {"llama.attention.sliding_window": 64, "llama.attention.scale": 0.5}
    config = load_model(write(tmp_path / "model.gguf", extra=extra)).config
    assert config.layer_windows == (64,) * 4
    assert config.attention_scale == 0.5


def test_every_end_of_an_answer(tmp_path: Path) -> None:
    tokenizer = load_model(write(tmp_path / "model.gguf", extra={"tokenizer.ggml.eot_token_id": 9})).tokenizer
    assert tokenizer.eos_token_ids == (2, 9, tokenizer.encode("<|im_end|>", add_special_tokens=False)[0])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"extra": {"general.architecture": "gemma2"}}, UnsupportedModel, "architecture 'gemma2' .* --engine vllm"),
        ({"extra": {"llama.expert_count": 8}}, UnsupportedModel, "mixture of experts"),
        ({"extra": {"split.count": 3}}, UnsupportedModel, "split over several GGUF files"),
        ({"extra": {"llama.rope.scaling.type": "su"}}, UnsupportedModel, "rope scaling 'su'"),
        ({"extra": {"tokenizer.ggml.model": "t5"}}, UnsupportedModel, "tokenizer model 't5'"),
        ({"splitter": "new-words"}, UnsupportedModel, "pre-tokenizer 'new-words'"),
        ({"splitter": None}, BrokenModel, "tokenizer.ggml.pre, which says how words are split, is missing"),
        ({"extra": {"tokenizer.ggml.bos_token_id": 512}}, BrokenModel, "bos_token_id is 512, the vocabulary has 512"),
        ({"extra": {"tokenizer.ggml.tokens": ["a", "a"]}}, BrokenModel, "holds the token 'a' more than once"),
        ({"extra": {"tokenizer.ggml.merges": [1, 2]}}, BrokenModel, "tokenizer.ggml.merges is not a list of str"),
        ({"extra": {"tokenizer.ggml.merges": ["a nosuchtoken"]}}, BrokenModel, "merges do not fit the vocabulary"),
        ({"extra": {"tokenizer.ggml.token_type": [1, 1]}}, BrokenModel, "2 token types for 512 tokens"),
        ({"extra": {"llama.block_count": "four"}}, BrokenModel, "llama.block_count is 'four', expected int"),
        ({"extra": {"llama.rope.dimension_count": 8}}, UnsupportedModel, "positions on 8 of 16 head values"),
        ({"extra": {"llama.embedding_length": 48}}, BrokenModel, r"embed_tokens.weight has shape \(512, 64\)"),
        ({"extra": {"llama.block_count": 2**31}}, BrokenModel, "no model has that many"),
        ({"extra": {"llama.attention.key_length": 0}}, BrokenModel, "rotary_dim is 0"),
        ({"extra": {"llama.block_count": 5}}, BrokenModel, "layers.4.input_layernorm.weight is missing"),
        ({"extra": {"general.alignment": 0}}, BrokenModel, "general.alignment is 0"),
        ({"leave_out": ("blk.2.attn_q.weight",)}, BrokenModel, "layers.2.self_attn.q_proj.weight is missing"),
        ({"extra": {"surplus.weight": np.ones(3, np.float32)}}, UnsupportedModel, "the tensor surplus.weight"),
        ({"extra": {"rope_freqs.weight": np.ones(3, np.float32)}}, BrokenModel, "3 rope frequency factors"),
        ({"extra": {"counts": np.ones(3, np.int32)}}, UnsupportedModel, "tensor type I32 of counts"),
        ({"kind": Kind.Q5_0}, UnsupportedModel, "tensor type Q5_0 of token_embd.weight"),
    ],
)
def test_what_is_wrong_with_a_model(
    options: dict[str, Any], error: type[ModelError], message: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "model.gguf", **options)
    with pytest.raises(error, match=message) as raised:
        load_model(path)
    assert str(raised.value).startswith(f"{path}: ")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (lambda content: b"", BrokenModel, "the file is empty"),
        (lambda content: b"GG", BrokenModel, "the file is truncated: its header continues past byte 2"),
        (lambda content: b"PK\x03\x04" + content[4:], BrokenModel, "not a GGUF file: it starts with b'PK"),
        (lambda content: content[:4] + struct.pack("<I", 1) + content[8:], UnsupportedModel, "GGUF version 1 "),
        (lambda content: content[:4] + struct.pack(">I", 3) + content[8:], UnsupportedModel, "little-endian"),
        (lambda content: content[:-1], BrokenModel, "the file is truncated: "),
        (lambda content: content[: len(content) // 2], BrokenModel, "the file is truncated: .* ends at byte"),
        (lambda content: content[:3000], BrokenModel, "broken string at byte|truncated"),
    ],
)
def test_what_is_wrong_with_a_file(
    damage: Callable[[bytes], bytes], error: type[ModelError], message: str, llama_bytes: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(damage(llama_bytes))
    with pytest.raises(error, match=message):
        load_model(path)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_damage_leaks_an_error_of_another_kind(llama_bytes: bytes, tmp_path: Path, data: st.DataObject) -> None:
    header_end = llama_bytes.index(b"token_embd.weight")
    position = data.draw(st.integers(0, header_end + 200))
    damage = data.draw(st.binary(min_size=1, max_size=8))
    path = tmp_path / "model.gguf"
    path.write_bytes(llama_bytes[:position] + damage + llama_bytes[position + len(damage) :])
    with contextlib.suppress(ModelError):
        load_model(path)


def test_a_file_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="no model at"):
        load_model(tmp_path / "missing.gguf")


def test_the_default_model() -> None:
    model = load_model("default")
    assert model.config.max_position == 8192
    assert sum(tensor.numel() for tensor in model.weights.values()) == 134515008
    reader = GgufFile(default_model_path())
    assert torch.equal(model.weights["embed_tokens.weight"], reader.read("token_embd.weight"))
    assert model.tokenizer.vocab_size == model.config.vocab_size == 49152
    assert model.tokenizer.decode(model.config.eos_token_ids[:1], skip_special_tokens=False) == "<|im_end|>"
