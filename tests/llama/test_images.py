"""Images in a text: what the context computes is what libmtmd's own helper computes."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

import llama_cpp
import llama_cpp.mtmd_cpp as mtmd
import numpy as np
import pytest
import tiny_projectors
from plain_context import assert_same, plain_context
from tiny_image_models import KINDS, image_for
from tiny_projectors import PAIRS, png

from ggufspec.decoding.types import Logits
from ggufspec.errors import ModelError, PromptError
from ggufspec.llama.context import Context
from ggufspec.llama.hidden_states import BatchPart
from ggufspec.llama.image_cells import (
    cells_of,
    images_in,
    n_replaced,
    replaced,
    without_images,
)
from ggufspec.llama.model import Model
from ggufspec.llama.projector import Projector
from ggufspec.llama.session import LlamaSession
from ggufspec.models.header import read_header

BEFORE, AFTER = [1, 20, 30, 40, 50], [60, 70, 80]
FILE = png(40, 24)
N_CTX = 1024

Loaded = tuple[Model, Projector]


@contextmanager
def opened(kind: str, folder: Path) -> Iterator[Loaded]:
    write_projector, write_model = KINDS[kind]
    file = write_projector(folder / "mmproj.gguf")
    with (
        closing(Model(write_model(folder / "model.gguf"))) as model,
        closing(Projector(file, model, n_threads=1)) as projector,
    ):
        yield model, projector


@pytest.fixture(scope="module", params=PAIRS)
def loaded(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    with opened(request.param, tmp_path_factory.mktemp("files")) as found:
        yield found


@pytest.fixture
def context(loaded: Loaded) -> Iterator[Context]:
    with context_of(loaded) as made:
        yield made


@contextmanager
def context_of(loaded: Loaded, **options: Any) -> Iterator[Context]:
    model, projector = loaded
    options = {"n_ctx": 256, "n_rows": 8, "n_sequences": 2, **options}
    with closing(plain_context(model, **options)) as made:
        made.projector, made.native.has_images = projector, True
        yield made


def by_helper(model: Model, projector: Projector, parts: Sequence[list[int] | bytes]) -> Logits:
    """The logits after tokens and image files, by mtmd_helper_eval_chunk_single."""
    with closing(plain_context(model, n_ctx=N_CTX)) as context:
        n_past = ctypes.c_int32(0)
        for part in parts:
            if isinstance(part, list):
                _decode_at(context, part, n_past.value)
                n_past.value += len(part)
                continue
            chunks = mtmd.mtmd_input_chunks_init()
            data = (ctypes.c_uint8 * len(part)).from_buffer_copy(part)
            bitmap = mtmd.mtmd_helper_bitmap_init_from_buf(
                projector.pointer, data, len(part), False
            )
            each = mtmd.mtmd_input_part(text=None, bitmap=bitmap)
            array = (ctypes.POINTER(mtmd.mtmd_input_part) * 1)(ctypes.pointer(each))
            assert not mtmd.mtmd_tokenize_from_parts(projector.pointer, chunks, array, 1, False)
            code = mtmd.mtmd_helper_eval_chunks(
                *(projector.pointer, context.pointer, chunks, n_past.value, 0, 256, False),
                ctypes.byref(n_past),
            )
            assert code == 0
            mtmd.mtmd_bitmap_free(bitmap)
            mtmd.mtmd_input_chunks_free(chunks)
        row = llama_cpp.llama_get_logits_ith(context.pointer, -1)
        return np.ctypeslib.as_array(row, (1, context.n_vocab)).copy()


def _decode_at(context: Context, tokens: list[int], position: int) -> None:
    batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for i, token in enumerate(tokens):
        batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position + i, 1
        batch.seq_id[i][0], batch.logits[i] = 0, i == len(tokens) - 1
    assert llama_cpp.llama_decode(context.pointer, batch) == 0
    llama_cpp.llama_batch_free(batch)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_libmtmd(kind: str, tmp_path: Path) -> None:
    file, other = image_for(kind), png(16, 32, seed=1)
    with opened(kind, tmp_path) as (model, projector):
        tokens = [*BEFORE, *projector.read(file), *AFTER, *projector.read(other), *AFTER]
        kept = projector.encode(tokens)
        assert len(kept) == len(images_in(tokens))
        with context_of((model, projector), n_ctx=N_CTX) as context:
            rows = LlamaSession(context).score(tokens).copy()
        assert_same(rows, by_helper(model, projector, [BEFORE, file, AFTER, other, AFTER]))
        wrong = by_helper(model, projector, [BEFORE, other, AFTER, file, AFTER])
        assert np.abs(rows - wrong).max() > 0.05


@pytest.fixture
def texts(loaded: Loaded) -> Iterator[tuple[list[int], list[int]]]:
    """Two texts that differ in an image; their images are known while it is used."""
    _, projector = loaded
    image, other = (projector.read(each) for each in (FILE, png(40, 24, seed=1)))
    first = [*BEFORE, *image, *AFTER, *other, *AFTER]
    second = [*BEFORE, *image, *AFTER, *image, *AFTER, *AFTER]
    kept = projector.encode([*first, *second])
    yield first, second
    del kept


def fresh(context: Context, tokens: Sequence[int], draft: Sequence[int] = ()) -> Logits:
    session = LlamaSession(context, 1)
    session.forget()
    return session.score(tokens, draft).copy()


def departs_at(text: list[int]) -> int:
    """The place of its second image."""
    return text.index(images_in(text)[1][0])


def test_a_text_that_departs_in_an_image_is_read_from_its_start(
    context: Context, texts: tuple[list[int], list[int]]
) -> None:
    session = LlamaSession(context)
    for text in (*texts, *texts, texts[0][:8]):
        whole = text if len(text) != 8 else [*text[:5], *AFTER]
        assert_same(session.score(whole), fresh(context, whole))
    if context.n_droppable is None and not context.model.has_windows:
        session.score(texts[0])
        inside = texts[0][: departs_at(texts[0]) + 2]
        for text in (texts[1], inside):
            assert session.n_common(text) == departs_at(texts[0])


def test_rows_of_drafts_behind_an_image_are_those_of_longer_texts(
    context: Context, texts: tuple[list[int], list[int]]
) -> None:
    session, draft = LlamaSession(context), [90, 91, 92, 93]
    for text in texts:
        rows = session.score(text, draft).copy()
        for i in range(len(draft) + 1):
            assert_same(rows[i : i + 1], fresh(context, [*text, *draft[:i]]))
        accepted = [*text, *draft[:2], 99]
        assert_same(session.score(accepted, draft), fresh(context, accepted, draft))


def test_trees_behind_an_image_have_the_rows_of_their_paths(
    loaded: Loaded, texts: tuple[list[int], list[int]]
) -> None:
    with context_of(loaded, n_leaves=3) as context:
        if not context.reads_trees:
            pytest.skip("this model reads chains only")
        session, text = LlamaSession(context), texts[0]
        tree, parents = [90, 91, 92, 93, 94], [-1, 0, -1, 2, 2]
        paths: list[list[int]] = [[], [90], [90, 91], [92], [92, 93], [92, 94]]
        rows = session.score(text, tree, parents).copy()
        for row, path in zip(rows, paths, strict=True):
            assert_same(row[None], fresh(context, [*text, *path]))
        accepted = [*text, 92, 94, 95]  # a branch
        assert_same(session.score(accepted), fresh(context, accepted))
        again = session.score([*accepted, 96], tree, parents).copy()
        assert_same(again[-1:], fresh(context, [*accepted, 96, 92, 94]))


def test_a_saved_text_with_images_goes_on(
    context: Context, texts: tuple[list[int], list[int]]
) -> None:
    session, text = LlamaSession(context), texts[0]
    session.score(text)
    saved = session.save(text)
    session.forget()
    session.restore(saved)
    assert session.n_common(text) == len(text)
    longer = [*text, 90, 91]
    assert_same(session.score(longer), fresh(context, longer))


def test_sequences_share_cells_of_images(
    context: Context, texts: tuple[list[int], list[int]]
) -> None:
    if not context.can_share_passes:
        pytest.skip("its sequences share no cells")
    one, two = LlamaSession(context), LlamaSession(context, 1)
    one.score(texts[0])
    two.borrow(0, texts[1])
    assert two.n_common(texts[1]) == departs_at(texts[0])
    rows = two.score(texts[1]).copy()
    one.forget()
    assert_same(rows, one.score(texts[1]))


def test_a_draft_model_reads_the_text_without_its_images(
    loaded: Loaded, context: Context, texts: tuple[list[int], list[int]]
) -> None:
    model, _ = loaded
    with closing(plain_context(model, n_ctx=256, n_rows=8)) as plain:
        session = LlamaSession(plain, drafts=True, cells_for=lambda cells: ())
        for text in (*texts, texts[0]):
            assert_same(session.score(text), fresh(context, without_images(text)))


def test_an_image_and_a_text_of_a_draft_are_read_in_one_call(
    loaded: Loaded, context: Context, texts: tuple[list[int], list[int]]
) -> None:
    cells = images_in(texts[0])[0]
    with closing(plain_context(loaded[0], n_ctx=256, n_rows=8)) as draft:
        of_draft = [BatchPart(0, array("i", BEFORE), 0)]
        context.decode_beside([BatchPart(0, cells, 0)], draft, of_draft)
        assert context.n_cells(0) == len(cells)
        assert draft.n_cells(0) == len(BEFORE)


def test_cells_tell_images_apart_and_say_where_they_end() -> None:
    one, two = cells_of(b"one", 5, 5), cells_of(b"two", 5, 3)
    assert max(*one, *two) < 0
    assert cells_of(b"one", 5, 5) == one
    assert not {*one} & {*two}
    assert images_in([1, *one, *two, 2, *one]) == [one, two, one]
    assert list(without_images([1, *one, 2])) == [1, 2]


def test_places_in_a_text_with_other_cells_are_found() -> None:
    one, two, small = cells_of(b"one", 5, 5), cells_of(b"two", 5, 3), cells_of(b"small", 2, 2)
    text = array("i", [1, 2, *one, 3, *two, *one, 4])
    others = {one.tobytes(): small, two.tobytes(): ()}

    def other(cells: array[int]) -> Sequence[int]:
        return others.get(cells.tobytes(), ())

    found = replaced(text, other)
    assert list(found) == [1, 2, *small, 3, *small, 4]
    places = [n_replaced(text, n, other) for n in range(len(found) + 1)]
    assert places == [0, 1, 2, 2, 7, 13, 13, 18, 19]
    assert list(replaced(text[:9], other)) == [1, 2, *small, 3], "an incomplete image is left out"


def test_an_image_that_is_not_kept_any_more_is_refused(loaded: Loaded) -> None:
    _, projector = loaded
    with pytest.raises(PromptError, match="render the messages with the image again"):
        projector.encode([1, *cells_of(b"unknown", 4, 4), 2])


def test_an_image_is_encoded_once(loaded: Loaded) -> None:
    _, projector = loaded
    before = projector.n_encoded
    tokens = projector.read(png(24, 24, seed=9))
    assert projector.n_encoded == before
    for _ in range(3):
        assert projector.read(png(24, 24, seed=9)) == tokens
        projector.encode([1, *tokens, 2])
    assert projector.n_encoded == before + 1


def test_an_image_whose_text_never_began_is_dropped(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, projector = loaded
    begun, refused = (projector.read(png(24, 24, seed)) for seed in (20, 21))
    projector.encode(begun)
    monkeypatch.setattr("ggufspec.llama.projector.monotonic", lambda: monotonic() + 61)
    projector.read(png(24, 24, seed=22))
    assert projector.check(begun) == 1
    with pytest.raises(PromptError, match="not kept any more"):
        projector.check(refused)


def test_a_projector_for_another_width_is_refused(tmp_path: Path) -> None:
    with closing(Model(tiny_projectors.tiny.write_llama(tmp_path / "m.gguf", n_embd=64))) as model:
        file = tiny_projectors.write_llava(tmp_path / "mmproj.gguf")
        with pytest.raises(ModelError, match="not made for"):
            Projector(file, model, n_threads=1)
        with pytest.raises(ModelError, match="is not a projector"):
            Projector(model.path, model, n_threads=1)


def test_a_model_without_the_tokens_between_parts_of_an_image_is_refused(tmp_path: Path) -> None:
    file = tiny_projectors.write_minicpmv(tmp_path / "mmproj.gguf")
    path = tiny_projectors.tiny.write_llama(tmp_path / "m.gguf", n_embd=128)
    with (
        closing(Model(path)) as model,
        closing(Projector(file, model, n_threads=1)) as projector,
        pytest.raises(PromptError, match="no tokens for the parts of an image"),
    ):
        projector.read(FILE)


def test_images_whose_cells_see_each_other_fit_into_a_batch(tmp_path: Path) -> None:
    write_projector, write_model = KINDS["gemma4v"]
    file, large = write_projector(tmp_path / "mmproj.gguf"), png(400, 300)
    with closing(Model(write_model(tmp_path / "model.gguf"))) as model:
        for n_batch, least in ((16, 60), (128, 100), (2048, 1000)):
            with closing(Projector(file, model, n_threads=1, n_batch=n_batch)) as projector:
                (cells,) = images_in(projector.read(large))
                assert least <= len(cells) <= max(n_batch, 80)


def test_breaks_between_rows_do_not_depend_on_unset_memory(tmp_path: Path) -> None:
    """Freed memory is full of NaN; glibc hands it out again, if it maps no memory for it."""
    libc, options = ctypes.CDLL(None), (-1, -3)  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
    if not hasattr(libc, "mallopt"):
        pytest.skip("this C library always maps new memory")
    write_projector, write_model = KINDS["pixtral"]
    file = write_projector(tmp_path / "mmproj.gguf")
    breaks = read_header(file).starts["v.token_embd.img_break"][1]
    wanted = np.frombuffer(file.read_bytes(), np.float32, 32, breaks)
    for option in options:
        libc.mallopt(option, 2**30)
    with closing(Model(write_model(tmp_path / "model.gguf"))) as model:
        for seed in range(8):
            garbage = [np.full(2**n, np.nan, np.float32) for n in range(12, 21) for _ in range(3)]
            del garbage
            with closing(Projector(file, model, n_threads=1)) as projector:
                (image,) = projector.encode([1, *projector.read(png(40, 24, seed)), 2])
                assert (image.embeddings == wanted).all(axis=1).sum() == 2  # of three rows
                assert np.isfinite(image.embeddings).all()
    for option in options:
        libc.mallopt(option, 2**17)  # the default
