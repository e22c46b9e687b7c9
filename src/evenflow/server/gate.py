"""The gate: how many requests run and wait, and how many tokens they may need, in all, by class and by tenant."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import NamedTuple

from evenflow.errors import InvalidConfig
from evenflow.server.errors import ApiError, overloaded
from evenflow.shares_file import QueueLimits, Shares, TenantSettings

_MIN_SIZE = 256  # bytes: no request or response fits in less
_ALL = ""  # the queue that every request is in


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """What is refused before it costs memory. Each choice of an HTTP request counts as one request."""

    max_body_size: int = 8 << 20  # bytes
    max_response_size: int = 64 << 20  # the most that it may take, known before it is computed
    max_prompt_tokens: int = 0  # besides the model's context; 0: no limit
    max_n: int = 128  # choices per HTTP request: n times its prompts
    max_waiting: int = 1024  # requests beyond those that can run
    max_open_tokens: int = 0  # of all requests that run or wait, their output as far as it may go; 0: no limit
    max_tenant_requests: int = 0  # running or waiting; 0: no limit

    def __post_init__(self) -> None:
        lowest = {"max_body_size": _MIN_SIZE, "max_response_size": _MIN_SIZE, "max_n": 1}
        for field in fields(self):
            name, low = field.name, lowest.get(field.name, 0)
            if (value := getattr(self, name)) < low:
                unit = f" bytes: write {value}KiB or {value}MiB" if low == _MIN_SIZE and value > 0 else ""
                raise InvalidConfig(f"Got {name}={value} but expected a whole number >= {low}{unit}.")


class _Queue(NamedTuple):
    """Requests that share one limit."""

    name: str
    who: str  # for messages
    limits: QueueLimits
    refusal: str  # one of the metric's reasons
    status: int


def _tenant_queue(tenant: str) -> str:
    return f"tenant {tenant}"


class Reservation:
    """The places and tokens that one HTTP request holds in its queues."""

    def __init__(self, gate: Gate, queues: list[_Queue], num_requests: int) -> None:
        self._gate = gate
        self._queues = queues
        self._num_requests = num_requests
        self._num_tokens = 0

    def take_tokens(self, num_tokens: int) -> None:
        """Hold tokens too, once prompts are counted; raises ApiError if there is no room."""
        for queue in self._queues:
            self._gate.check_tokens(queue, num_tokens)
        self._num_tokens = num_tokens
        self._change(num_tokens=num_tokens)

    def _change(self, num_requests: int = 0, num_tokens: int = 0) -> None:
        for queue in self._queues:
            self._gate.change(queue.name, num_requests, num_tokens)

    def __enter__(self) -> Reservation:
        self._change(self._num_requests)
        return self

    def __exit__(self, *error: object) -> None:
        self._change(-self._num_requests, -self._num_tokens)


class Gate:
    """Admits requests while there is room and counts them until they leave. Each choice counts as one request."""

    def __init__(
        self,
        limits: ServerLimits,
        max_running: Callable[[], int],
        on_refusal: Callable[[str], None],
        shares: Shares | None = None,
    ) -> None:
        self.limits = limits
        self._max_running = max_running
        self._on_refusal = on_refusal
        self.shares = shares or Shares()  # may be replaced
        self._requests: Counter[str] = Counter()  # running or waiting, by queue
        self._tokens: Counter[str] = Counter()
        self.is_draining = False

    @property
    def num_inside(self) -> int:
        """Requests that run or wait."""
        return self._requests[_ALL]

    @property
    def max_tenant_running(self) -> int:
        """Requests of one tenant that can run at a time."""
        return min(self._max_running(), self.limits.max_tenant_requests or self._max_running())

    def tenant_settings(self, tenant: str) -> TenantSettings:
        """By the name of `Caller.limited_as`."""
        return self.shares.tenants.get(tenant, TenantSettings())

    def enter(self, tenant: str, num_requests: int, service_class: str = "") -> Reservation:
        """Reserve places for this many requests during its context; raises ApiError if there are none."""
        if self.is_draining:
            self._on_refusal("draining")
            raise overloaded("The server is shutting down.")
        queues = self._queues(tenant, service_class)
        for queue in queues:
            self._check_requests(queue, num_requests, tenant)
        return Reservation(self, queues, num_requests)

    def check_num_choices(self, num_choices: int) -> None:
        """Refuse too many choices in one HTTP request, before anything is allocated for each."""
        if num_choices > self.limits.max_n:
            message = f"Got {num_choices} choices to generate but this server allows {self.limits.max_n} per request."
            raise ApiError(400, message, param="n")

    def _queues(self, tenant: str, service_class: str) -> list[_Queue]:
        limits, settings = self.limits, self.tenant_settings(tenant)
        for_all = QueueLimits(max_requests=self._max_running() + limits.max_waiting, max_tokens=limits.max_open_tokens)
        for_tenant = QueueLimits(
            max_requests=settings.max_requests or limits.max_tenant_requests, max_tokens=settings.max_tokens
        )
        for_class = self.shares.class_limits.get(service_class, QueueLimits())
        return [
            _Queue(_ALL, "The server", for_all, "queue_full", 503),
            _Queue(f"class {service_class}", f"The class {service_class!r}", for_class, "class_limit", 503),
            _Queue(_tenant_queue(tenant), "This tenant", for_tenant, "tenant_limit", 429),
        ]

    def _has_room(self, tenant: str, num_requests: int) -> bool:
        """Whether a tenant has less than its equal share of a full queue: nobody can keep the others out."""
        own = _tenant_queue(tenant)
        tenants = {name for name in self._requests if name.startswith(_tenant_queue(""))} | {own}
        limit = self._max_running() + self.limits.max_waiting
        return len(tenants) > 1 and (self._requests[own] + num_requests) * len(tenants) <= limit

    def _check_requests(self, queue: _Queue, num_requests: int, tenant: str) -> None:
        inside, limit = self._requests[queue.name], queue.limits.max_requests
        if (
            limit
            and inside + num_requests > limit
            and not (queue.name == _ALL and self._has_room(tenant, num_requests))
        ):
            self._on_refusal(queue.refusal)
            if queue.name == _ALL:
                raise overloaded(f"The queue is full: {inside} requests are running or waiting.")
            message = f"{queue.who} has {inside} requests running or waiting, and {limit} are allowed."
            raise overloaded(message, status=queue.status)

    def check_tokens(self, queue: _Queue, num_tokens: int) -> None:
        inside, limit = self._tokens[queue.name], queue.limits.max_tokens
        if not limit or inside + num_tokens <= limit:
            return
        needs = f"This request may need {num_tokens} tokens"
        if num_tokens > limit:
            raise ApiError(400, f"{needs} but {queue.who.lower()} is allowed {limit} at a time: lower max_tokens.")
        self._on_refusal(queue.refusal)
        message = f"{needs} and {queue.who.lower()} has {inside} running or waiting, and {limit} are allowed."
        raise overloaded(message, status=queue.status)

    def change(self, queue: str, num_requests: int, num_tokens: int) -> None:
        """These came, or left if there are fewer than none."""
        for counter, number in ((self._requests, num_requests), (self._tokens, num_tokens)):
            counter[queue] += number
            if not counter[queue]:
                del counter[queue]
