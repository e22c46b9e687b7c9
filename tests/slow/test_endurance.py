"""A million steps of a random load in virtual time: every promise at each, every request accounted for, flat memory."""

from __future__ import annotations

import pytest

from tests.core.endurance import Endurance
from tests.core.test_service_load import SEED_OF_THE_DAY

pytestmark = pytest.mark.slow

EVENTS = ("class changes", "clock jumps", "failed rows", "failed steps", "policy changes", "preempted", "refusals")
ENDS = ("length", "error", "aborted", "stopped", "expired")


def test_a_million_steps(capsys: pytest.CaptureFixture[str]) -> None:
    load = Endurance(SEED_OF_THE_DAY)
    try:
        load.run(1_000_000)
    finally:
        with capsys.disabled():
            print(f"\nseed {load.seed}: {dict(load.events)}, ends {dict(load.ends)}")
    load.check_accounts_add_up()
    assert all(load.events[name] > 1_000 for name in EVENTS)
    assert all(load.ends[name] > 1_000 for name in ENDS)
