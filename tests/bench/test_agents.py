"""Agents' traffic: what the load holds, how a trace becomes prompts, and which turns count as beside a miss."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from pathlib import Path

import pytest

from evenflow.bench.agents import AgentFigures, AgentsRound, compare
from evenflow.bench.agents_load import TRACE_BLOCK_TOKENS, AgentRequest, AgentsLoad, Session, TraceLoad, fit
from evenflow.bench.endpoints import Answer, Ask
from evenflow.errors import EndpointFailed, InvalidConfig, InvalidInput
from tests.shared_data import shared_path

LOAD = AgentsLoad(
    num_agents=3,
    prefix_tokens=16_000,
    turn_tokens=500,
    answer_tokens=120,
    think_s=0.0,
    num_misses=2,
    miss_tokens=50_000,
    miss_pause_s=0.0,
)


def first_of(session: Session, count: int) -> list[AgentRequest]:
    return list(islice(session, count))


def num_shared(a: list[int], b: list[int]) -> int:
    return next((place for place, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


# ---- the load of its own ----


def test_a_turn_repeats_the_conversation_so_far_and_adds_a_little() -> None:
    turns = first_of(LOAD.background()[0], 12)
    prompts = [turn.token_ids("n") for turn in turns]
    for before, after, turn in zip(prompts, prompts[1:], turns, strict=False):
        assert after[: len(before)] == before
        assert 60 + 250 <= len(after) - len(before) <= 180 + 750
        assert 60 <= turn.max_tokens <= 180
    num_new = sum(len(after) - len(before) for before, after in pairwise(prompts))
    assert 0.94 < 1 - num_new / sum(map(len, prompts[1:])) < 0.99  # cached


def test_agents_share_the_prefix_and_nothing_else_and_a_miss_shares_nothing() -> None:
    prompts = [next(session).token_ids("n") for session in LOAD.background()]
    misses = [miss.token_ids("n") for miss in first_of(LOAD.sessions()[0], 9)]
    assert [len(miss) for miss in misses] == [50_000, 50_000]
    assert num_shared(prompts[0], prompts[1]) in range(16_000, 16_004)  # by chance, a token more
    assert len({len(prompt) for prompt in prompts}) == 3  # at different stages
    assert num_shared(misses[0], misses[1]) < 4
    assert num_shared(misses[0], prompts[0]) < 4


def test_conversations_start_anew_and_every_prompt_fits() -> None:
    turns = first_of(LOAD.background()[0], 200)
    lengths = [turn.num_tokens for turn in turns]
    assert sum(after < before for before, after in pairwise(lengths)) > 5
    assert max(lengths) < 16_000 * 1.5 + 1.5 * 620
    assert max(lengths) <= replace(LOAD, miss_tokens=1).max_tokens


def test_a_seed_gives_the_same_load_and_a_nonce_other_tokens() -> None:
    def sample(load: AgentsLoad) -> list[AgentRequest]:
        return [request for session in (*load.background(), *load.sessions()) for request in islice(session, 20)]

    assert sample(LOAD) == sample(replace(LOAD))
    assert sample(LOAD) != sample(replace(LOAD, seed=1))
    request = sample(LOAD)[0]
    assert request.token_ids("a") == request.token_ids("a")
    assert num_shared(request.token_ids("a"), request.token_ids("b")) < 4
    assert len(request.text("a").split(" ")) - 1 == len(request.token_ids("a"))


@pytest.mark.parametrize("context", [64, 512, 8192, 32_768])
def test_lengths_shrink_together_until_the_longest_fits(context: int) -> None:
    load, scale = fit(LOAD, None, context)
    assert 0.85 * context < load.max_tokens <= context
    assert isinstance(load, AgentsLoad)
    assert load.prefix_tokens == pytest.approx(16_000 * scale, abs=1)
    assert load.miss_tokens == pytest.approx(50_000 * scale, abs=1)


def test_a_context_that_is_long_enough_or_unknown_changes_nothing() -> None:
    assert fit(LOAD, None, 131_072) == fit(LOAD, None, None) == (LOAD, 1.0)
    with pytest.raises(InvalidConfig, match=r"up to 25090 tokens with --scale 0.5 but the context is 8192"):
        fit(LOAD, 0.5, 8192)


# ---- traces ----


def trace(tmp_path: Path, *records: dict[str, object], speed: float = 1.0) -> TraceLoad:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return TraceLoad.read(path, 100, miss_tokens=900, speed=speed)


def record(at_ms: int, num_tokens: int, *block_ids: int) -> dict[str, object]:
    return {"timestamp": at_ms, "input_length": num_tokens, "output_length": 40, "hash_ids": block_ids}


@pytest.mark.parametrize("scale", [1.0, 0.3, 0.05])
def test_equal_block_ids_are_equal_prefixes_at_every_scale(tmp_path: Path, scale: float) -> None:
    load = trace(tmp_path, record(0, 1100, 7, 8, 9), record(2000, 1500, 7, 8, 12), record(3000, 700, 1, 2))
    requests = [next(session) for session in load.scaled(scale).sessions()]
    first, second, other = (request.token_ids("n") for request in requests)
    assert [len(first), len(second), len(other)] == [int(scale * length) for length in (1100, 1500, 700)]
    assert num_shared(first, second) in range(int(scale * 2 * TRACE_BLOCK_TOKENS), len(first))
    assert num_shared(first, other) < 4
    assert [request.max_tokens for request in requests] == [max(2, int(40 * scale))] * 3
    assert [request.is_miss for request in requests] == [True, False, False]  # 1100, 476 and 700 new tokens


def test_a_trace_is_replayed_from_its_first_arrival_on_at_the_speed_asked_for(tmp_path: Path) -> None:
    load = trace(tmp_path, record(5000, 600, 1, 2), record(9000, 600, 1, 3), speed=2.0)
    assert [next(session).pause for session in load.sessions()] == [0.0, 2.0]
    assert load.background() == []


def test_a_trace_without_block_ids_shares_nothing(tmp_path: Path) -> None:
    plain = {"arrival_s": 1.0, "prompt_tokens": 50, "output_tokens": 3}
    first, second = (next(session).token_ids("n") for session in trace(tmp_path, plain, plain).sessions())
    assert len(first) == len(second) == 50
    assert num_shared(first, second) < 4


@pytest.mark.parametrize("unfit", [{"prompt": "hello"}, {"input_length": 20, "output_length": 3}])
def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, unfit: dict[str, object]) -> None:
    with pytest.raises(InvalidInput, match="token counts and times of arrival"):
        trace(tmp_path, unfit)


def test_the_mooncake_trace_at_the_scale_of_a_small_model() -> None:
    path = shared_path("traces/mooncake_conversation_4000.jsonl")
    load, scale = fit(TraceLoad.read(path, 400, 16_000, 1.0), None, 8192)
    requests = [next(session) for session in load.sessions()]
    assert 0.06 < scale < 0.07
    assert max(request.num_tokens for request in requests) <= 8192
    assert 0.1 < sum(request.is_miss for request in requests) / 400 < 0.35
    assert [request.pause for request in requests] == sorted(request.pause for request in requests)


# ---- rounds ----


@dataclass
class Scripted:
    """Answers at once. With `is_text_only` it refuses token ids."""

    name: str
    max_model_len: int | None = 4096
    is_text_only: bool = False
    error: str | None = None
    prompts: list[str | tuple[int, ...]] = field(default_factory=list)
    num_rounds: int = 0

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        yield

    async def begin_round(self) -> None:
        self.num_rounds += 1

    async def stream(self, ask: Ask, answer: Answer) -> None:
        await asyncio.sleep(0)
        is_text = isinstance(ask.prompt, str)
        answer.error = "text, please" if self.is_text_only and not is_text else self.error
        if answer.error is None:
            self.prompts.append(ask.prompt if isinstance(ask.prompt, str) else tuple(ask.prompt))
            answer.piece_times_s, answer.num_prompt_tokens, answer.num_cached_tokens = [0.01, 0.02], len(ask.prompt), 5


def test_every_round_has_other_tokens_and_the_same_lengths() -> None:
    sides = [Scripted("a"), Scripted("b", max_model_len=8192)]
    comparison = asyncio.run(compare(sides, LOAD, scale=None, repeat=2))
    assert comparison.load.max_tokens <= 4096  # the smaller context's
    assert [side.num_rounds for side in sides] == [2, 2]
    assert len({prompt for side in sides for prompt in side.prompts}) == sum(len(side.prompts) for side in sides) - 1
    for figures in comparison.figures:
        assert figures.miss_ttft_s.count == 2 * 2
        assert figures.num_requests == figures.miss_ttft_s.count + figures.turn_ttft_s.count
        assert figures.requests_per_s > 0
    assert comparison.text_only == []


def test_a_server_that_takes_no_token_ids_gets_text() -> None:
    side = Scripted("a", is_text_only=True)
    assert asyncio.run(compare([side], LOAD, scale=0.01, repeat=1)).text_only == ["a"]
    assert all(isinstance(prompt, str) for prompt in side.prompts)


def test_a_side_that_cannot_answer_ends_the_run() -> None:
    with pytest.raises(EndpointFailed, match="a: no room"):
        asyncio.run(compare([Scripted("a", error="no room")], LOAD, scale=0.01, repeat=1))


def answer(sent_at: float, *times: float, cached: int | None = 90) -> Answer:
    return Answer(piece_times_s=list(times), num_prompt_tokens=100, num_cached_tokens=cached, sent_at=sent_at)


def test_what_counts_as_beside_a_miss() -> None:
    miss = answer(10.0, 5.0, 5.5, cached=None)  # waits from 10 to 15
    calm, beside, late = answer(9.0, 0.5, 7.0), answer(11.0, 2.0, 2.1, 9.0), answer(15.5, 0.25, 0.5)
    lost = Answer(error="gone", sent_at=12.0)
    figures = AgentFigures.of("a", [AgentsRound([calm, beside, late, lost], [miss], 20.0)])
    assert (figures.turn_ttft_s.count, figures.turn_ttft_s.p50) == (3, 0.5)
    assert (figures.turn_ttft_beside_miss_s.count, figures.turn_ttft_beside_miss_s.p99) == (1, 2.0)
    assert figures.miss_ttft_s.max == 5.0
    assert (figures.gap_s.count, figures.gap_beside_miss_s.count) == (4, 1)
    assert figures.gap_beside_miss_s.max == pytest.approx(0.1)
    assert (figures.cached_turn_share, figures.cached_share) == (0.9, 270 / 400)
    assert (figures.num_requests, figures.requests_per_s, figures.errors) == (4, 4 / 20, ("gone",))


def test_a_server_that_does_not_count_cached_tokens_has_no_share() -> None:
    figures = AgentFigures.of("a", [AgentsRound([answer(0.0, 0.1, cached=None)], [], 1.0)])
    assert (figures.cached_share, figures.cached_turn_share) == (None, None)
