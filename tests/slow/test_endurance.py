"""Random loads in virtual time: every promise at each step, every request accounted for, flat memory.

Two runs, which two workers do at the same time. EVENFLOW_ENDURANCE_STEPS=500000 makes it a million steps: 7 minutes.
"""

from __future__ import annotations

import os

import pytest

from tests.core.endurance import Endurance
from tests.core.test_service_load import SEED_OF_THE_DAY

pytestmark = pytest.mark.slow

STEPS = int(os.environ.get("EVENFLOW_ENDURANCE_STEPS", "25000"))

EVENTS = ("class changes", "clock jumps", "failed rows", "failed steps", "policy changes", "preempted", "refusals")
ENDS = ("length", "error", "aborted", "stopped", "expired")


@pytest.mark.parametrize("seed", [SEED_OF_THE_DAY, SEED_OF_THE_DAY + 1_000_000])
def test_every_promise_holds_at_every_step(seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    load = Endurance(seed)
    try:
        load.run(STEPS)
    finally:
        with capsys.disabled():
            print(f"\nseed {load.seed}: {dict(load.events)}, ends {dict(load.ends)}")
    load.check_accounts_add_up()
    assert all(load.events[name] for name in EVENTS)
    assert all(load.ends[name] for name in ENDS)
