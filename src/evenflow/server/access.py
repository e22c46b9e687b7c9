"""Who may ask, and how much at a time: API keys, and the gate that every request for an answer passes.

Must not know: routes, engines.
"""

from __future__ import annotations

import hashlib
import hmac
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from evenflow.errors import InvalidConfig
from evenflow.server.api.errors import ApiError, overloaded


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """What is refused before it costs memory. 0: no limit."""

    max_body_bytes: int = 8 << 20
    max_prompt_tokens: int = 0  # besides the model's context
    max_n: int = 128  # answers of one request: n times its prompts
    max_waiting: int = 1024  # answers that wait for a place among the running ones
    max_tenant_requests: int = 0  # answers of one tenant, running or waiting

    def __post_init__(self) -> None:
        for name, low in (("max_body_bytes", 1), ("max_n", 1), ("max_waiting", 0)):
            if getattr(self, name) < low:
                raise InvalidConfig(f"Got {name}={getattr(self, name)} but expected a whole number >= {low}.")
        for name in ("max_prompt_tokens", "max_tenant_requests"):
            if getattr(self, name) < 0:
                raise InvalidConfig(f"Got {name}={getattr(self, name)} but expected a whole number >= 0.")


class Caller(NamedTuple):
    """Who asks: the key that was shown, as a short digest ("" where none is needed)."""

    key: str = ""

    def tenant(self, name: str | None) -> str:
        """What salts the prefix cache: tenants of different keys never share one."""
        return f"{self.key}/{name or ''}"


class ApiKeys:
    """The keys that open the server. Kept as digests, all of equal length, and compared in constant time."""

    def __init__(self, keys: Sequence[str]) -> None:
        if any(not key.strip() for key in keys):
            raise InvalidConfig("Got an empty API key but expected at least one character.")
        self._digests = [hashlib.sha256(key.strip().encode()).digest() for key in keys]

    @property
    def are_needed(self) -> bool:
        return bool(self._digests)

    def caller(self, authorization: str | None) -> Caller:
        """Whose key this header shows; a 401 where it is nobody's."""
        if not self._digests:
            return Caller()
        scheme, _, key = (authorization or "").partition(" ")
        digest = hashlib.sha256(key.strip().encode(errors="replace")).digest()
        # Every key is looked at, so that the time taken says nothing about them.
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if scheme.lower() != "bearer" or not any(matches):
            message = "The API key is wrong." if authorization else "An API key is needed: Authorization: Bearer KEY."
            raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        return Caller(digest.hex()[:16])


def read_key_file(path: Path) -> list[str]:
    """One key a line; empty lines and those that begin with # are skipped."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        raise InvalidConfig(f"Got --api-key-file {str(path)!r} but it cannot be read: {error}.") from error
    keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not keys:
        raise InvalidConfig(f"Got --api-key-file {str(path)!r} but it holds no key.")
    return keys


class Gate:
    """Lets in what there is room for, and counts it until it leaves."""

    def __init__(
        self,
        limits: ServerLimits,
        num_running_places: Callable[[], int],
        on_refusal: Callable[[str], None] = lambda reason: None,  # told why, in one word
    ) -> None:
        self._limits = limits
        self._on_refusal = on_refusal
        self._num_running_places = num_running_places
        self.num_inside = 0  # answers that run or wait
        self._inside_by_tenant: Counter[str] = Counter()
        self.is_draining = False

    @contextmanager
    def enter(self, tenant: str, num_answers: int) -> Iterator[None]:
        """Room for so many answers, as long as the context lasts; an ApiError where there is none."""
        self._check(tenant, num_answers)
        self.num_inside += num_answers
        self._inside_by_tenant[tenant] += num_answers
        try:
            yield
        finally:
            self.num_inside -= num_answers
            self._inside_by_tenant[tenant] -= num_answers
            if not self._inside_by_tenant[tenant]:
                del self._inside_by_tenant[tenant]

    def check_num_answers(self, num_answers: int) -> None:
        """Refuse a request for too many, however much room there is. For whoever makes something for each of them."""
        if num_answers > self._limits.max_n:
            message = f"Got {num_answers} answers to make but this server makes {self._limits.max_n} a request."
            raise ApiError(400, message, param="n")

    def _check(self, tenant: str, num_answers: int) -> None:
        limits = self._limits
        if self.is_draining:
            self._on_refusal("draining")
            raise overloaded("The server is shutting down.")
        self.check_num_answers(num_answers)
        room = self._num_running_places() + limits.max_waiting - self.num_inside
        if num_answers > room:
            self._on_refusal("queue_full")
            raise overloaded(f"The queue is full: {self.num_inside} answers are running or waiting.")
        inside = self._inside_by_tenant.get(tenant, 0)
        if limits.max_tenant_requests and inside + num_answers > limits.max_tenant_requests:
            self._on_refusal("tenant_limit")
            raise overloaded(
                f"This tenant has {inside} answers running or waiting, and {limits.max_tenant_requests} are allowed.",
                status=429,
            )
