"""The page of constants has each number of `core` and `hosts`, with its value."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator

from tests.docs.pages import ROOT

PAGE = (ROOT / "docs" / "constants.md").read_text(encoding="utf-8")
PACKAGES = ("core", "hosts")
KINDS = {"tunable", "limit", "mark", "default", "derived", "guarantee", "property"}
MAX_TUNABLES = 30


def assigned(node: ast.stmt) -> Iterator[tuple[str, ast.expr]]:
    """The names that a statement assigns, each with its value."""
    if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        is_pair = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
        pairs = zip(target.elts, node.value.elts, strict=True) if is_pair else [(target, node.value)]
        yield from ((name.id, value) for name, value in pairs if isinstance(name, ast.Name))


def numbers_in_code() -> dict[tuple[str, str], str]:
    """Module constants that are numbers, with their values as written."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / "src" / "evenflow" / package).glob("*.py")):
            module = importlib.import_module(f"evenflow.{package}.{path.stem}")
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                for name, value in assigned(node):
                    if name.isupper() and type(getattr(module, name)) in (int, float):
                        found[f"{package}/{path.name}", name] = ast.unparse(value)
    return found


def rows_of_page() -> list[list[str]]:
    return [row.strip("| ").split(" | ") for row in re.findall(r"^\| `(?:core|hosts)/.*$", PAGE, re.MULTILINE)]


def test_the_page_has_every_number_with_its_value() -> None:
    listed = {(row[0].strip("`"), row[1].strip("`")): row[2].strip("`") for row in rows_of_page()}
    assert len(listed) == len(rows_of_page())
    assert listed == numbers_in_code()


def test_every_number_has_a_kind_and_a_reason() -> None:
    assert {row[3] for row in rows_of_page()} == KINDS
    assert all(len(row[4]) > 10 for row in rows_of_page())


def test_core_has_at_most_thirty_tunables() -> None:
    tunables = [row for row in rows_of_page() if row[3] == "tunable" and row[0].startswith("`core/")]
    assert 0 < len(tunables) <= MAX_TUNABLES
