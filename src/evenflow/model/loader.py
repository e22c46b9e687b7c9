"""Opens the model that `--model` names: its configuration, tokenizer and weights."""

from dataclasses import dataclass
from pathlib import Path

from evenflow.errors import ModelError
from evenflow.model.config import ModelConfig
from evenflow.model.formats.gguf_model import read_gguf_model
from evenflow.model.formats.hf_folder import read_hf_folder, read_hf_shape
from evenflow.model.formats.hf_tokenizer import read_or_make_tokenizer
from evenflow.model.formats.weights import RandomWeights, Weights, select_weights
from evenflow.model.hub.cached_models import find_model
from evenflow.model.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """All that a decoder and an engine need; the weights are still on disk."""

    config: ModelConfig
    tokenizer: Tokenizer
    weights: Weights


def load_model(model: str | Path, *, is_dummy: bool = False) -> LoadedModel:
    """Open a model: `default`, a Hugging Face folder, a .gguf file, or the name of one that was pulled.

    A dummy has random weights; of a folder, config.json is then enough.
    """
    path = find_model(model)
    read = read_hf_folder if path.is_dir() else read_gguf_model
    try:
        if is_dummy and path.is_dir():
            config, tokenizer = read_hf_shape(path, read_or_make_tokenizer)
            return LoadedModel(config, tokenizer, RandomWeights.of(config))
        config, tokenizer, stored = read(path)
        if is_dummy:
            return LoadedModel(config, tokenizer, RandomWeights.of(config))
        return LoadedModel(config, tokenizer, select_weights(stored, config))
    except ModelError as error:
        raise type(error)(f"{path}: {error}") from error
