"""Links in the repository's pages lead to files that exist, and to headings that they have."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

PAGES = [
    *ROOT.glob("*.md"),
    *(path for folder in ("docs", "benchmarks", "tests") for path in (ROOT / folder).rglob("*.md")),
]
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")


def headings(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    found = re.findall(r"^#+ (.+)$", _FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in found}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    for link in _LINK.findall(_FENCE.sub("", page.read_text(encoding="utf-8"))):
        if re.match(r"\w+://", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        if anchor:
            assert anchor in headings(target), f"{link}: {sorted(headings(target))}"


def test_site_menu_lists_every_page() -> None:
    menu = re.findall(r"^ +- .+: (\w+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(menu) == sorted(path.name for path in (ROOT / "docs").glob("*.md"))


def test_every_page_of_the_log_can_be_reached() -> None:
    summary = (ROOT / "docs/experiments.md").read_text(encoding="utf-8")
    linked = {link.partition("#")[0] for link in _LINK.findall(summary)}
    assert [path.name for path in (ROOT / "docs/log").glob("*.md") if f"log/{path.name}" not in linked] == []
