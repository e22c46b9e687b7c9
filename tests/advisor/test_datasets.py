"""One call from files, texts and records to an analysis."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from evenflow.advisor import Chunking, VLLMChunkedPrefillOptimizer, analyze
from evenflow.errors import InvalidInput
from tests.models import tiny_llama


class WordTokenizer:
    """One token per word, and one at the start if asked for."""

    def __init__(self, chat_template: str | None = None) -> None:
        self.chat_template = chat_template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [0] * add_special_tokens + [1] * len(text.split())

    def apply_chat_template(
        self, messages: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        assert (tokenize, add_generation_prompt) == (False, True)
        if any(message["role"] == "tool" for message in messages):
            raise ValueError("no such role")
        return "".join(f"<{message['role']}> {message['content']} " for message in messages) + "<assistant>"


def write_jsonl(path: Path, *texts: str) -> Path:
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def lengths(data: Any, tokenizer: Any = None, **options: Any) -> list[int]:
    return sorted(analyze(data, tokenizer, **options).lengths.elements())


def test_texts() -> None:
    found = analyze(["a" * 8, "b" * 9_000])
    assert [dataset.name for dataset in found.datasets] == ["inputs"]
    assert (found.tokens.count, found.tokens.max, found.tokens.p50) == (2, 2250, 2)
    assert found.characters is not None
    assert (found.characters.max, found.characters.mean, found.characters.p95) == (9000, 4504, 9000)
    assert found.num_with_long_characters == 1
    assert found.datasets[0].tokens_from.startswith("estimated")


def test_a_generator_is_read_once() -> None:
    assert lengths(text for text in ("abcd", "abcdabcd")) == [1, 2]


def test_token_ids_chats_and_records() -> None:
    chat = [{"role": "user", "content": "abcdefgh"}]
    items = [[5, 6, 7], chat, {"messages": chat}, {"prompt": "abcd"}, {"prompt_tokens": 40}]
    assert lengths(items) == [1, 2, 2, 3, 40]
    assert lengths([{"body": {"text": "abcd"}}], field="body.text") == [1]


def test_files_folders_and_names(tmp_path: Path) -> None:
    one, other = write_jsonl(tmp_path / "one.jsonl", "abcd"), write_jsonl(tmp_path / "other.jsonl", "abcdabcd", "abcd")
    assert lengths(str(one)) == [1]
    assert lengths(tmp_path) == [1, 1, 2]
    assert [dataset.name for dataset in analyze([one, other]).datasets] == ["one.jsonl", "other.jsonl"]
    found = analyze({"mine": one, "given": ["abcd" * 5], "theirs": str(other)})
    assert [(dataset.name, dataset.tokens.max) for dataset in found.datasets] == [
        ("mine", 1),
        ("given", 5),
        ("theirs", 2),
    ]
    assert found.mean_of_maxima == (1 + 5 + 2) / 3
    assert found.mean_of_maxima_characters == (4 + 20 + 8) / 3


def test_a_limit_is_noted(tmp_path: Path) -> None:
    for data in (["abcd"] * 5, write_jsonl(tmp_path / "data.jsonl", *["abcd"] * 5)):
        assert analyze(data, limit=2).datasets[0].is_cut_short
        assert analyze(data, limit=2).tokens.count == 2
        assert not analyze(data, limit=5).datasets[0].is_cut_short


def test_a_tokenizer_counts() -> None:
    assert lengths(["one two three"], WordTokenizer()) == [4]
    assert analyze(["a"], WordTokenizer()).datasets[0].tokens_from == "counted by the tokenizer given"


def test_chats_are_counted_with_the_template_if_it_takes_them() -> None:
    said = {"role": "user", "content": "one two"}
    assert lengths([[said]], WordTokenizer()) == [3]
    assert lengths([[said]], WordTokenizer("a template")) == [4]  # <user> one two <assistant>
    assert lengths([[{"role": "tool", "content": "one two"}]], WordTokenizer("a template")) == [3]


def test_tokenizers_of_every_package_count_alike() -> None:
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    from evenflow.model.formats.hf_tokenizer import read_hf_tokenizer

    texts = ["hello world, hello world", "half a character: \ud800"]
    counted = [
        lengths(texts, tokenizer)
        for tokenizer in (
            read_hf_tokenizer(tiny_llama()),
            tokenizers.Tokenizer.from_file(str(tiny_llama() / "tokenizer.json")),
            transformers.AutoTokenizer.from_pretrained(tiny_llama()),
        )
    ]
    assert counted[0] == counted[1] == counted[2]


def test_what_cannot_be_used_is_counted() -> None:
    found = analyze(["abcd", "", {"other": 1}, 5])
    assert found.tokens.count == 1
    assert found.datasets[0].unusable == {
        "an empty text": 1,
        "no field such as prompt, messages, conversations, instruction, context, input, question or text": 1,
        "not an object or a text": 1,
    }


def test_the_optimizer_takes_the_analysis() -> None:
    optimizer = VLLMChunkedPrefillOptimizer()
    half = analyze([[1] * 47] * 10 + [[1] * 8000] * 10)
    assert optimizer.analyze_dataset_for_optimal_threshold(half).decision is Chunking.SELECTIVE
    assert optimizer.analyze_dataset_for_optimal_threshold(analyze(["abcd"])).decision is Chunking.DISABLED


@pytest.mark.parametrize(
    ("data", "options", "named"),
    [
        ("/no/such/file", {}, "'/no/such/file'"),
        ([], {}, "nothing to analyze"),
        ({}, {}, "nothing to analyze"),
        ({"empty": []}, {}, "'empty' but nothing in it can be used: it is empty"),
        (5, {}, "Got 5 to analyze"),
        ({"max_sequence_length": 47}, {}, "Got 47 to analyze"),
        ([{"other": 1}], {}, "Name the prompt's field with --field, or field= in Python"),
        (["abcd"], {"limit": 0}, "limit=0"),
        (["abcd"], {"tokenizer": "gpt2"}, "tokenizer='gpt2' but expected an object with encode"),
        ([str(Path(__file__))], {}, r"test_datasets.py', which name files: give Path\("),
    ],
)
def test_wrong_data_is_named(data: Any, options: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidInput, match=named):
        analyze(data, **options)


def test_torch_is_not_needed() -> None:
    probe = (
        "import sys; from evenflow.advisor import analyze; analyze(['abcd']);"
        "print([name for name in ('torch', 'transformers', 'tokenizers') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_the_analysis_is_advice_when_it_is_printed(tmp_path: Path) -> None:
    rows = [{"context": "a" * 12_000, "question": "Who?", "answers": {}, "id": str(number)} for number in range(3)]
    (tmp_path / "squad.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    found = analyze(tmp_path / "squad.jsonl")
    assert (found.decision.decision, found.datasets[0].fields) == (Chunking.ALWAYS, {"context + question": 3})
    assert found.recommendation.settings["max_num_batched_tokens"] == 576
    first, *rest = str(found).splitlines()
    assert first.startswith("Chunked prefill: Always. Every input is over 2,048 tokens")
    assert any("max_num_batched_tokens=576: 512 tokens of prefill" in line for line in rest)
    assert "squad.jsonl: 3 inputs" in rest[-1]
    assert "Prompts from context + question; not used: answers, id." in rest[-1]
    assert not any("rompts from" in line for line in str(analyze(["Hello"])).splitlines())
