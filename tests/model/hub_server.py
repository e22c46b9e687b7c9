"""A model hub and file server for tests, over real HTTP: ranges, broken connections, tokens, busy replies, a proxy."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class HubServer:
    """What it holds, and how it misbehaves. `requests` are the paths that were asked for, with their Range."""

    address: str = ""
    files: dict[str, bytes] = field(default_factory=dict)  # by path
    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    token: str | None = None  # that repositories need
    wrong_checksums: bool = False
    break_after: list[int] = field(default_factory=list)  # bytes of the next answers, before the connection breaks
    busy: int = 0  # answers that are a 503
    redirects: dict[str, str] = field(default_factory=dict)  # from paths to addresses
    sizes: dict[str, int] = field(default_factory=dict)  # that the listing gives instead
    answers: dict[str, bytes] = field(default_factory=dict)  # instead of listings, by repository
    headers: dict[str, str] = field(default_factory=dict)  # of all files
    says_length: bool = True
    has_ranges: bool = True
    etag: str = '"1"'
    requests: list[tuple[str, str | None]] = field(default_factory=list)
    hosts: list[str] = field(default_factory=list)

    def add_repository(self, name: str, folder: Path) -> None:
        self.repositories[name] = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}

    def fetched(self, ending: str) -> list[str | None]:
        """The ranges in which files of this ending were asked for."""
        return [wanted for path, wanted in self.requests if path.endswith(ending)]

    def listing(self, name: str) -> dict[str, Any]:
        siblings = []
        for file, content in self.repositories[name].items():
            size = self.sizes.get(file, len(content))
            entry: dict[str, Any] = {"rfilename": file, "size": size, "blobId": _git_digest(content)}
            if file.endswith((".safetensors", ".gguf")):
                sha256 = hashlib.sha256(content + b"?" * self.wrong_checksums).hexdigest()
                entry["lfs"] = {"sha256": sha256, "size": size, "pointerSize": 100}
            siblings.append(entry)
        return {"id": name, "sha": COMMIT, "siblings": siblings}


@contextmanager
def hub_server() -> Iterator[HubServer]:
    hub = HubServer()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer

    def do_GET(self) -> None:
        url = urlsplit(self.path)  # with a host, if this server is asked as a proxy
        path, hub = unquote(url.path), self.hub
        hub.requests.append((path, self.headers.get("Range")))
        hub.hosts.append(url.netloc)
        if hub.busy:
            hub.busy -= 1
            self._reply(503)
        elif path in hub.redirects:
            self._reply(302, {"Location": hub.redirects[path]})
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/revision/([^/]+)", path):
            self._list(match[1], match[2])
        elif match := re.fullmatch(rf"/([^/]+/[^/]+)/resolve/{COMMIT}/(.+)", path):
            self._send(hub.repositories.get(match[1], {}).get(match[2]), needs_token=True)
        else:
            self._send(hub.files.get(path))

    def _list(self, name: str, revision: str) -> None:
        if not self._is_allowed():
            self._reply(401, {"X-Error-Code": "RepoNotFound"})
        elif name not in self.hub.repositories:
            self._reply(404, {"X-Error-Code": "RepoNotFound"})
        elif revision not in ("main", COMMIT, "v1.0"):
            self._reply(404, {"X-Error-Code": "RevisionNotFound"})
        else:
            self._reply(200, {}, self.hub.answers.get(name) or json.dumps(self.hub.listing(name)).encode())

    def _is_allowed(self) -> bool:
        return self.hub.token is None or self.headers.get("Authorization") == f"Bearer {self.hub.token}"

    def _send(self, content: bytes | None, needs_token: bool = False) -> None:
        if content is None:
            self._reply(404)
        elif needs_token and not self._is_allowed():
            self._reply(403, {"X-Error-Code": "GatedRepo"})
        else:
            start = self._start(len(content))
            if start > len(content):
                self._reply(416)
                return
            headers = {"ETag": self.hub.etag} | self.hub.headers
            if start:
                headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            self._reply(206 if start else 200, headers, content[start:])

    def _start(self, num_bytes: int) -> int:
        match = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        is_same = self.headers.get("If-Range") in (None, self.hub.etag)
        return int(match[1]) if match and self.hub.has_ranges and is_same else 0

    def _reply(self, status: int, headers: dict[str, str] | None = None, content: bytes = b"") -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if self.hub.says_length:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        limit = self.hub.break_after.pop(0) if content and self.hub.break_after else len(content)
        with suppress(ConnectionError):  # the client has enough
            self.wfile.write(content[:limit])

    def log_message(self, *_: object) -> None:
        pass


def _git_digest(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
