"""KV blocks on disk, one file each: a header line of JSON, then the encoded block.

A file's header identifies the model, type and version that wrote it, so files of others are never read; a checksum of
header and content detects torn files. Prompts can be guessed from the content, so only the owner may read the files.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from evenflow.core.blocks import Content
from evenflow.errors import InvalidConfig

logger = logging.getLogger("evenflow")

_FORMAT, _VERSION = "evenflow-kv", 1
_SUFFIX = ".kv"
_MOST_HEADER_BYTES = 1024
_MOST_TENANT_CHARACTERS = 128
_ABANDONED_S = 600.0  # a file that is still being written after this long was left by a process that died


class _Found(NamedTuple):
    path: Path
    size: int
    modified: float


class BlockFiles:
    """The files of one folder. All methods except `read` may raise OSError; it treats a bad file as absent."""

    def __init__(self, folder: Path, model: str, max_bytes: int) -> None:
        """`model` stands for everything that a block's bytes depend on."""
        self._folder, self._model, self._max_bytes = folder, model, max_bytes
        self._sizes: dict[bytes, int] = {}
        self._others: deque[_Found] = deque()  # that are not ours to read; the oldest first
        self._num_bytes = 0
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.contents = self._scan()
        except OSError as error:
            raise InvalidConfig(
                f"Got cache_dir={str(folder)!r} but it cannot be used ({error.strerror}): give a folder that can be "
                "written, or leave it out."
            ) from error

    @staticmethod
    def num_blocks(max_bytes: int, block_bytes: int) -> int:
        """How many blocks of at most this size fit."""
        return max_bytes // (block_bytes + _MOST_HEADER_BYTES)

    def _scan(self) -> tuple[Content, ...]:
        """What earlier runs left, the least recently used first. Says in one line what cannot be used, and why."""
        if not os.access(self._folder, os.W_OK | os.X_OK):
            raise PermissionError(13, "it cannot be written")
        contents: list[Content] = []
        reasons: dict[str, int] = {}
        for found in sorted(self._files(), key=lambda one: one.modified):
            self._num_bytes += found.size
            try:
                content = self._check(found)
                contents.append(content)
                self._sizes[content.block_hash] = found.size
            except (OSError, ValueError) as error:
                reason = str(error) if type(error) is ValueError else "unreadable"
                reasons[reason] = reasons.get(reason, 0) + 1
                self._others.append(found)
        if reasons:
            why = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
            logger.warning("Ignored files in %s: %s. They go when room is needed.", self._folder, why)
        return tuple(contents)

    def _files(self) -> Iterator[_Found]:
        for path in self._folder.iterdir():
            with suppress(OSError):  # another process may have removed it
                state = path.stat()
                if path.suffix == ".tmp" and time.time() - state.st_mtime > _ABANDONED_S:
                    path.unlink()
                elif path.suffix == _SUFFIX and path.is_file():
                    yield _Found(path, state.st_size, state.st_mtime)

    def _check(self, found: _Found) -> Content:
        with found.path.open("rb") as file:
            line = file.readline(_MOST_HEADER_BYTES)
        header = _read_header(line)
        if header["model"] != self._model:
            raise ValueError("of another model, format or version")
        content = Content(bytes.fromhex(header["hash"]), header["tenant"])
        if found.path.name != self._path(content.block_hash).name or found.size != len(line) + header["bytes"]:
            raise ValueError("torn")
        return content

    def _path(self, block_hash: bytes) -> Path:
        """Each model has its own names, so that models may share a folder."""
        return self._folder / f"{self._model}-{block_hash.hex()}{_SUFFIX}"

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._sizes

    def write(self, content: Content, data: bytes) -> None:
        header: dict[str, Any] = {
            "format": _FORMAT,
            "version": _VERSION,
            "model": self._model,
            "hash": content.block_hash.hex(),
            "tenant": content.tenant[:_MOST_TENANT_CHARACTERS],
            "bytes": len(data),
        }
        line = _header_line(header, data)
        self._make_room(len(line) + len(data))
        path = self._path(content.block_hash)
        scratch = path.with_suffix(f".{os.getpid()}.tmp")
        try:
            with open(scratch, "wb", opener=_private) as file:
                file.write(line)
                file.write(data)
            scratch.replace(path)
        except OSError:
            scratch.unlink(missing_ok=True)
            raise
        self._forget(content.block_hash)
        self._sizes[content.block_hash] = len(line) + len(data)
        self._num_bytes += len(line) + len(data)

    def _make_room(self, num_bytes: int) -> None:
        while self._others and self._num_bytes + num_bytes > self._max_bytes:
            other = self._others.popleft()
            other.path.unlink(missing_ok=True)
            self._num_bytes -= other.size

    def read(self, block_hash: bytes) -> bytes | None:
        """The block as it was written; None if it is gone, or not as it was written."""
        path = self._path(block_hash)
        try:
            line, _, data = path.read_bytes().partition(b"\n")
            header = _read_header(line + b"\n")
            del header["checksum"]
            is_ours = header["model"] == self._model and header["hash"] == block_hash.hex()
            if is_ours and line + b"\n" == _header_line(header, data):
                os.utime(path)  # used just now, for the next start
                return data
            logger.warning("Ignored %s: its checksum is wrong. The block is computed again.", path)
        except OSError as error:
            logger.warning("Ignored %s: it cannot be read (%s).", path, error.strerror)
        except ValueError as error:
            logger.warning("Ignored %s: it is %s.", path, error)
        return None

    def remove(self, block_hash: bytes) -> None:
        self._path(block_hash).unlink(missing_ok=True)
        self._forget(block_hash)

    def _forget(self, block_hash: bytes) -> None:
        self._num_bytes -= self._sizes.pop(block_hash, 0)


def _read_header(line: bytes) -> dict[str, Any]:
    """Its fields, each of the right type. ValueError, in a few words, if it is none."""
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
    """With the checksum of both."""
    digest = blake2b(json.dumps(header).encode(), digest_size=16)
    digest.update(data)
    return json.dumps(header | {"checksum": digest.hexdigest()}).encode() + b"\n"


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
