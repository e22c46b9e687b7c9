"""A million steps of random loads in virtual time: every promise at each, every request accounted for, flat memory.

Two halves, which two workers run at the same time.
"""

from __future__ import annotations

import pytest

from tests.core.endurance import Endurance
from tests.core.test_service_load import SEED_OF_THE_DAY

pytestmark = pytest.mark.slow

EVENTS = ("class changes", "clock jumps", "failed rows", "failed steps", "policy changes", "preempted", "refusals")
ENDS = ("length", "error", "aborted", "stopped", "expired")


@pytest.mark.parametrize("seed", [SEED_OF_THE_DAY, SEED_OF_THE_DAY + 1_000_000])
def test_half_a_million_steps(seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    load = Endurance(seed)
    try:
        load.run(500_000)
    finally:
        with capsys.disabled():
            print(f"\nseed {load.seed}: {dict(load.events)}, ends {dict(load.ends)}")
    load.check_accounts_add_up()
    assert all(load.events[name] > 500 for name in EVENTS)
    assert all(load.ends[name] > 500 for name in ENDS)
