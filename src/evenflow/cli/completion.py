"""Shell completion of option values. Runs at every Tab, so it must not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from evenflow.model.hub.cached_models import cached_models
from evenflow.model.hub.named_models import GGUF

POLICIES = {
    "target:200ms": "the largest chunks that keep every stream's next token in time",
    "target:200ms,paced": "the same, by an even pace: single gaps may be longer",
    "fixed:512": "at most this many tokens in a step, decodes first",
    "unchunked": "a prompt in one step",
    "alternate:128": "a chunk and a decode step in turn",
    "load": "a chunk size by load and prompt length",
    "adaptive": "a chunk size by recent step times",
    "prompt-length": "a chunk size by the length of the prompt",
}


def complete_policy(incomplete: str) -> Iterator[tuple[str, str]]:
    return ((policy, help) for policy, help in POLICIES.items() if policy.startswith(incomplete))


def complete_model(incomplete: str) -> Iterator[tuple[str, str]]:
    """Names, and models in the current folder. If none fits, the shell offers its files, as it does for paths."""
    found = {"default": "fetched at the first use"}
    found |= {model.name: f"cached: {model.path}" for model in cached_models()}
    for path in sorted(Path().iterdir()):
        if path.suffix == GGUF or (path / "config.json").is_file():
            found.setdefault(path.name, "in this folder")
    return ((name, help) for name, help in found.items() if name.startswith(incomplete))
