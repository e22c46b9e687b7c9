"""Records of task files: what is accepted, and the error for what is not; the shipped sets."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from evenflow.errors import InvalidInput
from evenflow.evals.tasks import ChoiceTask, CodeTask, ExactTask, read_tasks, shipped_sets

EXACT = {"scorer": "exact", "prompt": "Say yes.", "reference": "yes"}
CHOICE = {"scorer": "choice", "prompt": "Yes or", "choices": [" no", " yes"], "reference": " no"}


def write(tmp_path: Path, *records: Any) -> str:
    file = tmp_path / "tasks.jsonl"
    file.write_text("\n".join(record if isinstance(record, str) else json.dumps(record) for record in records))
    return str(file)


BAD: dict[str, tuple[Any, str]] = {
    "not JSON": ("{", "expected a JSON object on one line"),
    "not an object": ([1], "Expected `object`"),
    "no scorer": ({"prompt": "Hi", "reference": "x"}, "missing required field `scorer`"),
    "unknown scorer": ({**EXACT, "scorer": "guess"}, "'guess'"),
    "no reference": ({"scorer": "exact", "prompt": "Hi"}, "missing required field `reference`"),
    "misspelt field": ({**EXACT, "max_token": 3}, "unknown field `max_token`"),
    "no prompt": ({"scorer": "exact", "reference": "x"}, "one of prompt and messages"),
    "prompt and messages": ({**EXACT, "messages": [{"role": "user", "content": "Hi"}]}, "one of prompt and messages"),
    "empty prompt": ({**EXACT, "prompt": ""}, "$.prompt"),
    "unknown role": ({"scorer": "exact", "messages": [{"role": "me", "content": "a"}], "reference": "x"}, "'me'"),
    "no tokens": ({**EXACT, "max_tokens": 0}, "$.max_tokens"),
    "text for a number": ({**EXACT, "scorer": "numeric"}, "$.reference"),
    "one choice": ({**CHOICE, "choices": [" no"]}, "$.choices"),
    "the same choice twice": ({**CHOICE, "choices": [" no", " no"]}, "choices that differ"),
    "reference among no choices": ({**CHOICE, "reference": "no"}, "one of the choices"),
    "broken pattern": ({**EXACT, "scorer": "regex", "reference": "("}, "no regular expression"),
    "broken schema": ({**EXACT, "scorer": "json-schema", "reference": {"type": "objekt"}}, "no JSON schema"),
    "broken tests": ({**EXACT, "scorer": "code", "reference": "assert ("}, "no Python"),
    "id twice": ({**EXACT, "id": "first"}, "'first' a second time"),
}


@pytest.mark.parametrize(("record", "named"), BAD.values(), ids=BAD)
def test_an_error_names_the_line_and_the_problem(record: Any, named: str, tmp_path: Path) -> None:
    file = write(tmp_path, {**EXACT, "id": "first"}, "", record)
    with pytest.raises(InvalidInput) as failed:
        read_tasks(file)
    assert f"{file}, line 3: " in str(failed.value)
    assert named in str(failed.value)


def test_choices_need_a_prompt(tmp_path: Path) -> None:
    record = {**CHOICE, "messages": [{"role": "user", "content": "Hi"}]}
    del record["prompt"]
    with pytest.raises(InvalidInput, match="expected a prompt with the scorer choice"):
        read_tasks(write(tmp_path, record))


def test_records_are_read_in_order_and_numbered_by_line(tmp_path: Path) -> None:
    file = write(tmp_path, EXACT, "", CHOICE, {**EXACT, "id": "last", "meta": {"source": "mine"}})
    tasks = read_tasks(file)
    assert [task.id for task in tasks] == ["1", "3", "last"]
    assert [type(task) for task in tasks] == [ExactTask, ChoiceTask, ExactTask]
    assert read_tasks(file, 2) == tasks[:2]


def test_an_empty_file_and_a_missing_one(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="holds no tasks"):
        read_tasks(write(tmp_path, ""))
    with pytest.raises(InvalidInput, match=r"shipped sets: .*arithmetic.*retrieval"):
        read_tasks(str(tmp_path / "nothing.jsonl"))


def test_the_shipped_sets_are_valid_and_cover_every_scorer() -> None:
    sets = {name: read_tasks(name) for name in shipped_sets()}
    assert all(8 <= len(tasks) <= 100 for tasks in sets.values())
    scorers = {type(task).__struct_config__.tag for tasks in sets.values() for task in tasks}
    assert scorers == {"exact", "numeric", "choice", "regex", "json-schema", "code"}
    # Long enough for the default policy to cut them: over 2,048 tokens of four characters and more.
    assert all(len(task.prompt or "") > 8500 for task in sets["retrieval"])


def test_the_documented_tasks_are_valid_and_the_table_of_sets_is_right(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "eval.md").read_text()
    [example] = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    assert len(read_tasks(write(tmp_path, example))) == 3
    counts = {name: int(count) for name, count in re.findall(r"^\| `(\w+)` \| (\d+) \|", page, re.MULTILINE)}
    assert counts == {name: len(read_tasks(name)) for name in shipped_sets()}


def test_the_shipped_tests_of_programs_fail_without_an_answer() -> None:
    for task in read_tasks("code"):
        assert isinstance(task, CodeTask)
        names: dict[str, Any] = {}
        with pytest.raises((AssertionError, IndentationError)):
            exec(task.prefix + "\n    pass\n" + task.reference, names)


def test_prompts_of_common_shapes_are_made_of_all_their_fields(tmp_path: Path) -> None:
    said: list[str] = []
    squad = {"scorer": "exact", "context": "Bo ate.", "question": "Who ate?", "reference": "Bo"}
    alpaca = {"scorer": "regex", "instruction": "Say it.", "input": "yes", "reference": "yes"}
    sharegpt = {"scorer": "exact", "conversations": [{"from": "human", "value": "Hi"}], "reference": "Hi"}
    first, second, third, fourth = read_tasks(write(tmp_path, squad, alpaca, sharegpt, EXACT), say=said.append)
    assert [task.prompt for task in (first, second, third)] == ["Bo ate.\n\nWho ate?", "Say it.\n\nyes", None]
    assert (third.conversation, fourth.prompt) == ([{"role": "user", "content": "Hi"}], "Say yes.")
    assert said == ["Prompts from the fields context + question (1), instruction + input (1), conversations (1)."]
    with pytest.raises(InvalidInput, match="unknown field `title`"):
        read_tasks(write(tmp_path, {**squad, "title": "T"}))
