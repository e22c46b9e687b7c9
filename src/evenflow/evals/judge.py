"""The program that `sandbox.py` starts for one answer: it runs the tests, and the answer in a child of its own.

The child leaves before the tests are read, so nothing of them is in its memory. It gets two pipes, over which the tests
call it; the verdict goes over a descriptor that it never had. Needs only Python's library.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import signal
import sys
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from evenflow.evals import jail
from evenflow.evals.border import (
    DECLARED,
    LOOSE,
    NAMED,
    Border,
    Ended,
    Printed,
    perform,
    perform_for_answer,
    raise_rank,
)

_SHOWN_NOTE = 200


def main() -> None:
    """`sys.argv` holds this process's parent, the limits, and which guards to do without (for tests of the others)."""
    parent, limits, without = json.loads(sys.argv[1])
    folder, libc = os.getcwd(), jail.libc_of_linux()
    has_namespaces = "namespaces" not in without and jail.enter_namespaces(libc)
    has_disk = has_namespaces and jail.mount_own_disk(libc, folder, limits["file_bytes"])
    jail.die_with_parent(libc)
    if os.getppid() != parent:
        return
    jail.adopt_orphans(libc)
    to_answer, to_judge = os.pipe(), os.pipe()
    if (child := os.fork()) == 0:
        jail.die_with_parent(libc)
        keep_only(to_answer[0], to_judge[1])
        guards = jail.Guards(has_namespaces, has_disk, *confine(libc, folder, limits, without, is_judge=False))
        be_the_answer(to_answer[0], to_judge[1], guards)
    else:
        job, verdict = 0, os.dup(1)
        keep_only(job, verdict, to_judge[0], to_answer[1])
        confine(libc, folder, limits, without, is_judge=True)
        be_the_judge(to_judge[0], to_answer[1], verdict, child)


def keep_only(*descriptors: int) -> None:
    """Standard input and output lead nowhere, but for those that are kept."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in {0, 1, 2}.difference(descriptors):
        os.dup2(nowhere, standard)
    for kept, next_kept in pairwise([2, *sorted(one for one in descriptors if one > 2), 1 << 16]):
        os.closerange(kept + 1, next_kept)


def confine(libc: Any, folder: str, limits: dict[str, Any], without: list[str], *, is_judge: bool) -> tuple[bool, bool]:
    """Whether Landlock and seccomp hold from here on."""
    has_landlock = "landlock" not in without and jail.confine_files(libc, folder, may_signal=is_judge)
    jail.drop_rights(libc)
    jail.refuse_processes()
    jail.lower_limits(limits)
    has_seccomp = "seccomp" not in without and jail.refuse_system_calls(libc)
    for name in ("ctypes", "_ctypes", "resource"):
        sys.modules.pop(name, None)  # an import of them is checked from here on
    sys.addaudithook(jail.make_guard(folder))
    return has_landlock, has_seccomp


def be_the_answer(reads: int, writes: int, guards: jail.Guards) -> None:
    """Serve the judge's requests until it is gone."""
    names: dict[str, Any] = {"__name__": "answer"}
    printed = Printed()
    sys.stdin = io.TextIOWrapper(io.BytesIO())
    sys.stdout = io.TextIOWrapper(printed, encoding="utf-8", errors="replace", write_through=True)

    def run(program: str) -> None:
        try:
            exec(compile(program, "answer.py", "exec"), names)
        except MemoryError:
            names.clear()  # room to say so
            raise

    own: dict[str, Callable[..., Any]] = {
        "guards": lambda: tuple(guards),
        "run": run,
        "names": lambda *wanted: {name: names[name] for name in wanted if name in names},
    }

    def answers(operation: str, *arguments: Any) -> Any:
        return own[operation](*arguments) if operation in own else perform(operation, *arguments)

    border = Border(reads, writes, answers, rank=DECLARED, take_printed=printed.take)
    try:
        while True:
            border.serve()
    except Ended:
        os._exit(0)


def be_the_judge(reads: int, writes: int, verdict: int, child: int) -> None:
    border = Border(reads, writes, perform_for_answer)
    # Asked before the answer's program is sent, so this is still our own word.
    os.write(verdict, (json.dumps(border.request("guards")) + "\n").encode())
    with open(0, closefd=False) as file:
        job = json.load(file)
    os.dup2(1, 0)
    note = judged(border, job, child)
    os.write(verdict, (json.dumps({"is_correct": note is None, "note": note or ""}) + "\n").encode())
    signal.pause()  # the parent ends us, and all below us


def judged(border: Border, job: dict[str, Any], child: int) -> str | None:
    """Why the answer is wrong; None if it is right. All that goes wrong here makes it wrong."""
    try:
        border.request("run", job["program"])
        names = names_of_tests(border, job)
        exec(compile(job["tests"], "tests.py", "exec"), names)
        border.request("names")  # an answer that is gone by now is wrong, whatever the tests caught
    except Ended as end:
        return str(end) or ended_how(child)
    except SystemExit:
        return "ended the program before its tests"
    except BaseException as error:
        return f"{type(error).__name__}: {error}".removesuffix(": ").splitlines()[0][:_SHOWN_NOTE]
    return None


def names_of_tests(border: Border, job: dict[str, Any]) -> dict[str, Any]:
    """What the tests find: modules and helpers of the task's own, and what the answer defines for all other names."""
    names: dict[str, Any] = {"__name__": "answer"}
    for helper in job["helpers"]:
        try:
            exec(compile(helper, "task.py", "exec"), names)
        except Exception:  # it needs what only the answer has
            continue
    for module, attributes in job["modules"].items():
        found = importlib.import_module(module)
        if all(hasattr(found, attribute) for attribute in attributes):
            names.setdefault(module, found)
    wanted = [name for name in (*job["names"], *job["modules"]) if name not in names]
    for name, value in border.request("names", *wanted).items():
        rank = DECLARED if name in job["declared"] else NAMED if name in job["classes"] else LOOSE
        names[name] = raise_rank(value, rank)
    # `sum(10, 15) == 6` is about an answer's own sum, if the tests use no other name that could be the answer.
    own = border.request("names", *job["built_ins"])
    if len(own) == 1:
        names |= own
    return names


def clean_up() -> None:
    """Empty the folder that this is started in, whatever an answer has made there, and reach nothing else."""
    libc = jail.libc_of_linux()
    jail.confine_files(libc, os.getcwd())
    jail.drop_rights(libc)
    way: list[str] = []
    while True:
        with os.scandir(".") as entries:
            below = None
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    below = entry.name
                    break
                os.unlink(entry.name)
        if below is not None:
            os.chmod(below, 0o700)
            os.chdir(below)
            way.append(below)
        elif way:
            os.chdir("..")
            os.rmdir(way.pop())
        else:
            return


def ended_how(child: int) -> str:
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return f"killed by {signal.Signals(-code).name}" if code < 0 else "ended the program before its tests"
