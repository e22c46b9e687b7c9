"""Fetches files over HTTP: resumes broken transfers, checks files, and puts them in place only when complete.

Knows nothing about models. Proxies come from the usual variables (HTTPS_PROXY, HTTP_PROXY, ALL_PROXY, NO_PROXY).
"""

from __future__ import annotations

import fcntl
import hashlib
import ipaddress
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal, TypeVar

import httpx

from evenflow.errors import EndpointFailed, EvenflowError, ModelNotFound
from evenflow.model.hub.progress_bar import format_bytes

_READ_BYTES = 1 << 20
_MAX_SMALL_BYTES = 32 << 20  # of an answer that is read whole: several times the longest listing of a repository
_MAX_REDIRECTS = 20
_SPARE_BYTES = 64 << 20  # that a download leaves free on the disk
_TIMEOUT_S = 30.0
_ATTEMPTS = 5  # in a row that bring no byte
_RETRY_WAIT_S = 0.5  # doubled with each attempt
_BUSY_CODES = (429, 500, 502, 503, 504)
_PARTIAL_SUFFIX = ".incomplete"

Result = TypeVar("Result")
Show = Callable[[int, int | None], None]  # bytes so far, and of the whole file if known


@dataclass(frozen=True, slots=True)
class Checksum:
    """`git` is the SHA-1 that git gives a file's content."""

    kind: Literal["sha256", "git"]
    digest: str

    def digest_of(self, path: Path) -> str:
        """The digest of this kind of a file."""
        found = hashlib.sha256() if self.kind == "sha256" else hashlib.sha1(b"blob %d\0" % path.stat().st_size)
        with path.open("rb") as file:
            while content := file.read(_READ_BYTES):
                found.update(content)
        return found.hexdigest()


@dataclass(frozen=True, slots=True)
class Remote:
    """A file to fetch, and what is known about it."""

    url: str
    num_bytes: int | None = None
    checksum: Checksum | None = None
    max_bytes: int = sys.maxsize - 1  # where `num_bytes` is not known

    @property
    def limit(self) -> int:
        """The most bytes that are taken."""
        return self.max_bytes if self.num_bytes is None else self.num_bytes


class _Broken(Exception):
    """The server is busy or sent too little: worth another attempt."""


def refusal(response: httpx.Response) -> EvenflowError:
    """The error for an answer that no other attempt would change."""
    said = f"{response.url} replied {response.status_code} {response.reason_phrase}"
    if response.status_code in (404, 410):
        return ModelNotFound(f"{said}: check the address")
    return EndpointFailed(said)


class Downloader:
    """Fetches files over one HTTP client. `refused` makes the error of an answer that is neither 200 nor 206."""

    def __init__(
        self,
        http: httpx.Client,
        refused: Callable[[httpx.Response], EvenflowError] = refusal,
        *,
        retry_wait_s: float = _RETRY_WAIT_S,
    ) -> None:
        self._http = http
        self._refused = refused
        self._retry_wait_s = retry_wait_s

    def get(self, url: str) -> bytes:
        """A small answer, read whole."""

        def ask() -> bytes:
            content = bytearray()
            with self.reply(url) as response:
                for piece in response.iter_raw():
                    content += piece
                    if len(content) > _MAX_SMALL_BYTES:
                        raise EndpointFailed(f"{url} replied with more than {format_bytes(_MAX_SMALL_BYTES)}")
            return bytes(content)

        return self._persist(url, lambda: 0, ask)

    def fetch(self, remote: Remote, target: Path, show: Show = lambda num_bytes, total: None) -> Path:
        """The file at `target`, fetched unless it is there."""
        if target.is_file():
            show(target.stat().st_size, target.stat().st_size)
            return target
        partial = target.with_name(target.name + _PARTIAL_SUFFIX)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with locked(partial) as file:
                transfer = _Transfer(self.reply, remote, file, show)
                try:
                    if not target.is_file():  # else another process has fetched it while this one waited for the lock
                        self._persist(remote.url, transfer.num_bytes, transfer.attempt)
                        _check(remote, partial)
                        partial.replace(target)
                finally:
                    if target.is_file() or not transfer.num_bytes():  # else the next run continues
                        _drop(partial)
        except OSError as error:
            raise EndpointFailed(f"{target.parent} cannot be written: {error.strerror or error}") from error
        return target

    @contextmanager
    def reply(self, url: str, headers: dict[str, str] | None = None) -> Iterator[httpx.Response]:
        """The reply to a GET, if it has a body of plain bytes, which are not read yet.

        Redirects are followed, but not from a public host into a private network, where this machine may be trusted.
        """
        request = self._http.build_request("GET", url, headers=headers)
        for _ in range(_MAX_REDIRECTS + 1):
            response = self._http.send(request, stream=True)
            try:
                following = response.next_request
                if following is None:
                    self._check_reply(response)
                    yield response
                    return
            finally:
                response.close()
            if _is_private(following.url.host) and not _is_private(request.url.host):
                raise EndpointFailed(
                    f"{request.url.host} redirects to {following.url.host}, which is in a private network, and is not "
                    "followed there: give that address itself if it is meant"
                )
            request = following
        raise EndpointFailed(f"{url} redirects more than {_MAX_REDIRECTS} times")

    def _check_reply(self, response: httpx.Response) -> None:
        if response.status_code in _BUSY_CODES:
            raise _Broken(f"it replied {response.status_code}")
        if response.status_code not in (200, 206, 416):
            raise self._refused(response)
        # A few packed bytes could stand for any number, and were not asked for.
        encoding = response.headers.get("Content-Encoding", "")
        if encoding.lower() not in ("", "identity"):
            raise EndpointFailed(f"{response.url} sent {encoding!r} data, but only plain bytes were asked for")

    def _persist(self, url: str, num_bytes: Callable[[], int], attempt: Callable[[], Result]) -> Result:
        """Try again for as long as attempts bring bytes, and a few times more."""
        failures, before = 0, num_bytes()
        while True:
            try:
                return attempt()
            except (httpx.TransportError, _Broken) as error:
                failures, before = (0 if num_bytes() > before else failures) + 1, num_bytes()
                if failures == _ATTEMPTS or isinstance(error, httpx.ConnectError | httpx.UnsupportedProtocol):
                    raise _unreachable(url, error, num_bytes()) from error
                time.sleep(self._retry_wait_s * 2 ** (failures - 1))
            except httpx.InvalidURL as error:
                raise ModelNotFound(f"{url} is not a URL: {error}") from error


class _Transfer:
    """One file on its way into an open partial file."""

    def __init__(
        self,
        reply: Callable[[str, dict[str, str]], AbstractContextManager[httpx.Response]],
        remote: Remote,
        file: IO[bytes],
        show: Show,
    ) -> None:
        self._reply = reply
        self._remote = remote
        self._file = file
        self._show = show
        self._validator_path = _validator_path(Path(file.name))

    def num_bytes(self) -> int:
        self._file.flush()
        return os.fstat(self._file.fileno()).st_size

    def attempt(self) -> None:
        """Fetch what is missing. What arrives before an error stays in the file."""
        start = self.num_bytes()
        if start and start == self._remote.num_bytes:
            return
        with self._reply(self._remote.url, self._range(start)) as response:
            if response.status_code == 416:  # the partial file is longer than the file
                self._file.truncate(0)
                raise _Broken("it has fewer bytes than were fetched")
            if response.status_code == 200:  # the whole file
                start = 0
                self._file.truncate(0)
                self._keep_validator(response)
            length = response.headers.get("Content-Length", "")
            total = start + int(length) if length.isdigit() else None
            self._show(start, total)
            room = start  # the size for which the disk is known to have space
            for content in response.iter_raw():  # as they arrive: what is here when the connection breaks is kept
                if start >= room:
                    room = total or start + _SPARE_BYTES
                    check_space(self._validator_path.parent, room - start)
                start += self._file.write(content[: self._remote.limit + 1 - start])
                self._show(start, total)
                if start > self._remote.limit:  # `_check` says so
                    break
        num_bytes = self.num_bytes()  # on disk: buffers are flushed
        if self._remote.num_bytes is not None and num_bytes < self._remote.num_bytes:
            raise _Broken(f"it sent {num_bytes} of {self._remote.num_bytes} bytes")

    def _range(self, start: int) -> dict[str, str]:
        """Headers that ask for the rest, if it is sure to belong to what is here."""
        if not start:
            return {}
        asked = {"Range": f"bytes={start}-"}
        if self._remote.checksum is not None:
            return asked
        if self._validator_path.is_file():
            return asked | {"If-Range": self._validator_path.read_text()}
        return {}

    def _keep_validator(self, response: httpx.Response) -> None:
        """What tells this version of the file from others; a weak ETag does not."""
        etag = response.headers.get("ETag", "")
        validator = etag if etag.startswith('"') else response.headers.get("Last-Modified", "")
        self._validator_path.unlink(missing_ok=True)
        if validator and self._remote.checksum is None:
            self._validator_path.write_text(validator)


def _is_private(host: str) -> bool:
    """No, where the name is not known here: a proxy may know it."""
    try:
        found = {ipaddress.ip_address(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
    except (OSError, ValueError):
        return False
    return not all((getattr(address, "ipv4_mapped", None) or address).is_global for address in found)


def http_client(headers: dict[str, str] | None = None) -> httpx.Client:
    """A client that takes bytes as they are stored."""
    own = {"User-Agent": "evenflow", "Accept-Encoding": "identity"}
    return httpx.Client(headers=own | (headers or {}), timeout=_TIMEOUT_S)


def check_space(folder: Path, num_bytes: int) -> None:
    """Raise EndpointFailed if this does not fit on the folder's disk."""
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if num_bytes + _SPARE_BYTES > free:
        raise EndpointFailed(
            f"the download needs {format_bytes(num_bytes)} but {folder} has {format_bytes(free)} free: make room "
            "(evenflow models shows what is cached), or set EVENFLOW_CACHE or HF_HUB_CACHE to a folder on another disk"
        )


@contextmanager
def locked(path: Path) -> Iterator[IO[bytes]]:
    """The file, open for appending, while no other process has it so."""
    while True:
        with path.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            try:
                is_current = os.path.samestat(os.fstat(file.fileno()), path.stat())
            except FileNotFoundError:
                is_current = False
            if is_current:
                yield file
                return


def _drop(partial: Path) -> None:
    partial.unlink(missing_ok=True)
    _validator_path(partial).unlink(missing_ok=True)


def _validator_path(partial: Path) -> Path:
    return partial.with_name(partial.name + ".version")


def _check(remote: Remote, partial: Path) -> None:
    """Raise EndpointFailed, and drop the file, if it is not what it should be."""
    size, problem = partial.stat().st_size, None
    if size > remote.limit:
        problem = f"has more than {remote.limit} bytes"
    elif remote.num_bytes is not None and size != remote.num_bytes:
        problem = f"has {size} bytes, expected {remote.num_bytes}"
    elif remote.checksum is not None and (found := remote.checksum.digest_of(partial)) != remote.checksum.digest:
        problem = f"has {remote.checksum.kind} {found}, expected {remote.checksum.digest}"
    if problem is not None:
        _drop(partial)
        raise EndpointFailed(f"{remote.url} {problem}; what was fetched is deleted: try again, or use another source")


def _unreachable(url: str, error: Exception, num_bytes: int) -> EndpointFailed:
    host = str(httpx.URL(url).join("/"))
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.ProxyError):
        return EndpointFailed(
            f"cannot reach {host} ({error}). Is there a network? HTTPS_PROXY names a proxy, HF_ENDPOINT a mirror of "
            "the model hub. Without a network, copy the model to this machine and name it: evenflow pull PATH"
        )
    kept = f"; {format_bytes(num_bytes)} are kept, and the same command continues there" if num_bytes else ""
    return EndpointFailed(f"{host} broke off {_ATTEMPTS} times in a row ({str(error) or type(error).__name__}){kept}")
