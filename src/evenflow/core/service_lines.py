"""Who is next: lines of requests by class and tenant, and the service that each line has received.

    level    of the class: a more urgent one goes first. Prompts that miss their class's TTFT target anyway come after
             those that do not. A class that got less than its share has one request promoted above all others
    tenant   within a level, the lowest counter of virtual time goes first; see `tenant_shares`
    rank     within a tenant, the prompt whose first token is due earliest; see `Planner.place`

With one class and one tenant, only the rank counts. Used by evenflow's own scheduler and inside host engines.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import islice, takewhile
from typing import Generic, Protocol, TypeVar

from evenflow.core.account import PROMOTED, Account
from evenflow.core.deadlines import Place
from evenflow.core.queue import RankedQueue, rank
from evenflow.core.service_classes import ServiceClass, check_classes, check_weights, find_class, late_name
from evenflow.core.tenant_shares import LENT_S, TenantShares

# Of a class's share, what its late prompts get while others of the class wait.
_LATE_SHARE = 0.1


class Served(Protocol):
    """What the order of service looks at in a request."""

    account: Account
    rank: tuple[float, int]

    @property
    def id(self) -> str: ...
    @property
    def tenant(self) -> str: ...
    @property
    def service_class(self) -> str: ...
    @property
    def arrival_time(self) -> float: ...
    @property
    def place(self) -> Place: ...
    @property
    def is_running(self) -> bool: ...
    @property
    def is_prompt(self) -> bool: ...
    @property
    def num_known(self) -> int: ...
    @property
    def num_scheduled(self) -> int: ...
    @property
    def num_output_tokens(self) -> int: ...


RequestType = TypeVar("RequestType", bound=Served)


@dataclass(slots=True)
class _Line(Generic[RequestType]):
    """The unfinished requests of one account."""

    waiting: RankedQueue[RequestType] = field(default_factory=RankedQueue)
    requests: dict[str, RequestType] = field(default_factory=dict)  # in order of arrival, running ones too

    def prompts(self) -> Iterator[RequestType]:
        """Requests whose prompts are not computed yet."""
        return (one for one in self.requests.values() if one.is_prompt)

    @property
    def is_backlogged(self) -> bool:
        return bool(self.waiting) or any(True for _ in self.prompts())


@dataclass(slots=True)
class _Class:
    spec: ServiceClass
    level: int
    tenants: TenantShares
    credit: float = 0.0  # seconds of its share that it has not had yet


class ServiceLines(Generic[RequestType]):
    """The unfinished requests of one scheduler, in order of service."""

    def __init__(
        self,
        classes: Sequence[ServiceClass],
        weights: Mapping[str, float],
        price_of: Callable[[int, int], float],  # seconds of a chunk of this start and length
    ) -> None:
        self.classes = check_classes(classes)
        check_weights(weights)
        self._weights = weights  # may change
        self._price_of = price_of
        self._classes: dict[str, _Class] = {}
        self._late: dict[str, str] = {}  # of classes with a TTFT target, the name that late prompts are served under
        for spec in self.classes:
            self._add_class(spec)
            if spec.ttft_target is not None:
                self._late[spec.name] = late = late_name(spec.name)
                self._add_class(replace(spec, name=late, share=_LATE_SHARE * spec.share))
        self._lines: dict[Account, _Line[RequestType]] = {}
        self._num_waiting = 0
        self._num_steps = 0

    def _add_class(self, spec: ServiceClass) -> None:
        self._classes[spec.name] = _Class(spec, len(self._classes), TenantShares(self._weights))

    # ---- requests come, wait and go ----

    def add(self, request: RequestType) -> ServiceClass:
        """A request arrives; returns its class."""
        spec = find_class(self.classes, request.service_class or None)
        of_class = self._classes[spec.name]
        request.account = Account(of_class.level, spec.name, request.tenant)
        line = self._lines.get(request.account)
        if line is None or not line.is_backlogged:
            of_class.tenants.enter(request.tenant, self._backlogged(spec.name))
        self._lines.setdefault(request.account, _Line()).requests[request.id] = request
        return spec

    def discard(self, request: RequestType) -> None:
        """A request has ended."""
        self._leave_line(request)
        name = request.account.service_class
        if not any(account.service_class == name for account in self._lines):
            self._classes[name].tenants.clear()

    def _leave_line(self, request: RequestType) -> None:
        line = self._lines[request.account]
        del line.requests[request.id]
        if not line.requests:
            del self._lines[request.account]

    def push(self, request: RequestType) -> None:
        self._lines[request.account].waiting.push(request)
        self._num_waiting += 1

    def remove(self, request: RequestType) -> None:
        self._lines[request.account].waiting.remove(request)
        self._num_waiting -= 1

    def update(self, request: RequestType, rank: tuple[float, int]) -> None:
        """Give a request this rank."""
        if request.is_running:
            request.rank = rank
        else:
            self._lines[request.account].waiting.update(request, rank)

    def __len__(self) -> int:
        """Requests that wait for a slot."""
        return self._num_waiting

    @property
    def is_shared(self) -> bool:
        """Are there several classes or tenants?"""
        return len(self._lines) > 1

    @property
    def is_contended(self) -> bool:
        """Have several tenants of one class been served recently?"""
        return any(one.tenants.is_contended(self._num_steps) for one in self._classes.values())

    def spec_of(self, request: RequestType) -> ServiceClass:
        return self._classes[request.account.service_class].spec

    def _lines_of(self, class_name: str) -> Iterator[tuple[Account, _Line[RequestType]]]:
        return ((account, line) for account, line in self._lines.items() if account.service_class == class_name)

    def _backlogged(self, class_name: str) -> list[str]:
        return [account.tenant for account, line in self._lines_of(class_name) if line.is_backlogged]

    # ---- who is next ----

    def __iter__(self) -> Iterator[RequestType]:
        """Waiting requests in order of service, as if each prompt were computed whole in its turn."""
        return self.waiting_but()

    def waiting_but(self, at_limit: Set[str] = frozenset()) -> Iterator[RequestType]:
        """Waiting requests in order of service, without those of these tenants; promoted ones stay."""
        lines = [
            (account, line)
            for account, line in self._lines.items()
            if account.tenant not in at_limit or account.level == PROMOTED
        ]
        if len(lines) == 1:
            return iter(lines[0][1].waiting)
        starts = {account: ((one, one.place.num_cached_tokens) for one in line.waiting) for account, line in lines}
        return (request for request, _ in self._merge(starts))

    def arrange(self, starts: list[tuple[RequestType, int]], room: int) -> list[tuple[RequestType, int]]:
        """The first of these prompts in order of service, each with the start of its next chunk."""
        starts.sort(key=lambda start: start[0].rank)
        if not self.is_shared:
            return starts[:room]
        by_account: dict[Account, list[tuple[RequestType, int]]] = {}
        for start in starts:
            by_account.setdefault(start[0].account, []).append(start)
        return list(islice(self._merge(by_account), room))

    def _merge(self, lines: Mapping[Account, Iterable[tuple[RequestType, int]]]) -> Iterator[tuple[RequestType, int]]:
        heap = []
        for account, starts in lines.items():
            rest = iter(starts)
            if (first := next(rest, None)) is not None:
                heap.append((*self._standing(account), first[0].rank, account, first, rest))
        heapq.heapify(heap)
        while heap:
            level, counter, served_at, _, account, start, rest = heap[0]
            yield start
            if (following := next(rest, None)) is None:
                heapq.heappop(heap)
                continue
            if level != PROMOTED:
                request, position = start
                counter += self._price_of(position, request.num_known - position) / self._weight(account.tenant)
            heapq.heapreplace(heap, (level, counter, served_at, following[0].rank, account, following, rest))

    def length_of_turn(self, prompts: Sequence[tuple[RequestType, int]]) -> int:
        """How many of these, in order of service, belong to the next tenant, if it has received so little that it
        would still be next after them; else all. Classes do not take turns."""
        account = prompts[0][0].account if prompts else None
        own = list(takewhile(lambda one: one[0].account == account, prompts))
        if account is None or len(own) == len(prompts):
            return len(prompts)
        seconds = sum(self._price_of(start, request.num_known - start) for request, start in own)
        level, counter, _ = self._standing(account)
        next_level, next_counter, _ = self._standing(prompts[len(own)][0].account)
        is_next = level == next_level and counter + seconds / self._weight(account.tenant) < next_counter
        return len(own) if is_next else len(prompts)

    def _standing(self, account: Account) -> tuple[int, float, int]:
        if account.level == PROMOTED:
            return PROMOTED, 0.0, 0
        return account.level, *self._classes[account.service_class].tenants.standing(account.tenant)

    def _weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)

    def key(self, request: RequestType) -> tuple[int, float, int, tuple[float, int]]:
        """The lowest key is served next. Unlike `arrange`, this ignores what a tenant's first prompt will cost."""
        return *self._standing(request.account), request.rank

    # ---- what they got ----

    def charge(self, prices: Mapping[Account, float]) -> None:
        """A step gives each account these seconds of service."""
        self._num_steps += 1
        total = sum(prices.values())
        for of_class in self._classes.values():
            name = of_class.spec.name
            mine = {account: seconds for account, seconds in prices.items() if account.service_class == name}
            backlogged = self._backlogged(name)
            if backlogged:  # what nobody else waited for is free
                seconds_of: dict[str, float] = {}
                for account, seconds in mine.items():
                    seconds_of[account.tenant] = seconds_of.get(account.tenant, 0.0) + seconds
                of_class.tenants.charge(seconds_of, backlogged, self._num_steps)
            self._update_credit(of_class, mine, total, is_backlogged=bool(backlogged))
            if of_class.credit > 0 and of_class.level > 0:
                self._promote(of_class)

    def charge_only(self, seconds: float) -> None:
        """A step gives these seconds to the only account. For a tenant that arrives later, its part counts as lent."""
        self._num_steps += 1
        for account in self._lines:
            shares = self._classes[account.service_class].tenants
            shares.charge({account.tenant: seconds}, [account.tenant], self._num_steps)

    def _update_credit(
        self, of_class: _Class, mine: Mapping[Account, float], total: float, *, is_backlogged: bool
    ) -> None:
        """A class with prompts waiting earns its share of each step, and pays for its service.

        Service in its own turn is paid from what it earned; more of it is free. A promoted request is paid in full.
        """
        promoted = sum(seconds for account, seconds in mine.items() if account.level == PROMOTED)
        earned = min(of_class.credit + of_class.spec.share * total, LENT_S) if is_backlogged else 0.0
        usual = sum(mine.values()) - promoted
        of_class.credit = min(of_class.credit, 0.0) if not is_backlogged else earned - min(usual, max(0.0, earned))
        of_class.credit -= promoted

    def _promote(self, of_class: _Class) -> None:
        """The class got less than its share: its first prompts go before all others, and yield to none of them.

        As many as it has saved enough for, or one when it has saved all that it may.
        """
        prompts = [one for _, line in self._lines_of(of_class.spec.name) for one in line.prompts()]
        owed = sum(self._prefill_left(one) for one in prompts if one.account.level == PROMOTED)
        usual = [one for one in prompts if one.account.level != PROMOTED]
        while usual and (of_class.credit > owed or not owed):
            first = min(usual, key=self.key)
            needed = self._prefill_left(first)
            if of_class.credit < (owed + needed if owed else min(needed, LENT_S)):
                return
            owed += needed
            usual.remove(first)
            self._move(first, first.account._replace(level=PROMOTED))

    def _prefill_left(self, request: RequestType) -> float:
        """Seconds that the rest of its prompt takes."""
        start = request.num_scheduled if request.is_running else request.place.num_cached_tokens
        return self._price_of(start, request.num_known - start)

    def demote_late(self, now: float) -> None:
        """Prompts that can no longer meet their class's TTFT target make way for those that can: if they kept their
        places, those would be late as well."""
        if not self._late:
            return
        for account, line in list(self._lines.items()):
            late = self._late.get(account.service_class)
            if late is None or account.level == PROMOTED:
                continue
            for request in sorted((one for one in line.requests.values() if not one.num_output_tokens), key=rank):
                due = request.arrival_time + (self.spec_of(request).ttft_seconds or 0.0)
                if now + self._prefill_left(request) <= due:
                    break
                self._move(request, Account(self._classes[late].level, late, account.tenant))

    def _move(self, request: RequestType, account: Account) -> None:
        """Serve it under another account."""
        if not request.is_running:
            self.remove(request)
        self._leave_line(request)
        request.account = account
        self._lines.setdefault(account, _Line()).requests[request.id] = request
        if not request.is_running:
            self.push(request)

    def seconds_before(self, request: RequestType) -> float:
        """Seconds of prefill until the first token of a request that has not arrived yet, its own included.

        Before it go all prompts of more urgent levels, and those of its tenant with a lower rank. Other tenants of its
        class take turns with it, after what they owe it. Waits for slots and memory are not known, and not counted.
        """
        level = self._classes[find_class(self.classes, request.service_class or None).name].level
        start = request.place.num_cached_tokens
        before, own, others = 0.0, self._price_of(start, request.num_known - start), dict[str, float]()
        for account, line in self._lines.items():
            is_own = account.tenant == request.tenant
            if account.level > level:
                continue
            ahead = (one for one in line.prompts() if account.level < level or not is_own or one.rank <= request.rank)
            seconds = sum(map(self._prefill_left, ahead))
            if account.level < level:
                before += seconds
            elif is_own:
                own += seconds
            else:
                others[account.tenant] = seconds
        turn = max(0.0, own - LENT_S) / self._weight(request.tenant)
        return before + own + sum(min(seconds, turn * self._weight(tenant)) for tenant, seconds in others.items())
