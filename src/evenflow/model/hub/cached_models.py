"""The models on this machine: finds the one that `--model` names, lists them with their last use, and removes one.

Downloads only `default`, and never imports torch.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import quote

from evenflow.errors import InvalidInput, ModelNotFound
from evenflow.host import cache_folder
from evenflow.model.config import SUPPORTED_FAMILIES
from evenflow.model.hub.default_model import SMOLLM2_135M, default_model_path
from evenflow.model.hub.huggingface_cache import CachedRepository, cached_repositories, parse_hub_name
from evenflow.model.hub.named_models import GGUF, models_folder, named_model, named_models

_FILE_SUFFIXES = (".gguf", ".json", ".safetensors")
Source = Literal["default", "url", "link", "hub"]


@dataclass(frozen=True, slots=True)
class CachedModel:
    """`source`: the package index, a URL, a folder or file of the user, or Hugging Face's cache."""

    name: str
    path: Path
    source: Source

    @property
    def last_used(self) -> float | None:
        """Seconds since 1970; None if evenflow has not used it yet."""
        stamp = _stamp(self.name)
        return stamp.stat().st_mtime if stamp.is_file() else None


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
        return _named(name.removesuffix(GGUF), named)
    hub_name = parse_hub_name(name)
    found = CachedRepository(hub_name.repository).find(hub_name) if hub_name else None
    return CachedModel(str(found[0]), found[1], "hub") if found else None


def cached_models() -> list[CachedModel]:
    """All of them, by name."""
    return sorted(_find_all(), key=lambda model: model.name)


def cached_model(name: str) -> CachedModel:
    """The model of this name; ModelNotFound names the others."""
    found = cached_models()
    for model in found:
        if name in (model.name, f"{model.name}{GGUF}"):
            return model
    others = ", ".join(model.name for model in found)
    raise ModelNotFound(f"no model {name!r} is cached: " + (f"there are {others}" if others else "there is none"))


def note_use(name: str) -> None:
    """Remember that the model of this name is used now. Access times of files are too coarse, and often off."""
    with suppress(OSError):
        stamp = _stamp(name)
        stamp.parent.mkdir(parents=True, exist_ok=True)
        stamp.touch()


def remove_model(model: CachedModel) -> None:
    """Delete the model's files; of a link, only the link. What other models share stays."""
    try:
        _delete(model)
    except OSError as error:
        raise InvalidInput(f"{model.name} cannot be removed: {error.filename}: {error.strerror}") from error


def _delete(model: CachedModel) -> None:
    _stamp(model.name).unlink(missing_ok=True)
    if (name := parse_hub_name(model.name)) is not None and model.source == "hub":
        CachedRepository(name.repository).remove(name)
    elif model.path.is_dir() and not model.path.is_symlink():
        shutil.rmtree(model.path)
    else:
        model.path.unlink()
    (models_folder() / ".sources" / model.name).unlink(missing_ok=True)


def _find_all() -> Iterator[CachedModel]:
    if (default := cache_folder() / SMOLLM2_135M.file_name).is_file():
        yield CachedModel("default", default, "default")
    for name, path in named_models().items():
        yield _named(name, path)
    for repository in cached_repositories():
        for hub_name, path in repository.models():
            yield CachedModel(str(hub_name), path, "hub")


def _named(name: str, path: Path) -> CachedModel:
    return CachedModel(name, path, "link" if path.is_symlink() else "url")


def _stamp(name: str) -> Path:
    return models_folder() / ".used" / quote(name, safe="")


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
