"""What tests of the built-in page do in a browser."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

OpenPage = Callable[..., Any]


def send(page: Any, prompt: str, n_exchanges: int) -> None:
    page.fill("#prompt", prompt)
    page.keyboard.press("Enter")
    page.wait_for_selector(f".exchange >> nth={n_exchanges - 1}")
    page.wait_for_selector("#send:not([disabled])")


def answer(page: Any, n: int = -1) -> str:
    """The source of an answer, which the page shows where drafted tokens are."""
    return str(page.locator(".answer").nth(n).text_content())


def is_seen(page: Any, selector: str) -> bool:
    """Whether a click in the middle of an element hits it."""
    script = """element => {
        const box = element.getBoundingClientRect();
        const hit = document.elementFromPoint(box.x + box.width / 2, box.y + box.height / 2);
        return element.contains(hit);
    }"""
    return bool(page.locator(selector).last.evaluate(script))
