"""llama.cpp's own tests of its HTTP server, from a checkout of llama.cpp, against evenflow.

$EVENFLOW_LLAMA_CPP names the checkout; nothing of it is part of this project. llama_cpp_plugin.py lets its tests start
`evenflow serve` in place of llama-server, llama_cpp_names.py translates paths and fields, and llama_cpp_groups.py says
which tests are about llama.cpp alone.

    python tests/clients/run.py llama-cpp
    LLAMA_CPP_TESTS="-k embedding -x" python tests/clients/run.py llama-cpp   # more arguments for pytest
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from types import ModuleType

import pytest
from checking import WORK

HERE = Path(__file__).resolve().parent


def main() -> int:
    tests = Path(os.environ["EVENFLOW_LLAMA_CPP"]).resolve() / "tools" / "server" / "tests"
    os.chdir(tests)
    sys.modules["wget"] = ModuleType("wget")  # the tests import it to download models
    sys.path[:0] = [str(HERE), str(tests)]
    options = ["--quiet", "--tb=short", "--show-capture=no", "-p", "no:cacheprovider", "-p", "llama_cpp_plugin"]
    return pytest.main([*options, f"--basetemp={WORK / 'pytest'}", *shlex.split(os.environ.get("LLAMA_CPP_TESTS", ""))])


sys.exit(main())
