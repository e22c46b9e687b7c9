"""Reads the inputs of a dataset one at a time, without holding a whole data file in memory.

A dataset is a file or a folder: JSONL, JSON, CSV or Parquet (the first three also gzipped), or texts. What cannot be
used is counted, never fatal.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evenflow.errors import InvalidInput, MissingDependency
from evenflow.workload.inputs import Input, TextInput
from evenflow.workload.json_array import iterate_json
from evenflow.workload.records import KNOWN_FIELDS, UnusableRecordError, input_of

_MAX_TEXT_BYTES = 1 << 28  # a text is one prompt and is read whole: far above any context
_MAX_CSV_CELL = (1 << 31) - 1
_PARQUET_ROWS = 256
_NEVER_TEXTS = frozenset({".jsonl", ".ndjson", ".parquet"})


@dataclass(slots=True)
class ReadTally:
    """How far a dataset has been read, and what could not be used."""

    num_bytes: int = 0  # of all its files
    num_bytes_read: int = 0  # stays 0 for Parquet and gzip
    unusable: Counter[str] = field(default_factory=Counter)  # by problem


def read_inputs(path: Path, prompt_field: str | None, tally: ReadTally) -> Iterator[Input]:
    """The inputs of one dataset."""
    files = _files_of(path)
    tally.num_bytes = sum(file.stat().st_size for file in files)
    formats = [_format_of(file) for file in files]
    # In a folder with texts, such as a source tree, .json and .csv files are texts too.
    records = _RECORD_READERS if all(name in _RECORD_READERS for name in formats) else _NEVER_TEXTS
    for file, name in zip(files, formats, strict=True):
        try:
            if name in records:
                yield from _read_records(file, prompt_field, tally)
            else:
                yield from _read_text(file, tally)
        except (OSError, EOFError, zlib.error) as error:  # the last two: a truncated gzip file
            tally.unusable[f"a file that cannot be read ({getattr(error, 'strerror', None) or error})"] += 1


def _files_of(path: Path) -> list[Path]:
    """The file, or all files of a folder except hidden ones."""
    if not path.exists():
        raise InvalidInput(f"Got {str(path)!r} but there is no such file or folder.")
    if path.is_file():
        return [path]
    visible = (
        file for file in path.rglob("*") if not any(part.startswith(".") for part in file.relative_to(path).parts)
    )
    files = sorted(file for file in visible if file.is_file())
    if not files:
        raise InvalidInput(f"Got {str(path)!r} but the folder holds no files.")
    return files


def _format_of(file: Path) -> str:
    suffixes = [suffix.lower() for suffix in file.suffixes]
    return suffixes[-2] if suffixes[-1:] == [".gz"] and len(suffixes) > 1 else (suffixes or [""])[-1]


def _read_text(file: Path, tally: ReadTally) -> Iterator[Input]:
    size = file.stat().st_size
    tally.num_bytes_read += size
    if not size:
        tally.unusable["an empty file"] += 1
    elif size > _MAX_TEXT_BYTES:
        tally.unusable[f"a text over {_MAX_TEXT_BYTES >> 20} MiB"] += 1
    else:
        try:
            yield TextInput(file.read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            tally.unusable["a file that is not UTF-8 text"] += 1


def _read_records(file: Path, prompt_field: str | None, tally: ReadTally) -> Iterator[Input]:
    name = _format_of(file)
    try:
        for record in _RECORD_READERS[name](file, prompt_field, tally):
            try:
                yield input_of(record, prompt_field)
            except UnusableRecordError as error:
                tally.unusable[str(error)] += 1
    except (ValueError, RecursionError, csv.Error):
        tally.unusable[f"a {name} file that is malformed or truncated"] += 1


def _open(file: Path, tally: ReadTally) -> gzip.GzipFile | io.BufferedReader:
    if file.suffix.lower() == ".gz":
        return gzip.GzipFile(file)
    return io.BufferedReader(_CountedFile(file, tally), buffer_size=1 << 18)


class _CountedFile(io.FileIO):
    """Counts the bytes read from it."""

    def __init__(self, file: Path, tally: ReadTally) -> None:
        super().__init__(file)
        self._tally = tally

    def readinto(self, buffer: Any, /) -> int | None:
        num_bytes = super().readinto(buffer)
        self._tally.num_bytes_read += num_bytes or 0
        return num_bytes


def _jsonl_records(file: Path, prompt_field: str | None, tally: ReadTally) -> Iterator[Any]:
    with _open(file, tally) as lines:
        for line in filter(bytes.strip, lines):
            try:
                yield json.loads(line.decode("utf-8-sig"))
            except (ValueError, RecursionError):
                tally.unusable["a line that is not JSON"] += 1


def _json_records(file: Path, prompt_field: str | None, tally: ReadTally) -> Iterator[Any]:
    with _open(file, tally) as content, io.TextIOWrapper(content, "utf-8-sig") as text:
        yield from iterate_json(text)


def _csv_records(file: Path, prompt_field: str | None, tally: ReadTally) -> Iterator[Any]:
    csv.field_size_limit(_MAX_CSV_CELL)
    with _open(file, tally) as content, io.TextIOWrapper(content, "utf-8-sig", "replace", newline="") as text:
        yield from csv.DictReader(text)


def _parquet_records(file: Path, prompt_field: str | None, tally: ReadTally) -> Iterator[Any]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise MissingDependency(f"{file}: Parquet needs pyarrow; to install it: pip install pyarrow") from error
    wanted = KNOWN_FIELDS if prompt_field is None else {prompt_field.partition(".")[0]}
    try:
        with parquet.ParquetFile(file) as table:
            columns = [name for name in table.schema_arrow.names if name in wanted]
            if not columns:
                tally.unusable[f"no column {', '.join(sorted(wanted))}"] += 1
                return
            for batch in table.iter_batches(batch_size=_PARQUET_ROWS, columns=columns):
                yield from batch.to_pylist()
    except pyarrow.ArrowException as error:
        raise ValueError(str(error)) from error


_RECORD_READERS: dict[str, Callable[[Path, str | None, ReadTally], Iterator[Any]]] = {
    ".jsonl": _jsonl_records,
    ".ndjson": _jsonl_records,
    ".json": _json_records,
    ".csv": _csv_records,
    ".parquet": _parquet_records,
}
