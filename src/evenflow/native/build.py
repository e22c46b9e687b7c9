"""Compiles the C++ kernels of this folder, once per machine, and loads them; if that fails, callers use torch."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import re
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from evenflow.host import cache_folder, private_folder
from evenflow.log_output import STAGE

logger = logging.getLogger("evenflow")

_FOLDER = Path(__file__).parent
# No -ffast-math: it would change how the whole process treats denormal numbers.
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fopenmp", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math")
_FOR_THIS_CPU = ("-march=native", "-mcpu=native")
_COMPILERS = ("g++", "c++", "clang++")
_COMPILE_SECONDS = 300
_OPENMP_LIBRARY = re.compile(r"/\S*/lib(?:gomp|omp|iomp5)[^/\s]*\.so\S*")


class Unavailable(Exception):
    """Why there are no native kernels here, and what to do about it."""


class TurnedOff(Unavailable):
    """The user wants none."""


def library() -> ctypes.CDLL | None:
    """The kernels, compiled on first use; None if that fails, which is logged."""
    return _loaded()[0]


def why_unavailable() -> str | None:
    """Why `library()` is None; None if it is not."""
    return _loaded()[1]


def find_compiler() -> str | None:
    """The path of the C++ compiler that is used."""
    named = filter(None, (os.environ.get("CXX"), *_COMPILERS))
    return next((path for name in named if (path := shutil.which(name))), None)


@functools.cache
def _loaded() -> tuple[ctypes.CDLL | None, str | None]:
    try:
        if os.environ.get("EVENFLOW_NATIVE") == "0":
            raise TurnedOff("EVENFLOW_NATIVE=0 turns them off")
        openmp = _torch_openmp()
        path = _compiled()
        # The kernels are linked without an OpenMP library and find their symbols in torch's: the threads of a second
        # library would compete with torch's for the cores.
        ctypes.CDLL(str(openmp), mode=ctypes.RTLD_GLOBAL)
        return ctypes.CDLL(str(path)), None
    except (Unavailable, OSError) as error:
        level = logging.INFO if isinstance(error, TurnedOff) else logging.WARNING
        logger.log(level, "Running on torch's CPU operations, without evenflow's faster kernels: %s.", error)
        return None, str(error)


def _torch_openmp() -> Path:
    """The OpenMP library that torch has loaded: its own, or the only one in this process."""
    import torch

    if not torch.backends.openmp.is_available():  # type: ignore[no-untyped-call]
        raise Unavailable("this torch does not use OpenMP; install one that does, such as that of PyPI")
    try:
        found = set(_OPENMP_LIBRARY.findall(Path("/proc/self/maps").read_text()))
    except OSError:
        raise Unavailable("torch's OpenMP library can only be found on Linux") from None
    folder = str(Path(torch.__file__).parent)  # a prefix of torch/lib and of torch.libs
    found = {path for path in found if path.startswith(folder)} or found
    if len(found) != 1:
        raise Unavailable(f"expected one OpenMP library in this process, found {sorted(found) or 'none'}")
    return Path(found.pop())


def _compiled() -> Path:
    """The library's path for these sources, this compiler and this CPU; compiles it if it is not cached."""
    sources = sorted(_FOLDER.glob("*.cpp"))
    compiler = find_compiler()
    if compiler is None:
        raise Unavailable("no C++ compiler (g++, c++ or clang++) was found; install one, or set CXX to its path")
    cpu_flag, macros = _target(compiler)
    flags = (*_FLAGS, cpu_flag)
    key = hashlib.sha256(repr((compiler, flags, macros)).encode())
    for path in sorted([*sources, *_FOLDER.glob("*.h")]):
        key.update(path.read_bytes())
    target = _library_folder() / f"{key.hexdigest()[:32]}.so"
    if not target.is_file():
        logger.info("Compiling the CPU kernels, once for this machine.", extra=STAGE)
        _compile(compiler, flags, sources, target)
    return target


def _library_folder() -> Path:
    folder = cache_folder() / "native"
    try:
        private_folder(folder)  # it holds code
    except OSError as error:
        raise Unavailable(_unusable(folder, error)) from error
    return folder


def _target(compiler: str) -> tuple[str, str]:
    """The flag for this CPU, and the macros that the compiler then defines: its version and the CPU's features."""
    for flag in _FOR_THIS_CPU:
        try:
            return flag, _run([compiler, flag, "-fopenmp", "-dM", "-E", "-x", "c++", os.devnull])
        except Unavailable as error:
            refused = error
    raise refused


def _compile(compiler: str, flags: tuple[str, ...], sources: list[Path], target: Path) -> None:
    # In the target's folder, so that the last step is a rename: other processes see a whole library or none.
    with _scratch_folder(target.parent) as folder:
        objects = [str(Path(folder, f"{source.stem}.o")) for source in sources]
        commands = [
            [compiler, *flags, "-c", str(source), "-o", name] for source, name in zip(sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(len(commands)) as pool:
            list(pool.map(_run, commands))
        linked = Path(folder, target.name)
        _run([compiler, "-shared", *objects, "-o", str(linked)])
        linked.replace(target)


def _scratch_folder(parent: Path) -> tempfile.TemporaryDirectory[str]:
    try:
        return tempfile.TemporaryDirectory(prefix="build-", dir=parent)
    except OSError as error:
        raise Unavailable(_unusable(parent, error)) from error


def _unusable(folder: Path, error: OSError) -> str:
    return f"{folder} cannot be used ({error.strerror}); set EVENFLOW_CACHE to a folder that can be"


def _run(command: list[str]) -> str:
    """The command's output."""
    try:
        finished = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_COMPILE_SECONDS)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{command[0]} took more than {_COMPILE_SECONDS} s") from None
    if finished.returncode != 0:
        first_line = next(iter(finished.stderr.strip().splitlines()), "no output")
        raise Unavailable(f"{command[0]} fails: {first_line}; set CXX to another compiler")
    return finished.stdout
