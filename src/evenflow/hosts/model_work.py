"""What a decoder reads and multiplies in a step, from its Hugging Face config.

A mixture of experts, latent attention, sliding windows and gated delta nets are known. Of a model with anything else
nothing is estimated: no figures are better than those of another model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from evenflow.core.roofline import Device, ModelWork

# Fields of layers that are not estimated here.
_UNKNOWN_LAYERS = (
    *("attn_layer_period", "attn_type_list", "hc_mult", "hybrid_override_pattern", "index_topk", "layers_block_type"),
    *("interleave_moe_layer_step", "linear_attn_config", "mamba_d_conv", "mamba_d_ssm", "num_kv_shared_layers"),
)
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "experts_per_token", "top_k_experts")
_EXPERT_SIZE = ("moe_intermediate_size", "expert_intermediate_size", "intermediate_size")
_STATE_BYTES = 4  # of each number of a recurrent state
# Attention to cached latents first expands them to keys and values, once for each chunk: priced as for chunks of this
# size.
_CHUNK_ROWS = 512
_GROUP_BITS = 16  # a scale, and often a zero point, for each group of 4-bit weights
_GROUP = 64


class Precision(NamedTuple):
    """Of the weights of a model's layers. Its output layer has those of its data type."""

    bytes: float  # of a weight
    is_fp8: bool = False  # they are multiplied so too


def precision_of(itemsize: int, method: str | None, quantization: Mapping[str, Any] | None) -> Precision:
    """By the host's name of the quantization, and the model's own settings for it. ValueError: it is unknown."""
    if not method:
        return Precision(itemsize)
    settings = quantization or {}
    if method == "compressed-tensors":
        group: Mapping[str, Any] = next(iter(settings.get("config_groups", {}).values()), {})
        bits, rows = group.get("weights", {}).get("num_bits"), group.get("input_activations")
        if bits == 8:
            return Precision(1.0, is_fp8=bool(rows))
        if bits == 4 and not rows:
            return _of_groups(4)
    if method.startswith(("awq", "gptq")):
        return _of_groups(int(settings.get("bits") or settings.get("w_bit") or 4))
    if method in ("mxfp4", "gpt_oss_mxfp4", "modelopt_fp4", "nvfp4"):  # of experts alone, mostly: nearly all weights
        return _of_groups(4)
    if method in ("fp8", "fbgemm_fp8", "ptpc_fp8", "modelopt"):
        return Precision(1.0, is_fp8=True)
    raise ValueError(f"the quantization {method} is unknown")


def _of_groups(bits: int) -> Precision:
    return Precision((bits + _GROUP_BITS / _GROUP) / 8)


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer of one rank."""

    weights: float
    row_flops: float = 0.0  # beside multiplying by the weights
    position_flops: float = 0.0
    cache_bytes: float = 0.0
    stream_bytes: float = 0.0


def model_work(
    config: Any, num_ranks: int, itemsize: int, precision: Precision, device: Device, cache_itemsize: float = 2.0
) -> ModelWork:
    """Of one tensor-parallel rank. ValueError: a layer is unknown, or a number is missing."""
    if found := [name for name in _UNKNOWN_LAYERS if getattr(config, name, None)]:
        raise ValueError(f"layers with {found} are unknown")
    read = _Reader(config, num_ranks, cache_itemsize, device)
    num_layers = read("num_hidden_layers")
    layers = [_ATTENTION[kind](read) for kind in _kinds(read, num_layers)]
    stored, used = _feed_forward(read, num_layers)
    head = read("vocab_size") * read("hidden_size") / read.num_ranks
    attention = sum(layer.weights for layer in layers)
    return ModelWork(
        num_layers=num_layers,
        row_flops=2 * (attention + used + head) + sum(layer.row_flops for layer in layers),
        weight_bytes=precision.bytes * (attention + stored) + itemsize * head,
        position_flops=sum(layer.position_flops for layer in layers),
        cache_bytes=sum(layer.cache_bytes for layer in layers),
        stream_bytes=sum(layer.stream_bytes for layer in layers),
        is_fp8=precision.is_fp8,
    )


class _Reader:
    """A config's numbers, and what else is known of a rank."""

    def __init__(self, config: Any, num_ranks: int, cache_itemsize: float, device: Device) -> None:
        self.config = config
        self.num_ranks = num_ranks
        self.cache_itemsize = cache_itemsize
        self.device = device

    def __call__(self, *names: str, default: int | None = None) -> int:
        """The first of these that the config has."""
        values = (getattr(self.config, name, None) for name in names)
        value = next((value for value in values if value is not None), default)
        if type(value) is not int or value < (default is None):
            raise ValueError(f"{' or '.join(names)} is {value!r}")
        return value

    def has(self, *names: str) -> bool:
        return any(getattr(self.config, name, None) for name in names)


def _kinds(read: _Reader, num_layers: int) -> Sequence[str]:
    """Of each layer's attention."""
    kinds: Sequence[str] | None = getattr(read.config, "layer_types", None)
    if kinds is None:
        special, every = "full_attention", 0
        if read.has("full_attention_interval"):
            special, every = "linear_attention", read("full_attention_interval")
        elif read.has("sliding_window") and getattr(read.config, "use_sliding_window", True):
            special, every = "sliding_attention", read("sliding_window_pattern", default=0)
        kinds = ["full_attention" if every and not (n + 1) % every else special for n in range(num_layers)]
    if len(kinds) != num_layers or not set(kinds) <= set(_ATTENTION):
        raise ValueError(f"layers of {kinds} are unknown")
    return kinds


def _full(read: _Reader) -> _Layer:
    if read.has("kv_lora_rank"):
        return _latent(read)
    head_size = read("global_head_dim", default=_head_size(read))
    return _plain(read, head_size, read("num_global_key_value_heads", default=_num_kv_heads(read)))


def _windowed(read: _Reader) -> _Layer:
    """A row attends to the window's positions, wherever it is."""
    layer, window = _plain(read, _head_size(read), _num_kv_heads(read)), read("sliding_window", "attention_chunk_size")
    return _Layer(layer.weights, window * layer.position_flops, stream_bytes=window * layer.cache_bytes)


def _plain(read: _Reader, head_size: int, num_kv_heads: int) -> _Layer:
    hidden, num_heads = read("hidden_size"), read("num_attention_heads")
    width = num_heads * head_size / read.num_ranks
    kv_width = 2 * max(1.0, num_kv_heads / read.num_ranks) * head_size
    gate = width if read.has("attn_output_gate", "linear_num_value_heads") else 0.0
    return _Layer(
        weights=hidden * (2 * width + gate + kv_width),
        position_flops=4 * width,
        cache_bytes=read.cache_itemsize * kv_width,
    )


def _head_size(read: _Reader) -> int:
    return read("head_dim", default=read("hidden_size") // max(1, read("num_attention_heads")))


def _num_kv_heads(read: _Reader) -> int:
    return read("num_key_value_heads", default=read("num_attention_heads"))


def _latent(read: _Reader) -> _Layer:
    """Every rank has the latents of all heads. A decode multiplies them by its queries; a chunk expands them first."""
    hidden, latent, num_heads = read("hidden_size"), read("kv_lora_rank"), read("num_attention_heads") / read.num_ranks
    plain, rotated, value = read("qk_nope_head_dim"), read("qk_rope_head_dim"), read("v_head_dim")
    queries, expanded = num_heads * (plain + rotated), num_heads * (plain + value)
    of_queries = hidden * queries
    if query_latent := read("q_lora_rank", default=0):
        of_queries = query_latent * (hidden + queries)
    device, decode_flops = read.device, 2 * num_heads * (2 * latent + rotated)
    return _Layer(
        weights=of_queries + hidden * (latent + rotated) + latent * expanded + num_heads * value * hidden,
        position_flops=2 * (queries + num_heads * value) + 2 * latent * expanded / _CHUNK_ROWS,
        cache_bytes=max(
            read.cache_itemsize * (latent + rotated), decode_flops * device.bytes_per_second / device.flops_per_second
        ),
    )


def _linear(read: _Reader) -> _Layer:
    """A gated delta net: a state of fixed size for each stream, which each step reads and writes."""
    keys = read("linear_num_key_heads") * read("linear_key_head_dim") / read.num_ranks
    num_values = read("linear_num_value_heads") / read.num_ranks
    values = num_values * read("linear_value_head_dim")
    state = values * read("linear_key_head_dim")
    return _Layer(
        weights=read("hidden_size") * (2 * keys + 3 * values + 2 * num_values),
        row_flops=8 * state,
        stream_bytes=2 * _STATE_BYTES * state,
    )


_ATTENTION: dict[str, Callable[[_Reader], _Layer]] = {
    "full_attention": _full,
    "sliding_attention": _windowed,
    "chunked_attention": _windowed,
    "linear_attention": _linear,
}


def _feed_forward(read: _Reader, num_layers: int) -> tuple[float, float]:
    """Weights of all layers that a step of many rows reads, and those that each row is multiplied by."""
    hidden = read("hidden_size") / read.num_ranks
    if not read.has(*_NUM_EXPERTS):
        dense = 3 * hidden * read("intermediate_size") * num_layers
        return dense, dense
    num_experts, num_used = read(*_NUM_EXPERTS), read(*_EXPERTS_PER_TOKEN)
    expert = 3 * hidden * read(*_EXPERT_SIZE)
    shared = expert * read("n_shared_experts", default=0)
    shared += 3 * hidden * read("shared_expert_intermediate_size", default=0)
    if read.has("enable_moe_block"):  # beside the experts each layer has a dense part
        shared += 3 * hidden * read("intermediate_size")
    num_dense = _num_dense_layers(read, num_layers)
    num_mixed, dense = num_layers - num_dense, 3 * hidden * read("intermediate_size", default=0) * num_dense
    always = dense + num_mixed * (shared + hidden * num_experts)  # the router too
    return always + num_mixed * num_experts * expert, always + num_mixed * num_used * expert


def _num_dense_layers(read: _Reader, num_layers: int) -> int:
    sparse_step = read("decoder_sparse_step", "moe_layer_freq", default=1) or math.inf
    first, listed = read("first_k_dense_replace", default=0), getattr(read.config, "mlp_only_layers", None) or ()
    return sum(n < first or n in listed or bool((n + 1) % sparse_step) for n in range(num_layers))
