"""What llama.cpp decodes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from ggufspec.llama.context import Context


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the batches that go to llama.cpp, as they go."""
    sizes: list[int] = []
    decode = Context.decode

    def counting(self: Context, tokens: Sequence[int], *where: object) -> None:
        sizes.append(len(tokens))
        decode(self, tokens, *where)  # type: ignore[arg-type]

    monkeypatch.setattr(Context, "decode", counting)
    return sizes
