"""The built-in page in a real browser; skipped where Playwright or Chromium is not installed."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from serving import Live, comes_true, serving

from ggufspec.engine.engine import Engine

playwright = pytest.importorskip("playwright.sync_api")
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.skipif(BROWSER is None, reason="there is no browser here"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


@pytest.fixture
def open_page() -> Iterator[Callable[[Live], Any]]:
    """Opens the page; at the end it must have had no errors and no requests to other hosts."""
    troubles: list[str] = []
    asked: list[str] = []
    urls: list[str] = []
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])

        def opened(live: Live) -> Any:
            page = browser.new_page()
            page.on("pageerror", lambda error: troubles.append(str(error)))
            page.on("request", lambda request: asked.append(request.url))
            page.goto(live.url)
            urls.append(live.url)
            assert comes_true(lambda: page.inner_text("#model") != "")
            return page

        yield opened
        browser.close()
    assert troubles == []
    assert all(url.startswith((*urls, "data:")) for url in asked)


def send(page: Any, prompt: str, n_turns: int) -> None:
    page.fill("#prompt", prompt)
    page.keyboard.press("Enter")
    assert comes_true(lambda: page.locator(".turn").count() == n_turns)
    assert comes_true(lambda: not page.is_disabled("#send"), 20)


def test_accepted_draft_tokens_are_coloured_on_the_page(
    live: Live, open_page: Callable[[Live], Any]
) -> None:
    page = open_page(live)
    page.fill("#temperature", "0")
    page.fill("#tokens", "40")
    send(page, "hello world", 2)
    wanted = live.engine.chat(
        [{"role": "user", "content": "hello world"}], temperature=0, max_tokens=40
    )
    spans = page.locator(".turn").nth(1).locator("span:not(.role):not(.note)")
    assert "".join(spans.all_text_contents()) == wanted.text
    page.uncheck("#speculative")
    page.click("#clear")
    page.select_option("#form-of", "text")
    send(page, "hello world", 1)
    assert page.locator(".drafted").count() == 0
    assert "plain: 40 tokens" in page.inner_text("#texts")
    assert float(page.inner_text("#speedup")) > 0


def test_escape_stops_the_text_and_errors_are_shown(
    endless: Engine, open_page: Callable[[Live], Any]
) -> None:
    with serving(endless, api_keys=("s3cret",)) as live:
        page = open_page(live)
        page.fill("#key", "wrong")
        send(page, "hi", 2)
        assert "API key is missing or wrong" in page.inner_text("#texts .alarm")
        page.fill("#key", "s3cret")
        page.fill("#tokens", "100000")
        page.fill("#prompt", "hi")
        page.keyboard.press("Enter")
        assert comes_true(lambda: live.service.worker.n_running == 1)
        page.keyboard.press("Escape")
        assert live.is_free(within=2)
        assert comes_true(lambda: "stopped" in page.inner_text("#texts"))
