"""Servers over models of a few kilobytes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
from server.dialects import CALL, HELLO, TEMPLATE, TOOL
from server.pages import OpenPage
from serving import Live, serving

import ggufspec
from ggufspec.engine.engine import Engine

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
LETTERS = "abcdefghijklmnopqrstuvwxyz"
LONG = 200_000  # tokens: more than anybody waits for


@pytest.fixture(scope="package")
def chat_files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A pair for chat, with random weights: it writes any bytes at all."""
    folder = tmp_path_factory.mktemp("models")
    how: dict[str, Any] = {"vocab": tiny.BPE, "chat_template": tiny.CHATML, "n_ctx_train": 1024}
    return (
        tiny.write_llama(folder / "target.gguf", **how),
        tiny.write_llama(folder / "draft.gguf", n_layer=1, **how),
    )


@pytest.fixture(scope="package")
def chat_pair(chat_files: tuple[Path, Path]) -> Iterator[Engine]:
    with ggufspec.load(*chat_files, n_threads=1, tuned=False, n_remembered=0) as engine:
        yield engine


@pytest.fixture(scope="package")
def live(chat_pair: Engine) -> Iterator[Live]:
    """One server for all tests that leave it as it was; it drafts in every round."""
    with serving(chat_pair, keep_alive=0.1, defaults={"n_draft": 3}) as running:
        yield running


@pytest.fixture(scope="package")
def endless_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes the alphabet, over and over, and never ends."""
    path = tmp_path_factory.mktemp("models") / "endless.gguf"
    return tiny.write_scripted(path, tiny.SPM.spell(LETTERS), chat_template=tiny.CHATML)


@pytest.fixture(scope="package")
def endless(endless_file: Path) -> Iterator[Engine]:
    with ggufspec.load(endless_file, n_threads=1, n_ctx=LONG, tuned=False) as engine:
        yield engine


@pytest.fixture(scope="package")
def caller(chat_pair: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Reasons, says something and calls a tool twice, if it is asked HELLO with TOOL."""
    n_prompt = len(chat_pair.render(HELLO, TEMPLATE, tools=[TOOL]))
    script = tiny.BPE.spell(f"<think>So é</think>I say\n{CALL}\n{CALL}")
    how: dict[str, Any] = {"n_prompt": n_prompt, "vocab": tiny.BPE, "n_ctx_train": 1024}
    path = tmp_path_factory.mktemp("models") / "caller.gguf"
    script.append(tiny.BPE.id_of("<|im_end|>"))
    tiny.write_timed(path, script, chat_template=TEMPLATE, **how)
    with ggufspec.load(path, n_threads=1, tuned=False) as engine, serving(engine) as running:
        yield running


@pytest.fixture(scope="package")
def forced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Random weights, whose calls a grammar forces."""
    path = tmp_path_factory.mktemp("models") / "forced.gguf"
    tiny.write_llama(path, vocab=tiny.BPE, chat_template=TEMPLATE, n_ctx_train=8192)
    with ggufspec.load(path, n_threads=1, tuned=False) as engine, serving(engine) as running:
        yield running


@pytest.fixture(scope="package")
def strict(chat_pair: Engine) -> Iterator[Live]:
    """A server with a key, a small body, and little time for it."""
    with serving(chat_pair, api_keys=("s3cret",), n_body_bytes=1000, body_seconds=0.5) as running:
        yield running


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
        page = browser.new_context(viewport={"width": width, "height": height}).new_page()
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(live.url)
        urls.append(live.url)
        page.wait_for_selector("#model:not(:empty)")
        page.evaluate("options.open = true")
        return page

    yield opened
    for context in browser.contexts:
        context.close()
    assert troubles == []
    assert all(url.startswith((*urls, "data:")) for url in asked)
