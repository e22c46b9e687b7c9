"""A file with one writer that holds only whole lines, whatever happens to the disk."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Literal

_PRIVATE = 0o600


class LineFile:
    """Unbuffered: written lines survive the process. New files are private.

    Raises OSError if another writer has it open: two would truncate or overwrite each other's lines.
    """

    def __init__(self, path: str | Path, mode: Literal["wb", "ab"]) -> None:
        self._file = open(path, mode, buffering=0, opener=_open_alone)  # noqa: SIM115 (closed by close)
        self.num_bytes = os.fstat(self._file.fileno()).st_size
        if mode == "ab" and self.num_bytes and not _ends_a_line(path):
            self.write(b"")  # ends a line torn by a crash

    def write(self, line: bytes) -> None:
        """Write a line and its end; after an OSError nothing of it remains."""
        rest = memoryview(line + b"\n")
        try:
            while rest:
                rest = rest[self._file.write(rest) or 0 :]
        except OSError:
            with suppress(OSError):
                self._file.truncate(self.num_bytes)
            raise
        self.num_bytes += len(line) + 1

    def is_at(self, path: str | Path) -> bool:
        """False if the file was moved or deleted."""
        try:
            return os.path.samestat(os.stat(path), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return False

    def close(self) -> None:
        with suppress(OSError):
            self._file.close()


def _ends_a_line(path: str | Path) -> bool:
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def _open_alone(path: str, flags: int) -> int:
    descriptor = os.open(path, flags & ~os.O_TRUNC, _PRIVATE)
    try:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            _lock(descriptor, path)
            if flags & os.O_TRUNC:
                os.truncate(descriptor, 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _lock(descriptor: int, path: str) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise OSError(errno.EBUSY, "another server or engine is writing to it", path) from error
    except OSError:  # the file system has no locks
        pass
