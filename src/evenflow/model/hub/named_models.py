"""Models that `evenflow pull` gave a name: fetched from a URL, or links to folders and files of the user.

They are kept in `models` in evenflow's cache, as NAME.gguf or as the folder NAME. Uses no network.
"""

from __future__ import annotations

import re
from pathlib import Path

from evenflow.errors import InvalidInput, ModelNotFound
from evenflow.host import cache_folder
from evenflow.model.formats.inspection import inspect_model

GGUF, SAFETENSORS = ".gguf", ".safetensors"
_NAME = re.compile(r"\w[\w.-]*")


def models_folder() -> Path:
    return cache_folder() / "models"


def named_model(name: str) -> Path | None:
    """The folder or file that was pulled under this name."""
    if not _NAME.fullmatch(name):
        return None
    paths = (models_folder() / (name.removesuffix(GGUF) + GGUF), models_folder() / name)
    return next((path for path in paths if path.exists()), None)


def named_models() -> dict[str, Path]:
    """All of them, links whose target is gone included."""
    paths = [path for path in sorted(models_folder().glob("*")) if not path.name.startswith(".")]
    return {path.name.removesuffix(GGUF): path for path in paths}


def new_path(name: str, suffix: str) -> Path:
    """Where a model of this name and format goes; InvalidInput if the name cannot be used."""
    if not _NAME.fullmatch(name) or name == "default":
        raise InvalidInput(f"Got the name {name!r} but expected letters, digits, '_', '-' and '.', and not 'default'.")
    return models_folder() / (name.removesuffix(GGUF) + suffix)


def name_taken(name: str, where: Path) -> InvalidInput:
    return InvalidInput(
        f"{name} is the name of another model, {where}: give another with --name, or remove that one with "
        f"evenflow models rm {name}"
    )


def name_path(path: Path, name: str | None) -> str:
    """Give a folder or file of the user a name, once it is checked. It stays where it is."""
    path = _model_in(path.expanduser().absolute())
    name = (name or path.name).removesuffix(GGUF)
    link = new_path(name, GGUF if path.is_file() else "")
    inspect_model(path)
    current = named_models().get(name)
    if current is not None and current.resolve() != path.resolve():
        raise name_taken(name, current.resolve())
    if current is None:
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(path, target_is_directory=path.is_dir())
    return name


def _model_in(path: Path) -> Path:
    """The folder or GGUF file that is meant: a weight file stands for its folder, a folder for the file in it."""
    if path.suffix == SAFETENSORS and path.is_file():
        path = path.parent
    if path.is_dir() and not (path / "config.json").is_file():
        files = sorted(path.glob(f"*{GGUF}"))
        if len(files) != 1:
            found = f"{len(files)} .gguf files" if files else "no .gguf file"
            raise ModelNotFound(f"{path} holds no config.json and {found}: give a Hugging Face folder or a .gguf file")
        return files[0]
    if path.is_file() and path.suffix != GGUF:
        raise ModelNotFound(f"Got {path} but expected a Hugging Face folder, a .gguf or a .safetensors file.")
    return path
