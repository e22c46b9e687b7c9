"""The live page as somebody sees and uses it: a real server, a real model, a real browser."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.browser.conftest import Pages
from tests.browser.serving import figures, served, streaming

pytestmark = pytest.mark.browser

IS_LIVE = "document.getElementById('state').dataset.state === 'live'"
SIZES = [(375, 800), (1600, 1000)]

_NUM_DECODE_PIXELS = """
  () => {
    const canvas = document.getElementById("steps");
    const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
    const [red, green, blue] = [0x97, 0xa3, 0xb3]; // --decode in style.css
    let count = 0;
    for (let place = 0; place < pixels.length; place += 4) {
      if (pixels[place] === red && pixels[place + 1] === green && pixels[place + 2] === blue) count += 1;
    }
    return count;
  }
"""
_PICTURE = "() => document.getElementById('steps').toDataURL()"


def until(page: Any, condition: str, seconds: float = 60) -> None:
    """Wait for a condition on the page. Playwright's own way would need the page to allow eval."""
    end = time.monotonic() + seconds
    while not page.evaluate(condition):
        assert time.monotonic() < end, (
            f"in {seconds} s it did not come true that {condition}: {page.inner_text('body')}"
        )
        page.wait_for_timeout(50)


def until_seen(page: Any, is_seen: Callable[[], bool], seconds: float = 60) -> None:
    """Wait for what is not a condition on the page alone."""
    end = time.monotonic() + seconds
    while not is_seen():
        assert time.monotonic() < end, f"not seen in {seconds} s: {page.inner_text('body')}"
        page.wait_for_timeout(100)


def text_of(page: Any, selector: str) -> str:
    return str(page.locator(selector).text_content())


def say(page: Any, message: str, *, padding: str = "0", max_tokens: int = 40) -> None:
    page.get_by_label("Message").fill(message)
    page.get_by_label("Padding before it").select_option(padding)
    page.get_by_label("Maximum tokens").fill(str(max_tokens))
    page.get_by_role("button", name="Send").click()


def wait_for_answer(page: Any) -> None:
    until(page, "/^Done/.test(document.getElementById('chat-note').textContent)")


def test_steps_move_while_streams_run_and_stand_when_paused(pages: Pages, address: str) -> None:
    page = pages.open(address)
    until(page, IS_LIVE)
    assert text_of(page, "#model") == "tiny"
    assert page.evaluate(_NUM_DECODE_PIXELS) == 0
    with streaming(address, 4):
        until(page, "Number(document.getElementById('rate').textContent.replace(',', '')) > 10")
        until_seen(page, lambda: page.evaluate(_NUM_DECODE_PIXELS) > 100)
        first = page.evaluate(_PICTURE)
        until_seen(page, lambda: page.evaluate(_PICTURE) != first)
        until_seen(page, lambda: text_of(page, "#running") == "4")
        until_seen(page, lambda: re.fullmatch(r"[\d.]+ m?s", text_of(page, "#tbt-p99")) is not None)
        page.get_by_role("button", name="Pause").click()
        page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        standing = page.evaluate(_PICTURE)
        page.wait_for_timeout(500)
        assert page.evaluate(_PICTURE) == standing


def test_classes_and_tenants_have_their_own_rows(pages: Pages, address: str) -> None:
    page = pages.open(address)
    until(page, IS_LIVE)
    with streaming(address, 2, service_class="batch", tenant="nightly"):
        until_seen(page, lambda: text_of(page, "#tenants tbody") == "nightly20")
        row = page.locator("#classes tbody tr", has_text="batch")
        until_seen(page, lambda: re.search(r"^batch20.*m?s · .*m?s$", str(row.text_content())) is not None)
    until_seen(page, lambda: str(row.text_content()).startswith("batch00"))
    assert not page.locator("#tenants").is_visible()
    assert "No open requests" in text_of(page, "#no-tenants")


def test_the_page_keeps_up_with_fast_steps(pages: Pages, address: str) -> None:
    page = pages.open(address)
    until(page, IS_LIVE)
    began = figures(address)["evenflow:step_seconds_count"]
    with streaming(address, 2):
        until_seen(page, lambda: figures(address)["evenflow:step_seconds_count"] > began + 200)
        ended = figures(address)["evenflow:step_seconds_count"]
        page.locator("#steps").focus()
        page.keyboard.press("ArrowLeft")
        newest = int(re.findall(r"Step (\d+)", text_of(page, "#step-detail"))[0])
    assert newest > (began + ended) / 2


def test_the_slider_changes_chunk_sizes(pages: Pages, address: str) -> None:
    page = pages.open(address)
    until(page, IS_LIVE)

    def mean_chunk(prompt: str) -> float:
        before = figures(address)
        page.get_by_role("button", name="New chat").click()
        say(page, prompt, padding="1200", max_tokens=2)
        wait_for_answer(page)
        after = figures(address)
        tokens, chunks = (
            after[name] - before[name] for name in (f"evenflow:chunk_tokens_{s}" for s in ("sum", "count"))
        )
        return tokens / chunks

    slider = page.get_by_role("slider", name="Target")
    with streaming(address, 4):
        slider.press("End")
        until(page, "document.getElementById('target-number').value === '2000'")
        wait_for_target(address, 2.0)
        mean_chunk("warm up")
        large = mean_chunk("with time")
        slider.press("Home")
        wait_for_target(address, 0.005)
        small = mean_chunk("in haste")
        assert small < large / 2
        number = page.get_by_label("Target in milliseconds")
        number.fill("300")
        wait_for_target(address, 0.3)
        assert slider.get_attribute("aria-valuetext") == "300 ms"


def wait_for_target(address: str, seconds: float) -> None:
    for _ in range(100):
        if httpx.get(f"{address}/v1/target").json()["tbt_target"] == seconds:
            return
        time.sleep(0.05)
    raise AssertionError(f"the target did not become {seconds}: {httpx.get(f'{address}/v1/target').json()}")


# The page itself clicks when it sees the first text: on a busy machine the answer could end before we look.
STOP_AT_FIRST_TEXT = """
() => {
  const answer = document.getElementById("answer");
  new MutationObserver((_, observer) => {
    if (!answer.querySelector(".assistant span")?.textContent) return;
    observer.disconnect();
    document.getElementById("send").click();
  }).observe(answer, { childList: true, characterData: true, subtree: true });
}
"""
IS_STOPPED = "/^Stopped: first token after/.test(document.querySelector('.assistant small')?.textContent)"


def test_a_chat_streams_and_can_be_stopped(pages: Pages, address: str) -> None:
    page = pages.open(address)
    until(page, IS_LIVE)
    endless = {"ignore_eos": True}
    page.route(
        "**/v1/chat/completions", lambda route: route.continue_(post_data=route.request.post_data_json | endless)
    )
    page.evaluate(STOP_AT_FIRST_TEXT)
    say(page, "hello", max_tokens=3000)
    until(page, IS_STOPPED)
    until_seen(page, lambda: figures(address)["vllm:num_requests_running"] == 0)
    until_seen(page, lambda: bool(page.get_by_role("button", name="Send").is_enabled()))
    say(page, "hello again", max_tokens=5)
    wait_for_answer(page)


def event(**delta: str) -> str:
    return f"data: {json.dumps({'choices': [{'delta': delta}]})}\n\n"


def test_an_answer_that_has_arrived_whole_can_be_stopped(pages: Pages, address: str) -> None:
    """As on a busy machine: the server has sent all before the page reads the first piece."""
    page = pages.open(address)
    until(page, IS_LIVE)
    body = event(content="one ") + event(content="two") + "data: [DONE]\n\n"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body, content_type="text/event-stream"))
    page.evaluate(STOP_AT_FIRST_TEXT)
    say(page, "hello")
    until(page, IS_STOPPED)


def test_a_conversation_is_sent_whole_until_a_new_one_begins(pages: Pages, address: str) -> None:
    page = pages.open(address)
    until(page, IS_LIVE)
    sent: list[Any] = []

    def answer(route: Any) -> None:
        sent.append(route.request.post_data_json)
        body = event(content=f"answer {len(sent)}") + "data: [DONE]\n\n"
        route.fulfill(body=body, content_type="text/event-stream")

    page.route("**/v1/chat/completions", answer)
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Temperature").fill("0.5")
    for number, message in enumerate(["first", "second"], start=1):
        say(page, message)
        until(page, f"document.querySelectorAll('.assistant small').length === {number}")
    system = {"role": "system", "content": "Be brief."}
    first, second = ({"role": "user", "content": text} for text in ("first", "second"))
    assert [body["messages"] for body in sent] == [
        [system, first],
        [system, first, {"role": "assistant", "content": "answer 1"}, second],
    ]
    assert sent[0]["temperature"] == 0.5
    assert page.locator(".turn").all_inner_texts()[2] == "second"
    page.get_by_label("System prompt").fill("")
    page.get_by_role("button", name="New chat").click()
    assert page.locator(".turn").count() == 0
    say(page, "third")
    until(page, "document.querySelectorAll('.assistant small').length === 1")
    assert sent[2]["messages"] == [{"role": "user", "content": "third"}]


def test_a_message_that_is_refused_is_no_part_of_the_conversation(pages: Pages, address: str) -> None:
    page = pages.open(address)
    until(page, IS_LIVE)
    say(page, "hello", padding="4000", max_tokens=4096)
    until(page, "/Your message is back/.test(document.getElementById('chat-note').textContent)")
    assert "8192" in text_of(page, "#chat-note")
    assert page.locator(".turn").count() == 0
    assert page.get_by_label("Message").input_value().endswith("hello")
    say(page, "hello", max_tokens=5)
    wait_for_answer(page)
    pages.complaints = [text for text in pages.complaints if "400" not in text]


def short_load(page: Any, address: str, seconds: float) -> None:
    page.route("**/live/load", lambda route: route.continue_(url=f"{address}/live/load?seconds={seconds:g}"))


def test_one_click_puts_a_load_on_the_server(pages: Pages, address: str) -> None:
    page = pages.open(address)
    until(page, IS_LIVE)
    short_load(page, address, 3)
    before = figures(address)
    page.get_by_role("button", name="Put a load on it").click()
    until(page, "/^Sending 2 chats at a time/.test(document.getElementById('load-note').textContent)")
    until_seen(page, lambda: "long prompt" in text_of(page, "#load-figures"))
    page.get_by_label("Target in milliseconds").fill("400")
    wait_for_target(address, 0.4)
    said = "document.getElementById('load-note').textContent"
    until(page, f"/^The load has ended. Sent \\d+ chats and \\d+ long prompts?/.test({said})")
    rows = page.locator("#load-table tbody tr").all()
    assert rows
    for cells in (row.locator("td").all_text_contents() for row in rows):
        assert re.fullmatch(r"\d+ ms", cells[0]), cells
        assert int(cells[1]) > 0
        assert re.fullmatch(r"\d+(\.\d)?%", cells[5]), cells
    after = figures(address)
    assert after["vllm:num_requests_running"] == 0
    assert after["vllm:prompt_tokens_total"] > before["vllm:prompt_tokens_total"]
    page.get_by_label("Target in milliseconds").fill("500")
    wait_for_target(address, 0.5)


def test_a_switch_compares_the_load_without_a_target(pages: Pages, address: str) -> None:
    page = pages.open(address)
    until(page, IS_LIVE)
    page.get_by_label("Target in milliseconds").fill("500")
    wait_for_target(address, 0.5)
    switch = page.get_by_role("button", name="No target")
    switch.click()
    until(page, "document.getElementById('target-off').getAttribute('aria-pressed') === 'true'")
    assert httpx.get(address + "/v1/target", verify=False).json()["tbt_target"] is None
    short_load(page, address, 2)
    page.get_by_role("button", name="Put a load on it").click()
    until(page, "!document.getElementById('load-table').hidden")
    assert page.locator("#load-table tbody td").all_text_contents()[::5] == ["none", "–"]
    switch.click()
    wait_for_target(address, 0.5)


def test_a_wrong_target_is_said_beside_its_field(pages: Pages, address: str) -> None:
    page = pages.open(address)
    until(page, IS_LIVE)
    field = page.get_by_label("Target in milliseconds")
    for wrong in ("0", "70000", "1.5", ""):
        field.fill(wrong)
        assert "1 to 60,000" in text_of(page, "#target-problem")
        assert field.get_attribute("aria-invalid") == "true"
    field.fill("500")
    assert not text_of(page, "#target-problem")
    wait_for_target(address, 0.5)


def test_a_load_can_be_stopped_by_keyboard(pages: Pages, address: str) -> None:
    page = pages.open(address)
    until(page, IS_LIVE)
    page.get_by_role("button", name="Put a load on it").press("Enter")
    until(page, "/^Sending/.test(document.getElementById('load-note').textContent)")
    until_seen(page, lambda: text_of(page, "#running") in ("1", "2", "3"))
    page.get_by_role("button", name="Stop the load").press("Enter")
    until(page, "/^Stopped. Sent/.test(document.getElementById('load-note').textContent)")
    until_seen(page, lambda: figures(address)["vllm:num_requests_running"] == 0)


def test_a_server_without_room_is_left_alone(pages: Pages, model: Path, tmp_path: Path) -> None:
    with served(model, tmp_path / "log.txt", ["--max-tenant-requests", "1"]) as server:
        page = pages.open(server.address)
        until(page, IS_LIVE)
        with streaming(server.address, 1):
            until_seen(page, lambda: text_of(page, "#running") == "1")
            page.get_by_role("button", name="Put a load on it").click()
            until(page, "/no room for a load now: This tenant/.test(document.getElementById('load-note').textContent)")
        page.close()
    pages.complaints = [text for text in pages.complaints if "429" not in text]


def test_a_step_can_be_chosen_by_pointer_and_by_keyboard(pages: Pages, address: str) -> None:
    page = pages.open(address)
    until(page, IS_LIVE)
    say(page, "hello", max_tokens=200)
    wait_for_answer(page)
    page.locator("#steps").focus()
    page.keyboard.press("ArrowLeft")
    chosen = text_of(page, "#step-detail")
    assert re.match(r"Step \d+: [\d.]+ ms", chosen)
    page.keyboard.press("ArrowLeft")
    assert text_of(page, "#step-detail") != chosen
    page.keyboard.press("Escape")
    assert text_of(page, "#step-detail").startswith("Each bar is one step")
    with streaming(address, 1):
        places = itertools.cycle(range(20, 400, 10))

        def points_at_a_step() -> bool:
            box = page.locator("#steps").bounding_box()
            page.mouse.move(box["x"] + box["width"] - next(places), box["y"] + 40)
            return text_of(page, "#step-detail").startswith("Step ")

        until_seen(page, points_at_a_step)


@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_and_reads_on_every_screen(pages: Pages, address: str, width: int, height: int, scheme: str) -> None:
    page = pages.open(address, width=width, height=height, color_scheme=scheme)
    until(page, IS_LIVE)
    say(page, "hello " * 30, max_tokens=50)
    wait_for_answer(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    too_wide = """() => [...document.querySelectorAll("body *")].filter((node) => {
      const box = node.getBoundingClientRect();
      return box.width > 0 && (box.right > innerWidth + 1) && getComputedStyle(node).position !== "absolute";
    }).map((node) => node.id || node.tagName)"""
    assert page.evaluate(too_wide) == []
    ground, ink = page.evaluate(
        "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
    )
    is_dark = luminance(ground) < luminance(ink)
    assert is_dark == (scheme == "dark")


def luminance(colour: str) -> float:
    channels = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_its_ground(pages: Pages, address: str, scheme: str) -> None:
    page = pages.open(address, color_scheme=scheme)
    until(page, IS_LIVE)
    pairs = page.evaluate(
        """() => [...document.querySelectorAll("h1, h2, p, b, label, button, span, li, select, input, textarea")]
          .filter((node) => node.getBoundingClientRect().width > 0 && !node.disabled)
          .map((node) => {
            let ground = node;
            while (getComputedStyle(ground).backgroundColor === "rgba(0, 0, 0, 0)") ground = ground.parentElement;
            const ink = getComputedStyle(node).color;
            return [node.id || node.textContent, ink, getComputedStyle(ground).backgroundColor];
          })"""
    )
    assert len(pairs) > 30
    for name, ink, ground in pairs:
        light, dark = sorted((luminance(ink), luminance(ground)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, (name, ink, ground)


def test_everything_has_a_name_and_a_visible_focus(pages: Pages, address: str) -> None:
    page = pages.open(address)
    until(page, IS_LIVE)
    assert page.get_attribute("html", "lang") == "en"
    nameless = page.evaluate(
        """() => [...document.querySelectorAll("input, select, textarea, button, canvas, section")].filter((node) => {
          const ids = (node.getAttribute("aria-labelledby") || "").split(" ").filter(Boolean);
          return !(node.getAttribute("aria-label") || node.labels?.length
            || (node.matches("button") && node.textContent)
            || (ids.length && ids.every((id) => document.getElementById(id)?.textContent)));
        }).map((node) => node.outerHTML)"""
    )
    assert nameless == []
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map((node) => node.id)")
    assert len(ids) == len(set(ids))
    focused = [""]
    while focused[-1] != "send":
        assert len(focused) < 60, focused  # stalls are buttons too, as many as there were
        page.keyboard.press("Tab")
        name, outline = page.evaluate(
            """() => {
              const node = document.activeElement;
              return [node.id || node.className, getComputedStyle(node).outlineStyle];
            }"""
        )
        focused.append(name)
        assert outline == "solid", name
    assert {"target-range", "target-number", "load", "pause", "steps", "message", "new-chat"} <= set(focused)


def test_one_click_shows_the_life_of_a_request(pages: Pages, address: str) -> None:
    page = pages.open(address)
    until(page, IS_LIVE)
    assert not page.locator("#life").is_visible()
    say(page, "hello", padding="300", max_tokens=5)
    wait_for_answer(page)
    page.get_by_role("button", name="What the server did").click()
    rows = page.locator("#life-table tbody tr")
    until_seen(page, lambda: rows.count() >= 5)
    texts = rows.all_inner_texts()
    assert re.search(r"arrived with [\d,]+ prompt tokens", texts[0])
    assert any("no longer because the prompt ended" in text for text in texts)
    assert any("first token" in text for text in texts)
    assert "ended with 5 tokens: length" in texts[-1]
    page.get_by_role("button", name="Close").click()
    assert not page.locator("#life").is_visible()
    with streaming(address, 2):  # and of a stall, with its causes
        httpx.put(f"{address}/v1/target", json={"tbt_target": "0.1ms"}).raise_for_status()
        stall = page.locator("#stalls button").first
        until_seen(page, stall.is_visible)
        httpx.put(f"{address}/v1/target", json={"tbt_target": "500ms"}).raise_for_status()
    page.locator("#stalls button").first.click()
    until_seen(page, lambda: page.locator("#life-table tr.late").count() > 0)
    assert re.search(r"too late\s+[\d.]+ m?s\s+[\d.]+ m?s \w", page.locator("#life-table tr.late").first.inner_text())


def test_motion_is_reduced_for_those_who_ask(pages: Pages, address: str) -> None:
    page = pages.open(address, reduced_motion="reduce")
    with streaming(address, 2):
        page.wait_for_timeout(1500)
        changes = page.evaluate(
            """async () => {
              const canvas = document.getElementById("steps");
              let changes = 0;
              let last = canvas.toDataURL();
              const end = performance.now() + 2000;
              while (performance.now() < end) {
                await new Promise(requestAnimationFrame);
                const now = canvas.toDataURL();
                if (now !== last) changes += 1;
                last = now;
              }
              return changes;
            }"""
        )
    assert 1 <= changes <= 4


def test_the_page_loads_nothing_from_elsewhere_and_runs_no_inline_script(address: str) -> None:
    answer = httpx.get(address)
    policy = answer.headers["content-security-policy"]
    assert "script-src 'self'" in policy
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert not re.search(r"https?://|<script(?![^>]*src=)|style=|\son\w+=", answer.text)


def test_a_key_is_asked_for_and_used(pages: Pages, model: Path, tmp_path: Path) -> None:
    with served(model, tmp_path / "log.txt", ["--api-key", "open-sesame"]) as server:
        address = server.address
        assert httpx.get(address).status_code == 200
        assert httpx.get(f"{address}/live/feed").status_code == 401
        page = pages.open(address)
        field = page.get_by_label("This server needs an API key.")
        field.fill("wrong")
        field.press("Enter")
        until(page, "!document.getElementById('key-form').hidden")
        field.fill("open-sesame")
        field.press("Enter")
        until(page, IS_LIVE)
        say(page, "hello", max_tokens=5)
        wait_for_answer(page)
        page.reload()
        until(page, IS_LIVE)
        page.close()
    pages.complaints = [text for text in pages.complaints if "401" not in text]


def test_a_dead_engine_and_a_lost_server_are_shown(pages: Pages, model: Path, tmp_path: Path) -> None:
    with served(model, tmp_path / "log.txt") as server:
        page = pages.open(server.address)
        until(page, IS_LIVE)
        server.kill_engine()
        until(page, "document.getElementById('state').dataset.state === 'down'")
        until(page, IS_LIVE, seconds=60)
        say(page, "hello", max_tokens=5)
        wait_for_answer(page)
    until(page, "document.getElementById('state').dataset.state === 'lost'")
    port = server.address.rsplit(":", 1)[1]
    with served(model, tmp_path / "again.txt", ["--port", port]):
        until(page, IS_LIVE, seconds=60)
        page.close()
    pages.complaints = [text for text in pages.complaints if "ERR_" not in text]
