"""Valid small models in every format that evenflow reads: what mutants are made from."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import save

from evenflow.model.formats.weights import needed_shapes
from tests.fuzz.gguf_parts import ARRAY, BOOL, FLOAT32, INT32, STRING, UINT32, GgufParts, Tensor, Value
from tests.gguf_files import NAMES
from tests.model.tiny import random_tensors, tiny_config
from tests.models import CHAT_TEMPLATE, byte_level_tokenizer

_SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_layers": 1,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 16,
    "max_position": 256,
    "layer_windows": (None,),
    "layer_uses_rope": (True,),
}
_K_QUANT_SIZES = {**_SIZES, "hidden_size": 256, "intermediate_size": 256, "num_heads": 16}


@cache
def folder_seed() -> dict[str, bytes]:
    """A Hugging Face folder: its files by name."""
    tokenizer = byte_level_tokenizer()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "vocab_size": 512,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    settings = {"bos_token": "<|begin|>", "eos_token": {"content": "<|end|>"}, "chat_template": CHAT_TEMPLATE}
    files: dict[str, Any] = {
        "config.json": config,
        "generation_config.json": {"bos_token_id": 1, "eos_token_id": [2, 4], "do_sample": True},
        "tokenizer_config.json": settings,
        "special_tokens_map.json": {"bos_token": "<|begin|>", "unk_token": {"content": "<unk>"}},
        "tokenizer.json": json.loads(tokenizer.to_str()),
    }
    tensors = {_hf_name(name): tensor for name, tensor in random_tensors(tiny_config(**_SIZES)).items()}
    return {name: json.dumps(content).encode() for name, content in files.items()} | {
        "model.safetensors": save(tensors)
    }


@cache
def sharded_seed() -> dict[str, bytes]:
    """The same folder in two shards with an index."""
    files = dict(folder_seed())
    tensors = {_hf_name(name): tensor for name, tensor in random_tensors(tiny_config(**_SIZES)).items()}
    del files["model.safetensors"]
    names = sorted(tensors)
    shard_of = {name: f"model-0000{1 + place % 2}-of-00002.safetensors" for place, name in enumerate(names)}
    for shard in sorted(set(shard_of.values())):
        files[shard] = save({name: tensors[name] for name in names if shard_of[name] == shard})
    index = {"metadata": {"total_size": 1}, "weight_map": shard_of}
    return {**files, "model.safetensors.index.json": json.dumps(index).encode()}


def _hf_name(name: str) -> str:
    return name if name == "lm_head.weight" else f"model.{name}"


@cache
def gguf_seeds() -> list[GgufParts]:
    """Byte-level and sentencepiece vocabularies, four architectures, and tensor types of every family."""
    return [
        _gguf("llama", Kind.F32, _byte_level_values()),
        _gguf("llama", Kind.Q8_0, _sentencepiece_values()),
        _gguf("qwen2", Kind.F16, _byte_level_values(), qkv_bias=True),
        _gguf("qwen3", Kind.Q4_1, _byte_level_values(), qk_norm=True),
        _gguf("smollm3", Kind.BF16, _byte_level_values(), tie_embeddings=True),
        _gguf("llama", Kind.Q4_K, _byte_level_values(), **_K_QUANT_SIZES),
        _gguf("llama", Kind.Q6_K, _byte_level_values(), **_K_QUANT_SIZES),
    ]


def _gguf(name: str, kind: Kind, vocabulary: list[Value], **changes: Any) -> GgufParts:
    config = tiny_config(**{**_SIZES, **changes})
    sizes = {
        "block_count": config.num_layers,
        "context_length": config.max_position,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
    }
    values = [Value("general.architecture", STRING, name)]
    values += [Value(f"{name}.{key}", UINT32, size) for key, size in sizes.items()]
    values += [
        Value(f"{name}.attention.layer_norm_rms_epsilon", FLOAT32, 1e-5),
        Value(f"{name}.rope.freq_base", FLOAT32, 10000.0),
    ]
    tensors = [_tensor(canonical, shape, kind) for canonical, shape in needed_shapes(config).items()]
    return GgufParts(values + vocabulary, tensors)


def _tensor(name: str, shape: tuple[int, ...], kind: Kind) -> Tensor:
    kind = kind if len(shape) > 1 else Kind.F32
    generator = np.random.default_rng(len(name))
    if kind in (Kind.Q4_K, Kind.Q6_K):  # which the library reads but does not write
        block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        blocks = generator.integers(0, 256, (int(np.prod(shape)) // block_size, block_bytes), dtype=np.uint8)
        scales = np.full((len(blocks), 1), 1e-3, np.float16).view(np.uint8)
        blocks[:, -2:] = scales
        blocks[:, :4] = blocks[:, :4] if kind == Kind.Q6_K else np.concatenate((scales, scales), 1)
        data = blocks.tobytes()
    else:
        data = gguf.quants.quantize(generator.normal(0, 0.2, shape).astype(np.float32), kind).tobytes()
    return Tensor(_gguf_name(name), list(reversed(shape)), int(kind), data)


def _gguf_name(name: str) -> str:
    base, _, part = name.rpartition(".")
    if base.startswith("layers."):
        _, layer, rest = base.split(".", 2)
        return f"blk.{layer}.{NAMES[rest]}.{part}"
    return f"{NAMES.get(base) or NAMES['model.' + base]}.{part}"


@cache
def _byte_level_values() -> list[Value]:
    tokenizer = byte_level_tokenizer()
    ids: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    tokens = sorted(ids, key=lambda token: ids[token])
    special = tokenizer.get_added_tokens_decoder()
    merges = [" ".join(merge) for merge in json.loads(tokenizer.to_str())["model"]["merges"]]
    return [
        Value("tokenizer.ggml.model", STRING, "gpt2"),
        Value("tokenizer.ggml.pre", STRING, "llama-bpe"),
        Value("tokenizer.ggml.tokens", ARRAY, tokens, STRING),
        Value("tokenizer.ggml.token_type", ARRAY, [3 if i in special else 1 for i in range(len(tokens))], INT32),
        Value("tokenizer.ggml.merges", ARRAY, merges, STRING),
        *_special_values(),
    ]


def _sentencepiece_values() -> list[Value]:
    words = ["▁", *"abcdefghijklmnopqrstuvwxyz", "he", "ll", "▁t", "hell", "▁the", "er", "in"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    tokens += [f"<extra_{number}>" for number in range(512 - len(tokens))]
    types = [2, 3, 3, *[6] * 256, *[1] * len(words)]
    types += [4] * (512 - len(types))
    return [
        Value("tokenizer.ggml.model", STRING, "llama"),
        Value("tokenizer.ggml.tokens", ARRAY, tokens, STRING),
        Value("tokenizer.ggml.token_type", ARRAY, types, INT32),
        Value("tokenizer.ggml.scores", ARRAY, [-float(place) for place in range(512)], FLOAT32),
        *_special_values(),
    ]


def _special_values() -> list[Value]:
    return [
        Value("tokenizer.ggml.bos_token_id", UINT32, 1),
        Value("tokenizer.ggml.eos_token_id", UINT32, 2),
        Value("tokenizer.ggml.add_bos_token", BOOL, True),
        Value("tokenizer.chat_template", STRING, CHAT_TEMPLATE),
    ]


@cache
def known_gguf_values() -> list[Value]:
    """Keys that evenflow reads and most files lack."""
    found = [
        Value("general.alignment", UINT32, 64),
        Value("split.count", UINT32, 1),
        Value("tokenizer.ggml.add_eos_token", BOOL, True),
        Value("tokenizer.ggml.add_space_prefix", BOOL, False),
        Value("tokenizer.ggml.eot_token_id", UINT32, 4),
        Value("tokenizer.ggml.padding_token_id", UINT32, 2),
        Value("tokenizer.chat_template.tool_use", STRING, "{{ tools }}"),
    ]
    for name in ("llama", "qwen2", "qwen3", "smollm3"):
        found += [
            Value(f"{name}.vocab_size", UINT32, 512),
            Value(f"{name}.expert_count", UINT32, 0),
            Value(f"{name}.rope.dimension_count", UINT32, 8),
            Value(f"{name}.attention.scale", FLOAT32, 0.5),
            Value(f"{name}.attention.sliding_window", UINT32, 8),
            Value(f"{name}.rope.scaling.type", STRING, "yarn"),
            Value(f"{name}.rope.scaling.factor", FLOAT32, 4.0),
            Value(f"{name}.rope.scaling.original_context_length", UINT32, 64),
            Value(f"{name}.rope.scaling.yarn_beta_fast", FLOAT32, 32.0),
            Value(f"{name}.rope.scaling.yarn_beta_slow", FLOAT32, 1.0),
            Value(f"{name}.rope.scaling.attn_factor", FLOAT32, 1.0),
        ]
    return found


_ROPE = (
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": 1.0},
    {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": 1.0},
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    {
        "rope_type": "longrope",
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
        "original_max_position_embeddings": 64,
    },
)
_SPLIT = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
_DOUBLE = {"type": "Replace", "pattern": {"String": "l"}, "content": "lll"}

# Fields of each file that evenflow, or a library that it calls, knows and the seed lacks.
KNOWN_FIELDS: dict[str, dict[str, Any]] = {
    "config.json": {
        "rope_scaling": _ROPE,
        "rope_parameters": _ROPE,
        "architectures": [["MistralForCausalLM"], ["Qwen2ForCausalLM"], ["Qwen3ForCausalLM"], ["SmolLM3ForCausalLM"]],
        "sliding_window": [8, 1, 2**31, 2**32, 2**63],
        "use_sliding_window": [True],
        "max_window_layers": [0],
        "layer_types": [["sliding_attention"], ["full_attention"] * 3],
        "no_rope_layers": [[1], [0]],
        "no_rope_layer_interval": [1, 2],
        "partial_rotary_factor": [0.5, 0.25],
        "quantization_config": [{"quant_method": "awq"}],
        "attention_bias": [True],
        "mlp_bias": [True],
        "auto_map": [{"AutoModelForCausalLM": "evil.Model"}],
        "tie_word_embeddings": [True],
    },
    "tokenizer.json": {
        "normalizer": [
            {"type": "NFC"},
            _DOUBLE,
            {"type": "Sequence", "normalizers": [_DOUBLE] * 40},
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Precompiled", "precompiled_charsmap": "AAAA////"},
            {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "lowercase": True},
        ],
        "pre_tokenizer": [
            _SPLIT,
            {"type": "Sequence", "pretokenizers": [_SPLIT, {"type": "ByteLevel", "add_prefix_space": True}]},
            {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
            {"type": "Whitespace"},
        ],
        "decoder": [
            {"type": "ByteFallback"},
            {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
            {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Strip", "content": " ", "start": 1}]},
        ],
        "truncation": [{"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}],
        "padding": [{"strategy": {"Fixed": 10**9}, "direction": "Right", "pad_id": 0, "pad_type_id": 0}],
        "model": [
            {"type": "WordLevel", "vocab": {"a": 0, "b": 2**32 - 1}, "unk_token": "a"},
            {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["a", -1.0]], "byte_fallback": True},
            {"type": "WordPiece", "vocab": {"a": 0}, "unk_token": "[UNK]", "max_input_chars_per_word": 2**63},
        ],
    },
    "tokenizer_config.json": {
        "add_bos_token": [True, False],
        "add_eos_token": [True],
        "chat_template": [[{"name": "default", "template": "{{ messages }}"}], "{% for a in %}", "{{ 1" + "+(1" * 200],
        "auto_map": [{"AutoTokenizer": ["evil.Tokenizer", None]}],
    },
    "generation_config.json": {"eos_token_id": [2**31, -1, [1] * 1000]},
    "special_tokens_map.json": {"eos_token": ["<|end|>", {"content": "nosuchtoken"}]},
}


@cache
def step_times_seed() -> dict[str, Any]:
    """What a start learned: a record of StepTimeModel."""
    from evenflow.core.plan import ExecutorCaps
    from evenflow.core.step_time import StepTimeModel

    model = StepTimeModel()
    for number in range(40):
        shape = ExecutorCaps().step_shape(num_decodes=4, decode_context=40, chunks=[(0, 16 + number)])
        model.observe(shape, 0.002 + 0.0001 * number)
    return model.to_record()


def manifest_seed() -> dict[str, Any]:
    """What is stored beside a compiled model: a hash of it, and its constants."""
    return {"sha256": "", "notes": {"constants": {"scale": ["float32", [1.0, 2.0]], "count": ["int64", 3]}}}
