"""From what `--model` is given to a path, or one line that says what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from evenflow.engine.llm import LLM
from evenflow.errors import ModelNotFound, UnsupportedModel
from evenflow.model.hub.cached_models import find_model
from tests.cli.running import run_process
from tests.models import tiny_llama


@pytest.fixture(autouse=True)
def empty_hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def test_a_path_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "us" / "Tiny"
    folder.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert find_model("us/Tiny") == Path("us/Tiny")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_model("~/us/Tiny") == folder
    assert find_model(folder) == folder


def test_a_downloaded_model_goes_by_its_name(empty_hub_cache: Path) -> None:
    snapshots = empty_hub_cache / "models--us--Tiny" / "snapshots"
    snapshots.mkdir(parents=True)
    (snapshots / "abc").symlink_to(tiny_llama())
    assert find_model("us/Tiny") == snapshots / "abc"
    with LLM("us/Tiny", policy="fixed:64", max_model_len=64) as llm:
        [output] = llm.generate("hello")
    assert output.outputs[0].token_ids


@pytest.mark.parametrize("name", ["microsoft/DialoGPT-medium", "gpt2", "Qwen/Qwen2.5-0.5B-Instruct"])
def test_a_name_on_a_hub_is_told_what_to_do(name: str) -> None:
    with pytest.raises(ModelNotFound) as raised:
        LLM(name)
    message = str(raised.value)
    assert f"no model at {name}: give a Hugging Face folder, a .gguf file, or 'default'" in message
    assert f"evenflow pull {name}" in message
    assert "evenflow's own engine runs Llama, Mistral, Qwen2, Qwen3 and SmolLM models" in message
    assert f"evenflow serve --engine vllm --model {name}" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    "path", ["/no/such/model", "./no/such", "../model", "~/model", "a/b/c", "model.gguf", "us/x.gguf"]
)
def test_a_path_that_is_not_there_gets_no_word_about_hubs(path: str) -> None:
    with pytest.raises(ModelNotFound, match=r"no model at .*, or 'default'$"):
        find_model(path)


@pytest.mark.parametrize("command", [["generate", "hello"], ["serve", "--port", "0"]])
def test_commands_say_it_in_one_line(command: list[str], empty_hub_cache: Path) -> None:
    finished = run_process(*command, "--model", "microsoft/DialoGPT-medium")
    assert (finished.code, finished.out) == (2, "")
    assert finished.err.startswith("evenflow: no model at microsoft/DialoGPT-medium")
    assert "evenflow pull microsoft/DialoGPT-medium" in finished.err
    assert finished.err.count("\n") == 1


def test_another_architecture_is_named_before_what_else_is_missing(tmp_path: Path) -> None:
    """As in the folder of DialoGPT, which has no tokenizer.json."""
    (tmp_path / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(UnsupportedModel, match=r"GPT2LMHeadModel \(supported: Llama, .*\) is not supported here; vLLM"):
        LLM(tmp_path)
