"""Drafts that read the images of a text with a projector of their own."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import head_pairs
import pytest
import tiny
import tiny_projectors
from engine.test_images import GREEDY, HOW, n_encoded, said
from greedy import assert_same
from tiny_projectors import PAIRS, png

import ggufspec
from ggufspec.engine.engine import Engine
from ggufspec.errors import ModelError, OptionError

MODEL: Any = {**GREEDY, "drafter": "model", "n_draft": 3}


@pytest.fixture(scope="module", params=PAIRS)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """Two equal models in folders of their own, each with its projector."""
    folder = tmp_path_factory.mktemp(request.param)
    write_projector, write_model = PAIRS[request.param]
    (folder / "a").mkdir()
    write_projector(folder / "a" / "mmproj.gguf")
    target = write_model(folder / "a" / "model.gguf")
    return target, Path(shutil.copytree(folder / "a", folder / "b"), "model.gguf")


def acceptance(engine: Engine) -> float:
    n_drafted = n_accepted = 0
    for seed in range(3):
        prompt = engine.render([said("what", png(40, 24, seed), png(24, 24, seed + 9))])
        stats = engine.generate(prompt, **MODEL).stats
        n_drafted, n_accepted = n_drafted + stats.n_drafted, n_accepted + stats.n_accepted
    return n_accepted / n_drafted


def test_a_draft_equal_to_the_target_is_accepted_if_it_sees_the_images(
    pair: tuple[Path, Path],
) -> None:
    target, draft = pair
    with ggufspec.load(target, draft, **HOW) as engine:
        assert acceptance(engine) == 1
        engine.pair.are_apart = True  # as if on two devices, so that both read at the same time
        engine.forget()
        assert acceptance(engine) == 1
    blind: Any = {"mmproj": target.with_name("mmproj.gguf"), "mmproj_auto": False}
    with ggufspec.load(target, draft, **blind, **HOW) as engine:
        assert acceptance(engine) < 0.9


def test_a_projector_of_both_is_loaded_once(pair: tuple[Path, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(pair[0].parent, tmp_path / "both"))
    draft = Path(shutil.copy(folder / "model.gguf", folder / "draft.gguf"))
    with ggufspec.load(folder / "model.gguf", draft, **HOW) as engine:
        assert acceptance(engine) == 1
        assert n_encoded(engine) == 6
        assert "draft.gguf reads images with mmproj.gguf" in engine.kernels


@pytest.fixture(scope="module", params=[8, 2])
def other(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    """A draft whose projector makes 4 or 64 cells of an image, instead of 16."""
    folder = tmp_path_factory.mktemp("other")
    how: Any = {
        "mmproj": tiny_projectors.write_llava(folder / "target-mmproj.gguf"),
        "mmproj_draft": tiny_projectors.write_llava(folder / "p.gguf", patch=request.param),
    }
    target = tiny.write_llama(folder / "target.gguf")
    draft = tiny.write_llama(folder / "draft.gguf", seed=1)
    with ggufspec.load(target, draft, n_slots=2, **how, **HOW) as loaded:
        yield loaded


def test_greedy_texts_are_those_without_drafts(other: Engine) -> None:
    for seed in range(3):
        prompt = other.render([said("what", png(40, 24, seed), png(24, 24, seed + 9))])
        plain = other.generate(prompt, **{**GREEDY, "drafter": "none"})
        found = other.generate(prompt, **MODEL)
        assert_same(other, prompt, found.tokens, plain.tokens, **GREEDY)
        assert found.stats.n_drafted > 0


def test_over_two_turns_target_and_draft_keep_cells_and_encode_once(other: Engine) -> None:
    projector, tokens, n_before = other.pair.target.projector, list[int](), 0
    assert projector is not None
    assert projector.draft is not None
    is_smaller = len(projector.draft.read(png(16, 16))) < len(projector.read(png(16, 16)))
    before = projector.n_encoded, projector.draft.n_encoded
    for turn in range(2):
        tokens = [*tokens, *other.render([said(f"turn {turn}", png(16, 24, 100 + turn))])]
        held = [
            (slot.target.n_common(tokens), slot.draft.n_common(tokens))
            for slot in other.pair.slots
            if slot.draft is not None
        ]
        assert min(max(held)) >= n_before
        tokens += other.generate(tokens, **MODEL).tokens
        n_before = len(tokens) - 6  # the draft has not read the last round
        n_of_draft = turn + 1 if is_smaller else 0
        found = projector.n_encoded - before[0], projector.draft.n_encoded - before[1]
        assert found == (turn + 1, n_of_draft)


def test_a_text_without_a_draft_model_is_encoded_for_the_target_only(other: Engine) -> None:
    projector = other.pair.target.projector
    assert projector is not None
    assert projector.draft is not None
    before = projector.draft.n_encoded
    prompt = other.render([said("b", png(40, 24, 55))])
    for drafter in ("none", "ngram"):
        other.generate(prompt, drafter=drafter, **GREEDY)
    assert projector.draft.n_encoded == before


# What is refused, or left out


def test_a_projector_that_was_named_has_to_fit(tmp_path: Path) -> None:
    target = draft = tiny.write_llama(tmp_path / "target.gguf")
    tiny_projectors.write_llava(tmp_path / "mmproj.gguf")
    wide = tiny_projectors.write_llava(tmp_path / "wide.gguf", n_text=64)
    with pytest.raises(ModelError, match="not made for"):
        ggufspec.load(target, draft, mmproj_draft=wide, **HOW)
    with pytest.raises(OptionError, match=r"--mmproj-draft.*needs a draft model"):
        ggufspec.load(target, mmproj_draft=wide, **HOW)
    with pytest.raises(OptionError, match=r"--mmproj-draft.*a target that reads images"):
        ggufspec.load(target, draft, mmproj_draft=wide, mmproj_auto=False, **HOW)
    with pytest.raises(ModelError, match="its context is shorter"):
        ggufspec.load(target, draft, mmproj_draft=wide, n_ctx_draft=64, **HOW)
    other = tiny.write_llama(tmp_path / "other.gguf", vocab=tiny.BPE)
    with pytest.raises(ModelError, match="it has another vocabulary"):
        ggufspec.load(target, other, mmproj_draft=wide, **HOW)
    head = head_pairs.WRITERS["eagle3"](tmp_path)
    seeing = tiny_projectors.write_llava(tmp_path / "seeing.gguf")
    with pytest.raises(OptionError, match="needs a draft model"):
        ggufspec.load(head.target, head.draft, mmproj=seeing, mmproj_draft=wide, **HOW)


def test_a_projector_that_was_found_and_does_not_fit_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "draft").mkdir()
    target = tiny.write_llama(tmp_path / "target.gguf")
    tiny_projectors.write_llava(tmp_path / "mmproj.gguf")
    draft = tiny.write_llama(tmp_path / "draft" / "draft.gguf")
    tiny_projectors.write_llava(tmp_path / "draft" / "mmproj-draft.gguf", n_text=64)
    with ggufspec.load(target, draft, **HOW) as engine:
        assert any("mmproj-draft.gguf is not used: " in line for line in engine.kernels)
        assert acceptance(engine) < 1
