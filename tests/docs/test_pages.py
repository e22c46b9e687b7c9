"""Every command and snippet of README.md, CONTRIBUTING.md and docs/*.md runs as it stands.

Convention: a fenced block has a language. `python` blocks run in order, in one namespace for a page. In `console`
blocks each line that begins with `$` is a command and the others are output. `json` and `yaml` are read, and
`toml` is written to the file that its first line names. `stand_ins.py` says what stands for models, ports and files,
and which commands are not run, and why.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, ROOT, blocks, commands, evenflow_arguments, inline_commands, parse, words
from tests.docs.running import PageRun
from tests.docs.stand_ins import (
    LANGUAGES_NOT_RUN,
    NOT_RUN,
    SHORTER,
    SLOW,
    TEXTS,
    make_default_model,
    make_files,
    why_not_run,
)

CONSOLE = [
    (page, command)
    for page in PAGES
    for block in blocks(page)
    for command in commands(block)
    if block.language == "console"
]
RUNNABLE = [page for page in PAGES if any(block.language not in LANGUAGES_NOT_RUN for block in blocks(page))]


@pytest.fixture
def page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[PageRun]:
    make_default_model(tmp_path / "cache")
    folder = tmp_path / "folder"
    folder.mkdir()
    make_files(folder)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("EVENFLOW_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n/exit\n"))
    with ExitStack() as stack:
        yield PageRun(folder, capsys, stack)


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.slow] if page in SLOW else []) for page in RUNNABLE]
)
def test_a_page_runs(page: str, page_run: PageRun) -> None:
    page_run.run(page)


@pytest.mark.parametrize("page", PAGES)
def test_commands_in_the_text_are_understood(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for command in inline_commands(page):
        parse(words(command))


@pytest.mark.parametrize("page", PAGES)
def test_every_block_says_what_it_is(page: str) -> None:
    known = {"python", "console", "json", "yaml", "toml", *LANGUAGES_NOT_RUN}
    assert [block.place for block in blocks(page) if block.language not in known] == []
    assert PAGES[page].count("```") == 2 * len(blocks(page))  # none is indented or open


@pytest.mark.parametrize("page", PAGES)
def test_make_has_the_targets(page: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^\$ make ([a-z-]+)|`make ([a-z-]+)[` ]", PAGES[page], re.MULTILINE):
        assert re.search(rf"^{''.join(target)}:", makefile, re.MULTILINE), target


def test_pages_with_javascript_are_run_by_its_client() -> None:
    client = (ROOT / "tests/clients/openai_node.mjs").read_text(encoding="utf-8")
    pages = [page for page in PAGES if any(block.language == "javascript" for block in blocks(page))]
    assert pages
    assert [page for page in pages if f'"{page}"' not in client] == []


def test_nothing_is_declared_in_vain() -> None:
    used = {why_not_run(command) for _, command in CONSOLE}
    assert NOT_RUN.keys() - used == set()
    assert SLOW.keys() - set(RUNNABLE) == set()
    run = [" ".join(evenflow_arguments(command) or ()) for _, command in CONSOLE]
    assert [start for start in SHORTER if not any(command.startswith(start) for command in run)] == []
    whole = "\n".join(PAGES.values())
    assert [text for text in TEXTS if text not in whole] == []
    assert (
        LANGUAGES_NOT_RUN.keys()
        == {block.language for page in PAGES for block in blocks(page)} & LANGUAGES_NOT_RUN.keys()
    )
