"""The built-in page, and the headers that keep it to itself. Knows no routes."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Mapping
from functools import cache
from hashlib import sha256
from importlib.resources import files
from typing import NamedTuple


class Page(NamedTuple):
    """A document, and what has to be said with it."""

    html: str
    headers: Mapping[str, str]


@cache
def page() -> Page:
    """The page of the package; its one script and one style are allowed by their hashes."""
    html = files("ggufspec.server").joinpath("page.html").read_text(encoding="utf-8")
    rules = [
        "default-src 'none'",
        "connect-src 'self'",
        f"script-src {_hash_of(html, 'script')}",
        f"style-src {_hash_of(html, 'style')}",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
    headers = {
        "Content-Security-Policy": "; ".join(rules),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cache-Control": "no-cache",
    }
    return Page(html, headers)


def _hash_of(html: str, tag: str) -> str:
    (inside,) = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    return f"'sha256-{b64encode(sha256(inside.encode()).digest()).decode()}'"
