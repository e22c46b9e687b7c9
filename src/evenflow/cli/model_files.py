"""Reads parts of a model without loading it: its tokenizer, and the sizes that determine its memory.

Takes any architecture, because vLLM may run it. Never imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from evenflow.advisor.memory import ModelShape
from evenflow.advisor.token_counts import TokenizerTokens
from evenflow.cli.output import engine_imports
from evenflow.errors import BrokenModel, ModelError
from evenflow.model.hub.cached_models import find_model

# Model families name the same sizes differently; the first name found counts. The last one is that of a GGUF header.
_SIZES = {
    "hidden_size": ("hidden_size", "n_embd", "d_model", "embedding_length"),
    "intermediate_size": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "feed_forward_length"),
    "num_layers": ("num_hidden_layers", "n_layer", "num_layers", "block_count"),
    "num_heads": ("num_attention_heads", "n_head", "num_heads", "attention.head_count"),
    "num_kv_heads": ("num_key_value_heads", "n_head_kv", "attention.head_count_kv"),
    "head_dim": ("head_dim", "attention.key_length"),
    "vocab_size": ("vocab_size",),
    "max_position": ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "context_length"),
}


@contextmanager
def _opened(model: str) -> Iterator[Path]:
    """The model's path. An error in the block names it, or the package to install."""
    path = find_model(model)
    try:
        with engine_imports("reading a model"):
            yield path
    except ModelError as error:
        raise type(error)(f"{path}: {error}") from error


def load_tokens(model: str) -> TokenizerTokens:
    """A counter from a Hugging Face folder, a GGUF file, or a tokenizer.json."""
    with _opened(model) as path:
        if path.is_dir() or path.suffix == ".json":
            from evenflow.model.formats.hf_tokenizer import read_hf_tokenizer

            return TokenizerTokens(read_hf_tokenizer(path if path.is_dir() else path.parent), path.name)
        from evenflow.model.formats.gguf_file import GgufFile
        from evenflow.model.formats.gguf_tokenizer import read_gguf_tokenizer

        return TokenizerTokens(read_gguf_tokenizer(GgufFile(path)), path.name)


def read_shape(model: str) -> ModelShape:
    """The sizes of a model, from its config.json or GGUF header."""
    with _opened(model) as path:
        config, value_bytes = _hf_config(path) if path.is_dir() else (_gguf_config(path), 2)
        sizes = _sizes(config)
    usual = {
        "intermediate_size": 4 * sizes["hidden_size"],
        "num_kv_heads": sizes["num_heads"],
        "head_dim": sizes["hidden_size"] // sizes["num_heads"],
        "max_position": 2048,
    }
    name = "default" if model == "default" else path.name
    return ModelShape(name=name, value_bytes=value_bytes, **(usual | sizes))


def _hf_config(folder: Path) -> tuple[Mapping[str, Any], int]:
    from evenflow.model.formats.hf_files import read_config_json

    file = read_config_json(folder)
    config = file.content.get("text_config", file.content)  # if the model also takes images
    dtype = config.get("dtype", config.get("torch_dtype", file.content.get("dtype")))
    return config, 4 if dtype == "float32" else 2


def _gguf_config(path: Path) -> dict[str, Any]:
    from evenflow.model.formats.gguf_file import GgufFile

    file = GgufFile(path)
    prefix = file.get("general.architecture", str) + "."
    config = {key.removeprefix(prefix): value for key, value in file.content.items() if key.startswith(prefix)}
    if not config.get("vocab_size"):
        config["vocab_size"] = len(file.get_list("tokenizer.ggml.tokens", str))
    return config


def _sizes(config: Mapping[str, Any]) -> dict[str, int]:
    found = {size: [config[name] for name in names if config.get(name) is not None] for size, names in _SIZES.items()}
    sizes = {size: values[0] for size, values in found.items() if values and type(values[0]) is int}
    missing = [size for size in ("hidden_size", "num_layers", "num_heads", "vocab_size") if sizes.get(size, 0) < 1]
    if missing:
        raise BrokenModel(f"cannot tell its sizes: no {', '.join(missing)}")
    return sizes
