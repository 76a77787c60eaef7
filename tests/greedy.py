"""The one way to say that two texts at temperature 0 are equal: see ggufspec.engine.scoring."""

from __future__ import annotations

from collections.abc import Sequence

from ggufspec.engine.engine import Engine
from ggufspec.engine.options import CheckedOptions
from ggufspec.engine.scoring import compare


def assert_same(
    engine: Engine,
    prompt: str | Sequence[int],
    found: Sequence[int],
    wanted: Sequence[int],
    **options: object,
) -> int:
    """Both continuations are equal; returns how many differ by a near-tie.

    Only GPUs and llama.cpp's kernels make near-ties. `options` are those that the texts were
    written with. If they differ, the engine forgets its slots.
    """
    tokens = engine.tokenize(prompt)
    given = CheckedOptions.of({**engine.file_sampling.options, **options})  # type: ignore[typeddict-item]
    divergence = compare(engine, tokens, list(found), list(wanted), given)
    if divergence is None:
        return 0
    texts = ["".join(engine.vocab.piece(token).decode("utf-8", "replace") for token in text)
             for text in (found, wanted)]  # fmt: skip
    assert divergence.is_near_tie, (
        f"the texts differ {divergence.reason}\nfound:  {texts[0]!r}\nwanted: {texts[1]!r}"
    )
    return 1
