"""Texts with images: drafts change nothing, and no turn reads anything twice."""

from __future__ import annotations

import base64
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import head_pairs
import pytest
import tiny
import tiny_projectors
from greedy import assert_same
from tiny_image_models import KINDS, image_for
from tiny_projectors import PAIRS, png

import ggufspec
from ggufspec.engine.engine import Engine
from ggufspec.errors import ModelError, OptionError, PromptError, PromptTooLongError
from ggufspec.models.header import read_header

GREEDY: Any = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 24}
TEMPLATE = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
HOW: Any = {"n_ctx": 256, "n_threads": 1, "tuned": False, "chat_template": TEMPLATE}


def said(text: str, *images: bytes, role: str = "user") -> dict[str, Any]:
    shown = [{"type": "image", "data": image} for image in images]
    return {"role": role, "content": [{"type": "text", "text": "a"}, *shown,
                                      {"type": "text", "text": text}]}  # fmt: skip


@pytest.fixture(scope="module", params=PAIRS)
def files(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path, Path]:
    """A projector, its model, and a draft."""
    folder = tmp_path_factory.mktemp(request.param)
    write_projector, write_model = PAIRS[request.param]
    return (
        write_projector(folder / "mmproj.gguf"),
        write_model(folder / "target.gguf"),
        tiny.write_llama(folder / "draft.gguf", seed=1),
    )


@pytest.fixture(scope="module")
def engine(files: tuple[Path, Path, Path]) -> Iterator[Engine]:
    projector, target, draft = files
    with ggufspec.load(target, draft, mmproj=projector, n_slots=2, cache_ram=64, **HOW) as loaded:
        yield loaded


def n_encoded(engine: Engine) -> int:
    assert engine.pair.target.projector is not None
    return engine.pair.target.projector.n_encoded


def test_greedy_texts_are_equal_with_and_without_drafts(engine: Engine) -> None:
    for seed in range(3):
        prompt = engine.render([said("what? " * 4, png(40, 24, seed), png(16, 16, seed))])
        plain = engine.generate(prompt, drafter="none", **GREEDY)
        assert len(plain.tokens) == GREEDY["max_tokens"]
        for drafter in ("model", "ngram", "staged", "auto"):
            found = engine.generate(prompt, drafter=drafter, n_draft=4, **GREEDY)
            assert_same(engine, prompt, found.tokens, plain.tokens, **GREEDY)
            if drafter == "model":
                assert found.stats.n_drafted > 0


def test_sampled_texts_repeat_with_a_seed(engine: Engine) -> None:
    prompt = engine.render([said("b", png(40, 24, 7))])
    texts = {engine.generate(prompt, seed=3, max_tokens=16, n_draft=3).tokens for _ in range(2)}
    assert len(texts) == 1


def test_texts_with_images_share_passes(engine: Engine) -> None:
    prompts = [engine.render([said("b" * i, png(24, 24, i))]) for i in range(4)]
    together = engine.generate_batch(prompts, n_draft=2, **GREEDY)
    for prompt, found in zip(prompts, together, strict=True):
        alone = engine.generate(prompt, drafter="none", **GREEDY)
        assert_same(engine, prompt, found.tokens, alone.tokens, **GREEDY)


def test_over_four_turns_nothing_is_read_or_encoded_twice(engine: Engine) -> None:
    before, n_before = n_encoded(engine), 0
    tokens: list[int] = []
    for turn in range(4):
        tokens = [*tokens, *engine.render([said(f"turn {turn}", png(16, 24, 100 + turn))])]
        written = engine.generate(tokens, **{**GREEDY, "max_tokens": 6})
        if turn and engine.pair.target.n_droppable is None:
            assert written.stats.n_prompt_reused >= n_before - 1
        assert n_encoded(engine) == before + turn + 1
        n_before = len(tokens)
        tokens += written.tokens
    if engine.pair.target.n_droppable is None and not engine.pair.target.model.has_windows:
        # Another text takes both slots; then the conversation comes back from the prompt cache.
        engine.generate_batch([[*range(20 + 50 * i, 120 + i)] for i in (0, 1)], **GREEDY)
        again = engine.generate([*tokens, 9], **{**GREEDY, "max_tokens": 6})
        assert again.stats.n_prompt_reused >= len(tokens) - 1
    assert n_encoded(engine) == before + 4


def test_a_saved_text_is_restored_with_its_images(engine: Engine, tmp_path: Path) -> None:
    prompt = [*engine.render([said("saved", png(40, 24, 8))]), 9, 10]
    engine.save(tmp_path / "text", prompt)
    engine.forget()
    engine.restore(tmp_path / "text")
    wanted = engine.generate(prompt, **GREEDY)
    assert wanted.stats.n_prompt_reused >= len(prompt) - 2
    engine.forget()
    found = engine.generate(prompt, **GREEDY)
    assert_same(engine, prompt, found.tokens, wanted.tokens, **GREEDY)


def test_encoding_tells_its_progress_and_ends_if_that_raises(engine: Engine) -> None:
    prompt = engine.render([said("b", png(40, 24, 60), png(40, 24, 61))])
    before, told = n_encoded(engine), list[tuple[int, int]]()

    def stop(name: str, n_done: int, n_all: int) -> None:
        if name == "images":
            told.append((n_done, n_all))
            if n_done == 1 and told.count((1, 2)) == 3:
                raise InterruptedError("enough")

    with pytest.raises(InterruptedError, match="enough"):
        engine.generate(prompt, progress=stop, **GREEDY)
    assert n_encoded(engine) == before + 1
    found = engine.generate(prompt, progress=stop, **GREEDY)
    assert n_encoded(engine) == before + 2
    assert told[-1] == (2, 2)
    engine.forget()
    assert_same(engine, prompt, found.tokens, engine.generate(prompt, **GREEDY).tokens, **GREEDY)


def test_ctrl_c_ends_encoding(engine: Engine) -> None:
    prompt, before = engine.render([said("b", png(40, 24, 70))]), n_encoded(engine)
    n_told = 0

    def interrupt(name: str, n_done: int, n_all: int) -> None:
        nonlocal n_told
        n_told += 1
        if n_told == 2:
            signal.raise_signal(signal.SIGINT)
        assert n_told < 4, "it goes on"

    with pytest.raises(KeyboardInterrupt):
        engine.generate(prompt, progress=interrupt, **GREEDY)
    assert n_encoded(engine) == before
    assert engine.generate(prompt, **GREEDY).tokens
    assert n_encoded(engine) == before + 1


def test_an_image_changes_the_text_and_its_place_counts(engine: Engine) -> None:
    one, two = png(40, 24, 1), png(40, 24, 2)
    texts = [
        engine.chat([said("b", *images)], drafter="none", **GREEDY).tokens
        for images in ((one,), (two,), (one, two), (two, one))
    ]
    assert len({*texts}) == 4


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - PAIRS.keys()))
def test_drafts_without_the_tokens_around_images_change_nothing(kind: str, tmp_path: Path) -> None:
    write_projector, write_model = KINDS[kind]
    file, target = write_projector(tmp_path / "mmproj.gguf"), write_model(tmp_path / "target.gguf")
    draft = tiny.write_llama(tmp_path / "draft.gguf", seed=1)
    # States of recurrent models are kept at the ends of messages.
    more = {"n_ctx": 1024, "chat_template": TEMPLATE.replace("]{", "]</s>{") + "!"}
    with ggufspec.load(target, draft, mmproj=file, **{**HOW, **more}) as engine:
        first = said("what?", image_for(kind), png(16, 16))
        prompt = engine.render([first])
        plain = engine.generate(prompt, drafter="none", **GREEDY)
        for drafter in ("model", "ngram"):
            found = engine.generate(prompt, drafter=drafter, n_draft=4, **GREEDY)
            assert_same(engine, prompt, found.tokens, plain.tokens, **GREEDY)
            assert found.stats.n_drafted > 0 or drafter == "ngram"
        assert n_encoded(engine) == 2
        again = engine.chat([first, said("and?")], **GREEDY)
        assert n_encoded(engine) == 2
        assert again.stats.n_prompt_reused >= len(prompt) - 2


def test_a_model_without_positions_for_images_is_refused(tmp_path: Path) -> None:
    pair = head_pairs.WRITERS["glm4moe"](tmp_path)
    n_text = int(read_header(pair.target).number("embedding_length"))
    file = tiny_projectors.write_llava(tmp_path / "mmproj.gguf", n_text=n_text)
    with pytest.raises(ModelError, match="without positions for images"):
        ggufspec.load(pair.target, mmproj=file, **HOW)


HEADS = ("eagle3", "qwen35", "dflash", "gemma4")


@pytest.mark.parametrize("kind", HEADS)
def test_heads_draft_behind_images(kind: str, tmp_path: Path) -> None:
    pair = head_pairs.WRITERS[kind](tmp_path)
    n_text = int(read_header(pair.target).number("embedding_length"))
    file = tiny_projectors.write_llava(tmp_path / "mmproj.gguf", n_text=n_text)
    with ggufspec.load(pair.target, pair.draft, mmproj=file, **{**HOW, "n_ctx": 192}) as engine:
        prompt = engine.render([said("what", png(40, 24))])
        plain = engine.generate(prompt, drafter="none", **GREEDY)
        found = engine.generate(prompt, drafter="model", n_draft=3, **GREEDY)
        assert_same(engine, prompt, found.tokens, plain.tokens, **GREEDY)
        assert found.stats.n_accepted > 0


# What is refused


def test_a_model_without_projector_says_so(files: tuple[Path, Path, Path], tmp_path: Path) -> None:
    target = tmp_path / "text.gguf"
    target.write_bytes(files[1].read_bytes())
    with (
        ggufspec.load(target, **HOW) as engine,
        pytest.raises(PromptError, match=r"reads no images.*mmproj"),
    ):
        engine.render([said("b", png(8, 8))])


def test_a_projector_beside_the_target_is_found(files: tuple[Path, Path, Path]) -> None:
    with ggufspec.load(files[1], **HOW) as engine:
        assert engine.pair.target.projector is not None
    with ggufspec.load(files[1], mmproj_auto=False, **HOW) as engine:
        assert engine.pair.target.projector is None
    with pytest.raises(ModelError, match="is not a projector"):
        ggufspec.load(files[1], mmproj=files[1], **HOW)
    with pytest.raises(OptionError, match="mmproj is 3"):
        ggufspec.load(files[1], mmproj=3, **HOW)


def test_messages_that_are_refused_encode_nothing(engine: Engine) -> None:
    before, image = n_encoded(engine), png(32, 32, 50)
    with pytest.raises(PromptError, match="50 images, more than 32"):
        engine.chat([said("b", *[image] * 50)], **GREEDY)
    with pytest.raises(PromptTooLongError):
        engine.chat([said("b" * 300, image)], **GREEDY)
    url = "data:image/png;base64," + base64.b64encode(image).decode()
    for part, why in (
        ({"type": "image_url", "image_url": {"url": "http://a.b/c.png"}}, "begins with 'http"),
        ({"type": "image_url", "image_url": {"url": url[:-7] + "!"}}, "not valid base64"),
        ({"type": "image", "path": "/nowhere.png"}, "cannot be read"),
        ({"type": "image", "path": 7}, "path of an image is 7"),
        ({"type": "image", "path": "a\0b"}, "path of an image is"),
        ({"type": "image"}, "needs a file"),
        ({"type": "video", "url": "x"}, "needs a text 'content'"),
    ):
        with pytest.raises(PromptError, match=why):
            engine.chat([said("b", image), {"role": "user", "content": [part]}], **GREEDY)
    with pytest.raises(PromptError, match="is no object: 'what'"):
        engine.render([{"role": "user", "content": [*said("b", image)["content"], "what"]}])
    with pytest.raises(PromptError, match="not kept any more"):
        engine.generate([1, -5, 3], **GREEDY)
    with pytest.raises(PromptError, match="does not write each image once"):
        engine.render([said("b", image)], "{{ messages[0]['role'] }}")
    assert engine.pair.target.projector is not None
    if engine.pair.target.projector.read(image)[-1] < 0:
        bare = [{"role": "user", "content": [{"type": "image", "data": image}]}]
        with pytest.raises(PromptError, match="ends with an image"):
            engine.render(bare, "{{ messages[0]['content'] }}")
    assert n_encoded(engine) == before
