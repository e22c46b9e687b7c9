"""Model files that are made to do harm. Each of these did, or would in a loader that trusts them."""

from __future__ import annotations

import base64
import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from evenflow import LLM
from evenflow.core.request import SamplingParams
from evenflow.errors import BrokenModel, EndpointFailed, InvalidRequest, ModelError, UnsupportedModel
from evenflow.model.formats.gguf_file import GgufFile
from evenflow.model.formats.inspection import describe_model
from evenflow.model.hub.huggingface_cache import CachedRepository, HubName
from evenflow.model.loader import load_model
from evenflow.model.text.chat_template import ChatTemplate
from evenflow.model.text.tokenizer_file import read_tokenizer_file
from tests.fuzz.gguf_parts import ARRAY, STRING, UINT32, GgufParts, Tensor, Value
from tests.model.test_loader_hf import config_of
from tests.models import byte_level_tokenizer, tiny_llama


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of a small model, to be damaged."""
    return Path(shutil.copytree(tiny_llama(), tmp_path / "model"))


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


# ---- code ----


class _Payload:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_code_beside_a_model_is_never_run(folder: Path, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    code = f"import os\nos.mkdir({str(ran)!r})\nclass Model: pass\nclass Tokenizer: pass\n"
    (folder / "modeling_evil.py").write_text(code)
    auto_map = {"AutoConfig": "modeling_evil.Model", "AutoModelForCausalLM": "modeling_evil.Model"}
    edit_json(folder / "config.json", auto_map=auto_map, trust_remote_code=True)
    edit_json(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["modeling_evil.Tokenizer", None]})
    for name in ("pytorch_model.bin", "training_args.bin", "model.pt"):
        (folder / name).write_bytes(pickle.dumps(_Payload(ran)))
    with LLM(folder, kv_cache_memory=1 << 22, policy="fixed:64") as llm:
        assert llm.generate("hi", SamplingParams(max_tokens=1))[0].token_ids
    assert not ran.exists()


def test_pickled_weights_are_not_read(folder: Path, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(_Payload(ran)))
    with pytest.raises(BrokenModel, match=r"neither model\.safetensors nor"):
        load_model(folder)
    (folder / "model.safetensors").write_bytes(pickle.dumps(_Payload(ran)))
    with pytest.raises(BrokenModel, match="cannot be read"):
        load_model(folder)
    assert not ran.exists()


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.mkdir(path) }}",
        "{{ self.__init__.__globals__ }}",
        "{{ lipsum.__globals__['os'].mkdir(path) }}",
        "{{ strftime_now.__globals__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ '{0.__class__}'|attr('format')(messages) }}",
        "{{ messages|map(attribute='__class__')|list }}",
        "{% set f = '{0.__class__.__init__.__globals__}'.format %}{{ f(messages) }}",
        "{{ messages|map('format')|first }}{{ (messages|attr('__class__')).__name__ }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}{{ os.mkdir(path) }}",
    ],
)
def test_a_template_stays_in_its_sandbox(source: str, tmp_path: Path) -> None:
    template = ChatTemplate({"default": source}, {})
    try:
        text = template.render([{"role": "user", "content": "hi"}], path=str(tmp_path / "ran"))
    except InvalidRequest:
        text = ""
    assert "<class" not in text
    assert "function" not in text
    assert "root:" not in text
    assert not (tmp_path / "ran").exists()


def test_templates_that_are_nested_or_named_oddly(folder: Path) -> None:
    deep = ChatTemplate({"default": "{{ " + "(" * 5000 + ")" * 5000 + " }}"}, {})
    assert not deep.knows_tools
    with pytest.raises(InvalidRequest):
        deep.render([])
    with pytest.raises(InvalidRequest, match=r"refused these messages: one\\ntwo$"):
        ChatTemplate({"default": "{{ raise_exception('one\\ntwo') }}"}, {}).render([])
    edit_json(folder / "tokenizer_config.json", chat_template=[{"name": ["default"], "template": "a"}])
    with pytest.raises(BrokenModel, match="chat_template is neither"):
        load_model(folder)


# ---- paths ----


def to_index(folder: Path, shard: Any) -> None:
    (folder / "model.safetensors").rename(folder.parent / "secret.safetensors")
    index = {"weight_map": {"model.norm.weight": shard}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    "shard",
    ["../secret.safetensors", "a/../../secret.safetensors", "{parent}/secret.safetensors", "a\\b", "a\0b", "", 3],
)
def test_shards_are_in_the_models_folder(shard: Any, folder: Path) -> None:
    to_index(folder, shard.replace("{parent}", str(folder.parent)) if isinstance(shard, str) else shard)
    with pytest.raises(BrokenModel, match="expected a file's name"):
        load_model(folder)
    assert "expected a file's name" in str(describe_model(folder).why_not)


@pytest.mark.parametrize("shard", ["..", "x" * 5000, "\ud800"])
def test_shards_that_no_file_can_be(shard: str, folder: Path) -> None:
    to_index(folder, shard)
    with pytest.raises(BrokenModel, match="is missing"):
        load_model(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_pipe_is_no_file(name: str, folder: Path) -> None:
    """Reading one would never end."""
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(ModelError):
        load_model(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sha": "../../../../evil"}, "the checksum '../../../../evil'"),
        ({"sha": ["a"]}, "the checksum"),
        ({"siblings": [{"rfilename": "a", "size": 1, "blobId": "../../evil"}]}, "the checksum '../../evil'"),
        ({"siblings": [{"rfilename": "../a", "size": 1, "blobId": "0" * 40}]}, "the file name '../a'"),
        (
            {"siblings": [{"rfilename": "a", "size": 1, "lfs": {"sha256": "/etc/x", "size": 1}}]},
            "the checksum '/etc/x'",
        ),
    ],
)
def test_a_hub_cannot_choose_where_files_go(change: dict[str, Any], message: str) -> None:
    from evenflow.model.hub.repository import _read_listing

    listing = {"sha": "0" * 40, "siblings": []} | change
    with pytest.raises(EndpointFailed, match="did not reply as a model hub does") as raised:
        _read_listing("https://hub.example/api", json.dumps(listing).encode())
    assert message in str(raised.value)


def test_names_lead_to_no_other_folder() -> None:
    found = CachedRepository("../../evil").find(HubName("../../evil"))
    assert found is None


# ---- sizes ----


def gguf(*values: Value, tensors: tuple[Tensor, ...] = ()) -> GgufParts:
    return GgufParts([Value("general.architecture", STRING, "llama"), *values], list(tensors))


def with_length(parts: GgufParts, text: str, length: int) -> bytes:
    """The file with another length before a string."""
    content = bytearray(parts.encode())
    place = content.index(text.encode()) - 8
    content[place : place + 8] = struct.pack("<Q", length)
    return bytes(content)


NORM = Tensor("output_norm.weight", [4], 0, bytes(16))
NAMED = gguf(Value("general.name", STRING, "abc"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (with_length(NAMED, "abc", 2**64 - 1), "a string at byte .* ends at byte"),
        (with_length(NAMED, "abc", 1 << 40), "a string at byte .* ends at byte"),
        (gguf(Value("a", UINT32, 1), Value("a", UINT32, 2)).encode(), "the key a is there twice"),
        (gguf(tensors=(NORM, NORM)).encode(), "the tensor output_norm.weight is there twice"),
        (gguf(tensors=(Tensor("t", [1] * 5000, 0, b""),)).encode(), "5000 dimensions, expected at most 8"),
        (gguf(tensors=(Tensor("t", [2**40, 2**40], 0, b""),)).encode(), "the file is truncated: t ends at byte"),
        (gguf(tensors=(Tensor("t", [4], 0, bytes(16), offset=2**63),)).encode(), "the file is truncated"),
        (gguf(Value("a", ARRAY, b"1" * ((1 << 24) + 1), 0)).encode(), "no vocabulary has that many"),
    ],
)
def test_sizes_in_a_gguf_file_are_checked_before_they_are_used(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(BrokenModel, match=message):
        GgufFile(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 10**400}, "more than 64 bits"),
        ({"rope_theta": 10**400}, "more than 64 bits"),
        ({"max_position_embeddings": 2**32}, "max_position is 4294967296, no model has that many"),
        ({"max_position_embeddings": 1}, "no room for an answer"),
        ({"rms_norm_eps": 1e-320}, "rms_norm_eps is 1e-320"),
        ({"rope_theta": 1e300}, "theta is 1e\\+300"),
        (
            {"architectures": ["MistralForCausalLM"], "num_key_value_heads": 2, "sliding_window": 2**32},
            "sliding window",
        ),
        ({"head_dim": 15, "partial_rotary_factor": 0.2}, "head_dim is 15, it must be even|rotary"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 1e300}}, "factor|no model has that many"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "rope_theta": 1.0}, "above 1 for YaRN"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 1e300}}, "beta_fast"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale": -1.0, "mscale_all_dim": 2.0}}, "not positive"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [10**400], "long_factor": [1]}}, "above 1e30"),
    ],
)
def test_numbers_in_a_configuration_are_checked_before_they_are_used(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BrokenModel, match=message):
        config_of(**changes)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"])
def test_json_that_is_nested_too_deeply(name: str, folder: Path) -> None:
    (folder / name).write_text('{"a": ' + "[" * 200_000 + "]" * 200_000 + "}")
    with pytest.raises(BrokenModel, match=name):
        load_model(folder)
    assert describe_model(folder).format == "safetensors" or name != "config.json"


def test_a_header_that_is_nested_too_deeply(folder: Path) -> None:
    header = b'{"a": ' + b"[" * 200_000 + b"]" * 200_000 + b"}"
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    assert "nested too deeply" in str(describe_model(folder).why_not)
    with pytest.raises(BrokenModel):
        load_model(folder)


def test_files_that_are_read_whole_have_a_limit(folder: Path) -> None:
    with (folder / "config.json").open("r+b") as file:
        file.truncate(2 << 20)
    with pytest.raises(BrokenModel, match=r"config\.json has 2097152 bytes, expected at most 1048576"):
        load_model(folder)
    with (folder / "tokenizer.json").open("r+b") as file:
        file.truncate(1 << 40)  # sparse
    shutil.copy(tiny_llama() / "config.json", folder)
    with pytest.raises(BrokenModel, match=r"tokenizer\.json has 1099511627776 bytes"):
        load_model(folder)


# ---- tokenizers ----


def tokenizer_json(**changes: Any) -> str:
    return json.dumps({**json.loads(byte_level_tokenizer().to_str()), **changes})


REPLACE = {"type": "Replace", "pattern": {"String": "l"}, "content": "lll"}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


@pytest.mark.parametrize(
    "changes",
    [
        {"normalizer": {"type": "Sequence", "normalizers": [REPLACE] * 40}},
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "Sequence", "normalizers": [REPLACE] * 3}] * 3}},
        {"normalizer": {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000}},
        {"normalizer": {"type": "Replace", "pattern": {"Regex": "x*"}, "content": "a" * 128}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [BYTE_LEVEL] * 40}},
        # The library guesses what a step of another type is.
        {"normalizer": {"type": None, "normalizers": [REPLACE] * 40}},
        {"normalizer": {"type": "Other", "normalizers": [{**REPLACE, "type": 1}] * 40}},
        {"pre_tokenizer": {"pretokenizers": [{**BYTE_LEVEL, "type": None}] * 40}},
    ],
)
def test_a_tokenizer_may_not_blow_up_a_text(changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModel, match="times as long"):
        read_tokenizer_file(tokenizer_json(**changes))


def test_ordinary_normalizers_are_no_problem() -> None:
    space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    steps = [{"type": "NFC"}, {"type": "Prepend", "prepend": "▁"}, space]
    read_tokenizer_file(tokenizer_json(normalizer={"type": "Sequence", "normalizers": steps}))


@pytest.mark.parametrize(
    "table", [b"\0\0\0\xff\xff\xff", b"", b"\x03\0\0\0abc", b"\x04\0\0\0", struct.pack("<I", 2**32 - 4) + bytes(64)]
)
def test_a_table_of_characters_has_the_size_that_it_says(table: bytes) -> None:
    """The library would allocate 4 GB, or panic."""
    normalizer = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}
    with pytest.raises(BrokenModel, match=r"tokenizer\.json"):
        read_tokenizer_file(tokenizer_json(normalizer=normalizer))


def test_what_is_checked_is_what_is_used() -> None:
    """A key that is there twice, or is spelled with escapes, gets nothing past the check."""
    bomb = json.dumps({"type": "Sequence", "normalizers": [REPLACE] * 40})
    plain = tokenizer_json(normalizer=None)
    twice = plain.replace('"normalizer": null', f'"normalizer": {bomb}, "normalizer": null')
    assert read_tokenizer_file(twice).normalizer is None
    escaped = plain.replace('"normalizer": null', f'"n\\u006frmalizer": {bomb}')
    with pytest.raises(UnsupportedModel, match="times as long"):
        read_tokenizer_file(escaped)


def test_a_panic_of_the_tokenizer_is_an_error_of_the_request(folder: Path) -> None:
    """A regular expression that gives up, and a vocabulary without a token for what it does not know."""
    slow = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    words = {"type": "WordLevel", "vocab": {"b": 0}, "unk_token": "none"}
    for changes, text in (({"pre_tokenizer": slow}, "a" * 60 + "b"), ({"model": words}, "a")):
        (folder / "tokenizer.json").write_text(tokenizer_json(**changes, added_tokens=[]))
        tokenizer = load_model(folder).tokenizer
        with pytest.raises(InvalidRequest, match="the model's tokenizer fails on this text"):
            tokenizer.encode(text, add_special_tokens=False)


def test_a_token_of_a_megabyte(tmp_path: Path) -> None:
    """A sentencepiece vocabulary is cut at every place of every token."""
    values = [
        Value("tokenizer.ggml.model", STRING, "llama"),
        Value("tokenizer.ggml.tokens", ARRAY, ["a" * 1_000_000, "a"], STRING),
    ]
    (tmp_path / "model.gguf").write_bytes(gguf(*values).encode())
    with pytest.raises(BrokenModel, match="a token has 1000000 characters, expected at most 4096"):
        load_model(tmp_path / "model.gguf")


def test_a_merge_that_is_longer_than_every_token(tmp_path: Path) -> None:
    """The library panics, which is no Exception."""
    values = [
        Value("tokenizer.ggml.model", STRING, "gpt2"),
        Value("tokenizer.ggml.pre", STRING, "llama-bpe"),
        Value("tokenizer.ggml.tokens", ARRAY, ["a", "ab"], STRING),
        Value("tokenizer.ggml.merges", ARRAY, ["ab ab"], STRING),
    ]
    (tmp_path / "model.gguf").write_bytes(gguf(*values).encode())
    with pytest.raises(BrokenModel, match="merges do not fit the vocabulary"):
        load_model(tmp_path / "model.gguf")


# ---- messages and answers ----


@pytest.mark.parametrize("name", ["a\nERROR forged line", "\x1b[2J", "x" * 100_000, "\u202etxt.exe"])
def test_messages_are_short_and_on_one_line(name: str, folder: Path, tmp_path: Path) -> None:
    edit_json(folder / "config.json", architectures=[name])
    (tmp_path / "model.gguf").write_bytes(gguf(tensors=(Tensor(name, [4], 99, bytes(16)),)).encode())
    for path in (folder, tmp_path / "model.gguf"):
        with pytest.raises(ModelError) as raised:
            load_model(path)
        assert str(raised.value).isprintable()
        assert len(str(raised.value)) < 2000


def spoil(name: str, change: Callable[[torch.Tensor], object]) -> Callable[[Path], None]:
    def do(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors[name])
        save_file(tensors, folder / "model.safetensors")

    return do


@pytest.mark.parametrize(
    "damage",
    [
        spoil("lm_head.weight", lambda tensor: tensor[7, 3].fill_(torch.nan)),
        spoil("model.layers.0.self_attn.q_proj.weight", lambda tensor: tensor[0, 0].fill_(torch.inf)),
        spoil("model.norm.weight", lambda tensor: tensor.fill_(3e38)),
    ],
)
def test_weights_that_are_no_numbers_are_refused(damage: Callable[[Path], None], folder: Path) -> None:
    damage(folder)
    with pytest.raises(BrokenModel, match=r"the tensor \S+ holds values that are not finite, or too large"):
        LLM(folder, kv_cache_memory=1 << 22, policy="fixed:64")


def test_weights_too_large_for_the_type_they_run_in_are_refused(folder: Path) -> None:
    spoil("model.norm.weight", lambda tensor: tensor[0].fill_(70000.0))(folder)
    weights = load_model(folder).weights
    assert weights["norm.weight"][0] == 70000.0
    with pytest.raises(BrokenModel, match=r"the tensor norm\.weight holds values that are not finite, or too large"):
        weights.on(torch.device("cpu"), torch.float16)["norm.weight"]


@pytest.mark.parametrize("weights", ["float32", "int4"])
@pytest.mark.parametrize("prompt_logprobs", [None, 1])
def test_answers_that_overflow_are_errors(weights: str, prompt_logprobs: int | None, folder: Path) -> None:
    for name in ("model.norm.weight", "lm_head.weight"):
        spoil(name, lambda tensor: tensor.mul_(1e30))(folder)
    params = SamplingParams(max_tokens=2, temperature=0.0, logprobs=1, prompt_logprobs=prompt_logprobs)
    with LLM(folder, kv_cache_memory=1 << 22, policy="fixed:64", weights=weights) as llm:
        [output] = llm.generate([[40, 41, 42, 43]], params)
    assert output.finish_reason == "error"
    assert "no usable logits" in str(output.error)
