"""Is an answer right? Pure functions of a record and a text; programs are run elsewhere."""

from __future__ import annotations

import json
import math
import re
from typing import NamedTuple

from evenflow.evals.tasks import CodeTask, ExactTask, JsonSchemaTask, NumericTask, RegexTask

_NUMBER = re.compile(r"[-+\u2212]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?")
_FENCED = re.compile(r"```[\w+-]*[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
_SHOWN_CHARACTERS = 80


class Verdict(NamedTuple):
    """`note` says why an answer is wrong."""

    is_correct: bool
    note: str = ""


CORRECT = Verdict(True)


def judge(task: ExactTask | NumericTask | RegexTask | JsonSchemaTask, text: str) -> Verdict:
    match task:
        case ExactTask():
            return _judge_exact(task, text)
        case NumericTask():
            return _judge_number(task, text)
        case RegexTask():
            is_found = re.search(task.reference, text) is not None
            return CORRECT if is_found else Verdict(False, f"no match of {task.reference!r} in {_shown(text)}")
        case JsonSchemaTask():
            return _judge_json(task, text)


def _judge_exact(task: ExactTask, text: str) -> Verdict:
    said = " ".join(text.split())
    if said in {" ".join(reference.split()) for reference in task.references}:
        return CORRECT
    return Verdict(False, f"got {_shown(said)} but expected {' or '.join(map(repr, task.references))}")


def _judge_number(task: NumericTask, text: str) -> Verdict:
    number = last_number(text)
    if number is None:
        return Verdict(False, f"no number in {_shown(text)}")
    if math.isclose(number, task.reference, rel_tol=0.0, abs_tol=task.tolerance):
        return CORRECT
    return Verdict(False, f"got {number:g} but expected {task.reference:g}")


def last_number(text: str) -> float | None:
    """Commas separate thousands; a hyphen right after a word or a digit is no sign."""
    found = [match for match in _NUMBER.finditer(text) if any(map(str.isdigit, match[0]))]
    if not found:
        return None
    last = found[-1]
    written = last[0].replace(",", "").replace("\u2212", "-")
    if written[0] in "+-" and last.start() and text[last.start() - 1].isalnum():
        written = written[1:]
    return float(written)


def _judge_json(task: JsonSchemaTask, text: str) -> Verdict:
    import jsonschema
    import referencing

    try:
        value = json.loads(without_fence(text))
    except (ValueError, RecursionError) as error:
        return Verdict(False, f"not JSON: {error}")
    offline = {"registry": referencing.Registry()}  # nothing is fetched for a $ref to another place
    validator = jsonschema.validators.validator_for(task.reference)(task.reference, **offline)
    try:
        problem = next(iter(validator.iter_errors(value)), None)
    except referencing.exceptions.Unresolvable as error:
        return Verdict(False, f"the schema refers to what is not there: {error}")
    except RecursionError:
        return Verdict(False, "the schema refers to itself without end, or the answer is nested too deeply for it")
    if problem is None:
        return CORRECT
    return Verdict(False, f"{problem.json_path}: {problem.message}"[: 2 * _SHOWN_CHARACTERS])


def program_of(task: CodeTask, text: str) -> str:
    """What the answer's program is, without the tests: a fenced block stands for the whole answer."""
    return task.prefix + without_fence(text)


def without_fence(text: str) -> str:
    """The first block between ``` marks, which chat models put around code; without any, the text."""
    fenced = _FENCED.search(text)
    return fenced[1] if fenced else text


def _shown(text: str) -> str:
    return repr(text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "...")
