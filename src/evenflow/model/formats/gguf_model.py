"""A Llama-family model from a GGUF file of llama.cpp: its configuration and tensors."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from evenflow.model.config import ModelConfig, unsupported
from evenflow.model.formats.gguf_config import ROPE_FACTORS, GgufArchitecture, read_gguf_config, supported_architecture
from evenflow.model.formats.gguf_file import GgufFile
from evenflow.model.formats.gguf_tokenizer import read_gguf_tokenizer
from evenflow.model.formats.weights import StoredTensor
from evenflow.model.text.tokenizer import Tokenizer

_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OTHER_TENSORS = {
    "token_embd.weight": "embed_tokens.weight",
    "output_norm.weight": "norm.weight",
    "output.weight": "lm_head.weight",
}


def read_gguf_model(path: Path) -> tuple[ModelConfig, Tokenizer, dict[str, StoredTensor]]:
    """The configuration, tokenizer and tensors of a GGUF file."""
    file = GgufFile(path)
    architecture = supported_architecture(file)
    tokenizer = read_gguf_tokenizer(file)
    config = read_gguf_config(file, architecture, tokenizer)
    if architecture.interleaves_rope and config.rope.rotary_dim != config.head_dim:
        raise unsupported(
            f"{config.architecture} with positions on {config.rope.rotary_dim} of {config.head_dim} head values"
        )
    return config, tokenizer, _stored_tensors(file, config, architecture)


def _stored_tensors(file: GgufFile, config: ModelConfig, architecture: GgufArchitecture) -> dict[str, StoredTensor]:
    stored = {}
    for gguf_name, tensor in file.tensors.items():
        if gguf_name == ROPE_FACTORS:
            continue
        name = _canonical_name(gguf_name)
        read = partial(file.read, gguf_name)
        if architecture.interleaves_rope and ".q_proj." in name:
            read = partial(_split_halves, read, config.num_heads)
        elif architecture.interleaves_rope and ".k_proj." in name:
            read = partial(_split_halves, read, config.num_kv_heads)
        stored[name] = StoredTensor(tensor.shape, read)
    return stored


def _canonical_name(gguf_name: str) -> str:
    if gguf_name in _OTHER_TENSORS:
        return _OTHER_TENSORS[gguf_name]
    parts = gguf_name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER_TENSORS:
        return f"layers.{parts[1]}.{_LAYER_TENSORS[parts[2]]}.{parts[3]}"
    return gguf_name


def _split_halves(read: Callable[[], torch.Tensor], num_heads: int) -> torch.Tensor:
    """Reorder each head's rows from rotary pairs side by side, (0, 1), to pairs half a head apart, (0, n / 2)."""
    rows = read()
    return rows.reshape(num_heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
