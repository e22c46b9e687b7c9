"""Models with recurrent states, which vLLM caches at ends of blocks: our chunks end there too."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tests.vllm.driving import Driver, make_request, make_scheduler, vllm_version

from evenflow.vllm.versions import splits_blocks  # isort: skip

TARGET = 0.05
BLOCK = 528  # as vLLM chooses for Qwen3-Next
make = partial(make_request, block_size=BLOCK)


def hybrid(target: str | None, depth: int, block_size: int = BLOCK) -> Driver:
    scheduler = make_scheduler(
        target, is_async=depth > 1, block_size=block_size, has_states=True, prefix_caching=True, num_blocks=4_000
    )
    return Driver(scheduler, depth=depth)


def hit_tokens(driver: Driver) -> int:
    """Cached tokens in conversations of five turns, beside chats, cold prompts and each other."""
    driver.add(*[make(64, 4_000) for _ in range(16)])
    driver.run(num_steps=10)
    histories = [[(7 * i + 13 * number) % 991 for i in range(1_500 + 700 * number)] for number in range(6)]
    hits = 0
    for turn in range(5):
        driver.add(cold := make(9_000, 1))
        asked = [make(0, 40, prompt=history) for history in histories]
        driver.add(*asked)
        first = len(driver.ran)
        while cold.request_id not in driver.tokens or any(len(driver.tokens.get(a.request_id, ())) < 40 for a in asked):
            driver.step()
        for request, history in zip(asked, histories, strict=True):
            hits += len(history) - sum(ran.chunks.get(request.request_id, 0) for ran in driver.ran[first:])
            history += driver.tokens[request.request_id] + [turn] * 650
    return hits


@pytest.mark.parametrize("depth", [1, 2])
def test_conversations_hit_as_many_tokens_as_without_a_target(depth: int) -> None:
    hits = {target: hit_tokens(hybrid(target, depth)) for target in (None, "50ms")}
    assert hits["50ms"] >= hits[None] > 20_000


@pytest.mark.parametrize("depth", [1, 2])
def test_chunks_end_with_blocks_and_keep_the_target(depth: int) -> None:
    driver = hybrid("50ms", depth)
    chats = [make(64, 4_000) for _ in range(16)]
    driver.add(*chats)
    driver.run(num_steps=20)
    driver.add(teacher := make(9_000, 1))
    while teacher.request_id not in driver.tokens:
        driver.step()
    driver.times.clear()
    first = len(driver.ran)
    driver.add(long := make(20_000, 1))
    while long.request_id not in driver.tokens:
        driver.step()
    chunks = [ran.chunks[long.request_id] for ran in driver.ran[first:] if long.request_id in ran.chunks]
    *whole, _ = chunks
    assert not any(length % BLOCK for length in whole)
    assert max(whole) > BLOCK
    assert max(driver.gaps(*(chat.request_id for chat in chats))) <= 1.1 * TARGET


def test_a_block_that_takes_too_long_is_split() -> None:
    """Its parts keep the target, and the chunk that reaches its end does not go on beyond."""
    if not splits_blocks(vllm_version()):
        pytest.skip("this vLLM computes whole blocks")
    block = 4_096  # 82 ms
    driver = hybrid("50ms", 1, block)
    chats = [make_request(64, 4_000, block_size=block) for _ in range(8)]
    driver.add(*chats)
    driver.run(num_steps=20)
    driver.add(teacher := make_request(20_000, 1, block_size=block))
    while teacher.request_id not in driver.tokens:
        driver.step()
    driver.times.clear()
    first = len(driver.ran)
    driver.add(long := make_request(20_000, 1, block_size=block))
    while long.request_id not in driver.tokens:
        driver.step()
    assert max(driver.gaps(*(chat.request_id for chat in chats))) <= 1.1 * TARGET
    assert set(range(block, 20_000, block)) <= set(ends_of(driver, long, first))


def ends_of(driver: Driver, request: Any, first: int) -> list[int]:
    """Where the chunks of a prompt ended."""
    ends, end = [], 0
    for ran in driver.ran[first:]:
        if request.request_id in ran.chunks:
            end += ran.chunks[request.request_id]
            ends.append(end)
    return ends
