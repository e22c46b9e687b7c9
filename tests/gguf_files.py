"""Writes GGUF files for tests, the way llama.cpp's converter does."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
import torch
from gguf import GGMLQuantizationType, GGUFWriter

GGUF_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "SmolLM3ForCausalLM": "smollm3",
}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(
    path: Path,
    model: Any,
    tokenizer: tokenizers.Tokenizer,
    *,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    splitter: str | None = "gpt-2",
    extra: dict[str, Any] | None = None,
    leave_out: tuple[str, ...] = (),
) -> Path:
    """A model of transformers as a GGUF file; `extra` holds metadata values and tensors (as arrays) by their name."""
    name = GGUF_ARCHITECTURES[model.config.architectures[0] if model.config.architectures else type(model).__name__]
    writer = GGUFWriter(path, name)
    _add_sizes(writer, model.config)
    add_byte_level_vocabulary(writer, tokenizer, splitter)
    for hf_name, tensor in model.state_dict().items():
        gguf_name = _gguf_name(hf_name)
        if gguf_name not in leave_out:
            _add_tensor(writer, gguf_name, _interleaved(hf_name, tensor, model.config, name), kind)
    for key, value in (extra or {}).items():
        if isinstance(value, np.ndarray):
            writer.add_tensor(key, value)
        else:
            _add_value(writer, key, value)
    return finish(writer)


def finish(writer: GGUFWriter) -> Path:
    """Write out what was added."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(str(writer.path))


def add_byte_level_vocabulary(writer: GGUFWriter, tokenizer: tokenizers.Tokenizer, splitter: str | None) -> None:
    """The vocabulary, merges and special tokens of a byte-level BPE."""
    model = json.loads(tokenizer.to_str())["model"]
    ids: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    added = tokenizer.get_added_tokens_decoder()
    tokens = sorted(ids, key=lambda token: ids[token])
    writer.add_tokenizer_model("gpt2")
    if splitter is not None:
        writer.add_tokenizer_pre(splitter)
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if i in added else gguf.TokenType.NORMAL for i in range(len(ids))])
    writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    writer.add_bos_token_id(ids["<|begin|>"])
    writer.add_eos_token_id(ids["<|end|>"])
    writer.add_add_bos_token(True)


def _add_sizes(writer: GGUFWriter, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)


def _add_tensor(writer: GGUFWriter, name: str, tensor: torch.Tensor, kind: GGMLQuantizationType) -> None:
    # As llama.cpp does, what has one dimension stays float32.
    kind = kind if tensor.dim() > 1 else GGMLQuantizationType.F32
    writer.add_tensor(name, gguf.quants.quantize(tensor.float().numpy(), kind), raw_dtype=kind)


def _add_value(writer: GGUFWriter, key: str, value: Any) -> None:
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    kinds.get(type(value), writer.add_array)(key, value)


def _gguf_name(hf_name: str) -> str:
    base, _, part = hf_name.rpartition(".")
    if base.startswith("model.layers."):
        _, _, layer, rest = base.split(".", 3)
        return f"blk.{layer}.{NAMES[rest]}.{part}"
    return f"{NAMES[base]}.{part}"


def _interleaved(hf_name: str, tensor: torch.Tensor, config: Any, architecture: str) -> torch.Tensor:
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(hf_name.split(".")[-2])
    if heads is None or architecture not in ("llama", "smollm3"):
        return tensor
    return tensor.reshape(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape).contiguous()
