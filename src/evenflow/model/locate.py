"""Finds the folder or file of the model that `--model` names. Downloads only `default`, and never imports torch."""

from __future__ import annotations

from pathlib import Path

from evenflow.errors import ModelNotFound
from evenflow.model.cached_models import CachedModel, note_use
from evenflow.model.config import SUPPORTED_FAMILIES
from evenflow.model.default_model import default_model_path
from evenflow.model.hub_cache import CachedRepository, parse_hub_name
from evenflow.model.named_models import named_model

_FILE_SUFFIXES = (".gguf", ".json", ".safetensors")


def find_model(model: str | Path) -> Path:
    """The folder or file of a model: `default`, a path, or the name of one that was pulled or downloaded."""
    name = str(model)
    if name == "default":
        note_use(name)
        return default_model_path()
    path = Path(model).expanduser()
    if path.exists():
        return path
    if (found := find_cached(name)) is None:
        raise _not_found(name)
    note_use(found.name)
    return found.path


def find_cached(name: str) -> CachedModel | None:
    """The model that was pulled, or is in Hugging Face's cache, under this name."""
    if (named := named_model(name)) is not None:
        return CachedModel(name.removesuffix(".gguf"), named, "link" if named.is_symlink() else "url")
    if (hub_name := parse_hub_name(name)) is None:
        return None
    repository = CachedRepository(hub_name.repository)
    found = repository.find(hub_name)
    return None if found is None else CachedModel(repository.name_of(found), found, "hub")


def _not_found(model: str) -> ModelNotFound:
    message = f"no model at {model}: give a Hugging Face folder, a .gguf file, or 'default'"
    hub_name = parse_hub_name(model)
    if hub_name is not None and (hub_name.file or not model.endswith(_FILE_SUFFIXES)):
        message += (
            f". If it is a name on a model hub, fetch it first (evenflow pull {model}); evenflow's own engine runs "
            f"{SUPPORTED_FAMILIES}. vLLM downloads by itself and runs most models: "
            f"evenflow serve --engine vllm --model {hub_name.repository} --tbt-target 50ms"
        )
    return ModelNotFound(message)
