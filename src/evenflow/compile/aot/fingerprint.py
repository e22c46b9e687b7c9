"""The name under which a model's package is kept: it changes with all that the package depends on.

Must not know: where packages lie.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
from pathlib import Path
from typing import Any

import torch
import transformers

_FORMAT = 2  # of packages, manifests, and the options that packages are made with
_SAMPLED_VALUES = 1024
_CPU_INFO = Path("/proc/cpuinfo")


def artifact_key(module: Any, model_id: str, options: dict[str, Any]) -> str:
    """A readable part and a hash of weights, configuration, versions, device and options."""
    device = next(module.parameters()).device
    facts = {
        "format": _FORMAT,
        "class": f"{type(module).__module__}.{type(module).__qualname__}",
        "config": module.config.to_dict(),
        "attention": module.config._attn_implementation,
        "weights": weights_fingerprint(module),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": describe_device(device),
        "options": options,
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()
    return f"{re.sub(r'[^A-Za-z0-9._-]+', '-', model_id)[:60].strip('.-') or 'model'}-{digest[:32]}"


def weights_fingerprint(module: Any) -> str:
    """Names, shapes, types and evenly spaced values of all weights.

    A package holds no weights, it runs with those in memory; so samples do, where hashing all would take seconds.
    """
    digest = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        flat = tensor.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // _SAMPLED_VALUES)].cpu().contiguous()
        digest.update(sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def describe_device(device: torch.device) -> str:
    """What machine code is made for."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"cuda {major}.{minor} {torch.version.cuda}"
    capability = torch.backends.cpu.get_cpu_capability() if device.type == "cpu" else ""
    return f"{device.type} {platform.machine()} {capability} {_cpu_features()} threads={torch.get_num_threads()}"


def _cpu_features() -> str:
    """All instruction sets: Inductor compiles for this very CPU, torch names the widest vectors only."""
    try:
        found = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", _CPU_INFO.read_text(), re.MULTILINE)
    except OSError:  # not Linux
        return ""
    return found[1] if found else ""
