"""The page's load as the server hands it out: sized for its limits and its speed."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from evenflow.bench.live_load import USUAL_RATE, Load
from evenflow.server.live.load import PrefillSpeed
from tests.server.serving import RunningServer, scripted_server
from tests.server.stepping import ObservedEngine


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with scripted_server(settings={"limits": {"max_prompt_tokens": 300, "max_tenant_requests": 2}}) as running:
        yield running


def test_the_server_accepts_what_it_hands_out(server: RunningServer) -> None:
    load = msgspec.json.decode(server.get("/live/load?seconds=2").content, type=Load)
    assert load.send_s == 2
    assert [session.kind for session in load.sessions] == ["chat", "prompt"]
    for session in load.sessions:
        request = session.requests[0]
        body = {"messages": [{"role": "user", "content": request.content}], "max_tokens": request.max_tokens}
        answer = server.post("/v1/chat/completions", body)
        assert answer.status_code == 200, answer.text
        if session.kind == "prompt":
            assert 150 < answer.json()["usage"]["prompt_tokens"] <= 300


@pytest.mark.parametrize("seconds", ["0", "-1", "soon", "nan", "601"])
def test_a_time_that_makes_no_sense_is_refused(server: RunningServer, seconds: str) -> None:
    refused = server.get(f"/live/load?seconds={seconds}")
    assert refused.status_code == 400
    assert repr(seconds) in refused.json()["error"]["message"]


def test_the_speed_is_that_of_the_chunks_that_ran() -> None:
    observed = ObservedEngine("fixed:150")
    speed = PrefillSpeed(observed.observer)
    observed.add("short", 20, max_tokens=1)
    observed.run()
    assert speed.tokens_per_s == USUAL_RATE  # a step takes its time, however short the chunk
    observed.add("long", 320, max_tokens=1, token=2)
    events = observed.run()
    seconds = sum(chunk.seconds for event in events for chunk in event.chunks if chunk.length == 150)
    assert speed.tokens_per_s == pytest.approx(300 / seconds)
