"""The built-in page: in a real browser where there is one, and what it reads of each event."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import Live, comes_true, events_of, serving

import ggufspec
from ggufspec.engine.engine import Engine

PAGE = Path(ggufspec.__file__).parent / "server" / "page.html"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
OpenPage = Callable[..., Any]

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip(
        "playwright.sync_api", reason="needs a browser's driver: pip install playwright"
    )
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip("needs a browser: install Chromium")
    with api.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[OpenPage]:
    """Opens the page; at the end it must have had no errors and no requests to other hosts."""
    troubles: list[str] = []
    asked: list[str] = []
    urls: list[str] = []

    def opened(live: Live, width: int = 1280, height: int = 800) -> Any:
        page = browser.new_page(viewport={"width": width, "height": height})
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(live.url)
        urls.append(live.url)
        page.wait_for_selector("#model:not(:empty)")
        return page

    yield opened
    for context in browser.contexts:
        context.close()
    assert troubles == []
    assert all(url.startswith((*urls, "data:")) for url in asked)


def send(page: Any, prompt: str, n_turns: int) -> None:
    page.fill("#prompt", prompt)
    page.keyboard.press("Enter")
    page.wait_for_selector(f".turn >> nth={n_turns - 1}")
    page.wait_for_selector("#send:not([disabled])")


def text_of(turn: Any) -> str:
    return "".join(turn.locator("span:not(.role):not(.note):not(.prompt)").all_text_contents())


def test_a_conversation_on_the_page_is_that_of_the_model(live: Live, open_page: OpenPage) -> None:
    page = open_page(live)
    page.fill("#temperature", "0")
    page.fill("#tokens", "16")
    messages = []
    for n_turns in (2, 4):
        send(page, "hello world", n_turns)
        assert not page.locator(".alarm").all_text_contents()
        messages.append({"role": "user", "content": "hello world"})
        wanted = live.engine.chat(messages, temperature=0, max_tokens=16).text
        assert text_of(page.locator(".turn").nth(n_turns - 1)) == wanted
        messages.append({"role": "assistant", "content": wanted})
    assert "drafted tokens accepted" in page.inner_text("#texts")
    assert not re.search("[0-9]", page.inner_text("#speedup")), "nothing was decoded without drafts"


def test_a_text_on_the_page_is_compared_with_plain_decoding(
    live: Live, open_page: OpenPage
) -> None:
    page = open_page(live, width=360)
    page.select_option("#form-of", "text")
    page.fill("#temperature", "0")
    page.fill("#tokens", "40")
    send(page, "hello world", 1)
    wanted = live.engine.generate("hello world", temperature=0, max_tokens=40).text
    assert text_of(page.locator(".turn")) == wanted
    page.uncheck("#speculative")
    page.click("#clear")
    send(page, "hello world", 1)
    assert text_of(page.locator(".turn")) == wanted
    assert page.locator(".drafted").count() == 0
    assert "plain: 40 tokens" in page.inner_text("#texts")
    assert float(page.inner_text("#speedup")) > 0
    width = page.evaluate("document.documentElement.scrollWidth")
    assert width <= 360, "nothing is wider than a phone's screen"


def test_drafts_are_coloured_errors_are_shown_and_escape_stops_the_text(
    endless: Engine, open_page: OpenPage
) -> None:
    defaults = {"n_draft": 3, "drafter": "ngram"}
    with serving(endless, api_keys=("s3cret",), defaults=defaults) as live:
        page = open_page(live)
        page.fill("#key", "wrong")
        send(page, "hi", 2)
        assert "API key is missing or wrong" in page.inner_text("#texts .alarm")
        assert page.input_value("#prompt") == "hi", "it can be sent again"
        page.fill("#key", "s3cret")
        page.fill("#tokens", "40")
        send(page, "hi", 4)
        coloured = "".join(page.locator(".drafted").all_text_contents())
        assert coloured
        page.fill("#tokens", "")
        page.fill("#prompt", "hi")
        page.keyboard.press("Enter")
        assert comes_true(lambda: live.service.texts.n_running == 1)
        page.keyboard.press("Escape")
        assert live.is_free()
        page.wait_for_selector("text=stopped")


def is_seen(page: Any, selector: str) -> bool:
    """Whether a click in the middle of an element hits it."""
    script = """element => {
        const box = element.getBoundingClientRect();
        const hit = document.elementFromPoint(box.x + box.width / 2, box.y + box.height / 2);
        return element.contains(hit);
    }"""
    return bool(page.locator(selector).last.evaluate(script))


def test_a_text_can_be_stopped_on_each_screen(endless: Engine, open_page: OpenPage) -> None:
    with serving(endless) as live:
        page = open_page(live, 360, 640)
        for n, (width, height) in enumerate([(360, 640), (667, 375), (1280, 800)]):
            page.set_viewport_size({"width": width, "height": height})
            page.fill("#tokens", "")
            page.fill("#prompt", "hi")
            page.click("#send")
            page.wait_for_selector("#stop:not([disabled])")
            page.click("#stop")
            page.wait_for_selector(f"text=stopped >> nth={n}")
            assert live.is_free()
            boxes = {name: page.locator(name).bounding_box() for name in ("form", "footer")}
            assert boxes["footer"]["y"] >= boxes["form"]["y"] + boxes["form"]["height"]
            assert page.evaluate("scrollY") == 0 or height < 600
            for each in ("#send", "#stop", "#prompt", "#texts .note"):
                assert is_seen(page, each), (each, width)
        middles = "row => [...row.children].map(({offsetTop: y, offsetHeight: h}) => y + h / 2)"
        found = page.locator("form > .row").evaluate(middles)
        assert max(found) - min(found) < 4, "the buttons are in the row of the options"


def test_an_error_is_seen_and_says_what_to_do(endless: Engine, open_page: OpenPage) -> None:
    with serving(endless) as live:
        page = open_page(live, 360, 640)
        page.fill("#tokens", "40")
        for n_turns in (2, 4, 6):
            send(page, "hi", n_turns)
        page.fill("#tokens", "-3")
        page.evaluate("form.noValidate = true")
        send(page, "hi", 8)
        assert "max_tokens" in page.inner_text(".alarm")
        assert is_seen(page, ".alarm")
        assert page.input_value("#prompt") == "hi"
        page.fill("#tokens", "")
        page.keyboard.press("Enter")
        assert comes_true(lambda: live.service.texts.n_running == 1)
    page.wait_for_selector(".alarm >> nth=1")
    assert "is stopping" in page.locator(".alarm").last.inner_text()
    page.fill("#tokens", "40")
    send(page, "hi", 12)
    said = page.locator(".alarm").last.inner_text()
    assert said.startswith(f"no answer from {live.url}: the server has stopped")
    assert is_seen(page, ".alarm")
    page.click("summary")
    page.fill("#key", "k")
    page.keyboard.press("Tab")
    page.wait_for_selector("#model:has-text('the server has stopped')")


@pytest.mark.parametrize(
    ("path", "asked", "unread"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}, {"text"}),
        ("/v1/completions", {"prompt": "hi"}, {"delta"}),
    ],
)
def test_each_event_has_what_the_page_reads(
    live: Live, path: str, asked: dict[str, Any], unread: set[str]
) -> None:
    script = PAGE.read_text(encoding="utf-8")
    event_fields, choice_fields, statistics = (
        set(re.findall(rf"\b{name}\.(\w+)", script)) for name in ("event", "choice", "report")
    )
    assert {"choices", "ggufspec"} <= event_fields
    assert {"delta", "text", "finish_reason"} <= choice_fields
    assert "drafted" in statistics
    of_keys = {"key", "shiftKey", "isComposing", "preventDefault"}  # events of the keyboard
    events = events_of(live.post(path, **asked, max_tokens=9, stream=True, report_drafted=True))
    for event in events:
        assert event_fields - {"error"} - of_keys <= event.keys()
        assert choice_fields - unread <= event["choices"][0].keys()
        assert isinstance(event["ggufspec"]["drafted"], list)
    assert statistics <= events[-1]["ggufspec"].keys()
    assert events[-1]["choices"][0]["finish_reason"]
