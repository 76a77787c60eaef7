"""What the built-in page makes of texts: Markdown, never HTML; and what the browser keeps."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import tiny
from server.dialects import TEMPLATE
from server.pages import OpenPage, answer, is_seen, send
from serving import Live, comes_true, serving

import ggufspec
from ggufspec.engine.engine import Engine

ASKED = "How do I read a file?"
MARKDOWN = """<think>A list, *code* and a table.</think>## Reading *safely*

See [the docs](https://example.org/?a=1&b=2), not [this](javascript:alert(1)) or ![a picture](http://x.org/a.png).

1. `a &amp; b`
   - **bold** &lt;i&gt; ~~gone~~

```python
if 1 < 2 and "&lt;":
    print("<b>")
```

| Mode | Bytes |
|------|------:|
| `r`  | 1<br>2 |

<img src=x onerror="alert(1)"> and <b>bold</b>

<script>alert(1)</script>
<iframe src="javascript:alert(1)"></iframe>

> quoted
"""

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Answers ASKED with MARKDOWN."""
    folder = tmp_path_factory.mktemp("models")
    script = [*tiny.BPE.spell(MARKDOWN), tiny.BPE.id_of("<|im_end|>")]
    how: dict[str, Any] = {"vocab": tiny.BPE, "n_ctx_train": 2048, "chat_template": TEMPLATE}
    with ggufspec.load(
        tiny.write_timed(folder / "first.gguf", script, **how), n_threads=1, tuned=False
    ) as first:
        n_prompt = len(first.render([{"role": "user", "content": ASKED}], TEMPLATE))
    path = tiny.write_timed(folder / "writer.gguf", script, n_prompt=n_prompt, **how)
    defaults = {"n_draft": 3, "drafter": "ngram"}
    with (
        ggufspec.load(path, n_threads=1, tuned=False) as engine,
        serving(engine, defaults=defaults) as running,
    ):
        yield running


def test_an_answer_is_shown_as_markdown_and_never_as_html(
    writer: Live, open_page: OpenPage
) -> None:
    page = open_page(writer)
    dialogs: list[str] = []
    page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    send(page, ASKED, 1)
    shown = page.locator(".markdown")
    assert shown.locator("h3").inner_html() == "Reading <em>safely</em>"
    links = shown.locator("a")
    assert links.evaluate_all("all => all.map(each => each.href)") == [
        "https://example.org/?a=1&b=2",
        "http://x.org/a.png",
    ]
    assert links.nth(0).get_attribute("rel") == "noopener noreferrer"
    assert links.nth(1).text_content() == "a picture", "nothing is loaded"
    assert shown.locator("ol > li > span > code").text_content() == "a &amp; b"
    assert shown.locator("ol ul > li").text_content() == "bold <i> gone"
    assert shown.locator("pre code").text_content() == MARKDOWN.split("```")[1][7:-1]
    assert shown.locator("td.right").inner_html() == "1<br>2"
    assert shown.locator("blockquote").text_content() == "quoted"
    text = shown.text_content()
    for each in ('<img src=x onerror="alert(1)"> and <b>', "<script>alert(1)</script>", "<iframe"):
        assert each in text
    made = shown.evaluate("each => [...each.querySelectorAll('*')].map(one => one.localName)")
    assert not {"script", "img", "iframe", "b"} & set(made)
    assert page.locator(".answer details .source").text_content() == "A list, *code* and a table."
    assert not page.is_visible(".answer details .source"), "reasoning is shown on demand"
    streamed = shown.inner_html()
    page.reload()
    assert page.locator(".markdown").inner_html() == streamed, "built in pieces, or at once"
    assert dialogs == []


def test_markdown_that_grows_becomes_that_of_the_whole(live: Live, open_page: OpenPage) -> None:
    page = open_page(live)
    blocks = ["- a\n", "\n", "  c\r\n", "1. x\n", "> q\n", "    code\n", "```\n", "text *a*\n"]
    blocks += ["| a |\n|---|\n", "---\n", "<div>\n", "&lt; [l](http://x)\n", "# h\n", "\r\n"]
    chance = random.Random(7)
    texts = ["- a\n\n  b\n", *("".join(chance.choices(blocks, k=25)) for _ in range(60))]
    for text in texts:
        grown, whole = page.evaluate(
            """(text) => [1, text.length].map((step) => {
                const made = document.createElement("div");
                for (let end = step; end <= text.length; end += step)
                    markdown.show(made, text.slice(0, end));
                return made.innerHTML;
            })""",
            text,
        )
        assert grown == whole, text


def test_code_and_answers_are_copied(writer: Live, open_page: OpenPage) -> None:
    page = open_page(writer)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    send(page, ASKED, 1)
    script, whole = MARKDOWN.split("```")[1][7:-1], MARKDOWN.split("</think>")[1]
    for selector, wanted in ((".code .copy", script), (".controls .copy", whole)):
        page.focus(selector)
        page.keyboard.press("Enter")
        page.wait_for_selector(f"{selector}:has-text('Copied')")
        assert page.evaluate("navigator.clipboard.readText()") == wanted
        page.evaluate("navigator.clipboard.writeText('')")
    page.evaluate("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
    copied = "addEventListener('copy', () => { window.copied = String(getSelection()); })"
    page.evaluate(copied)
    page.wait_for_selector(".code .copy:has-text('Copy')")
    page.click(".code .copy")
    page.wait_for_selector(".code .copy:has-text('Copied')")
    assert page.evaluate("window.copied") == script, "as over plain HTTP, without a clipboard"


def test_no_stored_text_makes_the_page_fail(live: Live, open_page: OpenPage) -> None:
    page = open_page(live)
    deep = "> " * 20_000 + "end"
    exchange = {"mode": "chat", "prompt": "<b>deep</b>", "pieces": [[0, deep]], "note": ""}
    page.evaluate(
        "([deep]) => { localStorage['ggufspec:deep'] = JSON.stringify(deep);"
        " localStorage['ggufspec:bad'] = '{'; localStorage['ggufspec:null'] = 'null'; }",
        [{"id": "deep", "changed": 1, "exchanges": [exchange]}],
    )
    page.goto(live.url + "/#deep")
    page.reload()
    assert answer(page) == deep, "what the parser refuses is shown as it is"
    assert page.locator("#list li").count() == 1
    assert page.inner_text("#list a") == "<b>deep</b>"


def test_conversations_are_kept_in_the_browser(endless: Engine, open_page: OpenPage) -> None:
    with serving(endless) as live:
        page = open_page(live)
        page.fill("#tokens", "5")
        titles = page.locator("#list a")
        send(page, "first\nof all", 1)
        send(page, "more", 2)
        page.focus("#new")
        page.keyboard.press("Enter")
        assert page.locator(".exchange").count() == 0
        send(page, "second", 1)
        assert titles.all_inner_texts() == ["second", "first"]
        page.reload()
        assert page.locator(".asked").all_inner_texts() == ["second"]
        titles.nth(1).click()
        page.wait_for_selector(".exchange >> nth=1")
        assert page.locator(".asked").all_inner_texts() == ["first\nof all", "more"]
        page.go_back()
        page.wait_for_selector(".asked >> text=second")
        beside = page.context.new_page()
        beside.goto(live.url)
        beside.on("dialog", lambda dialog: dialog.accept())
        beside.click("[aria-label='Delete: first']")
        assert beside.locator("#list a").all_inner_texts() == ["second"]
        page.wait_for_selector("#list li >> nth=1", state="detached")
        page.once("dialog", lambda dialog: dialog.dismiss())
        page.click("[aria-label='Delete: second']")
        assert titles.count() == 1
        page.once("dialog", lambda dialog: dialog.accept())
        page.click("[aria-label='Delete: second']")
        assert titles.count() == page.locator(".exchange").count() == 0
        page.reload()
        assert titles.count() == 0


def test_the_last_message_is_asked_again_or_changed(endless: Engine, open_page: OpenPage) -> None:
    with serving(endless) as live:
        page = open_page(live)
        asked: list[list[str]] = []
        page.on(
            "request",
            lambda request: (
                request.post_data
                and asked.append([each["content"] for each in request.post_data_json["messages"]])
            ),
        )
        page.fill("#tokens", "5")
        send(page, "one", 1)
        send(page, "two", 2)
        page.click(".again >> visible=true")
        assert comes_true(lambda: len(asked) == 3)
        page.wait_for_selector("#send:not([disabled])")
        page.click(".edit >> visible=true")
        page.keyboard.press("Escape")
        assert page.input_value("#prompt") == ""
        page.click(".edit >> visible=true")
        assert page.input_value("#prompt") == "two"
        assert page.is_visible("#editing")
        send(page, "three", 2)
        assert not page.is_visible("#editing")
        first = page.locator(".answer").first.text_content()
        two = ["one", first, "two"]
        assert asked == [["one"], two, two, ["one", first, "three"]]
        assert page.locator(".asked").all_inner_texts() == ["one", "three"]


def test_another_conversation_stops_the_text_and_keeps_its_part(
    endless: Engine, open_page: OpenPage
) -> None:
    with serving(endless) as live:
        page = open_page(live, 360, 640)
        page.fill("#tokens", "")
        page.fill("#prompt", "hi")
        page.keyboard.press("Enter")
        page.wait_for_selector(".answer >> text=abc")
        page.focus("#menu")
        page.keyboard.press("Enter")
        assert is_seen(page, "#new")
        page.keyboard.press("Escape")
        assert not page.is_visible("#new")
        assert live.service.texts.n_running == 1
        page.click("#menu")
        page.click("#new")
        assert live.is_free()
        assert page.locator(".exchange").count() == 0
        assert not page.is_visible("#new")
        page.wait_for_selector("#list li", state="attached")
        page.click("#menu")
        page.click("#list a")
        page.wait_for_selector(".answer >> text=abc")
        page.wait_for_selector("text=stopped")


def test_a_browser_that_keeps_nothing_says_so(endless: Engine, open_page: OpenPage) -> None:
    with serving(endless) as live:
        page = open_page(live)
        page.add_init_script(
            "Object.defineProperty(window, 'localStorage', {get() { throw new Error('off'); }})"
        )
        page.reload()
        page.evaluate("options.open = true")
        page.fill("#tokens", "5")
        for n in (1, 2):
            send(page, "hi", n)
        page.wait_for_selector("#storage.alarm >> text=is not kept")
