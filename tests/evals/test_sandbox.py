"""Programs of answers under limits. Each hostile one runs for real, against what it tries to do."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from evenflow.evals import jail, sandbox
from evenflow.evals.sandbox import Limits, run_program
from evenflow.evals.scorers import Verdict

SHORT = Limits(wall_s=1.0)


def run(program: str, tests: str = "", limits: Limits | None = None) -> Verdict:
    return run_program(program, tests, limits or Limits()).verdict


def test_right_and_wrong_programs() -> None:
    assert run("def f(x):\n    return x + 1\n", "assert f(1) == 2") == (True, "")
    assert run("def f(x):\n    return x\n", "assert f(1) == 2, 'f(1)'") == (False, "AssertionError: f(1)")
    assert "SyntaxError" in run("def f(:").note
    assert "NameError" in run("", "f(1)").note


def test_the_usual_library_and_files_of_its_own_work() -> None:
    modules = (
        "asyncio, bisect, collections, dataclasses, datetime, decimal, functools, heapq, itertools, json, math, re"
    )
    program = f"import {modules}\nwith open('own.txt', 'w') as file:\n    file.write('hi')\n"
    assert run(
        program, "assert open('own.txt').read() == 'hi'\nassert asyncio.run(asyncio.sleep(0, 7)) == 7"
    ).is_correct


def is_confined(process: int) -> bool:
    """It gains no rights any more: the last of what may prevent a signal."""
    return "NoNewPrivs:\t1" in Path(f"/proc/{process}/status").read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere only processor time ends such a program")
def test_a_program_ends_with_the_process_that_watches_it(tmp_path: Path) -> None:
    """Else one that sleeps would stay when the evaluation is killed."""
    watching = (
        "from evenflow.evals import sandbox\n"
        "start = sandbox.subprocess.Popen\n"
        "def popen(*arguments, **options):\n"
        "    process = start(*arguments, **options)\n"
        "    print(process.pid, flush=True)\n"
        "    return process\n"
        "sandbox.subprocess.Popen = popen\n"
        "sandbox.run_program('import time; time.sleep(60)', '', sandbox.Limits(wall_s=60.0))"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", watching]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as watcher:
        assert watcher.stdout is not None
        pid = int(watcher.stdout.readline())
        while not ((below := sandbox._processes_below(pid)) and all(map(is_confined, (pid, *below)))):
            time.sleep(0.02)
        handles = [os.pidfd_open(process) for process in (pid, *below)]
        watcher.kill()
        assert all(select.select([handle], [], [], 30.0)[0] for handle in handles)


@pytest.mark.parametrize("program", ["while True: pass", "import time\ntime.sleep(60)", "x = 9 ** 9 ** 9"])
def test_time_is_limited(program: str) -> None:
    assert run(program, limits=SHORT) == (False, "ran longer than 1 s")


@pytest.mark.parametrize("program", ["x = bytearray(10 << 30)", "x = []\nwhile True: x.append(bytearray(1 << 20))"])
def test_memory_is_limited(program: str) -> None:
    assert run(program).note.startswith("MemoryError")


def test_files_and_output_are_limited() -> None:
    assert "File too large" in run("f = open('f', 'wb')\nfor _ in range(1000): f.write(bytes(1 << 20))").note
    assert "more than 64 files and folders" in run("for n in range(1000): open(str(n), 'w')").note
    assert run("while True: print('x' * 100_000)").note == "OSError: printed more than 1024 KiB"


@pytest.mark.parametrize("end", ["import os; os._exit(0)", "import sys; sys.exit(0)", "raise SystemExit"])
def test_ending_early_is_not_passing(end: str) -> None:
    assert run(end, "assert False") == (False, "ended the program before its tests")


@pytest.mark.parametrize(
    "program",
    [
        "import os\nos.fork()",
        "import os\nos.system('true')",
        "import os\nos.execv('/bin/true', ['true'])",
        "import subprocess\nsubprocess.run(['true'])",
        "import _posixsubprocess\n_posixsubprocess.fork_exec()",
        "import sys\ndel sys.modules['_posixsubprocess']\nimport _posixsubprocess",
        "import multiprocessing\nmultiprocessing.Process(target=print).start()",
        "import threading\nthreading.Thread(target=print).start()",
        "import ctypes",
        "import os\nos.kill(os.getppid(), 0)",
        "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (99, 99))",
    ],
)
def test_no_processes_no_threads_and_no_way_around(program: str) -> None:
    verdict = run(program)
    assert not verdict.is_correct
    assert "an answer may not" in verdict.note


def test_other_files_can_neither_be_read_nor_changed(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("original")
    for program in (
        f"open({str(secret)!r}).read()",
        f"open({str(secret)!r}, 'w')",
        f"import os\nos.open({str(secret)!r}, os.O_RDWR)",
        f"import os\nos.remove({str(secret)!r})",
        f"import os\nos.rename({str(secret)!r}, 'mine')",
        f"import os\nos.symlink({str(secret)!r}, 'link')\nopen('link').read()",
        f"import os\nos.chdir({str(tmp_path)!r})",
        f"import os\nos.listdir({str(tmp_path)!r})",
        f"import shutil\nshutil.rmtree({str(tmp_path)!r})",
        f"open({str(tmp_path / 'new')!r}, 'w')",
        f"import sqlite3\nsqlite3.connect({str(tmp_path / 'new')!r})",
    ):
        assert "PermissionError" in run(program).note, program
    assert secret.read_text() == "original"
    assert os.listdir(tmp_path) == ["secret"]


def test_no_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert "PermissionError" in run(f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 1)").note
        assert "an answer may not use socket." in run("import urllib.request as r\nr.urlopen('http://127.0.0.1')").note
        unix = "import socket\nsocket.socket(socket.AF_UNIX).connect('/run/docker.sock')"
        assert "PermissionError" in run(unix).note


def test_it_sees_no_environment_and_no_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENFLOW_API_KEY", "secret")
    assert run("import os", "assert 'EVENFLOW_API_KEY' not in os.environ").is_correct
    assert "EOFError" in run("input()").note


def kernel_only(code: str) -> subprocess.CompletedProcess[str]:
    """Code behind the kernel's guards alone, without the audit hook."""
    program = (
        "import os, socket, sys\nfrom evenflow.evals import jail\nlibc = jail.libc_of_linux()\n"
        "held = jail.enter_namespaces(libc) and jail.confine_files(libc, os.getcwd())\n"
        "held = held and jail.refuse_system_calls(libc)\n"
        "sys.exit(77) if not held else None\n" + code
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(jail.__file__).parents[2])}
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_the_kernel_refuses_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (tmp_path / "secret").write_text("original")
    monkeypatch.chdir(own)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        tries = {
            "read": "open('../secret').read()",
            "write": "open('../secret', 'w')",
            "TCP": f"socket.create_connection(('127.0.0.1', {port}), 1)",
            "UDP": f"socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {port}))",
        }
        done = {name: kernel_only(code) for name, code in tries.items()}
    if any(one.returncode == 77 for one in done.values()):
        pytest.skip("this kernel has no Landlock, or no network namespaces for this user")
    assert all(one.returncode == 1 for one in done.values()), done
    assert (tmp_path / "secret").read_text() == "original"
    assert kernel_only("open('mine', 'w').write('x'); import decimal").returncode == 0
