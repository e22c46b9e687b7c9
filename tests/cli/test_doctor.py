"""`evenflow doctor`: what it finds on this machine, and on machines that lack something."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from evenflow import __version__
from evenflow.cli import doctor
from evenflow.executors import torch_executor
from tests.cli.running import Finished, run_cli, run_process

CAPSYS = pytest.CaptureFixture[str]


def checks(finished: Finished) -> dict[str, dict[str, Any]]:
    return {check["name"]: check for check in json.loads(finished.out)["checks"]}


def test_all_is_well_here(monkeypatch: pytest.MonkeyPatch, capsys: CAPSYS) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    finished = run_cli(capsys, "doctor", "--json", "-")
    assert finished.code == 0
    report, found = json.loads(finished.out), checks(finished)
    assert (report["evenflow"], report["works"]) == (__version__, True)
    assert torch.__version__ in found["extra engine"]["found"]
    for name in ("evenflow", "extra engine", "extra compile", "cores", "memory", "cache", "threads"):
        assert found[name]["state"] == "ok", found[name]
        assert found[name]["advice"] is None
    for name in ("weights float32", "weights int4"):
        assert found[name]["found"].startswith("works, by ")
    assert found["native kernels"]["found"] in finished.err


@pytest.mark.slow
def test_without_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENFLOW_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    finished = run_process("doctor", "--json", "-")
    found = checks(finished)
    assert finished.code == 0
    assert found["C++ compiler"]["state"] == "note"
    assert found["native kernels"]["found"] == "not used: no C++ compiler (g++, c++ or clang++) was found"
    assert found["native kernels"]["advice"] == "install one, or set CXX to its path"
    assert found["weights float32"]["found"] == "works, by torch's kernels"
    assert "the default model is not fetched yet" in found["models"]["found"]


def test_without_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    hide = (
        "import importlib.metadata as metadata\n"
        "real = metadata.version\n"
        "def version(name):\n"
        "    if name in ('torch', 'fastapi'): raise metadata.PackageNotFoundError(name)\n"
        "    return real(name)\n"
        "metadata.version = version\n"
    )
    monkeypatch.delenv("EVENFLOW_VLLM_PYTHON", raising=False)
    finished = run_process("doctor", "--json", "-", before=hide)
    found = checks(finished)
    assert finished.code == 1
    assert found["extra engine"]["state"] == "problem"
    assert found["extra engine"]["found"].startswith("lacks fastapi, torch")
    assert "pip install 'evenflow[engine]'" in found["extra engine"]["advice"]
    assert found["extra compile"]["state"] == "note"
    assert "native kernels" not in found
    assert "problem" in finished.err


@pytest.mark.slow
def test_a_torch_that_cannot_be_imported() -> None:
    finished = run_process("doctor", "--json", "-", before="sys.modules['torch'] = None")
    assert finished.code == 1
    assert checks(finished)["torch"]["state"] == "problem"


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: CAPSYS) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("EVENFLOW_CACHE", str(tmp_path / "file" / "cache"))
    finished = run_cli(capsys, "doctor", "--json", "-")
    assert finished.code == 1
    assert checks(finished)["cache"]["advice"] == "set EVENFLOW_CACHE to a folder that can be"


def test_another_python_with_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: CAPSYS) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho $VERSION\n")
    python.chmod(0o755)
    monkeypatch.setenv("EVENFLOW_VLLM_PYTHON", str(python))
    for version, state in (("0.32.1", "ok"), ("0.99.0", "note"), ("0.2.0", "note"), ("", "problem")):
        monkeypatch.setenv("VERSION", version)
        finished = run_cli(capsys, "doctor", "--json", "-")
        assert checks(finished)["vLLM"]["state"] == state
        assert finished.code == (state == "problem")
        assert version in checks(finished)["vLLM"]["found"]


def test_threads_that_do_not_match_the_cores(monkeypatch: pytest.MonkeyPatch, capsys: CAPSYS) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", str((os.cpu_count() or 1) + 1))
    assert checks(run_cli(capsys, "doctor", "--json", "-"))["cores"]["state"] == "note"


def test_threads_in_a_container(monkeypatch: pytest.MonkeyPatch, capsys: CAPSYS) -> None:
    monkeypatch.setattr(torch_executor, "num_cpus", lambda: 1)
    assert checks(run_cli(capsys, "doctor", "--json", "-"))["threads"]["found"].startswith("1 for a step")


def test_little_memory_and_an_idle_gpu(monkeypatch: pytest.MonkeyPatch, capsys: CAPSYS, tmp_path: Path) -> None:
    (tmp_path / "version").touch()
    monkeypatch.setattr(doctor, "_NVIDIA_DRIVER", tmp_path / "version")
    monkeypatch.setattr(doctor, "available_memory", lambda: 1 << 30)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("EVENFLOW_VLLM_PYTHON", raising=False)
    found = checks(run_cli(capsys, "doctor", "--json", "-"))
    assert "--weights int4" in found["memory"]["advice"]
    assert torch.__version__ in found["CUDA"]["found"] or torch.cuda.is_available()
    assert "install vLLM and give --engine vllm" in found["CUDA"]["advice"] or torch.cuda.is_available()
    assert found["model hub"]["found"] == "HF_HUB_OFFLINE is set"


def test_a_version_out_of_range_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["torch<2.0; extra == 'engine'", "no-such-package; extra == 'data'", "torch; extra == 'eval'"]
    monkeypatch.setattr("importlib.metadata.requires", lambda name: lines)
    missing = doctor._missing_by_extra()
    assert missing["engine"] == [f"torch {torch.__version__} (needs <2.0)"]
    assert missing["data"] == ["no-such-package"]
    assert missing["eval"] == missing["compile"] == []
