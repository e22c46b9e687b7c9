"""The documentation site as it is opened from disk: complete, searchable, and without any request elsewhere."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.browser.conftest import Pages

pytestmark = pytest.mark.browser


@pytest.fixture
def site() -> Path:
    folder = Path(__file__).resolve().parents[2] / "site"
    if not (folder / "index.html").is_file():
        missing = "the site is not built: make docs"
        if os.environ.get("EVENFLOW_REQUIRE_BROWSER"):
            pytest.fail(missing)
        pytest.skip(missing)
    return folder


def test_pages_load_nothing_from_elsewhere(pages: Pages, site: Path) -> None:
    page = pages.open((site / "index.html").as_uri())
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    names = sorted(path.name for path in site.glob("*.html") if path.name != "404.html")  # its links are a server's
    assert len(names) > 20
    for name in names:
        page.goto((site / name).as_uri())
        assert page.locator("article h1").count() == 1, name
        broken = (
            "() => [...document.images].filter(image => image.complete && !image.naturalWidth).map(image => image.src)"
        )
        assert page.evaluate(broken) == [], name
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []


def test_search_leads_to_a_page(pages: Pages, site: Path) -> None:
    page = pages.open((site / "index.html").as_uri())
    page.locator("input.md-search__input").click()
    page.locator("input.md-search__input").press_sequentially("infeasible")
    result = page.locator(".md-search-result__link").first
    result.wait_for()
    result.click()
    page.wait_for_url("**/*.html?h=*")  # with what was searched for
    assert "infeasible" in page.locator("article").inner_text()
