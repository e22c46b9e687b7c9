"""Checks the wheel in a folder: its name, and that it runs in an empty environment, without the checkout."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

_SOURCE = Path(__file__).parents[1] / "src" / "evenflow" / "__init__.py"
COMMANDS = (("evenflow", "--version"), ("evenflow", "analyze", "--preset", "code"))


def check(folder: Path) -> None:
    [version] = re.findall(r'^__version__ = "(.+)"$', _SOURCE.read_text(encoding="utf-8"), re.MULTILINE)
    expected = f"evenflow-{version}-py3-none-any.whl"
    found = sorted(path.name for path in folder.glob("*.whl"))
    if found != [expected]:
        raise SystemExit(f"Got the wheels {found} in {folder} but expected {expected}.")
    with tempfile.TemporaryDirectory(prefix="evenflow-wheel-") as name:
        empty = Path(name)
        venv.create(empty / "env", with_pip=True)
        programs = empty / "env" / "bin"
        variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        install = (programs / "python", "-m", "pip", "install", "--quiet", folder.resolve() / expected)
        for line in (install, *((programs / program, *rest) for program, *rest in COMMANDS)):
            done = subprocess.run(line, cwd=empty, env=variables, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(f"{' '.join(map(str, line))}\n{done.stdout}{done.stderr}")
    print(f"{expected} installs and runs without the checkout.")


if __name__ == "__main__":
    check(Path(sys.argv[1]))
