"""Turns among clients."""

from __future__ import annotations

from evenflow.server.lanes import Lanes


def test_clients_take_turns_and_each_ones_items_stay_in_order() -> None:
    lanes: Lanes[int] = Lanes()
    for number in range(4):
        lanes.put("flood", number)
    lanes.put("other", 10)
    lanes.put("other", 11)
    taken = [lanes.take() for _ in range(3)]
    lanes.put("late", 20)
    assert len(lanes) == 3
    while lanes:
        taken.append(lanes.take())
    assert taken == [0, 10, 1, 11, 2, 20, 3]
