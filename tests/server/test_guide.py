"""The Python client of the guide, run as it is printed against a server."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import tiny
from serving import serving

import ggufspec
from ggufspec.standin import embedded

GUIDE = Path(ggufspec.__file__).parent / "server" / "README.md"
PRINTED_URL = "http://127.0.0.1:8080"


def test_the_client_of_the_guide_prints_texts(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 2
    assert PRINTED_URL in blocks[0]
    files = embedded.embedded_target(), embedded.embedded_draft()
    with (
        # The embedded pair was not made for chat.
        ggufspec.load(
            *files, n_threads=1, n_ctx=256, tuned=False, chat_template=tiny.CHATML
        ) as engine,
        serving(engine, alias="demo", max_tokens=16) as live,
    ):
        names: dict[str, object] = {}
        for n_texts, block in enumerate(blocks, start=1):
            exec(block.replace(PRINTED_URL, live.url), names)
            assert capsys.readouterr().out.strip()
            assert live.metric('generations_total{outcome="completed"}') == n_texts
        names["client"].close()  # type: ignore[attr-defined]
