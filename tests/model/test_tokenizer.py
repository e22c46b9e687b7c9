"""Tokenizers: those built from GGUF metadata against the originals, decoding, streaming, chat templates."""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from evenflow.errors import InvalidRequest, UnsupportedModel
from evenflow.model.formats.gguf_file import GgufFile
from evenflow.model.formats.gguf_tokenizer import read_gguf_tokenizer
from evenflow.model.text.chat_template import ChatTemplate
from evenflow.model.text.tokenizer import StreamDecoder, Tokenizer
from tests.gguf_files import add_byte_level_vocabulary, finish
from tests.models import VARIED_TEXTS, byte_level_tokenizer, default_model_path, stories260k_vocabulary

ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


def split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(pattern), "isolated")


# The pre-tokenizers as they are written in the tokenizer.json of SmolLM2, GPT-2, Llama 3, Qwen 2 and Mistral Nemo.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ORIGINALS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "smollm": lambda: byte_level_tokenizer(pre_tokenizers.Digits(individual_digits=True)),
    "gpt-2": byte_level_tokenizer,
    "llama-bpe": lambda: byte_level_tokenizer(split(LLAMA3), gpt2_words=False, ignore_merges=True),
    "qwen2": lambda: byte_level_tokenizer(split(QWEN2), gpt2_words=False, normalizer=normalizers.NFC()),
    "tekken": lambda: byte_level_tokenizer(split(TEKKEN), gpt2_words=False, ignore_merges=True),
}


@cache
def original_and_rebuilt(splitter: str, folder: Path) -> tuple[tokenizers.Tokenizer, Tokenizer]:
    original = ORIGINALS[splitter]()
    writer = gguf.GGUFWriter(folder / f"{splitter}.gguf", "llama")
    add_byte_level_vocabulary(writer, original, splitter)
    return original, read_gguf_tokenizer(GgufFile(finish(writer)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokenizers")


@pytest.mark.parametrize("splitter", ORIGINALS)
def test_byte_level_vocabularies_from_gguf(splitter: str, folder: Path) -> None:
    original, rebuilt = original_and_rebuilt(splitter, folder)

    @settings(deadline=None, max_examples=150)
    @given(text=ANY_TEXT | st.sampled_from(VARIED_TEXTS) | st.text("0123456789 \n\r'sSré½/A", max_size=20))
    def check(text: str) -> None:
        for add_special_tokens in (True, False):
            expected = original.encode(text, add_special_tokens=add_special_tokens).ids
            assert rebuilt.encode(text, add_special_tokens) == expected
        assert rebuilt.decode(expected) == original.decode(expected)

    check()


def test_the_default_splitter_cuts_at_punctuation_and_every_three_digits(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    add_byte_level_vocabulary(writer, byte_level_tokenizer(), "default")
    tokenizer = read_gguf_tokenizer(GgufFile(finish(writer)))
    parts = ("the", "!?", "123", "456", "7", " then", "'s")
    assert tokenizer.encode("".join(parts), False) == [i for part in parts for i in tokenizer.encode(part, False)]


@settings(deadline=None)
@given(token_ids=st.lists(st.integers(0, 520), max_size=30), skip=st.booleans())
def test_any_ids_decode_as_the_original_decodes_them(folder: Path, token_ids: list[int], skip: bool) -> None:
    original, rebuilt = original_and_rebuilt("gpt-2", folder)
    text = rebuilt.decode(token_ids, skip_special_tokens=skip)
    assert text == original.decode(token_ids, skip_special_tokens=skip)
    stream = StreamDecoder(rebuilt, skip_special_tokens=skip)
    assert "".join(map(stream.push, token_ids)) + stream.flush() == text


def best_score_merges(text: str, tokens: Sequence[str], scores: Sequence[float]) -> list[int]:
    """Sentencepiece's rule, in the plainest way: join the neighbours that make the best token, until none do."""
    ids = {token: i for i, token in enumerate(tokens) if i >= 259}
    pieces = list(("▁" + text).replace(" ", "▁")) if text else []
    while True:
        joined = [left + right for left, right in pairwise(pieces)]
        known = [i for i, piece in enumerate(joined) if piece in ids]
        if not known:
            break
        best = max(known, key=lambda i: (scores[ids[joined[i]]], -i))
        pieces[best : best + 2] = [joined[best]]
    return [i for piece in pieces for i in ([ids[piece]] if piece in ids else [3 + byte for byte in piece.encode()])]


@cache
def sentencepiece(folder: Path, prefixes_space: bool = True) -> Tokenizer:
    tokens, scores = stories260k_vocabulary()
    writer = gguf.GGUFWriter(folder / f"spm-{prefixes_space}.gguf", "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    kinds = gguf.TokenType
    writer.add_token_types([kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL] + [kinds.BYTE] * 256 + [kinds.NORMAL] * 253)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if not prefixes_space:
        writer.add_add_space_prefix(False)
    return read_gguf_tokenizer(GgufFile(finish(writer)))


@settings(deadline=None, max_examples=200)
@given(text=ANY_TEXT | st.sampled_from(VARIED_TEXTS) | st.text("abehnst theo\n.,'", max_size=60))
@example(text="▁ ▁a")
def test_sentencepiece_vocabularies_from_gguf(folder: Path, text: str) -> None:
    tokens, scores = stories260k_vocabulary()
    tokenizer = sentencepiece(folder)
    expected = best_score_merges(text, tokens, scores)
    assert tokenizer.encode(text) == [1, *expected]
    text = text.replace("▁", " ")  # which is how such vocabularies write a space
    assert tokenizer.decode(tokenizer.encode(text)) == text
    # An answer that continues a text keeps the space before its first word.
    stream = StreamDecoder(tokenizer, prompt_ids=tokenizer.encode("Once"))
    assert "".join(map(stream.push, expected)) + stream.flush() == (" " + text if text else "")


def test_sentencepiece_without_a_space_in_front(folder: Path) -> None:
    tokenizer = sentencepiece(folder, prefixes_space=False)
    for text in ("the", " the", "x the"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("the")[1] != tokenizer.encode(" the")[1]


def test_special_tokens_in_a_sentencepiece_text(folder: Path) -> None:
    tokenizer = sentencepiece(folder)
    assert tokenizer.encode("the</s>", add_special_tokens=False) == [*tokenizer.encode("the")[1:], 2]
    assert tokenizer.decode([1, 2]) == ""
    assert tokenizer.decode([1, 2], skip_special_tokens=False) == "<s></s>"


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return read_gguf_tokenizer(GgufFile(default_model_path()))


def test_smollm2_splits_numbers_digit_by_digit(smollm2: Tokenizer) -> None:
    assert [smollm2.token_bytes(i) for i in smollm2.encode("1234567")] == [b"1", b"2", b"3", b"4", b"5", b"6", b"7"]
    assert [smollm2.decode([i]) for i in smollm2.encode("in 42")] == ["in", " ", "4", "2"]


def test_smollm2_special_tokens(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("<|im_start|>user\nhi<|im_end|>")
    assert (ids[0], ids[-1]) == (1, 2)
    assert smollm2.decode(ids) == "user\nhi"
    assert smollm2.is_special(1)
    assert not smollm2.is_special(ids[1])
    assert smollm2.bos_token_id == 1
    assert smollm2.eos_token_ids[0] == 2


@pytest.mark.parametrize("text", VARIED_TEXTS)
def test_smollm2_round_trip(smollm2: Tokenizer, text: str) -> None:
    ids = smollm2.encode(text)
    assert smollm2.decode(ids) == text
    stream = StreamDecoder(smollm2)
    parts = [stream.push(token_id) for token_id in ids]
    assert "".join(parts) == text
    assert "\ufffd" not in "".join(parts)


def test_a_character_comes_out_with_its_last_token(smollm2: Tokenizer) -> None:
    stream = StreamDecoder(smollm2)
    ids = smollm2.encode("😀")
    assert len(ids) > 1
    assert [stream.push(token_id) for token_id in ids] == [""] * (len(ids) - 1) + ["😀"]
    assert stream.flush() == ""


def test_an_unfinished_character_is_replaced_at_the_end(smollm2: Tokenizer) -> None:
    stream = StreamDecoder(smollm2)
    assert stream.push(smollm2.encode("😀")[0]) == ""
    assert stream.flush() == "\ufffd"


def test_smollm2_chat(smollm2: Tokenizer) -> None:
    assert smollm2.has_chat_template
    prompt = smollm2.apply_chat_template(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    )
    assert prompt == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    without = smollm2.apply_chat_template([{"role": "user", "content": "Hi"}], add_generation_prompt=False)
    assert without.endswith("Hi<|im_end|>\n")


def test_settings_of_a_training_run_do_not_cut_or_fill_prompts() -> None:
    backend = byte_level_tokenizer()
    expected = backend.encode("one two three four").ids
    backend.enable_truncation(max_length=3)
    backend.enable_padding(length=100)
    tokenizer = Tokenizer(backend, bos_token_id=None, eos_token_ids=(), chat_template=None)
    assert tokenizer.encode("one two three four") == expected


def test_text_that_is_not_unicode(smollm2: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match=r"not valid Unicode: 'a\\ud800'"):
        smollm2.encode("a\ud800")


def test_a_decoder_that_is_not_known() -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(UnsupportedModel, match="decodes by WordPiece"):
        Tokenizer(backend, bos_token_id=None, eos_token_ids=(), chat_template=None)


def render(source: str, **variables: Any) -> str:
    return ChatTemplate({"default": source}, {"bos_token": "<s>"}).render(
        [{"role": "user", "content": "é<"}], **variables
    )


def test_templates_have_what_they_expect() -> None:
    assert render("{{ bos_token }}{{ messages[0]['content'] }}") == "<s>é<"
    assert render("{{ messages | tojson }}") == '[{"role": "user", "content": "é<"}]'
    assert render("{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=true) }}") == '{\n "a": 2,\n "b": 1\n}'
    assert render("{% if enable_thinking %}yes{% endif %}", enable_thinking=True) == "yes"
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    assert render("  {% for m in messages %}\n{{ m.role }}\n{% break %}{% endfor %}") == "user\n"
    assert render("a{% generation %}b{{ messages[0].role }}{% endgeneration %}c") == "abuserc"


def test_tools_choose_their_own_template() -> None:
    template = ChatTemplate({"default": "plain", "tool_use": "{{ tools | length }} tools"}, {})
    assert template.render([]) == "plain"
    assert template.render([], tools=[{"name": "search"}]) == "1 tools"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "broken at line 1"),
        ("{{ messages[0]['content'] + 1 }}", "refused these messages"),
        ("{{ messages.append(1) }}", "refused these messages"),
        ("{{ ''.__class__.__mro__ }}", "refused these messages"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "refused these messages"),
    ],
)
def test_what_goes_wrong_in_a_template_is_the_requests_fault(source: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        render(source)


def test_a_model_without_a_template(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    add_byte_level_vocabulary(writer, byte_level_tokenizer(), "gpt-2")
    tokenizer = read_gguf_tokenizer(GgufFile(finish(writer)))
    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidRequest, match="no chat template"):
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])


@cache
def plain_tokenizer() -> Tokenizer:
    return Tokenizer(byte_level_tokenizer(), bos_token_id=None, eos_token_ids=(), chat_template=None)


@settings(deadline=None)
@given(st.lists(st.sampled_from(VARIED_TEXTS), min_size=1), st.integers(1, 40))
def test_a_text_that_surely_exceeds_a_number_of_tokens_does(texts: list[str], size: int) -> None:
    tokenizer, text = plain_tokenizer(), "".join(texts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("evenflow.model.text.tokenizer._PIECE_CHARACTERS", size * 10)
        assert not tokenizer.surely_exceeds(text, len(tokenizer.encode(text)))
        assert tokenizer.surely_exceeds("a b " * 5000, 1000) or size < 3
