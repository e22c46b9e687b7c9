"""An append-only file of finished answers: a run resumes from it after a crash, and every report is made from it.

The first line identifies the run: tasks, sides and settings. Each further line is one answer. A last line that was cut
short by a crash is dropped.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import msgspec

from evenflow.errors import InvalidInput

_FORMAT = 2  # since 2, programs are judged in a process of their own
_SHOWN_DIGITS = 10


def digest_of(value: Any) -> str:
    return hashlib.sha256(msgspec.json.encode(value, order="sorted")).hexdigest()


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """What a run is. Answers under headers with the same key belong together."""

    tasks: str  # the file or the shipped set, as it was given
    digest: str  # of the tasks that are asked
    sides: list[str]
    settings: dict[str, Any]
    format: int = _FORMAT

    @property
    def key(self) -> str:
        """A short name of the run. Where the tasks were read from does not matter, only what they are."""
        identity = [self.format, self.digest, self.sides, self.settings]
        return digest_of(identity)[:_SHOWN_DIGITS]

    def difference(self, other: Header) -> str:
        """What makes `other` another run."""
        names = {"format": "another version of evenflow", "digest": "other tasks", "sides": "other sides"}
        found = [text for name, text in names.items() if getattr(self, name) != getattr(other, name)]
        changed = sorted(
            name
            for name in self.settings.keys() | other.settings.keys()
            if self.settings.get(name) != other.settings.get(name)
        )
        return ", ".join(found + [f"another {name.replace('_', ' ')}" for name in changed])


class Entry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One side's answer to one task. Times are seconds since its start of the command began to ask."""

    side: int
    task: str  # its id
    start: int  # the answer came from the first start of the command (0), or from a later one
    began_s: float
    ended_s: float
    text: str = ""  # for the scorer choice: the likeliest choice
    is_correct: bool = False
    note: str = ""  # why it is wrong
    error: str | None = None  # the request failed: the answer is neither right nor wrong
    ttft_s: float | None = None
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    num_chunks: int | None = None
    logprobs: list[float] | None = None  # of the choices
    is_judged: bool = True  # False: a program that has not been run yet; a later entry has its verdict
    guards: str | None = None  # of the program that was run

    @property
    def total_s(self) -> float:
        return self.ended_s - self.began_s


_DECODE_HEADER = msgspec.json.Decoder(Header).decode
_DECODE_ENTRY = msgspec.json.Decoder(Entry).decode


class Journal:
    """Open for one process at a time. `entries` holds the latest answer of each side to each task."""

    def __init__(self, path: Path, file: IO[bytes], header: Header, entries: Sequence[Entry]) -> None:
        self.path = path
        self.header = header
        self.entries = {(entry.side, entry.task): entry for entry in entries}
        self.num_starts = 1 + max((entry.start for entry in entries), default=-1)
        self._file = file

    @classmethod
    def create(cls, path: Path, header: Header) -> Journal:
        """A new file. One that exists is never overwritten."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = path.open("xb")
        except FileExistsError as error:
            raise InvalidInput(
                f"The journal {path} exists: add --resume to go on with it, or choose another file."
            ) from error
        except OSError as error:
            raise InvalidInput(f"Got the journal {str(path)!r} but cannot write it: {error.strerror}.") from error
        _lock(file, path)
        journal = cls(path, file, header, [])
        journal._write(header)
        return journal

    @classmethod
    def resume(cls, path: Path, header: Header) -> Journal:
        """An existing file of the same run."""
        try:
            file = path.open("r+b")
        except OSError as error:
            raise InvalidInput(f"Got the journal {str(path)!r} but cannot open it: {error.strerror}.") from error
        try:
            _lock(file, path)
            return cls(path, file, header, _read(file, path, header))
        except BaseException:
            file.close()
            raise

    def add(self, entry: Entry) -> None:
        self._write(entry)
        self.entries[entry.side, entry.task] = entry

    def _write(self, line: Header | Entry) -> None:
        self._file.write(msgspec.json.encode(line) + b"\n")
        self._file.flush()  # a killed process loses nothing that was flushed

    def discard(self) -> None:
        """Remove the file of a run that came to nothing."""
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _lock(file: IO[bytes], path: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise InvalidInput(f"The journal {path} is in use by another process.") from error


def _read(file: IO[bytes], path: Path, header: Header) -> list[Entry]:
    """All answers. The file is cut after its last whole line and positioned there."""
    content = file.read()
    num_whole = content.rfind(b"\n") + 1
    lines = content[:num_whole].splitlines()
    try:
        found = _DECODE_HEADER(lines[0] if lines else b"")
    except msgspec.DecodeError as error:
        raise InvalidInput(f"Got {str(path)!r} but it is no journal of evenflow eval.") from error
    if found.key != header.key:
        raise InvalidInput(f"The journal {path} is of another run: {header.difference(found)}.")
    entries = []
    for number, line in enumerate(lines[1:], start=2):
        try:
            entries.append(_DECODE_ENTRY(line))
        except msgspec.DecodeError as error:
            raise InvalidInput(f"The journal {path} is damaged in line {number}: {error}.") from error
    file.seek(num_whole)
    os.truncate(file.fileno(), num_whole)
    return entries
