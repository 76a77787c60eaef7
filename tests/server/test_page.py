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

    def opened(live: Live, width: int = 1280) -> Any:
        page = browser.new_page(viewport={"width": width, "height": 800})
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
    page.fill("#tokens", "40")
    messages = []
    for n_turns in (2, 4):
        send(page, "hello world", n_turns)
        assert not page.locator(".alarm").all_text_contents()
        messages.append({"role": "user", "content": "hello world"})
        wanted = live.engine.chat(messages, temperature=0, max_tokens=40).text
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
        page.fill("#tokens", "80")
        send(page, "hi", 4)
        coloured = "".join(page.locator(".drafted").all_text_contents())
        assert coloured
        page.fill("#tokens", "")
        page.fill("#prompt", "hi")
        page.keyboard.press("Enter")
        assert comes_true(lambda: live.service.worker.n_running == 1)
        page.keyboard.press("Escape")
        assert live.is_free()
        page.wait_for_selector("text=stopped")


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
