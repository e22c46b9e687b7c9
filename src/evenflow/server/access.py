"""API keys: who sent a request, and as which tenant it counts."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from starlette.types import Scope

from evenflow.core.service_classes import ServiceClass
from evenflow.duration import format_duration
from evenflow.errors import InvalidConfig
from evenflow.server.errors import ApiError

MONITORED = ("/health", "/ready")  # without a key

METRICS_PATH = "/metrics"
_NAMED_KEY = re.compile(r"(\S+)(?:\s+name=([A-Za-z0-9._-]{1,64}))?")


def cache_salt(key: str, tenant: str = "", salt: str | None = None) -> str:
    """Tenants with different keys never share a prefix cache. `key` is the one that `ApiKeys.check` returns.

    Keys are hexadecimal, and the tenant's length separates it from the salt: no two triples give the same text.
    """
    return f"{key}/{len(tenant)}:{tenant}{salt or ''}"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request."""

    key: str  # a short digest; "" if none is needed
    name: str  # of the key: its own, or key-1, admin-1; "" if none is needed
    address: str
    is_admin: bool
    is_for_metrics: bool = False  # may read /metrics, all of it, and nothing else

    @property
    def client(self) -> str:
        """Who shares one turn at slow work: names that a request can make up do not count."""
        return self.key or self.address

    def limited_as(self, tenant: str) -> str:
        """Who shares one limit, and one share of the engine. Only an admin's key may name tenants apart."""
        if not self.key:
            return self.address
        return f"{self.name}/{tenant}" if tenant and self.is_admin else self.name


class ApiKeys:
    """The accepted keys, kept as digests of equal length and compared in constant time.

    Without admin keys a single key is one, and of several none is. Without any key, everybody is an admin. A key may
    have a name behind it, `KEY name=NAME`, by which figures and the shares file call it.
    """

    def __init__(self, keys: Sequence[str], admin_keys: Sequence[str] = (), metrics_keys: Sequence[str] = ()) -> None:
        admins, others = _by_name(admin_keys, "admin"), _by_name(keys, "key")
        for_metrics = _by_name(metrics_keys, "metrics")
        if for_metrics and not (admins or others):
            raise InvalidConfig("Got a key for metrics alone but expected an API key too: --api-key KEY.")
        names, values = ([*admins, *others, *for_metrics], [*admins.values(), *others.values(), *for_metrics.values()])
        if len(set(values)) < len(values):
            raise InvalidConfig("Got one API key for two roles but expected each in one place.")
        if same := [name for name, count in Counter(names).items() if count > 1]:
            raise InvalidConfig(f"Got two API keys named {same[0]!r} but expected a name of its own for each.")
        self._admins = set(admins) or (set(others) if len(others) == 1 else set())
        self._for_metrics = set(for_metrics)
        self._digests = {name: hashlib.sha256(key.encode()).digest() for name, key in zip(names, values, strict=True)}

    @property
    def are_needed(self) -> bool:
        return bool(self._digests)

    @property
    def names(self) -> Sequence[str]:
        return list(self._digests)

    def replace(self, others: ApiKeys) -> None:
        """Accept these from now on, while the server runs."""
        if self.are_needed != others.are_needed:
            raise InvalidConfig("Got keys for a server without keys, or none for one with keys: restart it.")
        self._admins, self._for_metrics, self._digests = others._admins, others._for_metrics, others._digests

    def check_tenants(self, tenants: Iterable[str]) -> None:
        """Refuse settings of tenants that no key can be: NAME of a key, or NAME/TENANT of an admin's."""
        for tenant in tenants if self._digests else ():
            name, _, named = tenant.partition("/")
            if name not in self._digests or name in self._for_metrics or (named and name not in self._admins):
                who = f"Got settings of tenant {tenant!r} but expected the name of an API key"
                names, admins = ", ".join(self._digests), ", ".join(sorted(self._admins)) or "none"
                raise InvalidConfig(f"{who} ({names}), or NAME/TENANT with the name of an admin's key ({admins}).")

    def check(self, authorization: str | None, address: str, api_key: str | None = None) -> Caller:
        """Who sent these headers (`x-api-key` counts without the other); a 401 if the key in them is not accepted."""
        if not self._digests:
            return Caller("", "", address, is_admin=True)
        if authorization is None and api_key is not None:
            authorization = f"Bearer {api_key}"
        scheme, _, key = (authorization or "").partition(" ")
        digest = hashlib.sha256(key.strip().encode(errors="replace")).digest()
        # All keys are compared, so the time taken reveals nothing about them.
        names = [name for name, known in self._digests.items() if hmac.compare_digest(digest, known)]
        if scheme.lower() != "bearer" or not names:
            needed = "An API key is needed: Authorization: Bearer KEY, or x-api-key: KEY."
            message = "The API key is wrong." if authorization else needed
            raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        [name] = names
        is_for_metrics = name in self._for_metrics
        return Caller(digest.hex()[:16], name, address, name in self._admins, is_for_metrics=is_for_metrics)


def turn_of(keys: ApiKeys, scope: Scope) -> str:
    """Who shares a turn with this request: the same accepted key, else the same address. Monitors have their own."""
    address, path = (scope.get("client") or ("",))[0], scope["path"]
    if path in MONITORED:
        return f"{address} {path}"
    first = dict(reversed(scope["headers"]))  # of each name, as in `Headers.get`, which takes ten times as long
    found = [first.get(name) for name in (b"authorization", b"x-api-key")]
    if not any(found):
        return address
    authorization, api_key = (None if value is None else value.decode("latin-1") for value in found)
    try:
        return keys.check(authorization, address, api_key).client
    except ApiError:
        return address


def _by_name(keys: Sequence[str], kind: str) -> dict[str, str]:
    """Keys by their names; without one, by their kind and number."""
    found: dict[str, str] = {}
    for number, given in enumerate(dict.fromkeys(key.strip() for key in keys), 1):
        key, name = _parse_key(given)
        name = name or f"{kind}-{number}"
        if name in found or key in found.values():
            raise InvalidConfig(f"Got two API keys named {name!r}, or one key twice, but expected each once.")
        found[name] = key
    return found


def _parse_key(given: str) -> tuple[str, str | None]:
    """A key and its name. A message must not show the key."""
    if not given:
        raise InvalidConfig("Got an empty API key but expected at least one character.")
    match = _NAMED_KEY.fullmatch(given)
    if match is None:
        word = re.search(r"\s([a-z]{1,16})=", given)  # anything else may be a part of the key
        what = f"{word[1]}=..." if word is not None else "more text"
        raise InvalidConfig(
            f"Got an API key with {what} behind it but expected KEY, without spaces, or KEY name=NAME. A NAME has 1 to "
            "64 letters, digits, dots, dashes and underscores."
        )
    return match[1], match[2]


def check_role(caller: Caller, path: str) -> None:
    """Refuse what a key for metrics may not do: all but reading them."""
    if caller.is_for_metrics and path != METRICS_PATH:
        raise ApiError(403, f"This key may only read {METRICS_PATH}.", code="metrics_key")


def require_admin(caller: Caller) -> None:
    if not caller.is_admin:
        message = "This needs an admin's key. Start the server with --admin-api-key KEY, and use that one."
        raise ApiError(403, message, code="admin_key_required")


def check_own_target(
    caller: Caller, asked: float | None, target: float | None, of_class: ServiceClass, param: str
) -> None:
    """Refuse a target between tokens below the server's, or below its class's, unless an admin asks: it would slow the
    prompts of others."""
    if caller.is_admin or asked is None or target is None:
        return
    least = min(target, of_class.tbt_seconds or target)
    if asked < least:
        got, allowed = format_duration(asked), format_duration(least)
        message = f"Got tbt_target={got} but this key may ask for {allowed} or more: less is for an admin's key."
        raise ApiError(403, message, code="admin_key_required", param=param)


def read_key_file(path: Path) -> list[str]:
    """One key per line, with or without a name; empty lines and lines that start with # are skipped."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        raise InvalidConfig(f"Got the key file {str(path)!r} but it cannot be read: {error}.") from error
    keys: list[str] = []
    for number, line in enumerate(map(str.strip, lines), 1):
        if line and not line.startswith("#"):
            try:
                _parse_key(line)
            except InvalidConfig as error:
                raise InvalidConfig(f"In line {number} of the key file {str(path)!r}: {error}") from None
            keys.append(line)
    if not keys:
        raise InvalidConfig(f"Got the key file {str(path)!r} but it holds no key.")
    return keys
