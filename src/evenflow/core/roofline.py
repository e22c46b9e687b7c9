"""Estimates step costs before any step was measured: a roofline from the model's shape and the device's figures.

A step reads the weights once and multiplies its rows by them; attention reads the cache or multiplies. Real steps are
within about a factor of 1.5 of it, and the first few of them correct the rest.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, auto

from evenflow.core.plan import AttentionWaves
from evenflow.core.step_costs import StepCosts

# What large matrix products and plain reads reach of the figures that a vendor states: on an H200 787 of 989 TFLOP/s,
# and 4.14 of 4.8 TB/s.
_ARITHMETIC_EFFICIENCY = 0.8
_MEMORY_EFFICIENCY = 0.86
# Products in 8 bits over those in 16: twice as fast by data sheets; on an H200 a prefill of 8K takes 143 ms instead of
# 210, of which 20 are attention.
_FP8_SPEEDUP = 1.55
# Host seconds to launch one layer op by op: some 20 kernels, and the Python around them.
_LAYER_LAUNCH_S = 0.0008
_TILE_ROWS = 128  # of the kernels that run in waves


@dataclass(frozen=True, slots=True)
class Device:
    """Figures of one device as its vendor states them."""

    bytes_per_second: float
    flops_per_second: float  # 16-bit, dense
    num_processors: int | None = None  # where attention was seen to run in waves on them
    has_fp8: bool = True


@dataclass(frozen=True, slots=True)
class ModelWork:
    """What a decoder reads and multiplies."""

    num_layers: int
    row_flops: float  # mostly twice the weights that a row is multiplied by
    weight_bytes: float  # that a step of many rows reads
    position_flops: float  # of a row for each position that it attends to
    cache_bytes: float  # of one position, in the layers that attend to all of them
    stream_bytes: float = 0.0  # of a stream in a step, whatever its context: recurrent states, windows
    is_fp8: bool = False  # rows are multiplied by the weights in 8 bits, on devices that can


# By words of the name that the driver gives; the first match counts. From the vendors' data sheets.
DEVICES = {
    "GB200": Device(8.0e12, 2500e12),
    "B200": Device(8.0e12, 2250e12),
    "GH200": Device(4.0e12, 989e12, 132),
    "H200": Device(4.8e12, 989e12, 132),
    "H100 PCIe": Device(2.0e12, 756e12, 114),
    "H100 NVL": Device(3.9e12, 835e12, 132),
    "H100": Device(3.35e12, 989e12, 132),
    "H20": Device(4.0e12, 148e12),
    "A100-PCIE-40GB": Device(1.555e12, 312e12, has_fp8=False),
    "A100-SXM4-40GB": Device(1.555e12, 312e12, has_fp8=False),
    "A100": Device(2.0e12, 312e12, has_fp8=False),
    "L40S": Device(0.864e12, 362e12),
    "L40": Device(0.864e12, 181e12),
    "L4": Device(0.3e12, 121e12),
    "A10": Device(0.6e12, 125e12, has_fp8=False),
    "A10G": Device(0.6e12, 70e12, has_fp8=False),
    "RTX 5090": Device(1.79e12, 210e12),
    "RTX 4090": Device(1.008e12, 165e12),
    "RTX 3090": Device(0.936e12, 71e12, has_fp8=False),
    "RTX A6000": Device(0.768e12, 155e12, has_fp8=False),
    "V100": Device(0.9e12, 125e12, has_fp8=False),
    "T4": Device(0.32e12, 65e12, has_fp8=False),
    "MI300X": Device(5.3e12, 1307e12),
}


def known_device(name: str) -> Device | None:
    return next((device for part, device in DEVICES.items() if re.search(rf"\b{part}\b", name)), None)


class WaveKernel(Enum):
    """A kernel that runs in waves on Hopper GPUs."""

    FLASH_ATTENTION_3 = auto()  # a tile has the rows of all heads that share keys and values
    FLASHINFER = auto()  # a tile has the rows of one head


def attention_waves(
    num_heads: int, num_kv_heads: int, device: Device, kernel: WaveKernel = WaveKernel.FLASH_ATTENTION_3
) -> AttentionWaves | None:
    is_flashinfer = kernel is WaveKernel.FLASHINFER
    num_columns = num_heads if is_flashinfer else num_kv_heads  # of tiles
    if device.num_processors is None or num_columns > device.num_processors:
        return None
    tile_rows = max(1, _TILE_ROWS * num_columns // num_heads)
    return AttentionWaves(tile_rows, device.num_processors // num_columns, is_split=not is_flashinfer)


def roofline(model: ModelWork, device: Device, waves: AttentionWaves | None = None) -> StepCosts:
    arithmetic = _ARITHMETIC_EFFICIENCY * device.flops_per_second
    memory = _MEMORY_EFFICIENCY * device.bytes_per_second
    seconds_of_weights = model.weight_bytes / memory
    seconds_of_row = model.row_flops / (arithmetic * (_FP8_SPEEDUP if model.is_fp8 and device.has_fp8 else 1.0))
    seconds_of_position = model.position_flops / arithmetic
    return StepCosts(
        knee=round(seconds_of_weights / seconds_of_row),
        step=seconds_of_weights,
        row=seconds_of_row,
        attention=0.0 if waves else seconds_of_position,
        logits=model.stream_bytes / memory,
        wave_attention=seconds_of_position if waves else 0.0,
        context=model.cache_bytes / memory,
        launch=_LAYER_LAUNCH_S * model.num_layers,
    )
