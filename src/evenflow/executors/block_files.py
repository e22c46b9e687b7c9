"""KV blocks on disk, one file each: a header line of JSON, then the encoded block.

A file's header identifies the model, type and version that wrote it, so files of others are never read; a checksum of
header and content detects torn files. Prompts can be guessed from the content, so only the owner may read the files.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import secrets
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from evenflow.core.blocks import Content
from evenflow.errors import InvalidConfig
from evenflow.host import private_folder

logger = logging.getLogger("evenflow")

_FORMAT, _VERSION = "evenflow-kv", 1
_OURS = re.compile(r".+-[0-9a-f]{32}(\.kv|\.\d+\.tmp)")  # blocks of any model, and unfinished ones
_MAX_HEADER_BYTES = 2048
_MAX_TENANT_CHARACTERS = 128  # up to 12 bytes each
_ABANDONED_S = 600.0  # an unfinished file of this age was left by a dead process
_FULL = (errno.ENOSPC, errno.EDQUOT)
_LISTINGS_PER_FILL = 16  # folder listings while `max_bytes` are written


class _Found(NamedTuple):
    path: Path
    size: int
    modified: float


class BlockFiles:
    """The files of one folder, at most `max_bytes` in total. Evicts the least recently used, other processes' too.

    All methods except `read` may raise OSError; it treats a bad file as absent. One thread writes, another may read.
    """

    def __init__(self, folder: Path, model: str, max_bytes: int) -> None:
        """`model`: a fingerprint of everything that a block's bytes depend on."""
        self._folder, self._model, self.max_bytes = folder, model, max_bytes
        self._sizes: OrderedDict[str, int] = OrderedDict()  # by file name, least recently used first
        self._num_bytes = self._num_written = 0  # in total; written since the last listing
        self._lock = threading.Lock()  # guards the three above
        try:
            private_folder(folder)
            if not os.access(folder, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, "it cannot be written")
            self._list()
            self._make_room(0)
            self.contents = self._scan()
        except OSError as error:
            raise InvalidConfig(
                f"Got cache_dir={str(folder)!r} but it cannot be used ({error.strerror}): give a folder that can be "
                "written, or leave it out."
            ) from error

    def capacity(self, block_bytes: int) -> int:
        """The number of blocks of at most this size that fit."""
        return self.max_bytes // (block_bytes + _MAX_HEADER_BYTES)

    def _list(self) -> None:
        """Recount the folder: other processes may write to it too."""
        found = sorted(self._files(), key=lambda one: one.modified)
        self._sizes = OrderedDict((one.path.name, one.size) for one in found)
        self._num_bytes, self._num_written = sum(self._sizes.values()), 0

    def _files(self) -> Iterator[_Found]:
        for path in self._folder.iterdir():
            with suppress(OSError):  # another process may have removed it
                if not _OURS.fullmatch(path.name) or not path.is_file():
                    continue
                state = path.stat()
                if path.suffix == ".tmp" and time.time() - state.st_mtime > _ABANDONED_S:
                    path.unlink()
                else:
                    yield _Found(path, state.st_size, state.st_mtime)

    def _scan(self) -> tuple[Content, ...]:
        """Blocks of earlier runs, least recently used first. Logs the unusable files and the reasons in one line."""
        contents: list[Content] = []
        reasons: Counter[str] = Counter()
        for name, size in self._sizes.items():
            if name.endswith(".tmp"):
                continue
            try:
                contents.append(self._check(self._folder / name, size))
            except (OSError, ValueError) as error:
                reasons[str(error) if type(error) is ValueError else "unreadable"] += 1
        if reasons:
            why = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
            logger.warning("Ignored files in %s: %s. They go when room is needed.", self._folder, why)
        return tuple(contents)

    def _check(self, path: Path, size: int) -> Content:
        with path.open("rb") as file:
            line = file.readline(_MAX_HEADER_BYTES)
        header = _read_header(line)
        if header["model"] != self._model:
            raise ValueError("of another model, format or version")
        content = Content(bytes.fromhex(header["hash"]), header["tenant"])
        if path.name != self._path(content.block_hash).name or size != len(line) + header["bytes"]:
            raise ValueError("torn")
        return content

    def _path(self, block_hash: bytes) -> Path:
        """Each model has its own names, so that models may share a folder."""
        return self._folder / f"{self._model}-{block_hash.hex()}.kv"

    def write(self, content: Content, data: bytes) -> None:
        """Write one block; a block larger than `max_bytes` is skipped."""
        header: dict[str, Any] = {
            "format": _FORMAT,
            "version": _VERSION,
            "model": self._model,
            "hash": content.block_hash.hex(),
            "tenant": content.tenant[:_MAX_TENANT_CHARACTERS],
            "bytes": len(data),
        }
        line = _header_line(header, data)
        path = self._path(content.block_hash)
        # Not the process id: containers share those.
        scratch = path.with_suffix(f".{secrets.randbits(60)}.tmp")
        size = len(line) + len(data)
        if size > self.max_bytes:
            return
        with self._lock:
            if self._num_written * _LISTINGS_PER_FILL > self.max_bytes:
                self._list()
            self._make_room(size)
            self._count(scratch.name, size)
            self._num_written += size
        try:
            try:
                _store(scratch, line, data)
            except OSError as error:
                if error.errno not in _FULL or not self._give_way(scratch.name, size):
                    raise
                _store(scratch, line, data)
            scratch.replace(path)
        except OSError:
            self._remove(scratch.name)
            raise
        with self._lock:
            self._count(scratch.name, 0)
            self._count(path.name, size)

    def _count(self, name: str, size: int) -> None:
        """Mark a file of this size as most recently used; 0: removed."""
        self._num_bytes += size - self._sizes.pop(name, 0)
        if size:
            self._sizes[name] = size

    def _give_way(self, scratch: str, num_bytes: int) -> bool:
        """The disk is full: remove the least recently used files for this one. False: there is none."""
        with self._lock:
            others = self._num_bytes - self._sizes.get(scratch, 0)
            end, names = others - num_bytes, [name for name in self._sizes if name != scratch]
            for name in names:
                if others > end:
                    others -= self._sizes[name]
                    (self._folder / name).unlink(missing_ok=True)
                    self._count(name, 0)
        return bool(names)

    def _make_room(self, num_bytes: int) -> None:
        while self._num_bytes + num_bytes > self.max_bytes:
            name = next(iter(self._sizes))
            (self._folder / name).unlink(missing_ok=True)
            self._count(name, 0)

    def read(self, block_hash: bytes) -> bytes | None:
        """The block's content; None if it is missing or corrupt."""
        path = self._path(block_hash)
        try:
            line, _, data = path.read_bytes().partition(b"\n")
            header = _read_header(line + b"\n")
            del header["checksum"]
            is_ours = header["model"] == self._model and header["hash"] == block_hash.hex()
            if is_ours and line + b"\n" == _header_line(header, data):
                os.utime(path)  # most recently used, also to later starts and other processes
                with self._lock:
                    self._count(path.name, self._sizes.get(path.name, 0))
                return data
            logger.warning("Ignored %s: its checksum is wrong. The block is computed again.", path)
        except FileNotFoundError:  # evicted
            pass
        except OSError as error:
            logger.warning("Ignored %s: it cannot be read (%s).", path, error.strerror)
        except ValueError as error:
            logger.warning("Ignored %s: it is %s.", path, error)
        return None

    def remove(self, block_hash: bytes) -> None:
        self._remove(self._path(block_hash).name)

    def _remove(self, name: str) -> None:
        (self._folder / name).unlink(missing_ok=True)
        with self._lock:
            self._count(name, 0)


def _read_header(line: bytes) -> dict[str, Any]:
    """The header's fields, types checked. Raises ValueError with a short reason."""
    try:
        header = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError("torn") from error
    types = {"model": str, "hash": str, "tenant": str, "bytes": int, "checksum": str}
    if not isinstance(header, dict) or (header.get("format"), header.get("version")) != (_FORMAT, _VERSION):
        raise ValueError("of another model, format or version")
    if any(not isinstance(header.get(name), kind) for name, kind in types.items()) or not line.endswith(b"\n"):
        raise ValueError("torn")
    return header


def _header_line(header: dict[str, Any], data: bytes) -> bytes:
    """The header, with a checksum over header and data."""
    digest = blake2b(json.dumps(header).encode(), digest_size=16)
    digest.update(data)
    return json.dumps(header | {"checksum": digest.hexdigest()}).encode() + b"\n"


def _store(path: Path, *parts: bytes) -> None:
    with open(path, "wb", opener=_private) as file:
        for part in parts:
            file.write(part)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
