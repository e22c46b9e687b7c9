"""Shell completion of option values. Runs at every Tab, so it must not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from evenflow.core.policies import policy_kinds
from evenflow.model.hub.cached_models import cached_models
from evenflow.model.hub.named_models import GGUF


def complete_policy(incomplete: str) -> Iterator[tuple[str, str]]:
    examples = (example for kind in policy_kinds() for example in kind.examples.items())
    return ((policy, help) for policy, help in examples if policy.startswith(incomplete))


def complete_model(incomplete: str) -> Iterator[tuple[str, str]]:
    """Names, and models in the current folder. If none fits, the shell offers its files, as it does for paths."""
    found = {"default": "fetched at the first use"}
    found |= {model.name: f"cached: {model.path}" for model in cached_models()}
    for path in sorted(Path().iterdir()):
        if path.suffix == GGUF or (path / "config.json").is_file():
            found.setdefault(path.name, "in this folder")
    return ((name, help) for name, help in found.items() if name.startswith(incomplete))
