"""What clients may ask of answers, checked where it can be stopped."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from evenflow import Grammar
from evenflow.errors import InvalidRequest
from evenflow.model.loader import load_model
from evenflow.server.api.grammar_gate import GrammarGate
from tests.models import tiny_llama


@pytest.fixture(scope="module")
def gate() -> Iterator[GrammarGate]:
    gate = GrammarGate(load_model(tiny_llama()).tokenizer, 512)
    yield gate
    gate.close()


def test_good_grammars_pass_and_bad_ones_say_why(gate: GrammarGate) -> None:
    for grammar in (Grammar.json_object(), Grammar.regex("é+\n"), Grammar.choice(["a", "b"]), Grammar.json_object()):
        gate.check(grammar)
    with pytest.raises(InvalidRequest, match="the json_schema cannot be used: Invalid type: objekt"):
        gate.check(Grammar.json_schema({"type": "objekt"}))
    with pytest.raises(InvalidRequest, match="the json_schema cannot be used: key must"):
        gate.check(Grammar.json_schema("{nonsense"))
    names = {f"k{number}": {"type": "string", "pattern": "^[a-z]{1,500}$"} for number in range(1500)}
    with pytest.raises(InvalidRequest, match="cannot be used"):
        gate.check(Grammar.json_schema({"type": "object", "properties": names}))


def test_a_schema_that_would_take_hours_is_given_up(gate: GrammarGate, monkeypatch: pytest.MonkeyPatch) -> None:
    gate.check(Grammar.regex("a"))
    monkeypatch.setattr("evenflow.server.api.grammar_gate._CHECK_TIMEOUT_S", 0.3)
    patterns = [
        {"type": "string", "pattern": f".*{letter}.{{{ord(letter)}}}.*"} for letter in "abcdefghijklmnopqrstuvwxyz"
    ]
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="takes too long to compile"):
            gate.check(Grammar.json_schema({"allOf": patterns}))
    gate.check(Grammar.regex("a"))  # known
    monkeypatch.undo()
    gate.check(Grammar.regex("b"))  # by another process


def test_a_process_that_dies_is_replaced(gate: GrammarGate) -> None:
    gate.check(Grammar.regex("c"))
    process = gate._process
    assert process is not None
    process.kill()
    process.join()
    gate.check(Grammar.regex("d"))
    gate.close()
    gate.check(Grammar.regex("e"))


def test_many_threads_may_ask_at_once(gate: GrammarGate) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(gate.check, (Grammar.regex(f"{number % 20}") for number in range(60))))
