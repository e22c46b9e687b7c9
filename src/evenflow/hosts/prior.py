"""Estimates a host engine's step costs before any step has run, from a Hugging Face config and the device's name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from evenflow.core.plan import AttentionWaves
from evenflow.core.roofline import WaveKernel, attention_waves, known_device, roofline
from evenflow.core.step_costs import StepCosts
from evenflow.hosts.model_work import model_work, precision_of


class Prior(NamedTuple):
    """What is known about steps before any has run."""

    costs: StepCosts | None = None
    waves: AttentionWaves | None = None


def prior_of(
    text_config: Any,
    device_name: str,
    num_ranks: int,
    itemsize: int,
    *,
    quantization: str | None = None,
    quantization_config: Mapping[str, Any] | None = None,
    cache_itemsize: float = 2.0,
    kernel: WaveKernel | None = WaveKernel.FLASH_ATTENTION_3,
) -> Prior:
    """The roofline of one tensor-parallel rank; nothing if the device, a layer or the quantization is unknown.

    `itemsize`: bytes of a number of the model's data type. `quantization`: the host's name for it, beside the model's
    own settings for it. `kernel`: what attention may be.
    """
    device = known_device(device_name)
    if device is None:
        return Prior()
    try:
        precision = precision_of(itemsize, quantization, quantization_config)
        work = model_work(text_config, num_ranks, itemsize, precision, device, cache_itemsize)
    except (AttributeError, LookupError, TypeError, ValueError):  # a config may hold anything
        return Prior()
    waves = None
    if kernel is not None and not getattr(text_config, "kv_lora_rank", None):
        num_heads = text_config.num_attention_heads
        num_kv_heads = getattr(text_config, "num_key_value_heads", None) or num_heads
        waves = attention_waves(num_heads // num_ranks, max(1, num_kv_heads // num_ranks), device, kernel)
    return Prior(roofline(work, device, waves), waves)
