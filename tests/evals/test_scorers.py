"""What counts as a right answer."""

from __future__ import annotations

from typing import Any

import pytest

from evenflow.evals.scorers import judge, last_number, program_of, without_fence
from evenflow.evals.tasks import CodeTask, ExactTask, JsonSchemaTask, NumericTask, RegexTask

AGE = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}


@pytest.mark.parametrize(
    ("reference", "text", "is_correct"),
    [
        ("Paris", " Paris\n", True),
        ("New York", "New\n  York", True),
        ("Paris", "paris", False),
        ("Paris", "Paris.", False),
        (["four", "4"], "4", True),
        (["four", "4"], "5", False),
    ],
)
def test_exact(reference: Any, text: str, is_correct: bool) -> None:
    verdict = judge(ExactTask(prompt="?", reference=reference), text)
    assert verdict.is_correct is is_correct
    assert bool(verdict.note) is not is_correct


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("3 + 4 = 7", 7),
        ("It costs 1,250.50 euros.", 1250.5),
        ("-3", -3),
        ("\u22123", -3),
        ("10-4", 4),
        ("x-4", 4),
        ("2 - 5 = -3", -3),
        ("1.5e3 metres", 1500),
        (".5", 0.5),
        ("The answer is 12.", 12),
        ("nothing", None),
        ("", None),
        ("...,-", None),
    ],
)
def test_the_last_number(text: str, number: float | None) -> None:
    assert last_number(text) == number


def test_numeric_within_the_tolerance() -> None:
    assert judge(NumericTask(prompt="?", reference=7), "7.0").is_correct
    assert not judge(NumericTask(prompt="?", reference=7), "7.01").is_correct
    assert judge(NumericTask(prompt="?", reference=7, tolerance=0.1), "7.01").is_correct
    assert judge(NumericTask(prompt="?", reference=7), "seven") == (False, "no number in 'seven'")


def test_regex_matches_anywhere() -> None:
    task = RegexTask(prompt="?", reference=r"\bcat\b")
    assert judge(task, "A cat sat.").is_correct
    assert not judge(task, "A catalogue.").is_correct


@pytest.mark.parametrize(
    ("text", "is_correct"),
    [
        ('{"age": 4}', True),
        (' {"age": 4, "name": "Ada"}\n', True),
        ('Sure:\n```json\n{"age": 4}\n```\nDone.', True),
        ('{"age": "four"}', False),
        ("{}", False),
        ('{"age": 4', False),
        ('Age: {"age": 4}', False),
        ("[" * 100_000, False),
        ("", False),
    ],
)
def test_json_schema(text: str, is_correct: bool) -> None:
    verdict = judge(JsonSchemaTask(prompt="?", reference=AGE), text)
    assert verdict.is_correct is is_correct
    assert len(verdict.note) < 300


def test_a_schema_fetches_nothing() -> None:
    task = JsonSchemaTask(prompt="?", reference={"$ref": "http://127.0.0.1:9/schema.json"})
    assert "not there" in judge(task, "{}").note


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"$ref": "#"}, "{}"),
        ({"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"$ref": "#"}}}, "1"),
        ({"properties": {"a": {"$ref": "#"}}}, '{"a": ' * 900 + "1" + "}" * 900),
    ],
)
def test_recursion_without_end_is_a_wrong_answer(schema: dict[str, Any], text: str) -> None:
    assert (
        "refers to itself without end, or the answer" in judge(JsonSchemaTask(prompt="?", reference=schema), text).note
    )


def test_a_program_is_the_prefix_and_the_answer_without_its_fence() -> None:
    task = CodeTask(prompt="?", reference="pass", prefix="import math\n")
    assert program_of(task, "Here:\n```python\nx = 1\n```\nand\n```\ny\n```") == "import math\nx = 1\n"
    assert program_of(task, "x = 1") == "import math\nx = 1"
    assert without_fence("```py\nx = 1\n") == "x = 1\n"  # cut short by max_tokens
