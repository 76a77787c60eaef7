"""What several tests of this folder share: a pair of files, and the process of templates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny

from ggufspec.decoding.types import Logits
from ggufspec.engine.chat_template import TemplateProcess
from ggufspec.llama.session import LlamaSession


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target of three layers, and a draft of one."""
    folder = tmp_path_factory.mktemp("models")
    return (
        tiny.write_llama(folder / "target.gguf", n_layer=3),
        tiny.write_llama(folder / "draft.gguf", n_layer=1),
    )


@pytest.fixture(scope="session")
def process() -> Iterator[TemplateProcess]:
    made = TemplateProcess()
    yield made
    made.close()


@pytest.fixture
def exact_rows(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, ...], bytes]:
    """The target's logits after each text, of engines with an n_draft_max of 3.

    Fails where a text is scored again and its logits have other bits.
    """
    found: dict[tuple[int, ...], bytes] = {}
    real = LlamaSession.score

    def noted(
        self: LlamaSession, tokens: Sequence[int], draft: Sequence[int] = (), *more: Any
    ) -> Logits:
        logits = real(self, tokens, draft, *more)
        if self.n_rows == 4:  # of the target
            parents = more[0] if more and more[0] else range(-1, len(draft) - 1)
            texts = [tuple(tokens)]
            for token, parent in zip(draft, parents, strict=True):
                texts.append((*texts[parent + 1], token))
            for text, row in zip(texts, logits, strict=True):
                assert found.setdefault(text, row.tobytes()) == row.tobytes(), len(text)
        return logits

    monkeypatch.setattr(LlamaSession, "score", noted)
    return found
