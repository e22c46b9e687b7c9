"""From files, texts or records to an analysis in one call. Inputs are read one at a time and not kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from evenflow.advisor.analysis import Analysis, DatasetAnalysis, DatasetTally
from evenflow.advisor.token_counts import EstimatedTokens, TokenCounter, TokenizerTokens
from evenflow.errors import InvalidInput
from evenflow.workload.inputs import Input
from evenflow.workload.reading import ReadTally, read_inputs, usable_inputs

Dataset = str | Path | Iterable[Any]
_INPUTS_PER_PROGRESS = 1000


def analyze(
    data: Dataset | Mapping[str, Dataset], tokenizer: Any = None, *, field: str | None = None, limit: int | None = None
) -> Analysis:
    """What `evenflow analyze` finds in one dataset or several: print it, or take `decision` and `recommendation`.

        analyze("prompts.jsonl")                                a file or folder, as `evenflow analyze` reads it
        analyze(["What is a token?", [5, 6, 7]])                texts, token ids, or records with a prompt or messages
        analyze([Path("a.jsonl"), Path("texts")])               several files or folders
        analyze({"code": "code.jsonl", "chat": ["Hello"]})      several of either, by name

    The optimizers and compilers take it too. `tokenizer` has `encode(text)`, as those of transformers, tokenizers and
    evenflow do; without one, tokens are estimated as characters / 4. `field` names the field of the prompt; `limit`
    reads only the first inputs of each dataset.
    """
    if limit is not None and limit < 1:
        raise InvalidInput(f"Got limit={limit} but expected at least 1 input.")
    counter = EstimatedTokens() if tokenizer is None else TokenizerTokens(tokenizer)
    datasets = list(_named(data))
    if not datasets:
        raise InvalidInput("Got nothing to analyze: give a file, a folder, texts, or a mapping of these.")
    return Analysis.of(
        analyze_file(Path(content).expanduser(), counter, name=name, field=field, limit=limit)
        if isinstance(content, str | Path)
        else _analyze_items(name, content, counter, field, limit)
        for name, content in datasets
    )


def analyze_file(
    path: Path,
    counter: TokenCounter,
    *,
    name: str | None = None,
    field: str | None = None,
    limit: int | None = None,
    say: Callable[[str], object] = lambda progress: None,
) -> DatasetAnalysis:
    """One file or folder; `say` is told now and then how far it has been read."""
    read = ReadTally()

    def reported(inputs: Iterator[Input]) -> Iterator[Input]:
        for number, item in enumerate(inputs, 1):
            yield item
            if number % _INPUTS_PER_PROGRESS == 0:
                share = f", {read.num_bytes_read / read.num_bytes:.0%}" if read.num_bytes_read else ""
                say(f"Reading {path.name}: {number:,} inputs{share}")

    tally = DatasetTally(name or path.name or str(path), counter)
    return _analyze_inputs(tally, reported(read_inputs(path, field, read)), str(path), read, limit)


def _named(data: Dataset | Mapping[str, Dataset]) -> Iterator[tuple[str | None, Dataset]]:
    """Each dataset with its name; None: that of its file."""
    if isinstance(data, Mapping):
        yield from data.items()
        return
    if isinstance(data, str | Path):
        yield None, data
        return
    items = list(_items(data))
    if items and all(isinstance(item, Path) for item in items):
        yield from ((None, path) for path in items)
    elif items and all(isinstance(item, str) and _is_file(item) for item in items):
        raise InvalidInput(f"Got texts such as {items[0]!r}, which name files: give Path({items[0]!r}) to read them.")
    elif items:
        yield "inputs", items


def _items(data: Any) -> Iterator[Any]:
    try:
        return iter(data)
    except TypeError:
        message = f"Got {data!r} to analyze but expected a file, a folder, texts, or a mapping of these."
        raise InvalidInput(message) from None


def _is_file(text: str) -> bool:
    try:
        return Path(text).exists()
    except (OSError, ValueError):  # too long, or with a null character
        return False


def _analyze_items(
    name: str | None, items: Iterable[Any], counter: TokenCounter, field: str | None, limit: int | None
) -> DatasetAnalysis:
    read = ReadTally()
    # A list is a prompt itself: token ids, or the messages of a chat.
    records = ({"prompt": item} if isinstance(item, list) and field is None else item for item in _items(items))
    inputs = usable_inputs(records, field, read)
    return _analyze_inputs(DatasetTally(name or "inputs", counter), inputs, name or "inputs", read, limit)


def _analyze_inputs(
    tally: DatasetTally, inputs: Iterator[Input], source: str, read: ReadTally, limit: int | None
) -> DatasetAnalysis:
    for item in islice(inputs, limit):
        tally.add(item)
    if not tally.count:
        why = "; ".join(f"{count:,} x {what}" for what, count in read.unusable.most_common(3)) or "it is empty"
        missing = next((kind for kind in ("field", "column") if f"no {kind}" in why), None)
        hint = f" Name the prompt's {missing} with --field, or field= in Python." if missing else ""
        raise InvalidInput(f"Got {source!r} but nothing in it can be used: {why}.{hint}")
    is_cut_short = limit == tally.count and next(inputs, None) is not None
    return tally.analysis(dict(read.unusable), is_cut_short=is_cut_short, other_fields=read.other_fields)
