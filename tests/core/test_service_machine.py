"""The scheduler's state machine with classes and tenants: every promise of the plain one, and those of the order."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from evenflow.core.request import FinishReason
from evenflow.core.service_classes import DEFAULT_CLASSES
from evenflow.errors import LateRequest
from tests.core.promises import check_accounts
from tests.core.test_scheduler_machine import BLOCK_SIZE, SchedulerMachine, own_targets, sized

names = st.sampled_from(["", *(one.name for one in DEFAULT_CLASSES)])


class ServiceMachine(SchedulerMachine):
    """Prompts of all classes and of three tenants; prefixes are shared within a tenant."""

    @rule(
        length=st.integers(1, 60),
        max_tokens=st.integers(1, 30),
        family=st.integers(0, 2),
        tbt_target=own_targets,
        ttft_target=own_targets,
        deadline=st.sampled_from((None, None, 0.05, 1.0)),
        tenant=st.sampled_from("abc"),
        service_class=names,
    )
    def add_for(
        self,
        length: int,
        max_tokens: int,
        family: int,
        tbt_target: float | None,
        ttft_target: float | None,
        deadline: float | None,
        tenant: str,
        service_class: str,
    ) -> None:
        capacity = self.scheduler.pool.num_blocks * BLOCK_SIZE  # less than before when memory ran out
        length = min(length, capacity - 1)
        with suppress(LateRequest):
            self.driver.add(
                [family] * length,
                max_tokens=min(max_tokens, capacity - length),
                tenant=tenant,
                service_class=service_class,
                ignore_eos=True,
                tbt_target=tbt_target,
                ttft_target=ttft_target,
                deadline=deadline,
            )

    @rule()
    def expire(self) -> None:
        now = self.driver.executor.clock.now
        due = {name for name, request in self.scheduler.requests.items() if request.expires_at <= now}
        assert set(self.driver.expire()) == due
        for name in due:
            request = self.driver.requests[name]
            assert (request.finish_reason, request.is_finished) == (FinishReason.ERROR, True)
            assert "deadline" in (request.error or "")

    @invariant()
    def check_order(self) -> None:
        if hasattr(self, "driver"):
            check_accounts(self.scheduler)


class LongServiceMachine(ServiceMachine):
    """The same with more examples."""


TestServiceMachine = sized(ServiceMachine, 8)
TestLongServiceMachine = pytest.mark.slow(sized(LongServiceMachine, 40))
