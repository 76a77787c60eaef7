"""LoRA adapters in a server: listed, and the same for all texts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import lora
import pytest
import tiny
from serving import Live, serving

import ggufspec

GREEDY: dict[str, Any] = {"prompt": "hello world", "temperature": 0, "max_tokens": 8}
LOADED = [{"id": 0, "scale": 0.5}, {"id": 1, "scale": 1}]


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("adapted")
    model = tiny.write_llama(folder / "target.gguf", vocab=tiny.BPE, chat_template=tiny.CHATML)
    files = [lora.write_lora(folder / f"{i}.gguf", seed=i) for i in range(2)]
    how: dict[str, Any] = {"n_threads": 1, "n_ctx": 256, "tuned": False}
    with (
        ggufspec.load(model, lora=[(files[0], 0.5), files[1]], **how) as engine,
        serving(engine) as running,
    ):
        yield running


def test_they_are_listed_without_their_folder(adapted: Live, live: Live) -> None:
    assert adapted.client.get("/lora-adapters").json() == [
        {"id": 0, "path": "0.gguf", "scale": 0.5},
        {"id": 1, "path": "1.gguf", "scale": 1.0},
    ]
    assert live.client.get("/lora-adapters").json() == []


def test_a_request_may_name_the_scales_that_are_loaded(adapted: Live, live: Live) -> None:
    plain = adapted.ok("/v1/completions", **GREEDY)["choices"]
    for asked in (LOADED, LOADED[::-1], [], None):
        assert adapted.ok("/v1/completions", **GREEDY, lora=asked)["choices"] == plain
    message = {"role": "user", "content": "hello"}
    adapted.ok("/v1/chat/completions", messages=[message], max_tokens=2, lora=LOADED)
    assert live.ok("/v1/completions", **GREEDY, lora=[])["choices"]
    assert adapted.client.post("/lora-adapters", json=LOADED).json() == {"success": True}


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (
            [{"id": 0, "scale": 1}, LOADED[1]],
            r"\[0.5, 1.0\] for all texts.*request has \[1.0, 1.0\]",
        ),
        ([LOADED[0]], r"request has \[0.5, 0.0\]"),
        ([*LOADED, {"id": 2, "scale": 0}], "there is no LoRA adapter 2; the server has 2"),
        ([{"id": -1, "scale": 0}], "there is no LoRA adapter -1"),
        ([{"id": 0}], "scale"),
        ([{"id": "0", "scale": 1}], "id"),
        ([{"id": 0, "scale": 1, "more": 1}], "more"),
    ],
)
def test_other_scales_are_refused(adapted: Live, asked: Any, said: str) -> None:
    for response in (
        adapted.post("/v1/completions", **GREEDY, lora=asked),
        adapted.client.post("/lora-adapters", json=asked),
    ):
        assert response.status_code == 400, response.text
        assert re.search(said, response.json()["error"]["message"])
