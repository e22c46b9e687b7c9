"""What clients may ask of answers, checked where it can be stopped and where nobody else waits."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress

import pytest

from evenflow import Grammar
from evenflow.errors import EngineFailed, InvalidRequest
from evenflow.model.loader import load_model
from evenflow.server.api.grammar_gate import GrammarGate, _why_killed
from evenflow.server.errors import ApiError
from tests.models import tiny_llama
from tests.server.serving import scripted_server


def slow_schema(number: int) -> dict[str, object]:
    """Compiles for hours. Each number is another one."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    patterns = [{"type": "string", "pattern": f".*{letter}.{{{ord(letter) + number}}}.*"} for letter in letters]
    return {"allOf": patterns}


def run(use: Callable[[GrammarGate], Awaitable[None]]) -> None:
    @asynccontextmanager
    async def gate() -> AsyncIterator[GrammarGate]:
        gate = GrammarGate(load_model(tiny_llama()).tokenizer, 512)
        try:
            yield gate
        finally:
            await gate.close()

    async def main() -> None:
        async with gate() as opened:
            await use(opened)

    asyncio.run(main())


def test_good_grammars_pass_and_bad_ones_say_why() -> None:
    async def use(gate: GrammarGate) -> None:
        for grammar in (Grammar.json_object(), Grammar.regex("é+\n"), Grammar.choice(["a", "b"])):
            await gate.check(grammar)
        with pytest.raises(InvalidRequest, match="the json_schema cannot be used: Invalid type: objekt"):
            await gate.check(Grammar.json_schema({"type": "objekt"}))
        with pytest.raises(InvalidRequest, match="the json_schema cannot be used: key must"):
            await gate.check(Grammar.json_schema("{nonsense"))
        names = {f"k{number}": {"type": "string", "pattern": "^[a-z]{1,500}$"} for number in range(1500)}
        with pytest.raises(InvalidRequest, match="cannot be used"):
            await gate.check(Grammar.json_schema({"type": "object", "properties": names}))

    run(use)


def test_what_was_checked_is_remembered_good_or_bad() -> None:
    async def use(gate: GrammarGate) -> None:
        await gate.check(Grammar.regex("a"))
        with pytest.raises(InvalidRequest, match="takes too long to compile"):
            await gate.check(Grammar.json_schema(slow_schema(0)))
        pid = gate._helper.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await gate.check(Grammar.regex("a"))
        with pytest.raises(InvalidRequest, match="takes too long to compile"):
            await gate.check(Grammar.json_schema(slow_schema(0)))
        assert gate._helper.pid == pid, "no other process was needed"

    run(use)


def test_a_process_that_dies_is_replaced() -> None:
    async def use(gate: GrammarGate) -> None:
        checks = [asyncio.create_task(gate.check(Grammar.json_schema(slow_schema(0))))]
        await gate.check(Grammar.regex("c"), "another client")
        assert gate._helper.pid is not None
        os.kill(gate._helper.pid, signal.SIGKILL)
        with pytest.raises(EngineFailed, match="died"):
            await checks[0]
        await gate.check(Grammar.regex("d"))
        await gate.close()
        await gate.check(Grammar.regex("d"))
        with pytest.raises(EngineFailed, match="shutting down"):
            await gate.check(Grammar.regex("e"))

    run(use)


def test_a_busy_machine_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert b"takes too long" in _why_killed("regex", signal.SIGPROF)
    assert b"too much memory" in _why_killed("regex", 1 << 8)
    answers = [_why_killed("regex", signal.SIGKILL), b""]  # its first fork got no time

    async def ask(question: bytes) -> bytes:
        return answers.pop(0)

    async def use(gate: GrammarGate) -> None:
        monkeypatch.setattr(gate._helper, "ask", ask)
        with pytest.raises(ApiError, match="too busy to check") as raised:
            await gate.check(Grammar.regex("a"))
        assert (raised.value.status, raised.value.headers) == (503, {"Retry-After": "1"})
        for _ in range(2):
            await gate.check(Grammar.regex("a"))
        assert answers == []

    run(use)


def test_nobody_waits_in_the_queue_of_another_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, who queued a grammar that others use, behind slow ones of its own, made them wait for all of these."""

    async def use(gate: GrammarGate) -> None:
        num_asked, released = 0, asyncio.Event()

        async def ask(question: bytes) -> bytes:
            nonlocal num_asked
            num_asked += 1
            if b"slow" in question:
                await released.wait()
            return b""

        monkeypatch.setattr(gate._helper, "ask", ask)
        common = Grammar.json_object()
        held_up = [asyncio.create_task(gate.check(one, "attacker")) for one in (Grammar.regex("slow"), common)]
        await asyncio.sleep(0)
        async with asyncio.timeout(10):
            await gate.check(common, "another client")
        assert not held_up[1].done()
        released.set()
        await asyncio.gather(*held_up)
        assert num_asked == 2, "what another client's turn has answered is not compiled again"
        assert not gate._pending

    run(use)


def test_what_is_wrong_is_remembered_in_short() -> None:
    """The library quotes the grammar: 4,096 wrong ones would be a gigabyte."""

    async def use(gate: GrammarGate) -> None:
        for text in ("(" + "x" * 90_000, "(" + "é" * 45_000):
            with pytest.raises(InvalidRequest, match="the regex cannot be used"):
                await gate.check(Grammar.regex(text))
        assert all(len(problem) <= 1000 for problem in gate._known.values())

    run(use)


@pytest.mark.slow
def test_one_clients_slow_grammars_are_checked_one_at_a_time_and_delay_no_other_client() -> None:
    async def use(gate: GrammarGate) -> None:
        ended: list[str] = []

        async def check(name: str, grammar: Grammar, client: str) -> None:
            with suppress(InvalidRequest):
                await gate.check(grammar, client)
            ended.append(name)

        async with asyncio.TaskGroup() as group:
            for number in range(3):
                group.create_task(check("slow", Grammar.json_schema(slow_schema(number)), "attacker"))
            await asyncio.sleep(0)
            for number in range(20):
                group.create_task(check("quick", Grammar.regex(f"a{number}"), "another client"))
        assert ended[:20] == ["quick"] * 20

    run(use)


@pytest.mark.slow
def test_many_requests_for_the_same_grammar_compile_it_once_and_a_long_queue_is_refused() -> None:
    async def use(gate: GrammarGate) -> None:
        slow = Grammar.json_schema(slow_schema(0))
        found = await asyncio.gather(*(gate.check(slow, "a") for _ in range(500)), return_exceptions=True)
        assert all(isinstance(one, InvalidRequest) for one in found)
        many = [Grammar.regex(f"a{number}") for number in range(200)]
        results = await asyncio.gather(*(gate.check(grammar, "a") for grammar in many), return_exceptions=True)
        refused = [one for one in results if isinstance(one, ApiError)]
        assert {one.status for one in refused} == {429}
        assert 0 < len(refused) < 200
        assert all(one is None or isinstance(one, ApiError) for one in results)

    run(use)


def test_slow_grammars_delay_no_other_request() -> None:
    with ThreadPoolExecutor(10) as pool, scripted_server() as server:
        server.post("/v1/completions", {"prompt": "a", "max_tokens": 1, "guided_regex": "a"})  # its process is up
        attacks = [
            pool.submit(
                server.post, "/v1/completions", {"prompt": "a", "max_tokens": 1, "guided_json": slow_schema(number)}
            )
            for number in range(8)
        ]
        server.until(lambda: server.server.service.gate.num_inside > 0)
        for _ in range(3):
            assert server.get("/health").status_code == 200
            assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200
        assert not any(attack.done() for attack in attacks)
        server.server.should_exit = True
        assert {attack.result().status_code for attack in attacks} <= {400, 503}, "those that wait are told"
