"""A tokenizer for models that have none: token 5 is written `w5`. For random weights, where text means nothing."""

from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from evenflow.model.hf_files import read_config_json
from evenflow.model.hf_tokenizer import eos_token_ids_of, read_hf_tokenizer
from evenflow.model.tokenizer import Tokenizer


def read_or_make_tokenizer(folder: Path) -> Tokenizer:
    """The folder's own tokenizer, or one of as many words as the model has tokens."""
    if (folder / "tokenizer.json").exists():
        return read_hf_tokenizer(folder)
    config_file = read_config_json(folder)
    # With sentencepiece's mark for the space before a word: decoding then gives the text back.
    vocabulary = {f"▁w{number}": number for number in range(config_file.get("vocab_size", int))}
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="▁w0"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    return Tokenizer(
        backend,
        bos_token_id=config_file.optional("bos_token_id", int),
        eos_token_ids=eos_token_ids_of(config_file, None, None),
        chat_template=None,
    )
