"""Work that serving does not depend on: an error there never reaches the host, and is logged once."""

from __future__ import annotations

import logging

import pytest

from evenflow.best_effort import BestEffort


def test_an_error_costs_its_result_and_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    best_effort = BestEffort(logging.getLogger("evenflow.hosts"))

    def work() -> int:
        raise RuntimeError("no memory\nwhere the rest of a long text follows")

    assert [best_effort.run("the estimate", work, 0) for _ in range(3)] == [0, 0, 0]
    assert best_effort.run("the advice", work, 1) == 1
    assert best_effort.run("the estimate", lambda: 7, 0) == 7  # an error is no reason not to try again
    end = "failed, serving goes on without it: RuntimeError: no memory"
    assert caplog.messages == [f"evenflow: the estimate {end}", f"evenflow: the advice {end}"]


def test_what_ends_the_host_still_ends_it() -> None:
    def work() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        BestEffort(logging.getLogger("evenflow.hosts")).run("the estimate", work, None)
