"""A Chromium, a server of a small random model, and pages that must not complain."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.serving import served
from tests.models import tiny_hf_folder


def _chromium() -> str:
    names = (os.environ.get("CHROMIUM", ""), "chromium", "chromium-browser", "google-chrome")
    for name in names:
        if name and (found := shutil.which(name)):
            return found
    missing = "no Chromium was found as chromium, google-chrome or $CHROMIUM"
    if os.environ.get("EVENFLOW_REQUIRE_BROWSER"):
        pytest.fail(missing)
    pytest.skip(missing)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_hf_folder(tmp_path_factory.mktemp("model"), "LlamaForCausalLM", max_position_embeddings=8192)


@pytest.fixture(scope="session")
def address(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("server") / "log.txt"
    with served(model, log, ["--served-model-name", "tiny", "--tbt-target", "500ms"]) as server:
        yield server.address


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as playwright:
        # The sandbox does not start as root, as which tests run in containers.
        browser = playwright.chromium.launch(executable_path=_chromium(), args=["--no-sandbox"])
        yield browser
        browser.close()


class Pages:
    """Opens pages of any size and scheme, and remembers what they complained about."""

    def __init__(self, browser: Any) -> None:
        self._browser = browser
        self._contexts: list[Any] = []
        self.complaints: list[str] = []

    def open(self, address: str, *, width: int = 1280, height: int = 900, **options: Any) -> Any:
        context = self._browser.new_context(viewport={"width": width, "height": height}, **options)
        self._contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(30_000)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", lambda message: message.type == "error" and self.complaints.append(message.text))
        page.goto(address)
        return page

    def close(self) -> None:
        for context in self._contexts:
            context.close()


@pytest.fixture
def pages(browser: Any) -> Iterator[Pages]:
    pages = Pages(browser)
    yield pages
    pages.close()
    assert pages.complaints == []
