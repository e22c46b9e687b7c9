"""The items and events of a response's output, and the store of past responses, without a server."""

from __future__ import annotations

from typing import Any

import pytest

from evenflow.server.access import Caller
from evenflow.server.api.responses.output import OutputItems
from evenflow.server.api.responses.store import ResponseStore, StoreBounds, StoredResponse


def call(index: int, arguments: str, name: str | None = None) -> dict[str, Any]:
    function = {"arguments": arguments}
    start = {"id": f"call_{index}", "type": "function"} if name else {}
    return {"tool_calls": [{"index": index, **start, "function": {**({"name": name} if name else {}), **function}}]}


def test_an_item_ends_when_the_next_begins() -> None:
    output = OutputItems()
    events = [
        event["type"].removeprefix("response.")
        for delta in ({"content": "a"}, call(0, "{}", "f"), call(1, "{", "g"))
        for event in output.add(delta)
    ]
    events += [event["type"].removeprefix("response.") for event in output.end(is_complete=False)]
    text = ["output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done"]
    called = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    assert events == [*text, "output_item.done", *called, *called]
    assert [item["status"] for item in output.items] == ["completed", "completed", "incomplete"]
    assert [item.get("arguments") for item in output.items] == [None, "{}", "{"]


# ---- the store ----

ONE, TWO = (Caller(key, key, "127.0.0.1", is_admin=False) for key in ("one", "two"))


def stored(caller: Caller, num_bytes: int = 10) -> StoredResponse:
    parts = {"response": b"x" * (num_bytes - 4), "input_items": b"[]", "output_items": b"[]"}
    return StoredResponse(owner=caller.client, tenant="", share=caller.limited_as(""), **parts)


def kept(store: ResponseStore, caller: Caller, ids: list[str]) -> list[str]:
    return [one for one in ids if store.find(one, caller) is not None]


def test_the_oldest_of_a_share_goes_first() -> None:
    store = ResponseStore(StoreBounds(max_responses=2, max_bytes=25))
    for name in ("a", "b", "c"):
        store.add(name, stored(ONE))
    store.add("d", stored(TWO))
    assert kept(store, ONE, ["a", "b", "c", "d"]) == ["b", "c"]
    assert kept(store, TWO, ["a", "b", "c", "d"]) == ["d"]
    store.add("e", stored(ONE, 20))
    assert kept(store, ONE, ["b", "c", "e"]) == ["e"], "bytes count too"
    store.add("f", stored(ONE, 26))
    assert kept(store, ONE, ["e", "f"]) == ["e"], "too large for its share: nothing is displaced"
    assert store.num_bytes == 30


@pytest.mark.parametrize("bounds", [StoreBounds(max_total_bytes=60), StoreBounds(max_total_responses=6)])
def test_a_flood_displaces_its_own(bounds: StoreBounds) -> None:
    store = ResponseStore(bounds)
    store.add("mine", stored(TWO))
    for number in range(100):
        store.add(f"flood-{number}", stored(ONE))
    assert kept(store, TWO, ["mine"]) == ["mine"]
    assert kept(store, ONE, [f"flood-{number}" for number in range(100)]) == [f"flood-{n}" for n in range(95, 100)]
    assert (len(store), store.num_bytes) == (6, 60)


def test_removing_leaves_nothing() -> None:
    store = ResponseStore()
    store.add("a", stored(ONE))
    store.remove("a")
    assert (len(store), store.num_bytes, store.find("a", ONE)) == (0, 0, None)
