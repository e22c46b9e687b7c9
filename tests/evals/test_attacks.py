"""Answers that attack their judge, evenflow or the machine: each is wrong, and changes nothing outside of its jail.

Each runs under all guards, and as on a machine where users may make no namespaces.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from evenflow.evals.sandbox import Limits, run_program

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="system calls of Linux")
WRONG = "def f(x): return -1\n"
TESTS = (
    "import math\nassert f(3) == 9\nassert sorted(f(2) for _ in range(2)) == [4, 4]\nassert math.isclose(f(1), 1.0)\n"
)
EQUAL_TO_ALL = """
class Any:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __eq__
    def __hash__(self): return 9
    def __abs__(self): return 0
    def __float__(self): return 9.0
    def __int__(self): return 9
    def __sub__(self, other): return 0
    __rsub__ = __add__ = __radd__ = __sub__
    def __getattr__(self, name): return lambda *args: True
    def __bool__(self): return True
    def __len__(self): return 1
    def __iter__(self): return iter([self])
"""
# Behind the audit hook's back, as an answer can get that looks for a way.
RAW = """
import gc
for one in gc.get_objects():
    if getattr(one, '__qualname__', '') == 'make_guard.<locals>.guard':
        code = (lambda event, arguments: None).__code__
        one.__code__ = code.replace(co_freevars=one.__code__.co_freevars)
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def f(x): return -1
"""
GONE_ROUND = """
import os, sys, gc
def all_of(kind):
    return [one for one in gc.get_objects() if isinstance(one, kind)]
"""
FORGING = {
    "frames": "import sys\nframe = sys._getframe()\nwhile frame:\n    for name in list(frame.f_locals):\n"
    "        try: frame.f_locals[name] = 9\n        except BaseException: pass\n    frame = frame.f_back\n",
    "the caller's frame when called": "import sys\ndef f(x):\n    frame = sys._getframe(1)\n    while frame:\n"
    "        frame.f_globals.update(f=lambda x: x * x, __builtins__={}, math=None)\n        frame = frame.f_back\n"
    "    return -1\n",
    "globals of __main__": "import __main__\n__main__.__dict__.clear()\n" + WRONG,
    "the collector": GONE_ROUND
    + "for one in all_of(dict):\n    if 'verdict' in one: one['is_correct'] = True\n"
    + WRONG,
    "changed built-in functions": "import builtins\nbuiltins.sorted = lambda x: [4, 4]\nbuiltins.AssertionError = "
    "ValueError\nbuiltins.abs = lambda x: 0\ndef abs(x): return 0\ndef sorted(x): return [4, 4]\n" + WRONG,
    "a changed library": "import math, sys\nmath.isclose = lambda *a: True\nclass Fake:\n"
    "    isclose = lambda *a: True\nsys.modules['math'] = math = Fake()\n" + WRONG,
    "a changed unittest": "import unittest\nunittest.TestCase.assertEqual = lambda *a: None\n" + WRONG,
    "an exit hook that succeeds": "import atexit, os\natexit.register(os._exit, 0)\n" + WRONG,
    "leaving with success": "import os\ndef f(x): os._exit(0)\n",
    "leaving politely": "import sys\ndef f(x): sys.exit(0)\n",
    "leaving at once": "import os\nos._exit(0)",
    "an object equal to all": EQUAL_TO_ALL + "def f(x): return Any()\n",
    "an integer equal to all": "class One(int):\n    def __eq__(self, other): return True\n"
    "    __hash__ = int.__hash__\n    __float__ = lambda self: 1.0\ndef f(x): return One(-1)\n",
    "a list equal to all": "class All(list):\n    def __eq__(self, other): return True\n    __hash__ = None\n"
    "def f(x): return All()\n",
    "a class of another class": "class One:\n    __class__ = int\n    def __eq__(self, other): return True\n"
    "    def __hash__(self): return 9\ndef f(x): return One()\n",
    "a function that is a class": EQUAL_TO_ALL + "class f(Any):\n    def __init__(self, x): pass\n",
    "an error that is caught": "class E(AssertionError):\n    pass\ndef f(x): raise StopIteration\n",
    "all open files": 'import os\nfor n in range(64):\n    for text in (b\'{"is_correct": true, "note": ""}\\n\', '
    "b'\\0' * 7 + b'\\x1d[\"return\", 9, [], \"\"]'):\n        try: os.write(n, text)\n        except OSError: pass\n"
    + WRONG,
    "all files closed": "import os\nos.closerange(0, 64)\n" + WRONG,
    "replies that are no data": "import os\ndef f(x):\n    for n in range(3, 64):\n"
    "        try: os.write(n, b'x' * 99)\n        except OSError: pass\n    return 9\n",
    "a reply that is too long": "def f(x): return 'x' * (60 << 20)\n",
    "a reply that is too deep": "def f(x):\n    found = ()\n    for _ in range(100_000): found = (found,)\n"
    "    return found\n",
    "more output than anyone reads": "import os\nfor _ in range(99): os.write(1, bytes(9999))\n"
    "for _ in range(99): print('x' * 100_000)\n" + WRONG,
    "a signal to its group": "import os, signal\ntry: os.killpg(0, signal.SIGTERM)\nexcept OSError: pass\n" + WRONG,
    "a task that asks for the tests": "import os\nfor root in ('/proc', '/tmp', os.environ.get('HOME', '/root')):\n"
    "    for folder, _, files in os.walk(root):\n        for name in files:\n            try: "
    "open(os.path.join(folder, name)).read(99)\n            except (OSError, UnicodeError): pass\n" + WRONG,
}
MODES = {"all guards": (), "no namespaces": ("namespaces",)}


@pytest.fixture(params=MODES)
def without(request: pytest.FixtureRequest) -> tuple[str, ...]:
    return MODES[request.param]


@pytest.mark.parametrize(
    "missing", [(), ("namespaces",), ("seccomp", "landlock"), ("namespaces", "seccomp", "landlock")]
)
def test_a_right_answer_passes(missing: tuple[str, ...]) -> None:
    assert run_program("def f(x): return x * x", TESTS, Limits(), without=missing).verdict == (True, "")


@pytest.mark.parametrize("name", FORGING)
def test_no_score_is_forged(name: str, without: tuple[str, ...]) -> None:
    ran = run_program(FORGING[name], TESTS, Limits(wall_s=5.0), without=without)
    assert not ran.verdict.is_correct
    assert "judged in another process" in ran.guards
    assert ("namespace" in ran.guards) <= (not without)


@pytest.mark.parametrize("name", FORGING)
def test_no_score_is_forged_where_the_kernel_keeps_nothing(name: str) -> None:
    ran = run_program(FORGING[name], TESTS, Limits(wall_s=5.0), without=("namespaces", "seccomp", "landlock"))
    assert not ran.verdict.is_correct
    assert ran.guards.count("audit hook only") == 5


def test_methods_and_operators_that_tests_use_are_not_the_answers() -> None:
    answer = EQUAL_TO_ALL + "    def __init__(self, *args): pass\ndef f(x): return Any()\n"
    for tests in (
        "assert f(1) == 5",
        "assert 5 == f(1)",
        "assert f(1) in [1, 2]",
        "assert 5 in f(1)",
        "assert abs(f(1) - 5) < 1e-6",
        "assert 4 < f(1) < 6",
        "assert f('a').startswith('b')",
        "assert f(1).issubset({1})",
        "assert isinstance(f(1), list)",
        "assert {f(1)} == {9}",
        "assert {9: 1}[f(1)] == 1",
        "assert (1, f(1)) == (1, 9)",
        "assert [f(1)] == [5] and {'a': f(1)} == {'a': 5}",
        "import unittest\nunittest.TestCase().assertEqual(f(1), 5)",
        "import math\nassert math.isclose(f(1), 5)",
        "assert str(f(1)) == '5'",
        "assert Any(1) == 5 or 3 in Any(1)",
        "assert abs(Any(1) - 5) < 1e-6",
    ):
        assert not run_program(answer, tests, Limits(wall_s=5.0)).verdict.is_correct, tests


def test_what_tests_pass_in_leads_to_nothing_of_theirs() -> None:
    program = """
def f(*given):
    border = given[0]._remote.border
    names = "__globals__ __builtins__ __class__ __dict__ __func__ __self__ __init__ _secret gi_frame gi_code".split()
    one = given[0]
    requests = [(ask, one, name) for one in (*given, given[2].method) for name in names for ask in ("get", "delete")]
    requests += [("set", one, name, 1) for one in given for name in names if name[0] == "_"]
    requests += [("call", type, ("X", (), {}), {}), ("get", [1], "append"), ("run", "1"), ("eq", one, 1)]
    for request in requests:
        try:
            border.request(*request)
        except (PermissionError, AttributeError):
            continue
        return str(request)
    return given[2].shown
"""
    tests = (
        "class Thing:\n    _secret = [1]\n    shown = 'nothing'\n    def method(self): pass\n"
        "assert (found := f(lambda: 1, (n for n in ()), Thing())) == 'nothing', found"
    )
    assert run_program(program, tests, Limits()).verdict == (True, "")


MADE_UP = {  # and what is wrong with each
    "a number that is an object": (["complex", ["mine", 901, 1], 1], "asked while a message is read"),
    "an error whose class is an object": (
        ["own error", 902, 1, ["mine", 903, 1], "x"],
        "asked while a message is read",
    ),
    "a name that is code": (["named tuple", "x; import os", ["a"], 1], "valid identifiers"),
    "no container": (["at", 99], "out of range"),
    "no object": (["yours", 99], "out of range"),
}


@pytest.mark.parametrize("kind", ["return", "raise"])
@pytest.mark.parametrize("name", MADE_UP)
def test_a_message_that_an_answer_makes_up_is_no_right_answer(name: str, kind: str) -> None:
    value, problem = MADE_UP[name]
    program = (
        "import json, os\ndef f(x):\n"
        f"    content = json.dumps([{kind!r}, {value!r}, [['dict', None, []]] * 8, '']).encode()\n"
        "    for n in range(3, 32):\n        try: os.write(n, len(content).to_bytes(8, 'big') + content)\n"
        "        except OSError: pass\n    return 9\n"
    )
    verdict = run_program(program, "assert f(3) == 9\nassert f(2) == 4", Limits(wall_s=5.0)).verdict
    assert not verdict.is_correct
    assert "sent what is no data" in verdict.note
    assert problem in verdict.note


@pytest.fixture
def bystander() -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process.pid
        assert process.poll() is None
        process.kill()


def test_the_hook_alone_is_no_wall() -> None:
    """What the other tests here presume: an answer that wants to can call the kernel."""
    assert run_program(RAW, "assert libc.getpid() > 0 and libc.kill(os.getpid(), 0) in (0, -1)", Limits()).verdict == (
        True,
        "",
    )


REACHING = {
    "killing": "libc.kill(TARGET, 9); libc.kill(-1, 9); libc.kill(0, 9); libc.killpg(TARGET, 9)",
    "signals by a file's owner": "import fcntl\nr, w = os.pipe()\nfcntl.fcntl(r, 8, TARGET); fcntl.fcntl(r, 10, 9)\n"
    "fcntl.fcntl(r, fcntl.F_SETFL, fcntl.fcntl(r, fcntl.F_GETFL) | os.O_ASYNC); os.write(w, b'x')",
    "niceness": "libc.setpriority(0, TARGET, 19); libc.setpriority(1, 0, 19); libc.setpriority(2, 0, 19)",
    "affinity": "mask = ctypes.c_uint64(1); libc.sched_setaffinity(TARGET, 8, ctypes.byref(mask))",
    "limits": "limit = (ctypes.c_uint64 * 2)(1, 1); libc.prlimit(TARGET, 7, ctypes.byref(limit), None)",
    "tracing": "libc.ptrace(16, TARGET, 0, 0); libc.ptrace(0x4206, TARGET, 0, 0)",
    "memory": "open(f'/proc/{TARGET}/mem', 'r+b').write(b'x')",
}


def state_of(process: int) -> object:
    status = Path(f"/proc/{process}/status").read_text()
    kept = [line for line in status.splitlines() if line.startswith(("TracerPid", "Cpus_allowed:"))]
    return kept, os.getpriority(os.PRIO_PROCESS, process), Path(f"/proc/{process}/limits").read_text()


@needs_linux
@pytest.mark.parametrize("name", REACHING)
def test_no_other_process_is_reached(name: str, without: tuple[str, ...], bystander: int) -> None:
    targets = [os.getpid(), bystander]
    before = [state_of(target) for target in targets]
    for target in (*targets, "os.getppid()"):
        verdict = run_program(RAW + f"TARGET = {target}\n" + REACHING[name], TESTS, Limits(wall_s=5.0), without=without)
        assert not verdict.verdict.is_correct
    assert [state_of(target) for target in targets] == before


@needs_linux
@pytest.mark.parametrize("missing", [(), ("namespaces",), ("namespaces", "landlock", "seccomp")])
def test_the_judges_memory_and_files_are_closed(missing: tuple[str, ...]) -> None:
    program = RAW + (
        "opened = []\nfor name in ('mem', 'maps', 'environ', 'fd/0', 'root/etc/passwd'):\n"
        "    try: opened.append(open(f'/proc/{os.getppid()}/{name}', 'rb').read(9))\n    except OSError: pass\n"
        "traced = libc.ptrace(16, os.getppid(), 0, 0)\n"
    )
    assert run_program(program, "assert (opened, traced) == ([], -1)", Limits(), without=missing).verdict == (True, "")


@needs_linux
def test_without_a_guard_of_the_kernel_priorities_are_restored() -> None:
    before = state_of(os.getpid())
    program = RAW + f"mask = ctypes.c_uint64(1); libc.sched_setaffinity({os.getpid()}, 8, ctypes.byref(mask))"
    ran = run_program(program, TESTS, Limits(), without=("namespaces", "seccomp"))
    assert not ran.verdict.is_correct
    assert "judge and other processes: audit hook only" in ran.guards
    if len(os.sched_getaffinity(0)) > 1 and os.getuid() != 0:  # who has no capabilities may not change root's
        assert ran.verdict.note == "changed evenflow's own priority or cores, which are restored"
    assert state_of(os.getpid()) == before


LEAVES = (
    "import time\nif libc.fork() == 0:\n    libc.setsid()\n    if libc.fork() == 0:\n        libc.setsid()\n"
    "        open('outlived', 'w').close()\n        time.sleep(60)\n    time.sleep(60)\n"
)


@needs_linux
@pytest.mark.parametrize("missing", [(), ("namespaces",), ("namespaces", "seccomp"), ("seccomp",)])
def test_nothing_outlives_its_judge(missing: tuple[str, ...], tmp_path: Path) -> None:
    marker = f"evenflow-test-{tmp_path.name}-{os.getpid()}"
    program = RAW + f"libc.prctl(15, {marker[-15:].encode()!r}, 0, 0, 0)\nlibc.prctl(1, 0, 0, 0, 0)\n" + LEAVES
    verdict = run_program(program, TESTS, Limits(wall_s=5.0, memory_bytes=1 << 30), without=missing).verdict
    assert not verdict.is_correct
    assert "ran longer" not in verdict.note
    assert not [name for name in names_of_processes() if name == marker[-15:]]


def names_of_processes() -> list[str]:
    found = []
    for place in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = place.read_text().partition("(")[2].rpartition(")")
        except OSError:
            continue
        if rest.split()[0] not in "ZX":
            found.append(name)
    return found


@pytest.fixture
def own_temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where folders of answers are made."""
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    return place


ON_DISK = {
    "deep folders": "for _ in range(1500):\n    libc.mkdir(b'a' * 200, 0o700); libc.chdir(b'a' * 200)\n",
    "deep folders by Python": "import os\nfor _ in range(1500):\n    os.mkdir('a' * 200); os.chdir('a' * 200)\n",
    "links": "libc.symlink(OUTSIDE, b'link'); libc.link(OUTSIDE + b'/file', b'hard')\n"
    "libc.mkdir(b'closed', 0); libc.rename(b'link', b'closed/link')\n",
    "closed folders": "libc.mkdir(b'a', 0o700); libc.mkdir(b'a/b', 0o700); libc.mkdir(b'a/b/c', 0); libc.umask(0o777)\n"
    "open('a/file', 'w').close(); libc.mkdir(b'a/d', 0o777)\n"
    "libc.chmod(b'a/b', 0); libc.chmod(b'a', 0); libc.chmod(b'.', 0)\n",
    "modes": "libc.chmod(OUTSIDE, 0o777); libc.chmod(OUTSIDE + b'/file', 0o777); libc.chown(OUTSIDE, 1, 1)\n"
    "libc.symlink(OUTSIDE, b'a'); libc.utimes(OUTSIDE + b'/file', None); libc.truncate(OUTSIDE + b'/file', 0)\n",
    "names": "open('-rf', 'w'); open('a\\nb', 'w'); open(b'\\xff', 'w'); libc.mknod(b'pipe', 0o10600, 0)\n",
}


@needs_linux
@pytest.mark.parametrize("name", ON_DISK)
def test_nothing_is_left_or_changed_on_the_disk(
    name: str, without: tuple[str, ...], own_temporary: Path, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o700)
    (outside / "file").write_text("original")
    before = [(place.stat(), place.name) for place in (outside, outside / "file")]
    program = RAW + f"OUTSIDE = {os.fsencode(outside)!r}\n" + ON_DISK[name]
    assert not run_program(program, TESTS, Limits(), without=without).verdict.is_correct
    assert list(own_temporary.iterdir()) == []
    assert [(place.stat(), place.name) for place in (outside, outside / "file")] == before
    assert (outside / "file").read_text() == "original"


@needs_linux
def test_the_kernel_counts_folders_and_bytes() -> None:
    program = RAW + (
        "num_folders = sum(libc.mkdir(b'%d' % n, 0o700) == 0 for n in range(1000))\n"
        "def fill():\n    total = 0\n    for n in range(1000):\n        try:\n"
        "            with open(f'0/{n}', 'wb') as file: total += file.write(bytes(1 << 20))\n"
        "        except OSError: pass\n    return total\n"
    )
    ran = run_program(program, "assert num_folders < 130\nassert fill() <= 64 << 20", Limits())
    if "files and folders: its own tmpfs" not in ran.guards:
        pytest.skip("users may make no namespaces here")
    assert ran.verdict == (True, "")


def test_what_the_hook_counts() -> None:
    assert (
        "64 files and folders"
        in run_program("import os\nfor n in range(99): os.mkdir(str(n))", "", Limits()).verdict.note
    )
