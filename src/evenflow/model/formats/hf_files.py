"""What a Hugging Face folder holds: its JSON files and its weight files. Reads no tensor, and needs no torch."""

import json
import os
import reprlib
from pathlib import Path

from evenflow.errors import BrokenModel, ModelNotFound
from evenflow.model.formats.typed_values import TypedValues

_SINGLE_FILE = "model.safetensors"
_SHARD_INDEX = "model.safetensors.index.json"
# Of files that are read whole: several times what the largest models have.
_MAX_BYTES = 256 << 20
_MAX_JSON_BYTES = 16 << 20
MAX_CONFIG_BYTES = 1 << 20


def weight_files(folder: Path) -> list[str]:
    """The names of the safetensors files: one, or the shards of the index."""
    if os.path.isfile(folder / _SINGLE_FILE):  # not a pipe, which would never end
        return [_SINGLE_FILE]
    index = read_json(folder, _SHARD_INDEX)
    if index is None:
        raise BrokenModel(f"neither {_SINGLE_FILE} nor {_SHARD_INDEX} is there")
    shards = set()
    for tensor, shard in index.get("weight_map", dict).items():
        if not isinstance(shard, str) or not shard or {"/", "\\", "\0"} & set(shard):
            raise BrokenModel(f"{_SHARD_INDEX}: the shard of {tensor} is {reprlib.repr(shard)}, expected a file's name")
        shards.add(shard)
    for shard in shards:
        # os.path also takes names that no file can have for missing files.
        if not os.path.isfile(folder / shard):
            raise BrokenModel(f"the shard {shard} is missing")
    return sorted(shards)


def read_config_json(folder: Path) -> TypedValues:
    """config.json; ModelNotFound if it is not there."""
    if (config := read_json(folder, "config.json")) is None:
        raise ModelNotFound("the folder holds no config.json, so it is not a Hugging Face model")
    return config


def read_json(folder: Path, name: str) -> TypedValues | None:
    """The object in a JSON file, or None if there is no such file."""
    text = read_text(folder, name, MAX_CONFIG_BYTES if name == "config.json" else _MAX_JSON_BYTES)
    return None if text is None else parse_json(name, text)


def parse_json(name: str, text: str | bytes) -> TypedValues:
    """The object in a JSON text; BrokenModel if there is none."""
    try:
        content = json.loads(text)
    except ValueError as error:
        raise BrokenModel(f"{name} is not valid JSON: {error}") from error
    except RecursionError:
        raise BrokenModel(f"{name} is nested too deeply") from None
    if not isinstance(content, dict):
        raise BrokenModel(f"{name} holds {type(content).__name__}, expected an object")
    return TypedValues(name, content)


def read_text(folder: Path, name: str, max_bytes: int = _MAX_BYTES) -> str | None:
    """A file's text, or None if there is no such file."""
    path = folder / name
    if not os.path.isfile(path):
        return None
    try:
        if (num_bytes := path.stat().st_size) > max_bytes:
            raise BrokenModel(f"{name} has {num_bytes} bytes, expected at most {max_bytes}")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BrokenModel(f"{name} cannot be read: {error}") from error
