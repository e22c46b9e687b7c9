"""A model from a Hugging Face folder: configuration, tokenizer and safetensors, read without transformers."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from evenflow.errors import BrokenModel
from evenflow.model.config import ModelConfig, unsupported
from evenflow.model.formats.hf_config import read_config, supported_architecture
from evenflow.model.formats.hf_files import read_config_json, weight_files
from evenflow.model.formats.hf_tokenizer import read_hf_tokenizer
from evenflow.model.formats.weights import StoredTensor
from evenflow.model.text.tokenizer import Tokenizer

_DTYPES = ("F32", "F16", "BF16")


def read_hf_folder(folder: Path) -> tuple[ModelConfig, Tokenizer, dict[str, StoredTensor]]:
    """The configuration, tokenizer and tensors of a Hugging Face folder."""
    config, tokenizer = read_hf_shape(folder, read_hf_tokenizer)
    return config, tokenizer, _stored_tensors(folder)


def read_hf_shape(folder: Path, read_tokenizer: Callable[[Path], Tokenizer]) -> tuple[ModelConfig, Tokenizer]:
    """Without the tensors, which need not be there."""
    config_file = read_config_json(folder)
    supported_architecture(config_file)  # first: a model that cannot run may also lack files that only evenflow needs
    tokenizer = read_tokenizer(folder)
    return read_config(config_file, tokenizer.bos_token_id, tokenizer.eos_token_ids), tokenizer


def _stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    stored: dict[str, StoredTensor] = {}
    for name in weight_files(folder):
        stored |= _tensors_of(folder, name)
    return stored


def _tensors_of(folder: Path, name: str) -> dict[str, StoredTensor]:
    stored = {}
    try:
        file: Any = safe_open(folder / name, framework="pt")
        for key in file.keys():  # noqa: SIM118 - not a mapping
            part = file.get_slice(key)
            if part.get_dtype() not in _DTYPES:
                raise unsupported(f"{name}: the tensor type {part.get_dtype()} of {key}")
            read: Callable[[], torch.Tensor] = partial(file.get_tensor, key)
            stored[key.removeprefix("model.")] = StoredTensor(tuple(part.get_shape()), read)
    except (SafetensorError, OSError) as error:
        raise BrokenModel(f"{name} cannot be read: {error}") from error
    return stored
