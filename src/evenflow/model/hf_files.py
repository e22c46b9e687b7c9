"""What a Hugging Face folder holds: its JSON files and its weight files. Reads no tensor, and needs no torch."""

import json
from pathlib import Path

from evenflow.errors import BrokenModel
from evenflow.model.typed_values import TypedValues

_SINGLE_FILE = "model.safetensors"
_SHARD_INDEX = "model.safetensors.index.json"


def weight_files(folder: Path) -> list[str]:
    """The names of the safetensors files: one, or the shards of the index."""
    if (folder / _SINGLE_FILE).exists():
        return [_SINGLE_FILE]
    index = read_json(folder, _SHARD_INDEX)
    if index is None:
        raise BrokenModel(f"neither {_SINGLE_FILE} nor {_SHARD_INDEX} is there")
    shards = sorted(set(index.get("weight_map", dict).values()))
    for shard in shards:
        if not (folder / shard).is_file():
            raise BrokenModel(f"the shard {shard} is missing")
    return shards


def read_json(folder: Path, name: str) -> TypedValues | None:
    """The object in a JSON file, or None if there is no such file."""
    text = read_text(folder, name)
    if text is None:
        return None
    try:
        content = json.loads(text)
    except ValueError as error:
        raise BrokenModel(f"{name} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise BrokenModel(f"{name} holds {type(content).__name__}, expected an object")
    return TypedValues(name, content)


def read_text(folder: Path, name: str) -> str | None:
    """A file's text, or None if there is no such file."""
    try:
        return (folder / name).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise BrokenModel(f"{name} cannot be read: {error}") from error
