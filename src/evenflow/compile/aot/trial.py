"""Loads a new package in a process of its own before this one does: a faulty C++ compiler makes packages that crash.

Must not know: models.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

# What torch._inductor.aoti_load_package ends in: importing all of Inductor would take several times as long.
_LOAD = "import sys, torch; torch._C._aoti.AOTIModelPackageLoader(sys.argv[1], 'model', False, 1, -1)"
_PATIENCE_SECONDS = 300.0


def why_not_loadable(package: Path) -> str | None:
    """How a process that loads the package is killed by it; None where it is not.

    An error that the loader itself reports does no harm: whoever loads the package is told.
    """
    try:
        trial = subprocess.run(
            [sys.executable, "-c", _LOAD, str(package)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_PATIENCE_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return f"loading the compiled package takes over {_PATIENCE_SECONDS:.0f} s"
    if trial.returncode >= 0:
        return None
    ending, compiler = signal.Signals(-trial.returncode).name, os.environ.get("CXX", "g++")
    return (
        f"loading the compiled package ends a process with {ending}; {compiler} may be at fault, as where it links a "
        "C++ library of its own: the environment variable CXX names another compiler"
    )
