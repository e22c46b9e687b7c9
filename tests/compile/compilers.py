"""The C++ compiler that Inductor would use on this machine, for tests that compile."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

COMPILER = shutil.which(os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++"))


def compile_library(source: str, library: Path) -> None:
    assert COMPILER is not None
    command = [COMPILER, "-shared", "-fPIC", "-x", "c++", "-", "-o", str(library)]
    subprocess.run(command, input=source.encode(), check=True, capture_output=True)


def _why_unusable() -> str | None:
    if COMPILER is None:
        return "Inductor finds no C++ compiler"
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "probe.so"
        try:
            compile_library("#include <iostream>\nvoid probe() { std::cout << 1; }\n", library)
        except subprocess.CalledProcessError:
            return f"{COMPILER} does not compile"
        # A package with a C++ library of its own crashes the process that loads it.
        is_dynamic = any(name in library.read_bytes() for name in (b"libstdc++.", b"libc++."))
    return None if is_dynamic else f"{COMPILER} links its C++ library statically"


WHY_UNUSABLE = _why_unusable()
needs_compiler = pytest.mark.skipif(WHY_UNUSABLE is not None, reason=str(WHY_UNUSABLE))
