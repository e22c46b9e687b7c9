"""Builds a tokenizer from the vocabulary inside a GGUF file.

The file holds tokens and merges or scores, but only the name of its pre-tokenizer: the table of those is here.
"""

from collections import Counter
from dataclasses import dataclass

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from evenflow.errors import BrokenModel
from evenflow.model.config import unsupported
from evenflow.model.formats.gguf_file import GgufFile
from evenflow.model.text.chat_template import ChatTemplate
from evenflow.model.text.tokenizer import Tokenizer, add_special_tokens_around
from evenflow.model.text.tokenizer_file import is_library_error

_MAX_CHARACTERS = 4096  # of a token: every way to cut it in two is tried
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4

# Files often name only one end of text, not always the one that ends an answer in a conversation.
_END_OF_ANSWER = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|endoftext|>")


@dataclass(frozen=True, slots=True)
class _Splitter:
    """How text is split into words before the merges: by each pattern in turn, keeping the text between matches."""

    patterns: tuple[str, ...]
    normalizes: bool = False
    prefers_whole_words: bool = False
    adds_bos: bool = False


_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_THREE_DIGITS = _WORDS + r"\p{N}{1,3}" + _REST
_ONE_DIGIT = _WORDS + r"\p{N}" + _REST
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_WORDS = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|"
_TEKKEN = _CASED_WORDS + r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"

_GPT2 = _Splitter((_GPT2_WORDS,))
_DIGIT_BY_DIGIT = _Splitter((r"\p{N}", _GPT2_WORDS))
_LLAMA3 = _Splitter((_THREE_DIGITS,), prefers_whole_words=True, adds_bos=True)
_QWEN2 = _Splitter((_ONE_DIGIT,), normalizes=True)

_SPLITTERS = {
    "default": _Splitter((r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": _GPT2,
    "mellum": _GPT2,
    "smollm": _DIGIT_BY_DIGIT,
    "starcoder": _DIGIT_BY_DIGIT,
    "refact": _DIGIT_BY_DIGIT,
    "minerva-7b": _DIGIT_BY_DIGIT,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "pixtral": _LLAMA3,
    "smaug-bpe": _Splitter((_THREE_DIGITS,)),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "megrez": _QWEN2,
    "tekken": _Splitter((_TEKKEN,), prefers_whole_words=True, adds_bos=True),
}


def read_gguf_tokenizer(file: GgufFile) -> Tokenizer:
    """The tokenizer of a GGUF file, built from its metadata."""
    tokens = file.get_list("tokenizer.ggml.tokens", str)
    if len(set(tokens)) != len(tokens):
        twice, _ = Counter(tokens).most_common(1)[0]
        raise BrokenModel(f"the vocabulary holds the token {twice!r} more than once")
    if (longest := max(map(len, tokens), default=0)) > _MAX_CHARACTERS:
        raise BrokenModel(f"a token has {longest} characters, expected at most {_MAX_CHARACTERS}")
    types = file.get_list("tokenizer.ggml.token_type", int, [_NORMAL] * len(tokens))
    if len(types) != len(tokens):
        raise BrokenModel(f"{len(types)} token types for {len(tokens)} tokens")
    kind = file.get("tokenizer.ggml.model", str)
    if kind == "gpt2":
        splitter = _splitter(file)
        backend, adds_bos = _byte_level_backend(file, tokens, splitter), splitter.adds_bos
    elif kind == "llama":
        backend, adds_bos = _sentencepiece_backend(file, tokens, types), True
    else:
        raise unsupported(f"the tokenizer model {kind!r}")
    _mark_special_tokens(backend, tokens, types)
    bos, eos = _token_id(file, "bos", tokens), _token_id(file, "eos", tokens)
    add_special_tokens_around(
        backend,
        bos if file.get("tokenizer.ggml.add_bos_token", bool, adds_bos) else None,
        eos if file.get("tokenizer.ggml.add_eos_token", bool, False) else None,
    )
    ends, template = _end_ids(file, tokens, types), _chat_template(file, tokens)
    return Tokenizer(backend, bos_token_id=bos, eos_token_ids=ends, chat_template=template)


def _splitter(file: GgufFile) -> _Splitter:
    name = file.get("tokenizer.ggml.pre", str, "")
    if not name:
        raise BrokenModel("tokenizer.ggml.pre, which says how words are split, is missing: convert the model again")
    if name not in _SPLITTERS:
        raise unsupported(f"the pre-tokenizer {name!r}")
    return _SPLITTERS[name]


def _byte_level_backend(file: GgufFile, tokens: list[str], splitter: _Splitter) -> tokenizers.Tokenizer:
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    pairs = (merge.partition(" ") for merge in file.get_list("tokenizer.ggml.merges", str))
    merges = [(left, right) for left, _, right in pairs]
    try:
        model = models.BPE(vocab=ids, merges=merges, ignore_merges=splitter.prefers_whole_words)
    except BaseException as error:
        if not is_library_error(error):
            raise
        raise BrokenModel(f"tokenizer.ggml.merges do not fit the vocabulary ({error})") from None
    backend = tokenizers.Tokenizer(model)
    if splitter.normalizes:
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in splitter.patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece_backend(file: GgufFile, tokens: list[str], types: list[int]) -> tokenizers.Tokenizer:
    scores = file.get_list("tokenizer.ggml.scores", float)
    if len(scores) != len(tokens):
        raise BrokenModel(f"{len(scores)} scores for {len(tokens)} tokens")
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == _UNKNOWN), None)
    score_of = {token: score for token, score, kind in zip(tokens, scores, types, strict=True) if kind == _NORMAL}
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={token: token_id for token_id, token in enumerate(tokens)},
            merges=_merges_by_score(score_of),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefixes_space = file.get("tokenizer.ggml.add_space_prefix", bool, True)
    replace = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if prefixes_space else replace
    decoding = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefixes_space:
        decoding.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(decoding)
    return backend


def _merges_by_score(score_of: dict[str, float]) -> list[tuple[str, str]]:
    """Every way to make a token of two others, best token first: the merges that sentencepiece tries."""
    merges = []
    for token in sorted(score_of, key=lambda token: -score_of[token]):
        halves = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        merges += [(left, right) for left, right in halves if left in score_of and right in score_of]
    return merges


def _mark_special_tokens(backend: tokenizers.Tokenizer, tokens: list[str], types: list[int]) -> None:
    marked = [
        AddedToken(token, special=kind != _USER_DEFINED, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]
    backend.add_tokens(marked)


def _token_id(file: GgufFile, name: str, tokens: list[str]) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    if key not in file.content:
        return None
    token_id = file.get(key, int)
    if not 0 <= token_id < len(tokens):
        raise BrokenModel(f"{key} is {token_id}, the vocabulary has {len(tokens)} tokens")
    return token_id


def _end_ids(file: GgufFile, tokens: list[str], types: list[int]) -> tuple[int, ...]:
    named = (_token_id(file, name, tokens) for name in ("eos", "eot", "eom"))
    known = (i for i, token in enumerate(tokens) if types[i] == _CONTROL and token in _END_OF_ANSWER)
    return tuple(dict.fromkeys(token_id for token_id in (*named, *known) if token_id is not None))


def _chat_template(file: GgufFile, tokens: list[str]) -> ChatTemplate | None:
    key = "tokenizer.chat_template"
    sources = {"default": file.get(key, str, "")}
    if f"{key}.tool_use" in file.content:
        sources["tool_use"] = file.get(f"{key}.tool_use", str)
    if not sources["default"]:
        return None
    names = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    ids = {variable: _token_id(file, name, tokens) for variable, name in names.items()}
    return ChatTemplate(sources, {name: tokens[i] for name, i in ids.items() if i is not None})
