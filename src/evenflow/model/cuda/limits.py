"""GPU properties that determine kernel sizes."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch


class Limits(NamedTuple):
    num_processors: int
    shared_memory: int  # bytes per program
    memory: int  # bytes


@cache
def limits_of(device: torch.device) -> Limits:
    if device.type != "cuda":
        return Limits(16, 227 << 10, 8 << 30)  # for the interpreter: few processors, so that small tests split work too
    properties = torch.cuda.get_device_properties(device)
    # Not in torch's type hints.
    shared = getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
    return Limits(properties.multi_processor_count, int(shared), properties.total_memory)
