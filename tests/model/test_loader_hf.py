"""Hugging Face folders as transformers writes them, and error messages for broken ones."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from evenflow.errors import BrokenModel, ModelError, ModelNotFound, UnsupportedModel
from evenflow.model.config import FrequencyFactors, LinearScaling, Llama3Scaling, ModelConfig, RopeScaling, YarnScaling
from evenflow.model.formats.hf_config import read_config
from evenflow.model.formats.typed_values import TypedValues
from evenflow.model.loader import LoadedModel, load_model
from tests.models import (
    ARCHITECTURES,
    VARIED_TEXTS,
    reference_model,
    stories260k_folder,
    tiny_hf_folder,
    tiny_llama,
)
from tests.shared_data import shared_path


def reference_tensors(architecture: str, **changes: Any) -> dict[str, torch.Tensor]:
    tensors = reference_model(architecture, **changes).state_dict()
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}


def assert_same_weights(model: LoadedModel, tensors: dict[str, torch.Tensor]) -> None:
    assert model.weights.keys() == tensors.keys()
    for name, tensor in model.weights.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, tensors[name].float()), name


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture(architecture: str, tmp_path: Path) -> None:
    model = load_model(tiny_hf_folder(tmp_path, architecture))
    assert_same_weights(model, reference_tensors(architecture))
    config = model.config
    assert config.architecture == architecture
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (512, 64, 96)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (4, 4, 2, 16)
    assert (config.max_position, config.attention_scale, config.rope.rotary_dim) == (256, 0.25, 16)
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))
    assert config.rope.theta == (2e6 if architecture == "SmolLM3ForCausalLM" else 10000.0)
    assert config.qkv_bias == (architecture == "Qwen2ForCausalLM")
    assert config.qk_norm == (architecture == "Qwen3ForCausalLM")
    assert not config.tie_embeddings
    assert config.layer_windows == ((4096 if architecture == "MistralForCausalLM" else None),) * 4
    assert config.layer_uses_rope == (True, True, True, architecture != "SmolLM3ForCausalLM")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_becomes_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    model = load_model(tiny_hf_folder(tmp_path, "LlamaForCausalLM", dtype=dtype))
    expected = reference_tensors("LlamaForCausalLM")
    assert_same_weights(model, {name: tensor.to(dtype) for name, tensor in expected.items()})


def test_shards(tmp_path: Path) -> None:
    folder = tiny_hf_folder(tmp_path, "LlamaForCausalLM", shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    assert_same_weights(load_model(folder), reference_tensors("LlamaForCausalLM"))


def test_tied_embeddings_have_no_output_matrix(tmp_path: Path) -> None:
    model = load_model(tiny_hf_folder(tmp_path, "LlamaForCausalLM", tie_word_embeddings=True))
    assert model.config.tie_embeddings
    assert "lm_head.weight" not in model.weights


def test_biases(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"attention_bias": True, "mlp_bias": True}
    model = load_model(tiny_hf_folder(tmp_path, "LlamaForCausalLM", **changes))
    assert (model.config.qkv_bias, model.config.output_bias, model.config.mlp_bias) == (True, True, True)
    assert_same_weights(model, reference_tensors("LlamaForCausalLM", **changes))


def test_tokenizer_and_chat_template(tmp_path: Path) -> None:
    import tokenizers

    folder = tiny_hf_folder(tmp_path, "LlamaForCausalLM")
    tokenizer = load_model(folder).tokenizer
    reference = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in VARIED_TEXTS:
        assert tokenizer.encode(text) == reference.encode(text).ids
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    assert prompt == "<|begin|><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    (folder / "chat_template.jinja").write_text("from a file of its own: {{ messages[0].content }}{{ eos_token }}")
    template = load_model(folder).tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    assert template == "from a file of its own: hi<|end|>"


def test_added_special_tokens_follow_the_settings(tmp_path: Path) -> None:
    folder = tiny_hf_folder(tmp_path, "LlamaForCausalLM")
    plain = load_model(folder).tokenizer.encode("hi", add_special_tokens=False)
    for settings, expected in (
        ({"add_bos_token": False}, plain),
        ({"add_bos_token": True}, [1, *plain]),
        ({"add_bos_token": True, "add_eos_token": True}, [1, *plain, 2]),
    ):
        edit_json(folder / "tokenizer_config.json", **settings)
        assert load_model(folder).tokenizer.encode("hi") == expected


def test_every_id_that_ends_an_answer(tmp_path: Path) -> None:
    folder = tiny_hf_folder(tmp_path, "LlamaForCausalLM", eos_token_id=7)
    edit_json(folder / "generation_config.json", eos_token_id=[9, 7])
    model = load_model(folder)
    assert model.config.eos_token_ids == model.tokenizer.eos_token_ids == (9, 7, 2)


def test_stories260k_tells_its_published_story(tmp_path: Path) -> None:
    golden = shared_path("models/stories260K/golden.txt").read_text().strip()
    model = load_model(stories260k_folder(tmp_path))
    import transformers

    reference = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_pretrained(tmp_path)).eval()
    missing, unexpected = reference.load_state_dict(
        {f"model.{name}": tensor for name, tensor in model.weights.items()}, strict=False
    )
    assert (missing, unexpected) == (["lm_head.weight"], [])
    tokens = reference.generate(torch.tensor([[model.tokenizer.bos_token_id]]), max_new_tokens=160, do_sample=False)
    assert model.tokenizer.decode(tokens[0].tolist()).startswith(golden)
    # The text encoded by itself gives the tokens the model chose.
    assert model.tokenizer.encode(golden)[:100] == tokens[0, :100].tolist()


def edit_json(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, **changes}))


def config_of(**changes: Any) -> ModelConfig:
    content: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
    }
    return read_config(TypedValues("config.json", {**content, **changes}), None, ())


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"factor": 8, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"rope_type": "default"}, None),
        ({"rope_type": "dynamic", "factor": 2.0}, None),
        ({"rope_type": "linear", "factor": 2.0}, LinearScaling(2.0)),
        ({"rope_type": "llama3", **LLAMA3}, Llama3Scaling(8.0, 1.0, 4.0, 64)),
        (YARN, YarnScaling(4.0, 64, 32.0, 1.0, 0.1 * math.log(4.0) + 1.0, True)),
        ({**YARN, "attention_factor": 1.5, "beta_fast": 16}, YarnScaling(4.0, 64, 16.0, 1.0, 1.5, True)),
        (
            {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "truncate": False},
            YarnScaling(4.0, 64, 32.0, 1.0, 1.0, False),
        ),
        (
            {"rope_type": "longrope", **LONGROPE},
            FrequencyFactors((2.0,) * 8, math.sqrt(1.0 + math.log(4.0) / math.log(64))),
        ),
        (
            {"rope_type": "longrope", **LONGROPE, "original_max_position_embeddings": 256},
            FrequencyFactors((1.0,) * 8, 1.0),
        ),
    ],
)
def test_rope_settings_old_and_new(settings: dict[str, Any], expected: RopeScaling | None) -> None:
    new = config_of(rope_parameters={**settings, "rope_theta": 5000.0})
    assert (new.rope.theta, new.rope.scaling) == (5000.0, expected)
    renamed = {("type" if key == "rope_type" else key): value for key, value in settings.items()}
    assert config_of(rope_scaling=renamed, rope_theta=5000).rope == new.rope


def test_yarn_lengthens_the_context() -> None:
    assert config_of(rope_scaling={**YARN, "factor": 8.0}).max_position == 512
    assert config_of(rope_scaling=YARN, max_position_embeddings=1024).max_position == 1024


def test_partial_rotary_factor() -> None:
    assert config_of(partial_rotary_factor=0.5).rope.rotary_dim == 8


def test_sliding_windows() -> None:
    mistral = {"architectures": ["MistralForCausalLM"], "num_key_value_heads": 2}
    assert config_of(**mistral).layer_windows == (4096,) * 4
    assert config_of(**mistral, sliding_window=None).layer_windows == (None,) * 4
    qwen = {"architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 2, "sliding_window": 8}
    assert config_of(**qwen).layer_windows == (None,) * 4
    assert config_of(**qwen, use_sliding_window=True, max_window_layers=3).layer_windows == (None, None, None, 8)
    kinds = ["sliding_attention", "full_attention"] * 2
    assert config_of(**qwen, use_sliding_window=True, layer_types=kinds).layer_windows == (8, None, 8, None)
    smollm3 = {**qwen, "architectures": ["SmolLM3ForCausalLM"], "no_rope_layer_interval": 2}
    assert config_of(**smollm3, use_sliding_window=True).layer_windows == (None, 8, None, 8)


def test_layers_without_rope() -> None:
    smollm3 = {"architectures": ["SmolLM3ForCausalLM"], "num_key_value_heads": 2}
    assert config_of(**smollm3).layer_uses_rope == (True, True, True, False)
    assert config_of(**smollm3, no_rope_layers=[1, 0, 1, 0]).layer_uses_rope == (True, False, True, False)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"architectures": ["GemmaForCausalLM"]},
            UnsupportedModel,
            r"GemmaForCausalLM .* evenflow serve --engine vllm",
        ),
        ({"hidden_act": "gelu"}, UnsupportedModel, "activation 'gelu'"),
        ({"quantization_config": {"quant_method": "awq"}}, UnsupportedModel, "quantised by awq"),
        ({"rope_scaling": {"rope_type": "mrope"}}, UnsupportedModel, "rope scaling 'mrope'"),
        ({"rope_parameters": {"full_attention": {}}}, UnsupportedModel, "differ by layer"),
        ({"rope_scaling": {"rope_type": "linear"}}, BrokenModel, "config.json: rope: factor is missing"),
        ({"hidden_size": None}, BrokenModel, "config.json: hidden_size is missing"),
        ({"hidden_size": "64"}, BrokenModel, "hidden_size is '64', expected int"),
        ({"num_attention_heads": 0}, BrokenModel, "num_heads is 0, it must be positive"),
        ({"num_key_value_heads": 3}, BrokenModel, "num_heads 4 is not a multiple of num_kv_heads 3"),
        ({"num_hidden_layers": 10**12}, BrokenModel, "num_layers is 1000000000000, no model has that many"),
        ({"partial_rotary_factor": math.inf}, BrokenModel, "partial_rotary_factor is inf"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, BrokenModel, r"factor is 0\.0, it must be positive"),
        ({"rope_scaling": {**YARN, "original_max_position_embeddings": 0}}, BrokenModel, "is 0, expected 2 or more"),
        ({"head_dim": 0}, BrokenModel, "rotary_dim is 0"),
        ({"head_dim": 15}, BrokenModel, "rotary dimension is 15"),
        (
            {"rope_scaling": {"rope_type": "longrope", **LONGROPE}, "head_dim": 32},
            BrokenModel,
            "8 rope frequency factors",
        ),
    ],
)
def test_what_is_wrong_with_a_configuration(changes: dict[str, Any], error: type[ModelError], message: str) -> None:
    with pytest.raises(error, match=message):
        config_of(**changes)


def truncate(name: str) -> Callable[[Path], None]:
    def do(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: len(content) // 2])

    return do


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def rewrite(name: str, text: str) -> Callable[[Path], None]:
    def do(folder: Path) -> None:
        (folder / name).write_text(text)

    return do


def edit_tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def do(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return do


def claim_shards(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (remove("config.json"), ModelNotFound, "no config.json"),
        (truncate("config.json"), BrokenModel, "config.json is not valid JSON"),
        (rewrite("config.json", "[]"), BrokenModel, "config.json holds list"),
        (remove("tokenizer.json"), BrokenModel, "tokenizer.json is missing"),
        (truncate("tokenizer.json"), BrokenModel, "tokenizer.json cannot be read"),
        (truncate("model.safetensors"), BrokenModel, "model.safetensors cannot be read"),
        (rewrite("model.safetensors", "{}"), BrokenModel, "model.safetensors cannot be read"),
        (remove("model.safetensors"), BrokenModel, "neither model.safetensors nor"),
        (claim_shards, BrokenModel, "the shard model-00002-of-00002.safetensors is missing"),
        (edit_tensors(lambda tensors: tensors.pop(NORM)), BrokenModel, "tensor norm.weight is missing"),
        (
            edit_tensors(lambda tensors: tensors.update({NORM: torch.ones(65)})),
            BrokenModel,
            r"norm.weight has shape \(65,\)",
        ),
        (edit_tensors(lambda tensors: tensors.update({NORM: torch.ones(64).long()})), UnsupportedModel, "type I64"),
        (edit_tensors(lambda tensors: tensors.update(extra=torch.ones(1))), UnsupportedModel, "the tensor extra"),
    ],
)
def test_what_is_wrong_with_a_folder(
    damage: Callable[[Path], None], error: type[ModelError], message: str, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_llama(), folder)
    damage(folder)
    with pytest.raises(error, match=message) as raised:
        load_model(folder)
    assert str(raised.value).startswith(f"{folder}: ")
    assert "\n" not in str(raised.value)


def test_a_path_that_is_not_there() -> None:
    with pytest.raises(ModelNotFound, match=r"no model at no/such/place: give .* a \.gguf file, or 'default'"):
        load_model("no/such/place")
