"""Reads the inputs of a dataset one at a time, without holding a whole data file in memory.

A dataset is a file or a folder: JSONL, JSON, CSV or Parquet (the first three also gzipped), or texts. Unusable
records are counted, never fatal.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evenflow.errors import InvalidInput, MissingDependency
from evenflow.workload.inputs import KNOWN_FIELDS, USUAL_FIELDS, Input, TextInput, UnusableRecordError, input_of
from evenflow.workload.json_array import iterate_json
from evenflow.workload.results import requests_in

_MAX_TEXT_BYTES = 1 << 28  # a text is one prompt, read whole; far above any context
_MAX_CSV_CELL = (1 << 31) - 1
_PARQUET_ROWS = 256
_MAX_OTHER_FIELDS = 50
_NEVER_TEXTS = frozenset({".jsonl", ".ndjson", ".parquet"})
_RECORD_FORMATS = _NEVER_TEXTS | {".json", ".csv"}


@dataclass(slots=True)
class ReadTally:
    """The progress of reading a dataset, and counts of unusable records."""

    num_bytes: int = 0  # of all its files
    num_bytes_read: int = 0  # 0 for Parquet and gzip
    unusable: Counter[str] = field(default_factory=Counter)  # by problem
    other_fields: set[str] = field(default_factory=set)  # of the records, which became no part of an input


def read_inputs(path: Path, prompt_field: str | None, tally: ReadTally) -> Iterator[Input]:
    """The inputs of one dataset."""
    files = _files_of(path)
    tally.num_bytes = sum(file.stat().st_size for file in files)
    suffixes = [_suffix_of(file) for file in files]
    # In a folder with texts, such as a source tree, .json and .csv files are texts too.
    records = _RECORD_FORMATS if _RECORD_FORMATS.issuperset(suffixes) else _NEVER_TEXTS
    for file, suffix in zip(files, suffixes, strict=True):
        try:
            if suffix in records:
                yield from _read_records(file, suffix, prompt_field, tally)
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


def _suffix_of(file: Path) -> str:
    return Path(file.name.lower().removesuffix(".gz")).suffix


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


def _read_records(file: Path, suffix: str, prompt_field: str | None, tally: ReadTally) -> Iterator[Input]:
    try:
        yield from usable_inputs(_records(file, suffix, prompt_field, tally), prompt_field, tally)
    except (ValueError, RecursionError, csv.Error):
        tally.unusable[f"a {suffix} file that is malformed or truncated"] += 1


def usable_inputs(records: Iterable[Any], prompt_field: str | None, tally: ReadTally) -> Iterator[Input]:
    """The inputs of records; the tally gets the others, and the names of fields that no input uses."""
    for record in _each(records, tally) if prompt_field is None else records:
        try:
            item = input_of(record, prompt_field)
        except UnusableRecordError as error:
            tally.unusable[str(error)] += 1
            continue
        if item.fields and len(tally.other_fields) < _MAX_OTHER_FIELDS:
            tally.other_fields.update({str(name) for name in record} - {name.partition(".")[0] for name in item.fields})
        yield item


def _each(records: Iterable[Any], tally: ReadTally) -> Iterator[Any]:
    """One record for each request: another tool's result may hold many."""
    for record in records:
        try:
            yield from requests_in(record)
        except UnusableRecordError as error:
            tally.unusable[str(error)] += 1


def _records(file: Path, suffix: str, prompt_field: str | None, tally: ReadTally) -> Iterator[Any]:
    if suffix == ".parquet":
        yield from _parquet_records(file, prompt_field, tally)
        return
    with _open(file, tally) as content:
        if suffix == ".json":
            with io.TextIOWrapper(content, "utf-8-sig") as text:
                yield from iterate_json(text)
        elif suffix == ".csv":
            csv.field_size_limit(_MAX_CSV_CELL)
            with io.TextIOWrapper(content, "utf-8-sig", "replace", newline="") as text:
                yield from csv.DictReader(text)
        else:
            for line in filter(bytes.strip, content):
                try:
                    yield json.loads(line.decode("utf-8-sig"))
                except (ValueError, RecursionError):
                    tally.unusable["a line that is not JSON"] += 1


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
            tally.other_fields.update(name for name in table.schema_arrow.names if name not in wanted)
            if not columns:
                missing = f"such as {USUAL_FIELDS}" if prompt_field is None else prompt_field.partition(".")[0]
                tally.unusable[f"no column {missing}"] += 1
                return
            for batch in table.iter_batches(batch_size=_PARQUET_ROWS, columns=columns):
                yield from batch.to_pylist()
    except pyarrow.ArrowException as error:
        raise ValueError(str(error)) from error
