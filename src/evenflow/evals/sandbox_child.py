"""The script that `sandbox.py` starts in a process of its own to run an answer's program.

It drops the rights that the answer must not have, then runs it. Imports nothing from evenflow; needs only Python.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import sys
from collections.abc import Callable
from typing import Any

_NEW_USER_AND_NETWORK = 0x10000000 | 0x40000000  # of unshare(2)
_NO_NEW_PRIVILEGES = 38  # of prctl(2)
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # Landlock's system calls, the same on every architecture
_READ = 1 << 2 | 1 << 3  # Landlock's rights to read files and folders
_UNIX_SOCKET = 1  # the family AF_UNIX
_MAX_WRITTEN_FILES = 64  # together with the limit on one file, the most disk that an answer can fill
# Audit events, as Python names them.
_PROCESSES = ("os.fork", "os.exec", "os.posix_spawn", "os.spawn", "os.system", "os.kill", "subprocess.", "pty.")
_REFUSED = (*_PROCESSES, "signal.pthread_kill", "socket.", "syslog.", "sqlite3.", "ctypes.", "resource.")
_READS = ("os.listdir", "os.scandir", "os.chdir")
_CHANGES = ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod")
_CHANGES_OF_METADATA = ("os.chown", "os.utime", "os.setxattr", "os.removexattr")
_ON_PATHS = (*_READS, *_CHANGES, *_CHANGES_OF_METADATA)
_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def readable_places() -> list[str]:
    """Python's own library, and the system's that parts of it load."""
    system = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo", "/etc/ld.so.cache", "/dev/urandom")
    places = [os.path.dirname(os.__file__), os.path.join(sys.base_prefix, "lib"), *sys.path, *system]
    return sorted({os.path.realpath(place) for place in places if place and os.path.exists(place)})


def leave_network(libc: Any) -> bool:
    """Move to a network namespace without interfaces, if the kernel allows it."""
    return sys.platform == "linux" and bool(libc.unshare(_NEW_USER_AND_NETWORK) == 0)


def confine_files(libc: Any, folder: str) -> bool:
    """Landlock: from here on the kernel refuses all files but those in `folder` and, to read, the libraries."""
    if sys.platform != "linux":
        return False
    version = libc.syscall(_CREATE_RULESET, None, 0, 1)
    if version < 1:
        return False
    everything = (1 << (13 if version == 1 else 14 if version == 2 else 15)) - 1
    network, scopes = 3, 3  # all there are: TCP, and signals and sockets of other processes
    num_words = 1 if version < 4 else 2 if version < 6 else 3
    words = (ctypes.c_uint64 * 3)(everything, network, scopes)
    ruleset = libc.syscall(_CREATE_RULESET, ctypes.byref(words), ctypes.c_size_t(8 * num_words), 0)
    if ruleset < 0:
        return False
    for place, rights in [(folder, everything), *((place, _READ) for place in readable_places())]:
        descriptor = os.open(place, os.O_PATH)
        is_folder = os.path.isdir(place)
        rule = (ctypes.c_uint32 * 3)(rights if is_folder else rights & 1 << 2, 0, descriptor)
        added = libc.syscall(_ADD_RULE, ruleset, 1, ctypes.byref(rule), 0)
        os.close(descriptor)
        if added:
            return False
    libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    return bool(libc.syscall(_RESTRICT_SELF, ruleset, 0) == 0)


def lower_limits(job: dict[str, Any]) -> None:
    limits = {
        resource.RLIMIT_AS: job["memory_bytes"],
        resource.RLIMIT_FSIZE: job["file_bytes"],
        resource.RLIMIT_NOFILE: job["open_files"],
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NPROC: 0,  # no more processes or threads; the kernel exempts root
    }
    for limit, value in limits.items():
        resource.setrlimit(limit, (value, value))
    # At the first of these limits a signal says what it is about, at the second the kernel kills.
    resource.setrlimit(resource.RLIMIT_CPU, (job["cpu_s"], job["cpu_s"] + 1))


def make_guard(folder: str) -> Callable[[str, tuple[Any, ...]], None]:
    """An audit hook that refuses what an answer must not do, also if the kernel does not."""
    own, readable, num_written = os.path.realpath(folder), readable_places(), 0

    def is_in(path: str, places: list[str]) -> bool:
        return any(path == place or path.startswith(place.rstrip("/") + "/") for place in places)

    def check_path(path: Any, *, writes: bool) -> None:
        if isinstance(path, int):
            return  # opened before
        real = os.path.realpath(os.fsdecode("." if path is None else path))
        if not is_in(real, [own] if writes else [own, *readable]):
            raise PermissionError(f"an answer may not {'write' if writes else 'read'} {real}")

    def guard(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal num_written
        if event == "open":
            path, mode, flags = arguments
            writes = bool(flags & _WRITE_FLAGS) if mode is None else any(letter in mode for letter in "wax+")
            check_path(path, writes=writes)
            num_written += writes
            if num_written > _MAX_WRITTEN_FILES:
                raise PermissionError(f"an answer may not write more than {_MAX_WRITTEN_FILES} files")
        elif event in _ON_PATHS:
            for path in arguments:
                if isinstance(path, str | bytes | os.PathLike) or path is None:
                    check_path(path, writes=event not in _READS)
        elif event == "socket.__new__" and arguments[1] == _UNIX_SOCKET:
            pass  # asyncio wakes its loop through a pair of them; to connect one is refused
        elif event == "import" and arguments[0] in ("_posixsubprocess", "_ctypes"):
            raise PermissionError(f"an answer may not import {arguments[0]}")
        elif event.startswith(_REFUSED):
            raise PermissionError(f"an answer may not use {event}")

    return guard


def refuse_processes() -> None:
    """These start processes and threads without an audit event. Threads count: only root has them otherwise."""
    import _posixsubprocess
    import _thread

    def refuse(*_: Any, **__: Any) -> int:
        raise PermissionError("an answer may not start processes or threads")

    _posixsubprocess.fork_exec = refuse
    for name in ("start_new_thread", "start_new", "start_joinable_thread"):
        if hasattr(_thread, name):
            setattr(_thread, name, refuse)


def main() -> None:
    job, folder = json.load(sys.stdin), os.getcwd()
    libc = ctypes.CDLL(None, use_errno=True)
    done = {"network": leave_network(libc), "files": confine_files(libc, folder)}
    os.write(job["report_fd"], (json.dumps(done) + "\n").encode())
    refuse_processes()
    lower_limits(job)
    for name in ("ctypes", "_ctypes", "resource"):
        del sys.modules[name]  # an import of them is checked from here on
    sys.addaudithook(make_guard(folder))
    names = {"__name__": "answer"}
    exec(compile(job["program"], "answer.py", "exec"), names)
    exec(compile(job["tests"], "tests.py", "exec"), names)
    os.write(job["report_fd"], job["token"].encode())  # an answer that ends the program early does not get here


if __name__ == "__main__":
    main()
