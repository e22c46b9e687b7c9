"""Finds the folder or file of the model that `--model` names. Downloads only `default`, and never imports torch."""

from __future__ import annotations

import os
import re
from pathlib import Path

from evenflow.errors import ModelNotFound
from evenflow.model.config import SUPPORTED_FAMILIES
from evenflow.model.default_model import default_model_path

_HUB_NAME = re.compile(r"\w[\w.-]*(?:/\w[\w.-]*)?")
_FILE_SUFFIXES = (".gguf", ".json", ".safetensors")


def find_model(model: str | Path) -> Path:
    """The folder or file of a model: `default`, a path, or a name in Hugging Face's cache."""
    if str(model) == "default":
        return default_model_path()
    path = Path(model).expanduser()
    if path.exists():
        return path
    if (downloaded := _in_hub_cache(str(model))) is None:
        raise _not_found(str(model))
    return downloaded


def _in_hub_cache(name: str) -> Path | None:
    """The newest snapshot of a model that was downloaded under this name."""
    if not _HUB_NAME.fullmatch(name):
        return None
    home = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser()
    hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    snapshots = hub / f"models--{name.replace('/', '--')}" / "snapshots"
    found = sorted(snapshots.glob("*/config.json"), key=lambda file: file.stat().st_mtime)
    return found[-1].parent if found else None


def _not_found(model: str) -> ModelNotFound:
    message = f"no model at {model}: give a Hugging Face folder, a .gguf file, or 'default'"
    if _HUB_NAME.fullmatch(model) and not model.endswith(_FILE_SUFFIXES):
        message += (
            f". If it is a name on a model hub, download it first (hf download {model}); evenflow's own engine runs "
            f"{SUPPORTED_FAMILIES}. vLLM downloads by itself and runs most models: "
            f"evenflow serve --engine vllm --model {model} --tbt-target 50ms"
        )
    return ModelNotFound(message)
