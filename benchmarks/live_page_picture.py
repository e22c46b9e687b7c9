"""Takes the README's picture of the live page: a chat, then the page's own load on a running server.

evenflow serve &
python benchmarks/live_page_picture.py docs/images/live.png
"""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path

from playwright.sync_api import sync_playwright

_QUESTION = "What is the capital of France?"
_WIDTH, _HEIGHT, _SCALE = 1360, 900, 1.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the picture, a PNG file")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the server")
    parser.add_argument("--seconds", type=float, default=15.0, help="of the load before the picture is taken")
    options = parser.parse_args()
    chromium = shutil.which(os.environ.get("CHROMIUM") or "chromium") or shutil.which("google-chrome")
    if chromium is None:
        parser.error("found no Chromium as chromium, google-chrome or $CHROMIUM: install one or set $CHROMIUM")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": _WIDTH, "height": _HEIGHT}, device_scale_factor=_SCALE)
        page.goto(options.url)
        page.locator("#state[data-state=live]").wait_for()
        page.get_by_label("Message").fill(_QUESTION)
        page.get_by_role("button", name="Send").click()
        page.locator(".assistant small").wait_for(timeout=60_000)
        page.get_by_role("button", name="Put a load on it").click()
        page.wait_for_timeout(1000 * options.seconds)
        page.screenshot(path=options.out, full_page=True)
        page.get_by_role("button", name="Stop the load").click()
        print(page.inner_text("#load-note"))
        browser.close()


if __name__ == "__main__":
    main()
