"""What a command can know of a model without loading it: its tokenizer, and the shape that its memory depends on.

Takes any architecture, since vLLM may run it. Must not know: weights; torch is never imported.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evenflow.advisor.memory import ModelShape
from evenflow.errors import BrokenModel, EvenflowError, InvalidRequest, MissingDependency, ModelError, ModelNotFound
from evenflow.model.default_model import default_model_path
from evenflow.workload.inputs import ChatInput, TextInput

if TYPE_CHECKING:
    from evenflow.model.tokenizer import Tokenizer

# Families call the same sizes by different names; the first that is there counts.
_SIZES = {
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "intermediate_size": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
    "num_layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "num_heads": ("num_attention_heads", "n_head", "num_heads"),
    "num_kv_heads": ("num_key_value_heads", "n_head_kv"),
    "head_dim": ("head_dim",),
    "vocab_size": ("vocab_size",),
    "max_position": ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
}
_GGUF_SIZES = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_layers": "block_count",
    "num_heads": "attention.head_count",
    "num_kv_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "vocab_size": "vocab_size",
    "max_position": "context_length",
}


class TokenizerTokens:
    """Counts with a model's own tokenizer, conversations by its chat template."""

    def __init__(self, tokenizer: Tokenizer, path: Path) -> None:
        self._tokenizer = tokenizer
        self.description = f"counted by the tokenizer of {path.name}"

    def count(self, text: TextInput | ChatInput) -> int:
        if isinstance(text, ChatInput) and self._tokenizer.has_chat_template:
            try:
                prompt = self._tokenizer.apply_chat_template(text.messages)
                return self._num_tokens(prompt, add_special_tokens=False)
            except InvalidRequest:  # roles that this template refuses: what is said still counts
                pass
        return self._num_tokens(text.text, add_special_tokens=True)

    def _num_tokens(self, text: str, add_special_tokens: bool) -> int:
        valid = text.encode("utf-8", "replace").decode()  # JSON can write half a character, tokenizers refuse it
        return len(self._tokenizer.encode(valid, add_special_tokens))


def find_model(model: str) -> Path:
    """The folder or file of a model: a path, `default`, or the name of one in Hugging Face's cache."""
    if model == "default":
        return default_model_path()
    path = Path(model).expanduser()
    if path.exists():
        return path
    home = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser()
    snapshots = (
        Path(os.environ.get("HF_HUB_CACHE") or home / "hub") / f"models--{model.replace('/', '--')}" / "snapshots"
    )
    found = sorted(snapshots.glob("*/config.json"), key=lambda file: file.stat().st_mtime)
    if not found:
        raise ModelNotFound(f"no model at {model}: give a Hugging Face folder, a .gguf file, or 'default'")
    return found[-1].parent


def load_tokens(model: str) -> TokenizerTokens:
    """The tokenizer of a Hugging Face folder, a GGUF file, or a tokenizer.json."""
    path = find_model(model)
    try:
        return TokenizerTokens(_read_tokenizer(path), path)
    except ImportError as error:
        if isinstance(error, EvenflowError):
            raise
        raise MissingDependency(
            f"tokenizers need {error.name}, which is not installed: pip install 'evenflow[engine]'"
        ) from error
    except ModelError as error:
        raise type(error)(f"{path}: {error}") from error


def _read_tokenizer(path: Path) -> Tokenizer:
    from evenflow.model.hf_tokenizer import read_hf_tokenizer

    if path.is_dir():
        return read_hf_tokenizer(path)
    if path.suffix == ".json":
        return read_hf_tokenizer(path.parent)
    from evenflow.model.gguf_file import GgufFile
    from evenflow.model.gguf_tokenizer import read_gguf_tokenizer

    return read_gguf_tokenizer(GgufFile(path))


def read_shape(model: str) -> ModelShape:
    """The sizes of a model."""
    path = find_model(model)
    try:
        sizes, value_bytes = _hf_sizes(path) if path.is_dir() else _gguf_sizes(path)
        return _shape(path.name if model != "default" else "default", sizes, value_bytes)
    except ModelError as error:
        raise type(error)(f"{path}: {error}") from error


def _hf_sizes(folder: Path) -> tuple[dict[str, int], int]:
    try:
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelNotFound("the folder holds no config.json, so it is not a Hugging Face model") from None
    except (OSError, ValueError) as error:
        raise BrokenModel(f"config.json cannot be read: {error}") from error
    if not isinstance(content, Mapping):
        raise BrokenModel("config.json holds no object")
    config = content.get("text_config", content)  # where the model also sees images
    dtype = config.get("dtype", config.get("torch_dtype", content.get("dtype")))
    return _sizes_in(config), 4 if dtype == "float32" else 2


def _sizes_in(config: Mapping[str, Any]) -> dict[str, int]:
    sizes = {}
    for size, names in _SIZES.items():
        value = next((config[name] for name in names if config.get(name) is not None), None)
        if type(value) is int:
            sizes[size] = value
    return sizes


def _gguf_sizes(path: Path) -> tuple[dict[str, int], int]:
    try:
        from evenflow.model.gguf_file import GgufFile
    except ImportError as error:
        raise MissingDependency(
            f"GGUF files need {error.name}, which is not installed: pip install 'evenflow[engine]'"
        ) from error
    file = GgufFile(path)
    architecture = file.get("general.architecture", str)
    found = {size: file.metadata.get(f"{architecture}.{key}") for size, key in _GGUF_SIZES.items()}
    found["vocab_size"] = found["vocab_size"] or len(file.get_list("tokenizer.ggml.tokens", str))
    return {size: value for size, value in found.items() if type(value) is int}, 2


def _shape(name: str, sizes: dict[str, int], value_bytes: int) -> ModelShape:
    missing = [size for size in ("hidden_size", "num_layers", "num_heads", "vocab_size") if sizes.get(size, 0) < 1]
    if missing:
        raise BrokenModel(f"its sizes are not known: no {', '.join(missing)}")
    usual = {
        "intermediate_size": 4 * sizes["hidden_size"],
        "num_kv_heads": sizes["num_heads"],
        "head_dim": sizes["hidden_size"] // sizes["num_heads"],
        "max_position": 2048,
    }
    return ModelShape(name=name, value_bytes=value_bytes, **(usual | sizes))
