"""Room for requests: which waiting ones fit and may start, and which running ones give up a slot or blocks for others.

`service_order` says who is next and who yields; this module adds which slots and blocks are left. Plans no steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from itertools import islice

from evenflow.core.account import PROMOTED
from evenflow.core.block_moves import BlockMover
from evenflow.core.blocks import BlockPool
from evenflow.core.plan import Admission, ExecutorCaps
from evenflow.core.policy import Candidate, Policy
from evenflow.core.prefix_cache import PrefixCache
from evenflow.core.request import Request, Status
from evenflow.core.seats import Seats
from evenflow.core.service_order import ServiceOrder, Start

# Waiting requests that are looked at behind one that does not fit.
_MAX_TRIED = 32
# Under a target, the most of it that a tenant's streams take of prompts, while others are served too.
_MAX_STREAM_SHARE = 0.18


class Room:
    """Admits requests, and preempts them when others need their room more."""

    def __init__(
        self,
        seats: Seats,
        order: ServiceOrder,
        pool: BlockPool,
        prefix_cache: PrefixCache,
        mover: BlockMover,
        *,
        block_size: int,
        max_num_seqs: int,
        caps: ExecutorCaps,
        stream_price: Callable[[int, int], float],
    ) -> None:
        self._seats = seats
        self._order = order
        self._pool = pool
        self._prefix_cache = prefix_cache
        self._mover = mover
        self._block_size = block_size
        self._max_num_seqs = max_num_seqs
        self._caps = caps
        self._stream_price = stream_price  # seconds of a full step for this many streams with this much context
        # Of the step that is planned:
        self._at_limit: set[str] = set()  # tenants whose prompts do not start
        self._yielded: set[str] = set()  # requests that made way, and do not come back
        self._passing: dict[str, tuple[Request, Request]] = {}  # who may pass, each with the one that does not fit

    def start_step(self, policy: Policy) -> None:
        """Decide which requests make way in the step that is planned now."""
        self._at_limit, self._yielded = set(), set()
        if self._order:
            if policy.pacing is not None and self._order.is_contended:
                self._at_limit = self._tenants_at_limit(policy.pacing.target)
            if self._order.is_shared:
                self._make_way(policy.max_step_tokens)

    def _tenants_at_limit(self, target: float) -> set[str]:
        """Tenants whose streams take so much of the target that prompts of others would get too little of it."""
        positions: dict[str, list[int]] = {}
        for request in self._seats:
            positions.setdefault(request.tenant, []).append(request.num_known)
        most = _MAX_STREAM_SHARE * target
        return {
            tenant
            for tenant, of_tenant in positions.items()
            if self._stream_price(len(of_tenant), sum(of_tenant)) > most
        }

    def _make_way(self, max_step_tokens: int) -> None:
        """Preempt requests that yield to waiting ones, for as many of these as one step can take."""
        claimed, slots, tokens = len(self._seats), self._seats.num_free, 0
        for request in list(islice(self._order.waiting_but(self._at_limit), self._caps.max_prefill_sequences)):
            slots_kept, blocks_kept = self._reserve(request, claimed)
            needed = self._seats.num_blocks(request.num_known)
            if slots <= slots_kept or needed + claimed + blocks_kept > self._pool.num_free:
                needed, cached = self._blocks_to_admit(request)
                if self._is_pending(self._prefix_cache.first_missing(request, len(cached)), request):
                    continue
                lacking = needed + claimed + blocks_kept - self._pool.num_free - self._pool.num_settling
                if slots <= slots_kept or lacking > 0:
                    victims = self._victims(request, lacking)
                    if not victims:
                        break
                    for victim in victims:
                        self.preempt(victim)
                        self._yielded.add(victim.id)
                    slots += len(victims)
                    claimed -= len(victims)
            slots -= 1
            claimed += needed + 1
            tokens += request.num_known - request.place.num_cached_tokens
            if tokens >= max_step_tokens:
                break

    def _victims(self, request: Request, num_blocks: int) -> list[Request]:
        """Requests that yield a slot and this many blocks to a waiting one; none if all of them were not enough."""
        victims: list[Request] = []
        for victim in self._order.yielding(request, list(self._seats), self._seats.holdings()):
            victims.append(victim)
            num_blocks -= self._pool.count_sole(victim.block_ids) + 1  # and the one that it reserves
            if num_blocks <= 0:
                return victims
        return []

    def candidates(self) -> list[Candidate]:
        """Prompts to continue and prompts that could start, in order of service, as many as fit in one step."""
        if not self._seats.prefilling and not self._order:
            return []
        room = self._caps.max_prefill_sequences
        starts = [(request, request.num_scheduled) for request in self._seats.prefilling.values()]
        starts += islice(self._admissible(), room)
        return [
            Candidate(request.id, start, request.num_known - start, request.num_prompt_tokens)
            for request, start in self._order.arrange(starts, room)
        ]

    def _admissible(self) -> Iterator[Start]:
        """Waiting requests that fit in the free slots and blocks, each with its number of cached tokens.

        Each running request reserves one more block: otherwise a new one would soon preempt it. Of those behind the
        first that does not fit, a few may pass; see `_may_pass`.
        """
        self._passing.clear()
        if not self._pool.num_free:
            return
        claimed, slots, tried = len(self._seats), self._seats.num_free, 0
        starting: set[bytes] = set()  # the first blocks that requests ahead in line compute if they start
        blocked: Request | None = None
        for request in self._order.waiting_but(self._at_limit):
            slots_kept, blocks_kept = self._reserve(request, claimed)
            if slots <= slots_kept or tried > _MAX_TRIED:
                return
            if blocked is not None:
                tried += 1
                if not self._may_pass(request, blocked):
                    if request.account == blocked.account:
                        continue  # one that needs less may
                    return
            if request.id in self._yielded:
                continue
            needed, cached = self._blocks_to_admit(request)
            missing = self._prefix_cache.first_missing(request, len(cached))
            if missing in starting or self._is_pending(missing, request):
                continue  # waiting for it is cheaper than computing it twice
            request.place.num_cached_tokens = len(cached) * self._block_size
            if needed + claimed + blocks_kept > self._pool.num_free:
                blocked = blocked or request
                continue
            claimed += needed + 1
            if missing is not None:
                starting.add(missing)
            if self._mover.delays(request, cached):
                continue
            if blocked is not None:
                self._passing[request.id] = request, blocked
            yield request, len(cached) * self._block_size
            slots -= 1

    def _may_pass(self, request: Request, blocked: Request) -> bool:
        """May it take memory although `blocked`, which is ahead in line, does not fit?

        Tenants that hold less may. So may requests of the same account, as long as all that do need no more tokens to
        their ends than the blocked one: memory that would be idle is used, and it waits for little more.
        """
        if request.account != blocked.account:
            return self._order.may_pass(request, blocked, self._seats.holdings())
        passing = sum(one.max_known_tokens for one, passed in self._passing.values() if passed is blocked)
        return blocked.place.passed_tokens + passing + request.max_known_tokens <= blocked.max_known_tokens

    def _blocks_to_admit(self, request: Request) -> tuple[int, list[int]]:
        """How many free blocks its admission takes, and those that hold its cached prefix."""
        cached = self._prefix_cache.find(request)
        return self._seats.num_blocks(request.num_known) - len(cached) + self._pool.count_idle(cached), cached

    def _is_pending(self, block_hash: bytes | None, request: Request) -> bool:
        """Will this block be there soon? Not from a prompt that yields to the one that wants it, or is held up."""
        if block_hash is None or not self._prefix_cache.is_expected(block_hash):
            return False
        producer = self._seats.get(self._prefix_cache.producer(block_hash) or "")
        if producer is None:
            return True
        is_held_up = self._order.is_held_up(request, producer, self._seats.prefilling.values())
        return not is_held_up and not self._order.goes_before(request, producer)

    def _reserve(self, request: Request, num_claimed: int) -> tuple[int, int]:
        """Slots and blocks that its class leaves to the decodes of others, while any of them runs."""
        share = self._order.spec_of(request).reserve
        if not share or not num_claimed or request.account.level == PROMOTED:
            return 0, 0
        return int(share * self._max_num_seqs), int(share * self._pool.num_blocks)

    def secure_decodes(self) -> list[Request]:
        """The requests that decode in this step, each with a block for its next token; preempts if blocks run out."""
        block_size = self._block_size
        full = [
            r
            for r in self._seats.decoding.values()
            if not r.num_scheduled % block_size and r.num_scheduled == len(r.block_ids) * block_size
        ]
        without_block: set[str] = set()
        secured: set[str] = set()
        for request in self._order.by_urgency(full):
            if request.status is not Status.RUNNING or request.num_scheduled >= request.max_known_tokens - 1:
                continue
            if self._make_room(request, secured):
                self._seats.append_blocks(request, 1)
                secured.add(request.id)
            else:
                without_block.add(request.id)
        if self._seats.newest_step is None and not without_block:
            return list(self._seats.decoding.values())
        # With a step in flight, a request's last allowed token can be pending already.
        return [
            r
            for r in self._seats.decoding.values()
            if r.num_scheduled < r.max_known_tokens - 1 and r.id not in without_block
        ]

    def _make_room(self, request: Request, secured: Set[str]) -> bool:
        """Free a block for `request` by preempting those that yield to it; False if it must wait or yields itself.

        Those that have got their block for this step keep it.
        """
        while self._pool.num_free == 0:
            if self._pool.num_settling:
                return False  # blocks come free when a step in flight is committed
            running = [one for one in self._seats if one.id not in secured]
            first = self._order.first_to_yield(running, self._seats.holdings)
            self.preempt(first)
            if first is request:
                return False
        return True

    def preempt(self, request: Request) -> None:
        """Take a running request's slot and blocks. It starts over when there is room, keeping its output so far."""
        self._seats.leave(request)
        request.status = Status.PREEMPTED
        request.place.num_tokens, request.place.num_cached_tokens = request.num_known, 0
        request.num_scheduled = request.num_committed = request.num_cached_tokens = 0
        self._order.push(request)

    def admit(self, request: Request) -> Admission:
        """Let a waiting request in."""
        _, passed = self._passing.get(request.id, (None, None))
        if passed is not None and passed.account == request.account:
            passed.place.passed_tokens += request.max_known_tokens
        self._order.remove(request)
        self._mover.on_admit(request)
        return self._seats.admit(request)

    def fits_next(self) -> bool:
        """Is there room for the next waiting request?"""
        first = next(self._order.waiting_but(self._at_limit), None)
        if first is None:
            return False
        slots_kept, blocks_kept = self._reserve(first, len(self._seats))
        if self._seats.num_free <= slots_kept:
            return False
        needed, _ = self._blocks_to_admit(first)
        return needed + len(self._seats) + blocks_kept <= self._pool.num_free
