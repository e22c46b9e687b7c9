"""The choice of attention backend, and what is said where one cannot be used."""

from __future__ import annotations

import logging
import sys

import pytest
import torch

from evenflow.errors import InvalidConfig, UnsupportedModel
from evenflow.model.cuda import backends, reference_ops
from evenflow.model.cuda.backends import BACKEND_VARIABLE, choose_attention, choose_operations, usable_backends
from tests.model.tiny import tiny_config

_CPU, _GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def _no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(BACKEND_VARIABLE, raising=False)


@pytest.fixture
def _no_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("flashinfer", "triton"):
        monkeypatch.setitem(sys.modules, package, None)
    for module in (
        "attention.flashinfer",
        "attention.triton_chunks",
        "attention.triton_decodes",
        "attention.triton_parts",
        "kernels",
    ):
        monkeypatch.delitem(sys.modules, f"evenflow.model.cuda.{module}", raising=False)


def test_a_cpu_has_only_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_attention(tiny_config(), torch.float32, _CPU).name == "reference"
    monkeypatch.setenv(BACKEND_VARIABLE, "triton")
    with pytest.raises(InvalidConfig, match=f"Got {BACKEND_VARIABLE}='triton' but expected reference on this device"):
        choose_attention(tiny_config(), torch.float32, _CPU)
    with pytest.raises(InvalidConfig, match="Got device cpu but deterministic"):
        choose_attention(tiny_config(), torch.float32, _CPU, deterministic=True)


@pytest.mark.usefixtures("_no_packages")
def test_without_packages_a_gpu_runs_the_reference_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="evenflow"):
        assert choose_attention(tiny_config(), torch.bfloat16, _GPU).name == "reference"
        assert choose_operations(_GPU) is reference_ops
    assert "Attention does not run on flashinfer: FlashInfer cannot be imported" in caplog.text
    assert "pip install 'evenflow[cuda]'" in caplog.text
    assert "plain torch, one sequence after another, which is slow" in caplog.text
    assert "operations run unfused" in caplog.text
    reasons = usable_backends(torch.bfloat16, _GPU)
    assert list(reasons) == ["flashinfer", "triton"]
    assert all("cannot be imported" in str(reason) for reason in reasons.values())


@pytest.mark.usefixtures("_no_packages")
def test_a_backend_that_is_asked_for_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BACKEND_VARIABLE, "triton")
    with pytest.raises(UnsupportedModel, match="triton: Triton cannot be imported"):
        choose_attention(tiny_config(), torch.bfloat16, _GPU)
    monkeypatch.setenv(BACKEND_VARIABLE, "reference")
    with pytest.raises(InvalidConfig, match="expected flashinfer or triton on this device in deterministic mode"):
        choose_attention(tiny_config(), torch.bfloat16, _GPU, deterministic=True)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_gpu_runs_what_is_fastest_for_the_model() -> None:
    installed = usable_backends(torch.bfloat16, _GPU)["flashinfer"] is None
    usual, odd = tiny_config(head_dim=64), tiny_config(head_dim=80)
    assert choose_attention(usual, torch.bfloat16, _GPU).name.startswith("FlashInfer" if installed else "Triton")
    assert choose_attention(odd, torch.bfloat16, _GPU).name == "Triton"
    assert choose_attention(usual, torch.float32, _GPU).name == "Triton"
    assert choose_attention(odd, torch.bfloat16, _GPU, deterministic=True).name == "Triton, deterministic"
    on_hopper = installed and torch.cuda.get_device_capability(_GPU)[0] == 9
    fixed = choose_attention(usual, torch.bfloat16, _GPU, deterministic=True).name
    assert fixed.startswith("FlashInfer" if on_hopper else "Triton, deterministic")
    with pytest.raises(backends._Unusable, match="heads of 300"):
        backends._triton(False, tiny_config(head_dim=300), torch.bfloat16, _GPU)
