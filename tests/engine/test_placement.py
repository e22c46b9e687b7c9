"""Which device runs a model, and in what, on this machine."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from evenflow import LLM, EngineConfig, SamplingParams
from evenflow.engine.placement import on_this_machine
from evenflow.errors import InvalidConfig
from evenflow.model.formats.weights import needed_shapes
from evenflow.model.loader import load_model
from tests.model.cuda.devices import needs_cuda
from tests.models import tiny_llama

without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def decided(**settings: Any) -> tuple[str | None, str, int | None]:
    config = on_this_machine(EngineConfig(**settings))
    return config.device, config.weights, config.max_steps_in_flight


@without_cuda
def test_without_a_gpu_the_cpu_runs_in_float32() -> None:
    assert decided() == ("cpu", "float32", 1)
    assert decided(weights="int4", max_steps_in_flight=2) == ("cpu", "int4", 2)


@without_cuda
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "cuda"}, r"^Got device='cuda' but .*: use device='cpu'\.$"),
        ({"weights": "bfloat16"}, r"^Got weights='bfloat16', which needs a GPU, but .*: use weights='float32'\.$"),
    ],
)
def test_a_gpu_that_is_not_there_is_refused_in_one_line(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidConfig, match=message) as refused:
        decided(**settings)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("param", [pytest.param(None, marks=needs_cuda)])
def test_a_gpu_that_is_there_is_taken(param: None) -> None:
    assert decided()[0] == "cuda"
    assert decided(device="cpu") == ("cpu", "float32", 1)
    assert decided(weights="int4") == ("cpu", "int4", 1)
    assert decided(weights="float32") == ("cuda", "float32", 2)


def test_what_was_decided_can_be_read() -> None:
    with LLM(tiny_llama(), device="cpu") as llm:
        assert (llm.config.device, llm.config.weights, llm.config.max_steps_in_flight) == ("cpu", "float32", 1)


def test_a_configuration_alone_is_enough_for_random_weights(tmp_path: Path) -> None:
    shutil.copy(tiny_llama() / "config.json", tmp_path)
    model = load_model(tmp_path, is_dummy=True)
    assert {name: tuple(tensor.shape) for name, tensor in model.weights.items()} == needed_shapes(model.config)
    name = "layers.1.mlp.down_proj.weight"
    assert torch.equal(model.weights[name], model.weights[name])
    assert not torch.equal(model.weights[name], model.weights["layers.0.mlp.down_proj.weight"])
    assert model.weights.on(torch.device("cpu"), torch.float16)[name].dtype is torch.float16
    assert model.tokenizer.encode("w5 w17") == [5, 17]
    with LLM(tmp_path, device="cpu", load_format="dummy", policy="fixed:64") as llm:
        [output] = llm.generate(["w5 w17 w3"], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
    assert output.text.split() == [f"w{token}" for token in output.token_ids]


def test_random_weights_keep_a_models_own_tokenizer() -> None:
    assert load_model(tiny_llama(), is_dummy=True).tokenizer.encode("hi") == load_model(tiny_llama()).tokenizer.encode(
        "hi"
    )
