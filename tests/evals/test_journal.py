"""The journal: what survives a crash, and which journals are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from evenflow.errors import InvalidInput
from evenflow.evals.journal import Entry, Header, Journal

HEADER = Header(tasks="a.jsonl", digest="abc", sides=["x", "y"], settings={"seed": 0, "concurrency": 2})


def entry(task: str, side: int = 0, **changes: Any) -> Entry:
    return Entry(**{"side": side, "task": task, "start": 0, "began_s": 1.25, "ended_s": 2.5, "text": "é\n"} | changes)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "new" / "journal.jsonl"
    with Journal.create(path, HEADER) as journal:
        journal.add(entry("1"))
        journal.add(entry("2", ttft_s=0.1 + 0.2, logprobs=[-1.0000000001, -3.0]))
    return path


def test_answers_come_back_exactly(path: Path) -> None:
    with Journal.resume(path, HEADER) as journal:
        assert journal.num_starts == 1
        assert journal.entries[0, "1"] == entry("1")
        assert journal.entries[0, "2"].ttft_s == 0.1 + 0.2
        journal.add(entry("1", side=1, start=1))
    with Journal.resume(path, HEADER) as journal:
        assert list(journal.entries) == [(0, "1"), (0, "2"), (1, "1")]
        assert journal.num_starts == 2


@pytest.mark.parametrize("num_bytes", [1, 20, 60])
def test_a_torn_last_line_is_dropped_and_written_over(num_bytes: int, path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-num_bytes])
    with Journal.resume(path, HEADER) as journal:
        assert list(journal.entries) == [(0, "1")]
        journal.add(entry("3"))
    with Journal.resume(path, HEADER) as journal:
        assert list(journal.entries) == [(0, "1"), (0, "3")]


def test_the_latest_answer_counts(path: Path) -> None:
    with Journal.resume(path, HEADER) as journal:
        journal.add(entry("1", start=1, text="again"))
    with Journal.resume(path, HEADER) as journal:
        assert journal.entries[0, "1"].text == "again"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"digest": "abd"}, "other tasks"),
        ({"sides": ["x", "z"]}, "other sides"),
        ({"settings": {"seed": 1, "concurrency": 2}}, "another seed"),
        ({"settings": {"seed": 0, "concurrency": 2, "max_model_len": 9}}, "another max model len"),
        ({"format": 9}, "another version of evenflow"),
    ],
)
def test_a_journal_of_another_run_is_refused(changes: dict[str, Any], named: str, path: Path) -> None:
    content = path.read_bytes()
    with pytest.raises(InvalidInput, match=f"another run: {named}."):
        Journal.resume(path, msgspec.structs.replace(HEADER, **changes))
    assert path.read_bytes() == content


def test_the_same_tasks_from_another_place_are_the_same_run(path: Path) -> None:
    Journal.resume(path, msgspec.structs.replace(HEADER, tasks="../b.jsonl")).close()


def test_what_is_no_journal_is_refused(tmp_path: Path, path: Path) -> None:
    other = tmp_path / "other"
    for content in (b"", b"hello\n", b'{"prompt": "a task file"}\n'):
        other.write_bytes(content)
        with pytest.raises(InvalidInput, match="no journal of evenflow eval"):
            Journal.resume(other, HEADER)
        assert other.read_bytes() == content
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], b"garbage\n", *lines[1:]]))
    with pytest.raises(InvalidInput, match="damaged in line 2"):
        Journal.resume(path, HEADER)
    with pytest.raises(InvalidInput, match="cannot open it: No such file"):
        Journal.resume(tmp_path / "nothing", HEADER)


def test_a_journal_is_never_overwritten_nor_shared(path: Path) -> None:
    with pytest.raises(InvalidInput, match="add --resume"):
        Journal.create(path, HEADER)
    with Journal.resume(path, HEADER), pytest.raises(InvalidInput, match="in use by another process"):
        Journal.resume(path, HEADER)
