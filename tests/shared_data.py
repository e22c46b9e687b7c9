"""Finds data that is not part of the project: traces, and a small model with a published text."""

import os
from pathlib import Path

import pytest

_REPOSITORY = Path(__file__).resolve().parent.parent


def shared_path(name: str) -> Path:
    """A file or folder of the shared data; the test is skipped where it is absent.

    Looked for in $EVENFLOW_SHARED_DATA, in `shared` in the repository, and in `shared` beside it.
    """
    chosen = os.environ.get("EVENFLOW_SHARED_DATA")
    folders = [Path(chosen)] if chosen else [_REPOSITORY / "shared", _REPOSITORY.parent / "shared"]
    for folder in folders:
        if (folder / name).exists():
            return folder / name
    missing = f"the shared data {name} is not here; EVENFLOW_SHARED_DATA can say where it is"
    if os.environ.get("EVENFLOW_REQUIRE_SHARED_DATA"):
        pytest.fail(missing)
    pytest.skip(missing)
