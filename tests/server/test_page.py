"""The built-in page: in a real browser where there is one, and what it reads of each event."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from server.pages import OpenPage, answer, is_seen, send
from serving import Live, comes_true, events_of, serving

import ggufspec
from ggufspec.engine.engine import Engine

SCRIPT = Path(ggufspec.__file__).parent / "server" / "page.js"

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")


def test_a_conversation_on_the_page_is_that_of_the_model(live: Live, open_page: OpenPage) -> None:
    page = open_page(live)
    page.fill("#temperature", "0")
    page.fill("#tokens", "16")
    page.check("#drafts")
    messages = []
    for n in (1, 2):
        send(page, "hello world", n)
        assert not page.locator(".alarm").all_text_contents()
        messages.append({"role": "user", "content": "hello world"})
        wanted = live.engine.chat(messages, temperature=0, max_tokens=16).text
        assert answer(page) == wanted
        messages.append({"role": "assistant", "content": wanted})
    assert page.locator("#prompt[placeholder*='Images']").count() == 0, "the model reads none"
    assert "drafted tokens accepted" in page.inner_text("#texts")
    assert "cut at the maximum number of tokens" in page.inner_text("#texts")
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
    assert answer(page) == wanted
    page.uncheck("#speculative")
    page.click(".again")
    page.wait_for_selector("text=plain: 40 tokens")
    assert page.locator(".exchange").count() == 1
    assert answer(page) == wanted
    assert page.locator(".drafted").count() == 0
    assert float(page.inner_text("#speedup")) > 0
    width = page.evaluate("document.documentElement.scrollWidth")
    assert width <= 360, "nothing is wider than a phone's screen"


def test_drafts_are_coloured_on_demand_and_escape_stops_the_text(
    endless: Engine, open_page: OpenPage
) -> None:
    defaults = {"n_draft": 3, "drafter": "ngram"}
    with serving(endless, api_keys=("s3cret",), defaults=defaults) as live:
        page = open_page(live)
        page.fill("#key", "wrong")
        page.evaluate("options.open = false")
        page.fill("#prompt", "hi")
        page.keyboard.press("Enter")
        page.wait_for_selector("#texts .alarm >> text=API key is missing or wrong")
        assert page.is_visible("#key"), "a refused key can be mended"
        assert page.input_value("#prompt") == "hi", "it can be sent again"
        page.fill("#key", "s3cret")
        page.fill("#tokens", "40")
        send(page, "hi", 1)
        assert page.locator(".drafted").count() == 0
        page.check("#drafts")
        coloured = page.locator(".drafted").first
        assert coloured.text_content()
        background = "each => getComputedStyle(each).backgroundColor"
        assert coloured.evaluate(background) != page.locator(".answer").evaluate(background)
        page.fill("#tokens", "")
        page.fill("#prompt", "hi")
        page.keyboard.press("Enter")
        assert comes_true(lambda: live.service.texts.n_running == 1)
        page.keyboard.press("Escape")
        assert live.is_free()
        page.wait_for_selector("text=stopped")


def test_a_text_can_be_stopped_on_each_screen(endless: Engine, open_page: OpenPage) -> None:
    with serving(endless) as live:
        page = open_page(live, 360, 640)
        page.fill("#tokens", "")
        page.evaluate("options.open = false")
        for n, (width, height) in enumerate([(360, 640), (667, 375), (1280, 800)]):
            page.set_viewport_size({"width": width, "height": height})
            page.fill("#prompt", "hi")
            page.click("#send")
            page.wait_for_selector(f".answer >> nth={n} >> text=abc")
            page.click("#stop")
            page.wait_for_selector(f"text=stopped >> nth={n}")
            assert live.is_free()
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert page.evaluate("scrollY") == 0
            for each in ("#send", "#stop", "#prompt", "#options summary", "#texts .note"):
                assert is_seen(page, each), (each, width)
        middles = "row => [...row.children].map(({offsetTop: y, offsetHeight: h}) => y + h / 2)"
        found = page.locator("form > .row:not([hidden])").evaluate(middles)
        assert max(found) - min(found) < 4, "the buttons are in the row of the switches"


def test_an_error_is_seen_and_says_what_to_do(endless: Engine, open_page: OpenPage) -> None:
    with serving(endless) as live:
        page = open_page(live, 360, 640)
        page.fill("#tokens", "40")
        for n in (1, 2, 3):
            send(page, "hi", n)
        page.fill("#tokens", "-3")
        page.evaluate("form.noValidate = true")
        page.fill("#prompt", "ho")
        page.keyboard.press("Enter")
        page.wait_for_selector("#texts .alarm >> text=max_tokens")
        assert is_seen(page, ".alarm")
        assert page.input_value("#prompt") == "ho"
        assert page.locator(".exchange").count() == 3, "what was not answered is not kept"
        page.fill("#tokens", "")
        page.keyboard.press("Enter")
        page.wait_for_selector(".answer >> nth=3 >> text=abc")
    page.wait_for_selector(".alarm >> text=is stopping")
    page.click(".again >> visible=true")
    page.wait_for_selector(f".alarm >> text=no answer from {live.url}: the server has stopped")
    assert is_seen(page, "#texts > .alarm")
    assert page.locator(".exchange").count() == 4
    assert "abc" in page.locator(".answer").last.text_content(), "the answer before is kept"
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
    script = SCRIPT.read_text(encoding="utf-8")
    event_fields, choice_fields, statistics = (
        set(re.findall(rf"\b{name}\.(\w+)", script)) for name in ("event", "choice", "report")
    )
    assert {"choices", "ggufspec"} <= event_fields
    assert {"delta", "text", "finish_reason"} <= choice_fields
    assert "drafted" in statistics
    events = events_of(live.post(path, **asked, max_tokens=9, stream=True, report_drafted=True))
    for event in events:
        assert event_fields - {"error"} <= event.keys()
        assert choice_fields - unread <= event["choices"][0].keys()
        assert isinstance(event["ggufspec"]["drafted"], list)
    assert statistics <= events[-1]["ggufspec"].keys()
    assert events[-1]["choices"][0]["finish_reason"]
