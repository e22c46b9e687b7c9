"""What a scheduler promises at every moment, whatever happens to it."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from evenflow.core.account import PROMOTED
from evenflow.core.deadlines import NO_DEADLINE, PACED_SLACK
from evenflow.core.request import Request
from evenflow.core.scheduler import Scheduler


def check_scheduler(scheduler: Scheduler, touched: Collection[set[int]]) -> None:
    """`touched`: the blocks of each step in flight."""
    scheduler.pool.check_invariants()
    if scheduler.tier is not None:
        scheduler.tier.check_invariants()
        for block_hash, (block, _, _) in scheduler.tier._offered.items():
            assert scheduler.pool._content[block].block_hash == block_hash, "another block would be saved"
    assert scheduler.admission_failure() is None
    requests = scheduler.requests.values()
    for request in requests:
        check_counters(request, scheduler.block_size)
        check_deadline(scheduler, request)
    check_memory(scheduler, touched)
    running = [request for request in requests if request.is_running]
    slots = [request.slot for request in running]
    assert len(set(slots)) == len(slots) == scheduler.num_running, "a slot is shared"
    assert set(slots) <= set(range(scheduler.config.max_num_seqs))
    assert scheduler.num_running + len(scheduler.waiting) == len(scheduler.requests)
    assert scheduler.num_in_flight == len(touched)


def check_memory(scheduler: Scheduler, touched: Iterable[set[int]]) -> None:
    pool = scheduler.pool
    held = {block for request in scheduler.requests.values() for block in request.block_ids}
    num_returning = scheduler.tier.num_returning if scheduler.tier is not None else 0
    assert pool.num_held == len(held) + num_returning, "a block without its owner, or an owner without its block"
    in_use = held.union(*touched)
    assert pool.num_free <= pool.num_blocks - len(in_use), "a block is free that a step in flight touches"


def check_counters(request: Request, block_size: int) -> None:
    if request.is_finished:
        assert request.block_ids == []
        return
    assert (request.slot >= 0) == request.is_running
    assert 0 <= request.num_committed <= request.num_scheduled <= request.num_known + request.num_pending
    assert request.num_output_tokens + request.num_pending <= request.sampling.max_tokens
    assert len(request.block_ids) * block_size >= request.num_scheduled


def check_deadline(scheduler: Scheduler, request: Request) -> None:
    pacing, deadline = scheduler.config.policy.pacing, request.deadline
    if request.is_finished or deadline.due == NO_DEADLINE:
        return
    assert pacing is not None, "a deadline without a target"
    own, ahead = request.sampling.tbt_seconds or pacing.target, deadline.due - deadline.last_token_time
    most = 1 + PACED_SLACK * pacing.is_paced
    # An own target that cannot be kept counts as the engine's.
    assert any(one - 1e-9 <= ahead <= one * most + 1e-9 for one in {own, max(own, pacing.target)})


def check_accounts(scheduler: Scheduler) -> None:
    """Every unfinished request is in the line of its account, and the most urgent class needs no promotion."""
    order, requests = scheduler.order, scheduler.requests.values()
    waiting = [request.id for request in order]
    assert len(waiting) == len(set(waiting)) == len(order)
    assert set(waiting) == {request.id for request in requests if not request.is_running}
    assert order.is_shared == (len({request.account for request in requests}) > 1)
    promoted = [one.account.service_class for one in requests if one.account.level == PROMOTED and one.is_prompt]
    assert "interactive" not in promoted, "the most urgent class needs no promotion"
