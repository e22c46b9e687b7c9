"""Every format gives the same inputs, one at a time; what is broken is counted."""

from __future__ import annotations

import csv
import gzip
import io
import json
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenflow.errors import InvalidInput, MissingDependency
from evenflow.workload import json_array
from evenflow.workload.inputs import TextInput
from evenflow.workload.json_array import iterate_json
from evenflow.workload.reading import ReadTally, read_inputs

TEXTS = ["Hello", "a\nb", 'said "no", she', "Zürich – 東京"]


def read(path: Path, field: str | None = None) -> tuple[list[Any], ReadTally]:
    tally = ReadTally()
    return list(read_inputs(path, field, tally)), tally


def write_jsonl(path: Path) -> None:
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS), encoding="utf-8")


def write_jsonl_gz(path: Path) -> None:
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps({"prompt": text}, ensure_ascii=False) + "\n" for text in TEXTS)


def write_json(path: Path) -> None:
    path.write_text(json.dumps([{"prompt": text} for text in TEXTS], indent=1), encoding="utf-8")


def write_json_object(path: Path) -> None:
    content = {"version": "1.0", "tags": ["x"], "data": [{"prompt": text} for text in TEXTS]}
    path.write_text("\ufeff" + json.dumps(content), encoding="utf-8")


def write_csv(path: Path) -> None:
    with path.open("w", encoding="utf-8-sig", newline="") as file:
        writer = csv.DictWriter(file, ["id", "prompt"])
        writer.writeheader()
        writer.writerows({"id": number, "prompt": text} for number, text in enumerate(TEXTS))


def write_parquet(path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"id": range(len(TEXTS)), "prompt": TEXTS}), path)


FORMATS = {
    "data.jsonl": write_jsonl,
    "data.NDJSON": write_jsonl,
    "data.jsonl.gz": write_jsonl_gz,
    "data.json": write_json,
    "object.json": write_json_object,
    "data.csv": write_csv,
    "data.parquet": write_parquet,
}


@pytest.mark.parametrize("name", FORMATS)
def test_each_format_gives_the_same(name: str, tmp_path: Path) -> None:
    FORMATS[name](tmp_path / name)
    inputs, tally = read(tmp_path / name)
    assert inputs == [TextInput(text) for text in TEXTS]
    assert tally.unusable.total() == 0


def test_a_folder_of_texts_is_one_text_a_file(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "two.md").write_text("two", encoding="utf-8")
    (tmp_path / "a.txt").write_text("one", encoding="utf-8")
    (tmp_path / "settings.json").write_text("{}", encoding="utf-8")  # among texts it is one
    (tmp_path / "image.png").write_bytes(b"\x89PNG\xff\x00")
    (tmp_path / "empty.txt").touch()
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("hidden", encoding="utf-8")
    inputs, tally = read(tmp_path)
    assert inputs == [TextInput("one"), TextInput("two"), TextInput("{}")]
    assert tally.unusable == {"a file that is not UTF-8 text": 1, "an empty file": 1}


def test_a_folder_of_data_files_is_their_records(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "part-0.jsonl")
    write_csv(tmp_path / "part-1.csv")
    assert len(read(tmp_path)[0]) == 2 * len(TEXTS)


def test_records_among_texts_are_records(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "data.jsonl")
    (tmp_path / "readme.txt").write_text("about the data", encoding="utf-8")
    inputs, _ = read(tmp_path)
    assert len(inputs) == len(TEXTS) + 1
    assert inputs[-1] == TextInput("about the data")


def test_broken_lines_are_counted_and_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"prompt": "one"}\n\n{"prompt": \n\xff\xfe\n{"other": 1}\n[1, 2]\n{"prompt": "two"}')
    inputs, tally = read(path)
    assert inputs == [TextInput("one"), TextInput("two")]
    assert tally.unusable["a line that is not JSON"] == 2
    assert tally.unusable.total() == 4
    assert tally.num_bytes_read == tally.num_bytes


@pytest.mark.parametrize(
    ("name", "content", "num_read"),
    [
        ("cut.json", b'[{"prompt": "one"}, {"prompt": "tw', 1),
        ("glued.json", b'[{"prompt": "one"} {"prompt": "two"}]', 1),
        ("none.json", b"no JSON at all", 0),
        ("empty.json", b"", 0),
        ("bytes.json", b'[{"prompt": "\xff"}]', 0),
        ("none.parquet", b"PAR1 no", 0),
        ("none.jsonl.gz", b"no gzip", 0),
    ],
)
def test_files_that_break_off_end_there(name: str, content: bytes, num_read: int, tmp_path: Path) -> None:
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(content)
    inputs, tally = read(tmp_path / name)
    assert len(inputs) == num_read
    assert tally.unusable.total() == 1


def test_a_gzip_file_that_breaks_off_is_counted(tmp_path: Path) -> None:
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "one"}\n' * 9)[:-9])
    assert read(tmp_path / "cut.jsonl.gz")[1].unusable.total() == 1


def test_cells_of_any_length(tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_text("prompt\n" + "x" * 500_000 + "\n", encoding="utf-8")
    assert [len(item.text) for item in read(tmp_path / "data.csv")[0]] == [500_000]


def test_a_parquet_column_may_lie_deep(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"body": [{"input": "deep"}], "prompt": ["no"]}), tmp_path / "data.parquet")
    assert read(tmp_path / "data.parquet", "body.input")[0] == [TextInput("deep")]
    _, tally = read(tmp_path / "data.parquet", "nothing")
    assert tally.unusable == {"no column nothing": 1}


def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "data.parquet").touch()
    with pytest.raises(MissingDependency, match="pip install pyarrow"):
        read(tmp_path / "data.parquet")


@pytest.mark.parametrize("name", ["no-such-file.jsonl", "empty-folder"])
def test_where_nothing_is(name: str, tmp_path: Path) -> None:
    (tmp_path / "empty-folder").mkdir()
    with pytest.raises(InvalidInput, match=name):
        read(tmp_path / name)


def _many_lines(path: Path, record: str, count: int) -> None:
    path.write_text("".join(f"{record}\n" for _ in range(count)), encoding="utf-8")


def _one_array(path: Path, record: str, count: int) -> None:
    path.write_text("[" + ",".join([record] * count) + "]", encoding="utf-8")


@pytest.mark.parametrize(("name", "write"), [("data.jsonl", _many_lines), ("data.json", _one_array)])
def test_a_large_file_is_never_held_whole(name: str, write: Callable[[Path, str, int], None], tmp_path: Path) -> None:
    path = tmp_path / name
    write(path, json.dumps({"prompt": "x" * 10_000}), 4000)
    tracemalloc.start()
    try:
        count = sum(1 for _ in read_inputs(path, None, ReadTally()))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert count == 4000
    assert peak < path.stat().st_size / 4


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@pytest.mark.slow
@given(st.lists(VALUES), st.sampled_from([None, 1]), st.integers(1, 7))
def test_an_array_is_read_alike_in_pieces_of_any_size(values: list[Any], indent: int | None, size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_array, "_READ_CHARACTERS", size)
        assert list(iterate_json(io.StringIO(json.dumps(values, indent=indent)))) == values
