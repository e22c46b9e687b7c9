"""Compiling the kernels: once per machine, on torch's threads, and with a reason if it fails."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from evenflow.native import build

SOURCE = """
#include <omp.h>
extern "C" int answer() {
    int sum = 0;
#pragma omp parallel for reduction(+ : sum)
    for (int i = 0; i < 42; ++i) sum += 1;
    return sum;
}
"""


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A cache and a source for each test, and a library loaded from them."""
    (tmp_path / "sources").mkdir()
    (tmp_path / "sources" / "answer.cpp").write_text(SOURCE)
    monkeypatch.setattr(build, "_FOLDER", tmp_path / "sources")
    monkeypatch.setenv("EVENFLOW_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("EVENFLOW_NATIVE", raising=False)
    caplog.set_level(logging.INFO, "evenflow")
    build._loaded.cache_clear()
    yield
    build._loaded.cache_clear()


def _why_nothing_compiles() -> str | None:
    """What this machine lacks: Linux, a torch with OpenMP, or a C++ compiler whose OpenMP code runs on torch's."""
    try:
        openmp = build._torch_openmp()
    except build.Unavailable as error:
        return str(error)
    compiler = next(filter(None, map(shutil.which, filter(None, (os.environ.get("CXX"), *build._COMPILERS)))), None)
    if compiler is None:
        return "no C++ compiler"
    source = "#include <omp.h>\n"
    if "libgomp" in openmp.name:  # clang's code needs LLVM's runtime
        source += "#ifdef __clang__\n#error\n#endif\n"
    check = [compiler, "-fopenmp", "-fsyntax-only", "-x", "c++", "-"]
    is_fit = subprocess.run(check, input=source.encode(), capture_output=True).returncode == 0
    return None if is_fit else f"{compiler} cannot compile for {openmp.name}"


WHY_NOT = _why_nothing_compiles()
needs_compiler = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))


@needs_compiler
def test_the_kernels_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of the kernels are skipped without a library: only this one notices a source that does not compile."""
    monkeypatch.undo()
    monkeypatch.delenv("EVENFLOW_NATIVE", raising=False)
    build._loaded.cache_clear()
    assert build.why_unavailable() is None


def _files(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "cache" / "native").iterdir())


@needs_compiler
def test_compiles_once_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    library = build.library()
    assert library is not None
    assert library.answer() == 42
    assert build.why_unavailable() is None
    assert caplog.messages == ["Compiling the CPU kernels, once for this machine."]
    files = _files(tmp_path)
    assert [Path(name).suffix for name in files] == [".so"]

    build._loaded.cache_clear()
    assert build.library() is not None
    assert len(caplog.messages) == 1
    assert _files(tmp_path) == files


@needs_compiler
def test_other_sources_are_another_library(tmp_path: Path) -> None:
    first = build._compiled()
    (tmp_path / "sources" / "answer.cpp").write_text(SOURCE.replace("42", "43"))
    assert build._compiled() != first


@needs_compiler
def test_shares_the_threads_of_torch() -> None:
    def loaded() -> set[str]:
        return set(build._OPENMP_LIBRARY.findall(Path("/proc/self/maps").read_text()))

    before = loaded()  # other packages may have brought libraries of their own
    assert build.library() is not None
    assert loaded() == before
    assert str(build._torch_openmp()) in before


@needs_compiler
def test_a_source_that_does_not_compile_is_a_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "sources" / "answer.cpp").write_text("this is not C++")
    assert build.library() is None
    assert "fails: " in (build.why_unavailable() or "")
    assert caplog.messages[-1].startswith("Running on torch's CPU operations, without evenflow's faster kernels: ")
    assert _files(tmp_path) == []


@pytest.mark.skipif(shutil.which("false") is None, reason="there is no false")
def test_a_broken_compiler_is_a_reason(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("CXX", "false")
    monkeypatch.setattr(build, "_torch_openmp", lambda: Path("unused"))
    assert build.library() is None
    assert (build.why_unavailable() or "").endswith("false fails: no output; set CXX to another compiler")
    assert build.library() is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]  # said once


def test_no_compiler_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(build, "_torch_openmp", lambda: Path("unused"))
    assert build.library() is None
    why = build.why_unavailable() or ""
    assert "no C++ compiler" in why
    assert why.endswith("install one, or set CXX to its path")


@needs_compiler
def test_a_cache_that_cannot_be_written_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("EVENFLOW_CACHE", str(tmp_path / "file"))
    assert build.library() is None
    why = build.why_unavailable() or ""
    assert f"{tmp_path / 'file' / 'native'} cannot be used (Not a directory)" in why
    assert why.endswith("set EVENFLOW_CACHE to a folder that can be")


@needs_compiler
def test_a_cache_that_others_may_write_to_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """They could put their own code there."""
    assert build.library() is not None
    build._loaded.cache_clear()
    folder = Path(os.environ["EVENFLOW_CACHE"], "native")
    folder.chmod(0o777)
    assert build.library() is None
    assert f"{folder} cannot be used (all users may write to it: its mode is 777" in (build.why_unavailable() or "")


def test_can_be_turned_off(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("EVENFLOW_NATIVE", "0")
    assert build.library() is None
    assert [record.levelname for record in caplog.records] == ["INFO"]  # the user knows
    assert build.why_unavailable() == "EVENFLOW_NATIVE=0 turns them off"
