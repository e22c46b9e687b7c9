"""The tokenizer of a Hugging Face folder, and the token ids that end an answer; reads no weights and needs no torch."""

import reprlib
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from evenflow.errors import BrokenModel
from evenflow.model.formats.hf_files import read_config_json, read_json, read_text
from evenflow.model.formats.typed_values import TypedValues
from evenflow.model.text.chat_template import ChatTemplate
from evenflow.model.text.tokenizer import Tokenizer, add_special_tokens_around
from evenflow.model.text.tokenizer_file import read_tokenizer_file

_SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


def read_hf_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer with its chat template; config.json need not be there."""
    config_file = read_json(folder, "config.json") or TypedValues("config.json", {})
    generation_file = read_json(folder, "generation_config.json")
    backend = _read_backend(folder)
    settings = read_json(folder, "tokenizer_config.json") or TypedValues("tokenizer_config.json", {})
    special_tokens = _special_tokens(folder, settings)
    ids = {name: backend.token_to_id(token) for name, token in special_tokens.items()}
    if "add_bos_token" in settings.content or "add_eos_token" in settings.content:
        add_special_tokens_around(
            backend,
            ids.get("bos_token") if settings.get("add_bos_token", bool, False) else None,
            ids.get("eos_token") if settings.get("add_eos_token", bool, False) else None,
        )
    return Tokenizer(
        backend,
        bos_token_id=ids.get("bos_token", config_file.optional("bos_token_id", int)),
        eos_token_ids=_eos_token_ids(config_file, generation_file, ids.get("eos_token")),
        chat_template=_chat_template(folder, settings, special_tokens),
    )


def read_or_make_tokenizer(folder: Path) -> Tokenizer:
    """The folder's own tokenizer, or one for random weights: as many words as the model has tokens, 5 is `w5`."""
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
        eos_token_ids=_eos_token_ids(config_file, None, None),
        chat_template=None,
    )


def _read_backend(folder: Path) -> tokenizers.Tokenizer:
    text = read_text(folder, "tokenizer.json")
    if text is None:
        raise BrokenModel("tokenizer.json is missing")
    return read_tokenizer_file(text)


def _special_tokens(folder: Path, settings: TypedValues) -> dict[str, str]:
    """The text of the special tokens by role; tokenizer_config.json wins over the older file."""
    older = read_json(folder, "special_tokens_map.json")
    named = {**(older.content if older else {}), **settings.content}
    tokens = {}
    for role in _SPECIAL_TOKENS:
        token = named.get(role)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            tokens[role] = text
    return tokens


def _eos_token_ids(
    config_file: TypedValues, generation_file: TypedValues | None, tokenizer_eos_id: int | None
) -> tuple[int, ...]:
    """All ids that end an answer: files name the end of text, the end of a turn, or both."""
    found: list[Any] = []
    for file in (generation_file, config_file):
        ids = file.content.get("eos_token_id") if file else None
        found += ids if isinstance(ids, list) else [ids]
    found.append(tokenizer_eos_id)
    for token_id in found:
        if token_id is not None and type(token_id) is not int:
            raise BrokenModel(f"eos_token_id is {reprlib.repr(token_id)}, expected an integer or a list of them")
    return tuple(dict.fromkeys(token_id for token_id in found if token_id is not None))


def _chat_template(folder: Path, settings: TypedValues, special_tokens: dict[str, str]) -> ChatTemplate | None:
    source = read_text(folder, "chat_template.jinja")
    if source is None:
        source = settings.content.get("chat_template")
    if isinstance(source, str):
        return ChatTemplate({"default": source}, special_tokens)
    if isinstance(source, list):
        sources = {str(entry.get("name")): entry.get("template") for entry in source if isinstance(entry, dict)}
        if all(isinstance(text, str) for text in sources.values()) and "default" in sources:
            return ChatTemplate(sources, special_tokens)
    if source is not None:
        raise BrokenModel(f"{settings.name}: chat_template is neither a text nor a list with a default one")
    return None
