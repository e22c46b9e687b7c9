"""Random loads of classes and tenants with too little memory: longer runs than the state machine's, in which all ways
to yield occur together. `tests/slow/test_endurance.py` runs many more of them."""

from __future__ import annotations

import datetime
import os

import pytest

from tests.core.endurance import Endurance

# A new load each day: the name of the test that fails has its seed, and $EVENFLOW_SEED brings it back.
SEED_OF_THE_DAY = int(os.environ.get("EVENFLOW_SEED") or datetime.datetime.now(datetime.UTC).date().toordinal())


@pytest.mark.parametrize("seed", [1, SEED_OF_THE_DAY])
def test_a_random_load_ends_well(seed: int) -> None:
    load = Endurance(seed)
    load.run(2_000)
    load.check_accounts_add_up()
