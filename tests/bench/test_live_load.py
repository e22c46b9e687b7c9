"""The live page's load: it fits the server, its sessions keep their order, and the first refusal ends it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from evenflow.bench.endpoints import Answer, Ask, Scores
from evenflow.bench.live_load import Load, LoadLimits, LoadRequest, LoadRun, LoadSession, make_load


def characters(text: str) -> int:
    return len(text)


def prompts_of(load: Load) -> list[LoadRequest]:
    [session] = [session for session in load.sessions if session.kind == "prompt"]
    return list(session.requests)


@pytest.mark.parametrize(
    ("limits", "rate", "lowest", "highest"),
    [
        (LoadLimits(max_model_len=8192), 700, 1200, 1450),
        (LoadLimits(max_model_len=8192), 100_000, 3500, 4096),
        (LoadLimits(max_model_len=None), 100_000, 7500, 16384),
        (LoadLimits(max_model_len=8192, count_tokens=characters), 700, 1200 // 4, 1450 // 4),
        (LoadLimits(max_model_len=512, count_tokens=characters), 700, 350 // 4, 512 // 4),
        (LoadLimits(max_model_len=8192, max_prompt_tokens=600, count_tokens=characters), 700, 400 // 4, 600 // 4),
    ],
)
def test_prompts_take_about_two_seconds_and_fit(limits: LoadLimits, rate: float, lowest: int, highest: int) -> None:
    for prompt in prompts_of(make_load(limits, rate, "nonce")):
        assert lowest <= len(prompt.content) / 4 <= highest


def test_prompts_share_no_prefix_with_each_other_or_with_an_earlier_load() -> None:
    limits = LoadLimits(max_model_len=8192)
    prompts = [*prompts_of(make_load(limits, 700, "one")), *prompts_of(make_load(limits, 700, "two"))]
    assert len({prompt.content.partition("\n")[0] for prompt in prompts}) == len(prompts) > 10


@pytest.mark.parametrize(("max_requests", "num_chats"), [(None, 2), (256, 2), (2, 1), (1, 1)])
def test_chats_leave_room_for_a_prompt(max_requests: int | None, num_chats: int) -> None:
    load = make_load(LoadLimits(max_model_len=2048, max_requests=max_requests), 700, "nonce")
    assert [session.kind for session in load.sessions] == ["chat"] * num_chats + ["prompt"]
    assert load.title.startswith("1 chat at" if num_chats == 1 else "2 chats at")
    assert all(request.at <= load.send_s < load.stop_after_s for s in load.sessions for request in s.requests)


def test_a_load_survives_its_journey_as_json() -> None:
    load = make_load(LoadLimits(max_model_len=2048), 700, "nonce", send_s=5.0)
    assert msgspec.json.decode(msgspec.json.encode(load), type=Load) == load


class Answering:
    """Answers at once with two pieces; refuses what is marked, and holds what is marked until it is cancelled."""

    name, max_model_len = "an endpoint", None

    def __init__(self) -> None:
        self.asks: list[Ask] = []

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        yield

    async def begin_round(self) -> None:
        """Nothing to prepare."""

    async def score(self, prompt: str, continuations: Any) -> Scores:
        raise NotImplementedError

    async def stream(self, ask: Ask, answer: Answer) -> None:
        self.asks.append(ask)
        assert ask.messages is not None
        match ask.messages[0]["content"]:
            case "refuse":
                answer.error = "status 429: busy"
            case "hold":
                await asyncio.Event().wait()
            case content:
                answer.add_piece(content)
                answer.add_piece(content)


def run(*sessions: LoadSession, stop_after_s: float = 60.0) -> tuple[LoadRun, list[str]]:
    endpoint = Answering()
    found = LoadRun(Load("a load", 0.2, stop_after_s, sessions), endpoint)
    asyncio.run(found.run())
    return found, [ask.messages[0]["content"] for ask in endpoint.asks if ask.messages]


def session(kind: Any, *requests: tuple[float, str]) -> LoadSession:
    return LoadSession(kind, [LoadRequest(at, content, 4) for at, content in requests])


def test_a_session_sends_in_order_and_nothing_after_its_time() -> None:
    found, sent = run(session("chat", (0.0, "a"), (0.05, "b"), (0.5, "late")), session("prompt", (0.02, "p")))
    assert sent == ["a", "p", "b"]
    assert (len(found.answers["chat"]), len(found.answers["prompt"])) == (2, 1)
    assert found.gaps().count == 2
    assert (found.error, found.num_open, found.num_stopped) == (None, 0, 0)


def test_the_first_refusal_ends_the_load() -> None:
    found, sent = run(session("chat", (0.0, "hold")), session("prompt", (0.01, "refuse"), (0.02, "never")))
    assert sent == ["hold", "refuse"]
    assert found.error == "status 429: busy"


def test_what_does_not_end_is_stopped() -> None:
    found, _ = run(session("chat", (0.0, "hold")), stop_after_s=0.05)
    assert (found.num_stopped, found.error) == (1, None)
