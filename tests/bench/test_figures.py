from __future__ import annotations

from evenflow.bench.figures import Spread


def test_percentiles_are_samples_that_were_seen() -> None:
    assert Spread.of([float(n) for n in range(100, 0, -1)]) == Spread(100, 50.0, 99.0, 100.0)
    assert Spread.of([3.0, 1.0]) == Spread(2, 1.0, 3.0, 3.0)
    assert Spread.of([2.0]) == Spread(1, 2.0, 2.0, 2.0)


def test_no_samples() -> None:
    assert Spread.of([]) == Spread(0, 0.0, 0.0, 0.0)
