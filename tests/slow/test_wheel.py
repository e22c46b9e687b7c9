"""The wheel and the source distribution, as a user gets them: in empty environments, away from the checkout."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from evenflow import __version__
from tests.cli.running import long_context_llama, read_address

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "evenflow"


class Built(NamedTuple):
    wheel: Path
    sdist: Path


class Environment(NamedTuple):
    """A virtual environment, and an empty folder to run in."""

    programs: Path
    folder: Path
    variables: dict[str, str]

    def run(self, *words: object, code: int = 0) -> str:
        """What a program of the environment prints."""
        line = [str(self.programs / str(words[0])), *map(str, words[1:])]
        done = subprocess.run(
            line, cwd=self.folder, env=self.variables, capture_output=True, text=True, check=False, timeout=300
        )
        assert done.returncode == code, f"{line}\n{done.stdout}\n{done.stderr}"
        return done.stdout if code == 0 else done.stderr


def build(source: Path, target: Path, *options: str) -> None:
    """As `make wheel` does."""
    line = [sys.executable, "-m", "build", *options, "--outdir", str(target), str(source)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("dist")
    build(ROOT, folder)
    return Built(folder / f"evenflow-{__version__}-py3-none-any.whl", folder / f"evenflow-{__version__}.tar.gz")


def make_environment(folder: Path, wheel: Path, extras: str = "") -> Environment:
    venv.create(folder / "env", with_pip=True)
    (folder / "empty").mkdir()
    hidden = ("PYTHONPATH", "VIRTUAL_ENV", "EVENFLOW_CACHE", "EVENFLOW_NATIVE", "OMP_NUM_THREADS")
    variables = {name: value for name, value in os.environ.items() if name not in hidden}
    environment = Environment(folder / "env" / "bin", folder / "empty", variables)
    install = ("pip", "install", "--quiet", "--disable-pip-version-check", "--constraint", ROOT / "constraints.txt")
    environment.run(*install, f"{wheel}{extras}")
    (folder / "home").mkdir()
    variables["HOME"] = str(folder / "home")  # no cache yet
    variables.pop("XDG_CACHE_HOME", None)
    return environment


@pytest.fixture(scope="module")
def base(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return make_environment(tmp_path_factory.mktemp("base"), built.wheel)


@pytest.fixture(scope="module")
def engine(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return make_environment(tmp_path_factory.mktemp("engine"), built.wheel, "[engine]")


# ---- what is built ----


def contents(wheel: Path) -> dict[str, int]:
    """The wheel's files, with a checksum each."""
    with zipfile.ZipFile(wheel) as archive:
        return {entry.filename: entry.CRC for entry in archive.infolist()}


def wheel_metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        return Parser().parsestr(archive.read(f"evenflow-{__version__}.dist-info/METADATA").decode())


def test_the_wheel_has_every_file_of_the_package(built: Built) -> None:
    files = [path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    expected = {path.relative_to(PACKAGE.parent).as_posix() for path in files}
    found = {name for name in contents(built.wheel) if not name.startswith("evenflow-")}
    assert found == expected
    assert {path.suffix for path in files} >= {".py", ".typed", ".cpp", ".h", ".jsonl", ".html", ".js", ".css"}


def test_metadata(built: Built) -> None:
    line = [sys.executable, "-m", "twine", "check", "--strict", str(built.wheel), str(built.sdist)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    metadata = wheel_metadata(built.wheel)
    assert metadata["Version"] == __version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["License-File"] == "LICENSE"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata["Requires-Python"] == ">=3.11"
    assert {"engine", "compile", "eval", "data", "otel", "dev"} <= set(metadata.get_all("Provides-Extra") or ())
    assert "Typing :: Typed" in (metadata.get_all("Classifier") or ())
    required = [line for line in metadata.get_all("Requires-Dist") or () if "extra ==" not in line]
    assert not any(line.startswith("torch") for line in required)


def test_the_source_distribution_has_what_its_tests_need(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for name in (
        "Makefile",
        "constraints.txt",
        "LICENSE",
        "tests/models.py",
        "docs/server.md",
        "deploy/docker/compose.yaml",
    ):
        assert name in names
    assert not [name for name in names if re.search(r"(^|/)(\.venv|__pycache__|dist)(/|$)", name)]


def test_every_way_to_build_gives_the_same_wheel(built: Built, tmp_path: Path) -> None:
    """From the source distribution (that is how `built` is made), from the checkout, and from docker's context."""
    build(ROOT, tmp_path / "checkout", "--wheel")
    context = tmp_path / "context"
    context.mkdir()
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if line.startswith("!"):
            source = ROOT / line.removeprefix("!")
            (shutil.copytree if source.is_dir() else shutil.copy)(source, context / source.name)
    build(context, tmp_path / "docker", "--wheel")
    for folder in ("checkout", "docker"):
        assert contents(tmp_path / folder / built.wheel.name) == contents(built.wheel)


# ---- without extras ----


def test_the_base_package_alone(base: Environment) -> None:
    assert base.run("evenflow", "--version") == f"evenflow {__version__}\n"
    assert base.run("python", "-m", "evenflow", "--version") == f"evenflow {__version__}\n"
    where = base.run("python", "-c", "import evenflow; print(evenflow.__file__)")
    assert str(ROOT) not in where
    assert "Input tokens" in base.run("evenflow", "analyze", "--preset", "evaluation")
    assert "No model is cached" in base.run("evenflow", "models")
    message = base.run("evenflow", "generate", "Hi", "--model", long_context_llama(), code=1)
    assert "pip install 'evenflow[engine]'" in message


def test_doctor_says_what_the_base_package_lacks(base: Environment) -> None:
    base.run("evenflow", "doctor", "--json", "report.json", code=1)
    report = json.loads((base.folder / "report.json").read_text())
    [engine] = [check for check in report["checks"] if check["name"] == "extra engine"]
    assert "torch" in engine["found"]
    assert engine["state"] == "problem"


# ---- with the engine ----


def test_doctor_finds_nothing_wrong(engine: Environment) -> None:
    report = json.loads(engine.run("python", "-m", "evenflow", "doctor", "--json", "-"))
    states = {check["name"]: check["state"] for check in report["checks"]}
    assert report["works"]
    assert states["extra engine"] == states["weights float32"] == states["weights int4"] == "ok"
    if shutil.which("g++"):
        assert states["native kernels"] == "ok"  # their sources are in the wheel


def test_the_demo(engine: Environment) -> None:
    output = engine.run("evenflow", "demo", "--model", long_context_llama(), "--threads", 1)
    assert "Longest pause of a stream between two tokens" in output
    assert "the answers are the same in all runs" in output


def test_the_shipped_tasks(engine: Environment) -> None:
    model = ("--model", long_context_llama(), "--threads", 1)
    assert "knowledge" in engine.run("evenflow", "eval", "knowledge", "-n", 1, *model)


def test_the_server_and_its_page(engine: Environment) -> None:
    line = [str(engine.programs / "evenflow"), "serve", "--port", "0", "--model", str(long_context_llama())]
    with subprocess.Popen(
        [*line, "--policy", "fixed:64"], cwd=engine.folder, env=engine.variables, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            address = read_address(process)
            page = httpx.get(address + "/").text
            for script in re.findall(r'(?:src|href)="([\w./-]+\.(?:js|css|svg))"', page):
                assert httpx.get(f"{address}/{script.lstrip('/')}").status_code == 200
            assert "<title>" in page
        finally:
            process.terminate()
            process.wait(60)
    assert process.returncode == 0
