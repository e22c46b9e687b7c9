"""What an answer's process, and the judge's, may not do: kept by the kernel as far as it can, and by an audit hook.

Each guard says whether it holds here. Imports nothing but Python's library: it runs without site packages.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

_NEW_NAMESPACES = 0x10000000 | 0x40000000 | 0x20000000 | 0x08000000 | 0x00020000  # user, network, PID, IPC, mounts
_MOUNT_FLAGS = 2 | 4 | 8  # no set-user-ID files, no devices, no programs
_NOBODY = 65534
_DIE_WITH_PARENT, _SET_DUMPABLE, _SET_SECCOMP, _SET_SUBREAPER, _NO_NEW_PRIVILEGES = 1, 4, 22, 36, 38  # of prctl(2)
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # Landlock's system calls, the same on every architecture
_READ = 1 << 2 | 1 << 3  # Landlock's rights to read files and folders
_UNIX_SOCKET = 1  # the family AF_UNIX
MAX_WRITTEN_FILES = 64  # together with the limit on one file, the most disk that an answer can fill
_MAX_INODES = 2 * MAX_WRITTEN_FILES  # of files and folders, where the kernel counts them
# Audit events, as Python names them.
_PROCESSES = ("os.fork", "os.exec", "os.posix_spawn", "os.spawn", "os.system", "os.kill", "subprocess.", "pty.")
_REFUSED = (*_PROCESSES, "signal.pthread_kill", "socket.", "syslog.", "sqlite3.", "ctypes.", "resource.")
_READS = ("os.listdir", "os.scandir", "os.chdir")
_CHANGES = ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod")
_CHANGES_OF_METADATA = ("os.chown", "os.utime", "os.setxattr", "os.removexattr")
_ON_PATHS = (*_READS, *_CHANGES, *_CHANGES_OF_METADATA)
_MAKES = ("os.mkdir", "os.link", "os.symlink")
_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

# System calls that reach other processes, the network, or files by other ways than opening them. By architecture.
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # as the kernel's audit names them
_FORBIDDEN = {
    "x86_64": (
        *(56, 57, 58, 59, 322, 435),  # clone, fork, vfork, execve, execveat, clone3
        *(62, 200, 234, 129, 297, 424, 434, 438),  # kill and its kin, pidfd_send_signal, pidfd_open, pidfd_getfd
        *(101, 310, 311, 312, 440, 448, 256, 279),  # ptrace, process_vm_*, kcmp, process_*, migrate and move pages
        *(141, 142, 144, 203, 251, 302, 314),  # priorities, affinity, prlimit64: of any process of the same user
        *(109, 112, 135, 155, 161, 165, 166, 272, 308),  # sessions, personality, roots, mounts, namespaces
        *(41, 42, 43, 49, 50, 288),  # socket, connect, accept, bind, listen, accept4
        *(29, 30, 31, 64, 65, 68, 69, 240, 241),  # System V's and POSIX' shared objects outlive a process
        *(86, 88, 133, 259, 265, 266),  # links and device files
        *(90, 91, 92, 93, 94, 132, 235, 254, 260, 261, 268, 280),  # modes, owners, times, and watching files
        *(188, 189, 190, 197, 198, 199, 303, 304),  # attributes, handles
        *(103, 248, 249, 250, 298, 300, 321, 323),  # syslog, keys, perf, fanotify, bpf, userfaultfd
    ),
    "aarch64": (
        *(220, 221, 281, 435),
        *(129, 130, 131, 138, 240, 424, 434, 438),
        *(117, 270, 271, 272, 440, 448, 238, 239),
        *(118, 119, 122, 140, 30, 261, 274),
        *(154, 157, 92, 41, 51, 40, 39, 97, 268),
        *(198, 200, 201, 202, 203, 242),
        *(194, 196, 195, 190, 193, 186, 189, 180, 181),
        *(33, 36, 37),
        *(52, 53, 54, 55, 27, 88),
        *(5, 6, 7, 14, 15, 16, 264, 265),
        *(116, 217, 218, 219, 241, 262, 280, 282),
    ),
}
_FORBIDDEN_EVERYWHERE = (425, 426, 427, 428, 429, 430, 431, 432, 433, 442, 452)  # io_uring, mounts, fchmodat2
_FIRST_UNKNOWN = 463  # newer system calls than those that were looked at
_ALL, _NO_STREAMS = 0xFFFFFFFF, (0, *range(2, 16))
# By number, bits and forbidden values of its second argument: signals to others by the owner of a file (fcntl, ioctl);
# pairs of sockets of other kinds than streams, which can send to a named one.
_ARGUMENTS = {
    "x86_64": ((72, _ALL, (8, 10, 15)), (16, _ALL, (0x8901, 0x8902, 0x5410, 0x5412)), (53, 15, _NO_STREAMS)),
    "aarch64": ((25, _ALL, (8, 10, 15)), (29, _ALL, (0x8901, 0x8902, 0x5410, 0x5412)), (199, 15, _NO_STREAMS)),
}


class Guards(NamedTuple):
    """Which guards of the kernel hold for a process."""

    namespaces: bool = False  # of its own for users, processes, network, IPC and mounts
    own_disk: bool = False  # its folder is in memory, bounded in bytes and inodes, and goes when it ends
    landlock: bool = False
    seccomp: bool = False

    def describe(self) -> str:
        """Who keeps what from an answer. A guard that does not hold is not named."""
        names = {"network": self.namespaces, "PID": self.namespaces, "seccomp": self.seccomp}

        def kept(*wanted: str) -> str:
            found = [f"{name} namespace" if name != "seccomp" else name for name in wanted if names[name]]
            return " and ".join(found) or "audit hook only"

        parts = {
            "judge and other processes": kept("PID", "seccomp"),
            "network": kept("network", "seccomp"),
            "files": "Landlock" if self.landlock else "audit hook only",
            "modes and links of files": kept("seccomp"),
            "number of files and folders": "its own tmpfs" if self.own_disk else "audit hook only",
        }
        return "judged in another process; " + ", ".join(f"{what}: {who}" for what, who in parts.items())


class _NoLinux:
    """Every call fails, as on a kernel that does not know it."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *_: -1


def libc_of_linux() -> Any:
    return ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else _NoLinux()


def enter_namespaces(libc: Any) -> bool:
    """Move to namespaces of its own, as a user without rights; the next child is the first process of its PIDs."""
    user, group = os.getuid(), os.getgid()
    if libc.unshare(_NEW_NAMESPACES):
        return False
    try:
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{_NOBODY} {user} 1"),
            ("gid_map", f"{_NOBODY} {group} 1"),
        ):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    except OSError:
        return True  # without a map there is no own disk; the namespaces hold
    for place in ("/proc", *package_places()):  # an empty folder instead
        libc.mount(b"tmpfs", os.fsencode(place), b"tmpfs", _MOUNT_FLAGS | 1, b"size=4k")
    return True


def mount_own_disk(libc: Any, folder: str, file_bytes: int) -> bool:
    """Nobody has to clean it up: it goes with the namespace."""
    options = f"size={MAX_WRITTEN_FILES * file_bytes},nr_inodes={_MAX_INODES},mode=700"
    if libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", _MOUNT_FLAGS, options.encode()):
        return False
    os.chdir(folder)
    return True


def drop_rights(libc: Any) -> None:
    """No capabilities, none to be gained, and no other process may look into this one."""
    header, nothing = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    libc.capset(ctypes.byref(header), ctypes.byref(nothing))
    libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    libc.prctl(_SET_DUMPABLE, 0, 0, 0, 0)


def die_with_parent(libc: Any) -> None:
    """It watches the wall clock, and may be killed. The kernel forgets this when a process changes its namespaces."""
    libc.prctl(_DIE_WITH_PARENT, 9, 0, 0, 0)


def adopt_orphans(libc: Any) -> None:
    """Processes that lose their parent stay below this one, where they can be found."""
    libc.prctl(_SET_SUBREAPER, 1, 0, 0, 0)


def refuse_system_calls(libc: Any) -> bool:
    """Seccomp: what Landlock does not know, and what reaches other processes, fails from here on."""
    machine = os.uname().machine
    if machine not in _ARCHITECTURES or sys.maxsize < 1 << 32:
        return False
    load, equal, at_least, mask, ret = 0x20, 0x15, 0x35, 0x54, 0x06
    refused, passed = (ret, 0, 0, 0x00050000 | errno.EPERM), (ret, 0, 0, 0x7FFF0000)
    code = [(load, 0, 0, 4), (equal, 1, 0, _ARCHITECTURES[machine]), (ret, 0, 0, 0x80000000), (load, 0, 0, 0)]
    code += [(at_least, 0, 1, _FIRST_UNKNOWN), (ret, 0, 0, 0x00050000 | errno.ENOSYS)]
    for number in (*_FORBIDDEN[machine], *_FORBIDDEN_EVERYWHERE):
        code += [(equal, 0, 1, number), refused]
    for number, bits, values in _ARGUMENTS[machine]:
        tests = [step for value in values for step in ((equal, 0, 1, value), refused)]
        code += [(equal, 0, 3 + len(tests), number), (load, 0, 0, 24), (mask, 0, 0, bits), *tests, passed]
    code += [passed]
    packed = b"".join(
        operation.to_bytes(2, "little") + bytes((yes, no)) + value.to_bytes(4, "little")
        for operation, yes, no, value in code
    )
    filters = ctypes.create_string_buffer(packed, len(packed))
    program = (ctypes.c_uint64 * 2)(len(code), ctypes.addressof(filters))
    return bool(libc.prctl(_SET_SECCOMP, 2, ctypes.byref(program), 0, 0) == 0)


def readable_places() -> list[str]:
    """Python's own library, and the system's that parts of it load."""
    system = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo", "/etc/ld.so.cache", "/dev/urandom")
    places = [os.path.dirname(os.__file__), os.path.join(sys.base_prefix, "lib"), *sys.path, *system]
    return sorted({os.path.realpath(place) for place in places if place and os.path.exists(place)})


def package_places() -> list[str]:
    """Among those: packages that were installed. Programs run without them, and task sets may be there."""
    library = os.path.dirname(os.__file__)
    places = [*(os.path.join(library, name) for name in ("site-packages", "dist-packages")), "/usr/lib/python3"]
    return sorted({os.path.realpath(place) for place in places if os.path.isdir(place)})


def confine_files(libc: Any, folder: str, *, may_signal: bool = False) -> bool:
    """Landlock: from here on the kernel refuses all files but those in `folder` and, to read, the libraries.

    The judge `may_signal`: the kernel sends the signal that ends an answer in the name of the judge that has died.
    """
    version = libc.syscall(_CREATE_RULESET, None, 0, 1)
    if version < 1:
        return False
    everything = (1 << (13 if version == 1 else 14 if version == 2 else 15)) - 1
    network, scopes = 3, 1 if may_signal else 3  # all there are: TCP, and sockets and signals of other processes
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


def lower_limits(limits: dict[str, Any]) -> None:
    import resource

    values = {
        resource.RLIMIT_AS: limits["memory_bytes"],
        resource.RLIMIT_FSIZE: limits["file_bytes"],
        resource.RLIMIT_NOFILE: limits["open_files"],
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NPROC: 0,  # no more processes or threads; the kernel exempts root
    }
    for limit, value in values.items():
        resource.setrlimit(limit, (value, value))
    # At the first of these limits a signal says what it is about, at the second the kernel kills.
    resource.setrlimit(resource.RLIMIT_CPU, (limits["cpu_s"], limits["cpu_s"] + 1))


def make_guard(folder: str) -> Callable[[str, tuple[Any, ...]], None]:
    """An audit hook that refuses what an answer must not do, also if the kernel does not."""
    own, readable, packages, num_written = os.path.realpath(folder), readable_places(), package_places(), 0

    def is_in(path: str, places: list[str]) -> bool:
        return any(path == place or path.startswith(place.rstrip("/") + "/") for place in places)

    def check_path(path: Any, *, writes: bool) -> None:
        if isinstance(path, int):
            return  # opened before
        real = os.path.realpath(os.fsdecode("." if path is None else path))
        if not is_in(real, [own] if writes else [own, *readable]) or is_in(real, packages):
            raise PermissionError(f"an answer may not {'write' if writes else 'read'} {real}")

    def count(is_new: bool) -> None:
        nonlocal num_written
        num_written += is_new
        if num_written > MAX_WRITTEN_FILES:
            raise PermissionError(f"an answer may not write more than {MAX_WRITTEN_FILES} files and folders")

    def guard(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = arguments
            writes = bool(flags & _WRITE_FLAGS) if mode is None else any(letter in mode for letter in "wax+")
            check_path(path, writes=writes)
            count(writes)
        elif event in _ON_PATHS:
            count(event in _MAKES)
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
