"""Refuses what a web page of another site sends to a server without keys, by Host, Origin and Sec-Fetch-Site.

A page can reach a server on the reader's own machine, either by its address or by a name of the page's own that is
made to point there (DNS rebinding). Without keys nothing else would stop it.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from evenflow.server.errors import ApiError

ANY = "*"
_LOCAL = "localhost"
_OTHER_SITES = ("cross-site", "same-site")


class BrowserGuard:
    """Passes on requests for this server's own names, from its own pages or allowed ones."""

    def __init__(self, app: ASGIApp, hosts: Sequence[str], origins: Sequence[str]) -> None:
        self._app = app
        self._hosts = {host.lower().rstrip(".") for host in (*hosts, socket.gethostname()) if host}
        self._origins = {origin.lower().rstrip("/") for origin in origins}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (refusal := self._problem(Headers(scope=scope))) is not None:
            await refusal.response(scope["path"])(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _problem(self, headers: Headers) -> ApiError | None:
        hosts, origin = headers.getlist("host"), headers.get("origin")
        if len(hosts) > 1 or (hosts and not self._is_own(hosts[0])):
            return _refused("Host", ", ".join(hosts), "--allow-host NAME")
        is_own_page = hosts and origin is not None and urlsplit(origin).netloc.lower() == hosts[0].lower()
        if origin is not None and not is_own_page and not self._origins & {origin.lower(), ANY}:
            return _refused("Origin", origin, "--allow-origin ORIGIN")
        # Images and scripts of a page are fetched without an Origin. A link that is followed shows its answer to nobody
        # but the reader.
        site, is_link = headers.get("sec-fetch-site", ""), headers.get("sec-fetch-mode") == "navigate"
        if origin is None and site in _OTHER_SITES and not (is_link and headers.get("sec-fetch-dest") == "document"):
            return _refused("Sec-Fetch-Site", site, "--allow-origin ORIGIN")
        return None

    def _is_own(self, host: str) -> bool:
        """An address cannot be made to point elsewhere, so any is fine."""
        try:
            name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
            is_local = name == _LOCAL or name.endswith(f".{_LOCAL}")
            return is_local or name in self._hosts or ANY in self._hosts or bool(ipaddress.ip_address(name))
        except ValueError:
            return False


def _refused(header: str, value: str, option: str) -> ApiError:
    message = (
        f"Got {header} {value[:100]!r}, which is not this server's: a web page may have sent the request. "
        f"If it is yours, start the server with {option}, or with an API key."
    )
    return ApiError(403, message, code="forbidden_" + header.lower().replace("-", "_"))
