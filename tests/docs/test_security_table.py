"""The page on security names tests that exist."""

from __future__ import annotations

import ast
import re

from tests.docs.pages import ROOT

PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")


def test_every_test_that_is_named_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", PAGE)
    assert len([test for _, test in named if test]) >= 20
    for file, test in named:
        path = ROOT / file
        assert path.is_file(), file
        if test:
            functions = [
                node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)
            ]
            assert test in functions, f"{file}::{test}"


def test_every_promise_has_a_test() -> None:
    tables = re.findall(r"^\|[^\n]*\| test \|\n\|[-|]+\|\n((?:\|[^\n]*\n)+)", PAGE, re.MULTILINE)
    rows = [row for table in tables for row in table.splitlines()]
    assert len(rows) >= 50
    for row in rows:
        assert "::test_" in row, row


def test_every_class_of_hole_has_a_test() -> None:
    table = PAGE.partition("## By class")[2].partition("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("|")][2:]
    assert len(rows) >= 15
    for row in rows:
        assert "::test_" in row, row
