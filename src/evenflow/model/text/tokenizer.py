"""Text to token ids and back, whole or one token at a time."""

import codecs
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple, Self

import tokenizers
from tokenizers import processors

from evenflow.errors import InvalidRequest, printable
from evenflow.model.config import unsupported
from evenflow.model.text.chat_template import ChatTemplate
from evenflow.model.text.special_tokens import BREAK, SpecialTokens
from evenflow.model.text.tokenizer_file import is_library_error
from evenflow.model.text.tool_messages import Message

_SHORT_CHARACTERS = 2000  # longer texts are encoded by the call that lets other threads run
_PIECE_CHARACTERS = 1 << 16
_SEPARATOR = "\x02"  # a text that no vocabulary joins with another
_SENTENCEPIECE_SPACE = "▁"
_SENTENCEPIECE_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_INFILL_TOKENS = (  # before the prefix, before the suffix, before the text to fill in
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
)


class Tokenizer:
    """One model's vocabulary, special tokens and chat template."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_token_id: int | None,
        eos_token_ids: tuple[int, ...],
        chat_template: ChatTemplate | None,
    ) -> None:
        # Files may hold the truncation and padding of a training run; a prompt is served whole.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.chat_template = chat_template
        self._piece_to_bytes, self.strips_leading_space = _piece_decoder(backend)
        added_tokens = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, added in added_tokens.items() if added.special)
        self._bytes_of_token = {token_id: added.content.encode() for token_id, added in added_tokens.items()}
        self.bos_token_id = bos_token_id
        self.eos_token_ids = eos_token_ids
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of `text`; special tokens written in it are recognised either way."""
        try:
            if len(text) > _SHORT_CHARACTERS:
                return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError as error:  # a lone surrogate: JSON can write one, UTF-8 cannot
            raise InvalidRequest(f"the text is not valid Unicode: {text[:40]!r}") from error
        except BaseException as error:
            if not is_library_error(error):
                raise
            raise InvalidRequest(f"the model's tokenizer fails on this text: {printable(str(error))}") from error

    def surely_exceeds(self, text: str, num_tokens: int) -> bool:
        """Whether a long text has more tokens than this, found piece by piece.

        The library takes hundreds of bytes for each token of a text that it encodes.
        """
        found = 0
        for first in range(0, len(text), _PIECE_CHARACTERS):
            piece = text[first : first + _PIECE_CHARACTERS]
            # A cut adds no more tokens than the bytes of the one that it divides.
            found += len(self.encode(piece, add_special_tokens=False)) - self.longest_token_bytes
            if found > num_tokens:
                return True
        return False

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of these ids; ids outside the vocabulary give none."""
        stream = StreamDecoder(self, skip_special_tokens=skip_special_tokens)
        return "".join(map(stream.push, token_ids)) + stream.flush()

    def stream_decoder(self, prompt_token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> "StreamDecoder":
        """A decoder for the answer to this prompt."""
        return StreamDecoder(self, prompt_token_ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes of a token, often only part of a character."""
        known = self._bytes_of_token.get(token_id)
        if known is None:
            piece = self._backend.id_to_token(token_id)
            known = self._bytes_of_token[token_id] = b"" if piece is None else self._piece_to_bytes(piece)
        return known

    def token_id(self, piece: str) -> int | None:
        """The id of a token by its text in the vocabulary, None if there is none."""
        found: int | None = self._backend.token_to_id(piece)
        return found

    @cached_property
    def longest_token_bytes(self) -> int:
        """No text of more than this times n bytes fits into n tokens."""
        return max(map(len, self.all_token_bytes()), default=1)

    def all_token_bytes(self) -> Iterator[bytes]:
        """`token_bytes` of the whole vocabulary, in any order."""
        return map(self._piece_to_bytes, self._backend.get_vocab())

    def is_special(self, token_id: int) -> bool:
        """Whether a token is a control token rather than text."""
        return token_id in self._special_ids

    @cached_property
    def special_tokens(self) -> SpecialTokens:
        """The control tokens by their text."""
        return SpecialTokens(self.token_bytes(token_id).decode() for token_id in self._special_ids)

    @property
    def has_chat_template(self) -> bool:
        return self.chat_template is not None

    def apply_chat_template(self, messages: Sequence[Message], **options: Any) -> str:
        """The prompt for a conversation; `options` are those of `ChatTemplate.render`.

        It holds its special tokens: encode it with `add_special_tokens=False`.
        """
        if self.chat_template is None:
            raise InvalidRequest("this model has no chat template: send plain text instead of messages")
        return self.chat_template.render(messages, **options)

    def encode_chat(self, messages: Sequence[Message], **options: Any) -> list[int]:
        """The token ids of a conversation. What people wrote in it never becomes a control token."""
        return self.encode_rendered(self.apply_chat_template(messages, protected=self.special_tokens, **options))

    def encode_rendered(self, text: str) -> list[int]:
        """The token ids of a rendered conversation, piece by piece where special tokens are broken."""
        first, *others = text.split(BREAK)
        token_ids = self.encode(first, add_special_tokens=False)
        for piece in others:
            token_ids += self.encode_inside(piece)
        return token_ids

    def encode_inside(self, text: str) -> list[int]:
        """The token ids of this text inside a longer one: sentencepiece begins every text with a space."""
        if not self.strips_leading_space:
            return self.encode(text, add_special_tokens=False)
        before = self.encode(_SEPARATOR, add_special_tokens=False)
        return self.encode(_SEPARATOR + text, add_special_tokens=False)[len(before) :]


class InfillTokens(NamedTuple):
    """The special tokens in a prompt for the text between a prefix and a suffix."""

    prefix: int
    suffix: int
    middle: int

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Self | None:
        """None if the model has none: it was not trained to fill in text."""
        for names in _INFILL_TOKENS:
            prefix, suffix, middle = map(tokenizer.token_id, names)
            if prefix is not None and suffix is not None and middle is not None:
                return cls(prefix, suffix, middle)
        return None

    def prompt(self, before: list[int], after: list[int]) -> list[int]:
        return [self.prefix, *before, self.suffix, *after, self.middle]


class StreamDecoder:
    """Turns the tokens of one answer into text as they come.

    A character split over several tokens comes with the last of them. Sentencepiece puts a space before every word: the
    first one is dropped, unless `prompt_ids` hold text that the answer continues.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Iterable[int] = (), *, skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._drops_space = tokenizer.strips_leading_space and not any(map(self._bytes, prompt_ids))

    def push(self, token_id: int) -> str:
        """The text that this token completes, if any."""
        text_bytes = self._bytes(token_id)
        if self._drops_space and text_bytes:
            text_bytes = text_bytes.removeprefix(b" ")
            self._drops_space = False
        return self._utf8.decode(text_bytes)

    def flush(self) -> str:
        """The rest at the end: a replacement character if the last one is incomplete."""
        return self._utf8.decode(b"", final=True)

    def _bytes(self, token_id: int) -> bytes:
        if self._skip_special_tokens and self._tokenizer.is_special(token_id):
            return b""
        return self._tokenizer.token_bytes(token_id)


def add_special_tokens_around(
    backend: tokenizers.Tokenizer, first_token_id: int | None, last_token_id: int | None
) -> None:
    """Make `backend` put these tokens around every text it encodes with special tokens."""
    # Named by their place: a token's text may contain the template's own notation.
    named = {"first": first_token_id, "last": last_token_id}
    special_tokens = [
        {"id": name, "ids": [token_id], "tokens": [backend.id_to_token(token_id)]}
        for name, token_id in named.items()
        if token_id is not None
    ]
    first = [] if first_token_id is None else ["first:0"]
    last = [] if last_token_id is None else ["last:0"]
    backend.post_processor = processors.TemplateProcessing(
        single=[*first, "$A:0", *last], special_tokens=special_tokens
    )


def _piece_decoder(backend: tokenizers.Tokenizer) -> tuple[Callable[[str], bytes], bool]:
    """How this vocabulary writes bytes, and whether decoding drops a text's first space."""
    steps = _decoder_steps(backend)
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds:
        return _byte_level_bytes, False
    if kinds & {"ByteFallback", "Metaspace"}:
        strips = any(
            (step["type"] == "Strip" and step["start"] > 0)
            or (step["type"] == "Metaspace" and step["prepend_scheme"] != "never")
            for step in steps
        )
        return _sentencepiece_bytes, strips
    raise unsupported(f"a tokenizer that decodes by {', '.join(sorted(kinds)) or 'nothing'}")


def _decoder_steps(backend: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    if backend.decoder is None:
        return []
    decoder: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    return decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]


def _byte_of_character() -> dict[str, int]:
    # Byte-level vocabularies write a printable byte as its Latin-1 character, all others as U+0100 and up.
    printable = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
    others = sorted(set(range(0x100)) - set(printable))
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_of_character()


def _byte_level_bytes(piece: str) -> bytes:
    try:
        return bytes([_BYTE_OF_CHARACTER[character] for character in piece])
    except KeyError:  # not in byte-level notation
        return piece.encode()


def _sentencepiece_bytes(piece: str) -> bytes:
    if byte := _SENTENCEPIECE_BYTE.fullmatch(piece):
        return bytes.fromhex(byte[1])
    return piece.replace(_SENTENCEPIECE_SPACE, " ").encode()
