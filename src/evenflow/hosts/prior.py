"""Estimates a host engine's step costs before any step has run, from a Hugging Face config and the device's name."""

from __future__ import annotations

from typing import Any, NamedTuple

from evenflow.core.plan import AttentionWaves
from evenflow.core.roofline import ModelWork, WaveKernel, attention_waves, known_device, roofline
from evenflow.core.step_costs import StepCosts

_FIELDS_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


class Prior(NamedTuple):
    """What is known about steps before any has run."""

    costs: StepCosts | None = None
    waves: AttentionWaves | None = None


def prior_of(
    text_config: Any,
    device_name: str,
    num_ranks: int,
    weight_bytes: float,
    *,
    kernel: WaveKernel | None = WaveKernel.FLASH_ATTENTION_3,
) -> Prior:
    """The roofline of one tensor-parallel rank; nothing if the device is unknown, or the model is not a dense decoder.

    `weight_bytes` is the size of one weight. `kernel`: what attention may be.
    """
    device = known_device(device_name)
    if device is None or any(getattr(text_config, name, None) for name in _FIELDS_OF_EXPERTS):
        return Prior()
    try:
        hidden, num_heads = text_config.hidden_size, text_config.num_attention_heads
        num_layers, intermediate = text_config.num_hidden_layers, text_config.intermediate_size
        num_rows = text_config.vocab_size
    except AttributeError:
        return Prior()
    head_size = getattr(text_config, "head_dim", None) or hidden // num_heads
    num_kv_heads = getattr(text_config, "num_key_value_heads", None) or num_heads
    width, kv_width = num_heads * head_size, 2 * num_kv_heads * head_size
    num_weights = hidden * (num_layers * (2 * width + kv_width + 3 * intermediate) + num_rows) // num_ranks
    work = ModelWork(
        num_layers=num_layers,
        num_weights=num_weights,
        weight_bytes=weight_bytes * num_weights,
        attention_width=width // num_ranks,
        cache_bytes=2.0 * num_layers * kv_width / num_ranks,  # 16 bits each
    )
    ranks_kv_heads = max(1, num_kv_heads // num_ranks)
    waves = attention_waves(num_heads // num_ranks, ranks_kv_heads, device, kernel) if kernel is not None else None
    return Prior(roofline(work, device, waves), waves)
