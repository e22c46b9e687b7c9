"""What a model's files say about it without loading it: format, architecture, whether evenflow's own engine runs it.

Reads headers only and needs no torch.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from evenflow.errors import BrokenModel, MissingDependency, ModelError, UnsupportedModel
from evenflow.model.formats.hf_config import supported_architecture
from evenflow.model.formats.hf_files import parse_json, read_config_json, weight_files

_MAX_HEADER_BYTES = 100_000_000  # as in safetensors itself


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """`why_not`: why evenflow's own engine does not run it; None if it does."""

    format: str
    architecture: str | None
    num_bytes: int
    why_not: str | None


def inspect_model(path: Path) -> ModelFacts:
    """The facts about a Hugging Face folder or a GGUF file; BrokenModel if files are missing or truncated."""
    return _inspect_folder(path) if path.is_dir() else _inspect_gguf(path)


def describe_model(path: Path) -> ModelFacts:
    """The same for a list: a broken model is one that does not run."""
    try:
        return inspect_model(path)
    except (ModelError, MissingDependency) as error:
        return ModelFacts("safetensors" if path.is_dir() else "GGUF", None, num_bytes_of(path), str(error))


def num_bytes_of(path: Path) -> int:
    """Bytes of a file, or of all files in a folder."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


def _inspect_folder(folder: Path) -> ModelFacts:
    config = read_config_json(folder)
    architecture = ", ".join(map(str, config.get("architectures", list, [])))
    why_not = None
    try:
        supported_architecture(config)
    except UnsupportedModel as error:
        why_not = str(error)
    kinds: Counter[str] = Counter()
    for name in weight_files(folder) if why_not is None else ():
        kinds += _safetensors_kinds(folder / name)
    if why_not is None and not (folder / "tokenizer.json").is_file():
        raise BrokenModel("tokenizer.json is missing")
    return ModelFacts(_format("safetensors", kinds), architecture or None, num_bytes_of(folder), why_not)


def _safetensors_kinds(path: Path) -> Counter[str]:
    """The bytes of each tensor type, from the header; checks that the file is whole."""
    num_bytes = path.stat().st_size
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if not 0 < header_bytes <= min(num_bytes, _MAX_HEADER_BYTES):
            raise BrokenModel(f"{path.name} is not a safetensors file")
        header = file.read(header_bytes)
    kinds: Counter[str] = Counter()
    end = 0
    tensors = parse_json(f"the header of {path.name}", header)
    try:
        for name, tensor in tensors.content.items():
            if name != "__metadata__":
                first, last = tensor["data_offsets"]
                kinds[str(tensor["dtype"])] += last - first
                end = max(end, last)
    except (ValueError, KeyError, TypeError) as error:
        raise BrokenModel(f"{path.name} has a broken header: {error}") from error
    if 8 + header_bytes + end != num_bytes:
        raise BrokenModel(f"{path.name} has {num_bytes} bytes, its header says {8 + header_bytes + end}")
    return kinds


def _inspect_gguf(path: Path) -> ModelFacts:
    try:
        from evenflow.model.formats.gguf_config import supported_architecture
        from evenflow.model.formats.gguf_file import GgufFile
    except ImportError as error:
        raise MissingDependency(
            f"reading GGUF files needs {error.name}, which is not installed: pip install 'evenflow[engine]'"
        ) from error
    try:
        file = GgufFile(path)
    except UnsupportedModel as error:  # a tensor type
        return ModelFacts("GGUF", None, num_bytes_of(path), str(error))
    why_not = None
    try:
        supported_architecture(file)
    except UnsupportedModel as error:
        why_not = str(error)
    kinds: Counter[str] = Counter()
    for tensor in file.tensors.values():
        kinds[tensor.kind.name] += tensor.num_bytes
    return ModelFacts(_format("GGUF", kinds), file.optional("general.architecture", str), num_bytes_of(path), why_not)


def _format(name: str, kinds: Counter[str]) -> str:
    """The format and the tensor type that most bytes have."""
    return f"{name} {kinds.most_common(1)[0][0]}" if kinds else name
