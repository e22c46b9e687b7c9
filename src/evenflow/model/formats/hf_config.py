"""Reads the config.json of a Hugging Face folder, in the format of transformers 5 or earlier, with its defaults."""

import math
from dataclasses import dataclass

from evenflow.errors import BrokenModel
from evenflow.model.config import (
    SUPPORTED_FAMILIES,
    FrequencyFactors,
    LinearScaling,
    Llama3Scaling,
    ModelConfig,
    RopeConfig,
    RopeScaling,
    YarnScaling,
    checked_num_layers,
    unsupported,
    yarn_attention_factor,
)
from evenflow.model.formats.typed_values import TypedValues


@dataclass(frozen=True, slots=True)
class _Family:
    """Defaults of transformers' class for an architecture."""

    qkv_bias: bool | None = None  # None: config.json says
    qk_norm: bool = False
    num_kv_heads: int | None = None
    head_dim: int | None = None
    rope_theta: float = 10000.0
    tie_embeddings: bool = False


_FAMILIES = {
    "LlamaForCausalLM": _Family(),
    "MistralForCausalLM": _Family(qkv_bias=False, num_kv_heads=8),
    "Qwen2ForCausalLM": _Family(qkv_bias=True, num_kv_heads=32),
    "Qwen3ForCausalLM": _Family(qk_norm=True, num_kv_heads=32, head_dim=128),
    "SmolLM3ForCausalLM": _Family(num_kv_heads=4, rope_theta=2000000.0, tie_embeddings=True),
}


def read_config(file: TypedValues, bos_token_id: int | None, eos_token_ids: tuple[int, ...]) -> ModelConfig:
    """The configuration in config.json; the special tokens depend on other files too."""
    architecture, family = supported_architecture(file)
    hidden_size = file.get("hidden_size", int)
    num_layers = checked_num_layers(file.get("num_hidden_layers", int))
    num_heads = file.get("num_attention_heads", int)
    head_dim = file.get("head_dim", int, family.head_dim or hidden_size // max(num_heads, 1))
    attention_bias = file.get("attention_bias", bool, False) if family.qkv_bias is None else None
    rope, max_position = _read_rope(file, family, head_dim)
    return ModelConfig(
        architecture=architecture,
        vocab_size=file.get("vocab_size", int),
        hidden_size=hidden_size,
        intermediate_size=file.get("intermediate_size", int),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=file.get("num_key_value_heads", int, family.num_kv_heads or num_heads),
        head_dim=head_dim,
        max_position=max_position,
        rms_norm_eps=file.get("rms_norm_eps", float, 1e-6),
        attention_scale=max(head_dim, 1) ** -0.5,
        rope=rope,
        layer_windows=_layer_windows(file, architecture, num_layers),
        layer_uses_rope=_layer_uses_rope(file, architecture, num_layers),
        tie_embeddings=file.get("tie_word_embeddings", bool, family.tie_embeddings),
        qkv_bias=bool(family.qkv_bias) if attention_bias is None else attention_bias,
        output_bias=bool(attention_bias),
        mlp_bias=file.get("mlp_bias", bool, False),
        qk_norm=family.qk_norm,
        bos_token_id=bos_token_id,
        eos_token_ids=eos_token_ids,
    )


def supported_architecture(file: TypedValues) -> tuple[str, _Family]:
    """The architecture in config.json, or UnsupportedModel."""
    names = file.get("architectures", list)
    name = ", ".join(map(str, names))
    if name not in _FAMILIES:
        raise unsupported(f"the architecture {name or 'without a name'} (supported: {SUPPORTED_FAMILIES})")
    if file.content.get("quantization_config") is not None:
        method = TypedValues(file.name, file.get("quantization_config", dict)).optional("quant_method", str)
        raise unsupported(f"a checkpoint quantised by {method or 'an unnamed method'}")
    activation = file.get("hidden_act", str, "silu")
    if activation != "silu":
        raise unsupported(f"the activation {activation!r}")
    return name, _FAMILIES[name]


def _layer_windows(file: TypedValues, architecture: str, num_layers: int) -> tuple[int | None, ...]:
    if architecture == "LlamaForCausalLM":
        return (None,) * num_layers
    if architecture == "MistralForCausalLM":
        window = file.optional("sliding_window", int) if "sliding_window" in file.content else 4096
        return (window,) * num_layers
    window = file.optional("sliding_window", int)
    if window is None or not file.get("use_sliding_window", bool, False):
        return (None,) * num_layers
    kinds = file.optional("layer_types", list)
    if kinds is None and architecture == "SmolLM3ForCausalLM":
        return tuple(None if uses_rope else window for uses_rope in _layer_uses_rope(file, architecture, num_layers))
    if kinds is None:
        first_window = file.get("max_window_layers", int, 28)
        return tuple(window if layer >= first_window else None for layer in range(num_layers))
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _layer_uses_rope(file: TypedValues, architecture: str, num_layers: int) -> tuple[bool, ...]:
    if architecture != "SmolLM3ForCausalLM":
        return (True,) * num_layers
    flags = file.optional("no_rope_layers", list)  # despite the name, 1 is a layer with rope
    if flags is not None:
        return tuple(map(bool, flags))
    interval = file.get("no_rope_layer_interval", int, 4)
    if interval <= 0:
        raise BrokenModel(f"{file.name}: no_rope_layer_interval is {interval}, it must be positive")
    return tuple((layer + 1) % interval != 0 for layer in range(num_layers))


def _read_rope(file: TypedValues, family: _Family, head_dim: int) -> tuple[RopeConfig, int]:
    """The rope settings, and the longest context that they give."""
    # transformers 5 has all settings in rope_parameters; older ones have rope_theta, and the rest in rope_scaling.
    settings = file.optional("rope_scaling", dict) or file.optional("rope_parameters", dict) or {}
    rope = TypedValues(f"{file.name}: rope", settings)
    if any(isinstance(value, dict) for value in settings.values()):
        raise unsupported("rope settings that differ by layer")
    theta = rope.get("rope_theta", float, file.get("rope_theta", float, family.rope_theta))
    partial = rope.get("partial_rotary_factor", float, file.get("partial_rotary_factor", float, 1.0))
    if not 0 < partial <= 1:
        raise BrokenModel(f"{file.name}: partial_rotary_factor is {partial}, it must be above 0 and at most 1")
    max_position = file.get("max_position_embeddings", int)
    scaling = _read_scaling(rope, max_position)
    if isinstance(scaling, YarnScaling):
        max_position = max(max_position, int(scaling.factor * scaling.original_max_position))
    return RopeConfig(theta, int(head_dim * partial), scaling), max_position


def _read_scaling(rope: TypedValues, max_position: int) -> RopeScaling | None:
    kind = rope.get("rope_type", str, rope.get("type", str, "default"))
    # Dynamic scaling begins beyond max_position_embeddings, which is the limit of requests here.
    if kind in ("default", "dynamic"):
        return None
    if kind == "linear":
        return LinearScaling(rope.get("factor", float))
    original_max_position = rope.get("original_max_position_embeddings", int, max_position)
    if original_max_position < 2:
        raise BrokenModel(
            f"{rope.name}: original_max_position_embeddings is {original_max_position}, expected 2 or more"
        )
    if kind == "llama3":
        return Llama3Scaling(
            factor=rope.get("factor", float),
            low_freq_factor=rope.get("low_freq_factor", float),
            high_freq_factor=rope.get("high_freq_factor", float),
            original_max_position=original_max_position,
        )
    if kind == "yarn":
        return _read_yarn(rope, max_position, original_max_position)
    if kind == "longrope":
        return _read_longrope(rope, max_position, original_max_position)
    raise unsupported(f"the rope scaling {kind!r}")


def _read_yarn(rope: TypedValues, max_position: int, original_max_position: int) -> YarnScaling:
    factor = rope.get("factor", float, max_position / original_max_position)
    mscale, mscale_all_dim = rope.optional("mscale", float), rope.optional("mscale_all_dim", float)
    if mscale and mscale_all_dim:
        if not min(mscale, mscale_all_dim) > 0:
            raise BrokenModel(f"{rope.name}: mscale and mscale_all_dim are {mscale} and {mscale_all_dim}, not positive")
        suggested = yarn_attention_factor(factor, mscale) / yarn_attention_factor(factor, mscale_all_dim)
    else:
        suggested = yarn_attention_factor(factor)
    return YarnScaling(
        factor=factor,
        original_max_position=original_max_position,
        beta_fast=rope.get("beta_fast", float, 32.0),
        beta_slow=rope.get("beta_slow", float, 1.0),
        attention_factor=rope.get("attention_factor", float, suggested),
        truncate=rope.get("truncate", bool, True),
    )


def _read_longrope(rope: TypedValues, max_position: int, original_max_position: int) -> FrequencyFactors:
    """One set of factors for all lengths: the long one if the context is long.

    Switching by the length of each request would change keys that are already cached.
    """
    factor = rope.get("factor", float, max_position / original_max_position)
    suggested = 1.0 if factor <= 1.0 else math.sqrt(1.0 + math.log(factor) / math.log(original_max_position))
    factors = rope.get("long_factor" if max_position > original_max_position else "short_factor", list)
    if not all(type(factor) in (int, float) for factor in factors):
        raise BrokenModel(f"{rope.name}: its factors are not all numbers")
    if any(abs(factor) > 1e30 for factor in factors):  # JSON has integers that no float holds
        raise BrokenModel(f"{rope.name}: one of its factors is above 1e30")
    return FrequencyFactors(tuple(map(float, factors)), rope.get("attention_factor", float, suggested))
