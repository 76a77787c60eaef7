"""The built-in page, with headers that prevent it from contacting other servers."""

from __future__ import annotations

import re
from base64 import b64encode
from functools import cache
from hashlib import sha256
from importlib.resources import files

from starlette.responses import HTMLResponse


@cache
def page() -> HTMLResponse:
    """The response with the page; its policy allows one script and one style, by their hashes."""
    html = files("ggufspec.server").joinpath("page.html").read_text(encoding="utf-8")
    policy = [
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
        "Content-Security-Policy": "; ".join(policy),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cache-Control": "no-cache",
    }
    return HTMLResponse(html, headers=headers)


def _hash_of(html: str, tag: str) -> str:
    (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    return f"'sha256-{b64encode(sha256(content.encode()).digest()).decode()}'"
