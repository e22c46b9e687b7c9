"""The records of a task file, one JSON object per line, checked as they are read; and the task sets of this package.

An error names the file, the line and what was expected. Nothing here runs a model.
"""

from __future__ import annotations

import ast
import importlib.resources
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta

from evenflow.errors import InvalidInput, MissingDependency
from evenflow.workload.inputs import ChatInput, TraceRequest, UnusableRecordError, input_of

_SETS = importlib.resources.files("evenflow.evals") / "sets"
_MAX_TOKENS = 256
_SHOWN_PROBLEM = 200

Text = Annotated[str, Meta(min_length=1)]
Number = int | float


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: Literal["system", "user", "assistant"]
    content: Text


class Task(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="scorer", kw_only=True):
    """What every record may hold: one of `prompt` and `messages`, and how an answer to it ends."""

    id: Text = ""  # by default the number of its line
    prompt: Text | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    max_tokens: Annotated[int, Meta(ge=1)] = _MAX_TOKENS
    stop: Annotated[list[Text], Meta(max_length=4)] = []
    meta: Any = None  # the author's own notes

    def check(self) -> None:
        """Raise ValueError if fields that are right each for itself do not go together."""
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("expected one of prompt and messages")

    @property
    def conversation(self) -> list[dict[str, str]] | None:
        return None if self.messages is None else [msgspec.to_builtins(message) for message in self.messages]


class ExactTask(Task, frozen=True, tag="exact"):
    """The answer is the reference, or one of several, apart from white space."""

    reference: Text | Annotated[list[Text], Meta(min_length=1)]

    @property
    def references(self) -> Sequence[str]:
        return [self.reference] if isinstance(self.reference, str) else self.reference


class NumericTask(Task, frozen=True, tag="numeric"):
    """The last number of the answer is the reference, within the tolerance."""

    reference: Number
    tolerance: Annotated[float, Meta(ge=0)] = 1e-6


class ChoiceTask(Task, frozen=True, tag="choice"):
    """The likeliest continuation of the prompt is the reference. Nothing is generated."""

    choices: Annotated[list[Text], Meta(min_length=2)]
    reference: Text

    def check(self) -> None:
        super().check()
        if self.prompt is None:
            raise ValueError("expected a prompt with the scorer choice: it compares continuations of a text")
        if len(set(self.choices)) < len(self.choices):
            raise ValueError("expected choices that differ")
        if self.reference not in self.choices:
            raise ValueError(f"got the reference {self.reference!r} but expected one of the choices")


class RegexTask(Task, frozen=True, tag="regex"):
    """The reference, a regular expression, matches somewhere in the answer."""

    reference: Text

    def check(self) -> None:
        super().check()
        try:
            re.compile(self.reference)
        except re.error as error:
            raise ValueError(
                f"got the reference {self.reference!r}, which is no regular expression: {error}"
            ) from error


class JsonSchemaTask(Task, frozen=True, tag="json-schema"):
    """The answer is JSON that is valid by the reference, a JSON schema."""

    reference: dict[str, Any]

    def check(self) -> None:
        super().check()
        try:
            import jsonschema
        except ImportError as error:
            raise MissingDependency(
                "the scorer json-schema needs jsonschema, which is not installed: pip install 'evenflow[eval]'"
            ) from error
        try:
            jsonschema.validators.validator_for(self.reference).check_schema(self.reference)
        except jsonschema.SchemaError as error:
            raise ValueError(f"got a reference that is no JSON schema: {error.message}") from error


class CodeTask(Task, frozen=True, tag="code"):
    """`prefix`, the answer and the reference, which is tests in Python, run as one program without an error."""

    reference: Text
    prefix: str = ""
    time_limit_s: Annotated[float, Meta(gt=0, le=600)] = 10.0

    def check(self) -> None:
        super().check()
        try:
            ast.parse(self.reference)
        except (SyntaxError, ValueError) as error:
            raise ValueError(f"got a reference that is no Python: {error}") from error


AnyTask = ExactTask | NumericTask | ChoiceTask | RegexTask | JsonSchemaTask | CodeTask
_TASK_FIELDS = frozenset(name for kind in get_args(AnyTask) for name in kind.__struct_fields__) | {"scorer"}


def shipped_sets() -> list[str]:
    """The names of the sets that come with evenflow."""
    return sorted(file.name.removesuffix(".jsonl") for file in _SETS.iterdir() if file.name.endswith(".jsonl"))


def _decode(line: bytes, prompts_from: Counter[str]) -> AnyTask:
    try:
        record = msgspec.json.decode(line)
    except msgspec.DecodeError as error:
        raise ValueError(f"expected a JSON object on one line: {error}") from error
    if isinstance(record, dict) and not {"prompt", "messages"} & record.keys():
        record = _with_prompt(record, prompts_from)
    return msgspec.convert(record, AnyTask)  # type: ignore[no-any-return]


def _with_prompt(record: dict[str, Any], prompts_from: Counter[str]) -> dict[str, Any]:
    """A record of a common shape, such as SQuAD's, with its fields joined to one prompt or conversation."""
    try:
        found = input_of({name: value for name, value in record.items() if name not in _TASK_FIELDS}, None)
    except UnusableRecordError:
        return record
    if isinstance(found, TraceRequest):
        return record
    prompts_from[" + ".join(found.fields)] += 1
    rest = {name: value for name, value in record.items() if name not in found.fields}
    return rest | ({"messages": found.messages} if isinstance(found, ChatInput) else {"prompt": found.text})


def read_tasks(source: str, most: int | None = None, say: Callable[[str], object] = lambda text: None) -> list[AnyTask]:
    """The first `most` records of a file, or of a shipped set by its name.

    `say` is told which fields the prompts are made of, if they are neither `prompt` nor `messages`.
    """
    path = Path(source)
    if path.is_file():
        content = path.read_bytes()
    elif source in shipped_sets():
        content = (_SETS / f"{source}.jsonl").read_bytes()
    else:
        raise InvalidInput(
            f"Got {source!r} but expected a file of tasks, or one of the shipped sets: {', '.join(shipped_sets())}."
        )
    tasks: dict[str, AnyTask] = {}
    prompts_from: Counter[str] = Counter()
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            task = _decode(line, prompts_from)
            task.check()
            task = task if task.id else msgspec.structs.replace(task, id=str(number))
            if task.id in tasks:
                raise ValueError(f"got the id {task.id!r} a second time")
        except ValueError as error:
            problem = " ".join(str(error).split())[:_SHOWN_PROBLEM]
            raise InvalidInput(
                f"{source}, line {number}: {problem.rstrip('.')}. docs/eval.md has the format."
            ) from error
        tasks[task.id] = task
    if not tasks:
        raise InvalidInput(f"{source} holds no tasks: expected a JSON object on each line.")
    if prompts_from:
        ways = ", ".join(f"{fields} ({count:,})" for fields, count in prompts_from.most_common())
        say(f"Prompts from the fields {ways}.")
    return list(tasks.values())[:most]
