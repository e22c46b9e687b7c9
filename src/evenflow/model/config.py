"""The sizes and options of a Llama-family decoder, independent of the file format it came in."""

import math
from dataclasses import dataclass, fields

from evenflow.errors import BrokenModel, UnsupportedModel

SUPPORTED_FAMILIES = "Llama, Mistral, Qwen2, Qwen3 and SmolLM models"


def unsupported(what: str) -> UnsupportedModel:
    """The error for a valid model that evenflow's own engine does not run."""
    return UnsupportedModel(f"{what} is not supported here; vLLM may run it: evenflow serve --engine vllm")


_MAX = 2**31 - 1  # of anything that is counted: kernels hold it in 32 bits
_MIN_FLOAT, _MAX_FLOAT = 1e-30, 1e30  # with room to multiply as 32-bit floats


def checked_num_layers(num_layers: int) -> int:
    """The same number, or BrokenModel if it is absurd: lists by layer are made before tensors are counted."""
    if num_layers > 10_000:
        raise BrokenModel(f"num_layers is {num_layers}, no model has that many")
    return num_layers


def _check_positive(owner: str, settings: "RopeScaling | RopeConfig | ModelConfig") -> None:
    for field in fields(settings):
        value = getattr(settings, field.name)
        if type(value) not in (int, float) or field.name == "bos_token_id":
            continue
        if not 0 < value < math.inf:
            raise BrokenModel(f"{owner}: {field.name} is {value}, it must be positive")
        if type(value) is int and value > _MAX:
            raise BrokenModel(f"{owner}: {field.name} is {value}, no model has that many")
        if type(value) is float and not _MIN_FLOAT < value < _MAX_FLOAT:
            raise BrokenModel(f"{owner}: {field.name} is {value}, expected {_MIN_FLOAT} to {_MAX_FLOAT}")


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Every frequency divided by `factor`."""

    factor: float

    def __post_init__(self) -> None:
        _check_positive("rope scaling", self)


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Low frequencies divided by `factor`, high ones kept, with a smooth transition between the two."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int

    def __post_init__(self) -> None:
        _check_positive("rope scaling", self)
        if not self.high_freq_factor > self.low_freq_factor:
            raise BrokenModel(
                f"rope scaling: high_freq_factor {self.high_freq_factor} is not above "
                f"low_freq_factor {self.low_freq_factor}"
            )


def yarn_attention_factor(factor: float, weight: float = 1.0) -> float:
    """YaRN's suggestion for how much to sharpen attention when positions are stretched by `factor`."""
    return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """Interpolated and original frequencies blended over a ramp; `attention_factor` multiplies cos and sin."""

    factor: float
    original_max_position: int
    beta_fast: float
    beta_slow: float
    attention_factor: float
    truncate: bool

    def __post_init__(self) -> None:
        _check_positive("rope scaling", self)


@dataclass(frozen=True, slots=True)
class FrequencyFactors:
    """Each of the rotary_dim / 2 frequencies divided by its own factor; `attention_factor` multiplies cos and sin.

    Used for LongRoPE, and for the factors that GGUF files store as a tensor.
    """

    factors: tuple[float, ...]
    attention_factor: float

    def __post_init__(self) -> None:
        _check_positive("rope scaling", self)
        for factor in self.factors:
            LinearScaling(factor)


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | FrequencyFactors


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary positions: the first `rotary_dim` values of a head are rotated, in pairs (i, i + rotary_dim / 2)."""

    theta: float
    rotary_dim: int
    scaling: RopeScaling | None

    def __post_init__(self) -> None:
        _check_positive("rope", self)
        if self.rotary_dim % 2:
            raise BrokenModel(f"the rotary dimension is {self.rotary_dim}, it must be even")
        if isinstance(self.scaling, YarnScaling) and self.theta <= 1:
            raise BrokenModel(f"rope: theta is {self.theta}, it must be above 1 for YaRN")
        if isinstance(self.scaling, FrequencyFactors) and len(self.scaling.factors) != self.rotary_dim // 2:
            raise BrokenModel(
                f"{len(self.scaling.factors)} rope frequency factors, {self.rotary_dim // 2} are needed "
                f"for a rotary dimension of {self.rotary_dim}"
            )


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and options of one model.

    `layer_windows[i]` is the number of positions layer i sees, including its own, or None for all of them.
    `layer_uses_rope[i]` is False if layer i attends without positions.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float
    attention_scale: float
    rope: RopeConfig
    layer_windows: tuple[int | None, ...]
    layer_uses_rope: tuple[bool, ...]
    tie_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        _check_positive("the model", self)
        if self.max_position < 2:
            raise BrokenModel(f"the context is {self.max_position} token: there is no room for an answer")
        if self.head_dim % 2:
            raise BrokenModel(f"head_dim is {self.head_dim}, it must be even")
        if self.num_heads % self.num_kv_heads:
            raise BrokenModel(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.rope.rotary_dim > self.head_dim:
            raise BrokenModel(f"the rotary dimension {self.rope.rotary_dim} is larger than head_dim {self.head_dim}")
        for name in ("layer_windows", "layer_uses_rope"):
            if len(getattr(self, name)) != self.num_layers:
                raise BrokenModel(f"{name} has {len(getattr(self, name))} entries for {self.num_layers} layers")
        for window in self.layer_windows:
            if window is not None and not 0 < window <= _MAX:
                raise BrokenModel(f"a sliding window is {window} positions, expected 1 to {_MAX}")
        for token_id in (self.bos_token_id, *self.eos_token_ids):
            if token_id is not None and not 0 <= token_id < self.vocab_size:
                raise BrokenModel(f"special token id {token_id} is outside the vocabulary of {self.vocab_size} tokens")
