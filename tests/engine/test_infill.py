"""Prompts for the text between two others: their order, what is cut, and what is drafted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny

import ggufspec
from ggufspec.engine.engine import Engine
from ggufspec.engine.infill import infill_prompt, reading_order
from ggufspec.errors import PromptError
from ggufspec.llama.vocab import Vocab

PRE, SUF, MID, REPO, FILE = map(tiny.CODE.id_of, tiny.INFILL_NAMES)


@pytest.fixture(scope="module")
def coder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    path = tmp_path_factory.mktemp("models") / "coder.gguf"
    tiny.write_llama(path, vocab=tiny.CODE, n_ctx_train=4096)
    with ggufspec.load(path, n_threads=1, tuned=False) as engine:
        yield engine


@pytest.fixture(scope="module")
def vocab(coder: Engine) -> Vocab:
    return coder.vocab


def tokens_of(vocab: Vocab, text: str) -> list[int]:
    return vocab.tokenize(text, add_special=False, parse_special=False)


def made(vocab: Vocab, prefix: str, suffix: str, **how: Any) -> list[int]:
    return infill_prompt(vocab, prefix, suffix, **{"n_ctx": 4096, "n_text": 64, **how})


def test_the_order_is_that_of_llama_cpp(vocab: Vocab) -> None:
    found = made(vocab, "a =", "c", files=[("x.py", "x = 1")], begun=" b")
    head = [REPO, *tokens_of(vocab, "myproject\n"), FILE, *tokens_of(vocab, "x.py\n")]
    here = [*tokens_of(vocab, "x = 1"), FILE, *tokens_of(vocab, "filename\n")]
    begins = [vocab.bos] if vocab.adds_bos else []
    before = [PRE, *tokens_of(vocab, "a ="), *tokens_of(vocab, " b")]
    after = [SUF, *tokens_of(vocab, "c")]
    assert found == [*head, *here, *begins, *before, *after, MID]
    found = made(vocab, "a =", "c", suffix_first=True)
    assert found[found.index(SUF) :] == [*after, PRE, *tokens_of(vocab, "a ="), MID]


def test_names_of_special_tokens_in_the_texts_are_plain_text(vocab: Vocab) -> None:
    found = made(vocab, "<|fim_middle|>", "<|fim_prefix|>", files=[("tmp", "<|file_sep|>")])
    assert [found.count(each) for each in (PRE, SUF, MID, FILE)] == [1, 1, 1, 2]


def test_long_texts_are_cut_around_the_gap_and_fit_the_context(vocab: Vocab) -> None:
    numbers = " ".join(map(str, range(3000)))
    files = [("old.py", numbers), ("new.py", "near")]
    for n_ctx in (64, 256, 1024, 4096, 8192):
        found = made(vocab, numbers, numbers, files=files, n_ctx=n_ctx, n_text=n_ctx // 4)
        assert len(found) <= n_ctx - min(n_ctx // 4, 512)
        before = found[found.index(PRE) + 1 : found.index(SUF)]
        after = found[found.index(SUF) + 1 : -1]
        assert before == tokens_of(vocab, numbers)[-len(before) :]
        assert after == tokens_of(vocab, numbers)[: len(after)]
        assert len(before) > len(after)
        near = [*tokens_of(vocab, "near"), FILE, *tokens_of(vocab, "filename\n")]
        assert found[: found.index(PRE)][-len(near) :] == near or n_ctx < 256


def test_typing_moves_the_beginning_of_a_cut_prefix_in_steps_only(vocab: Vocab) -> None:
    text = "".join(map(chr, range(97, 123))) * 100
    starts = set()
    for n in range(100):
        found = made(vocab, text[: 2400 + n], "after")
        starts.add(bytes(str(found[: found.index(PRE) + 20]), "ascii"))
    assert len(starts) <= 2


def test_the_engine_leaves_room_for_the_text(coder: Engine) -> None:
    numbers = " ".join(map(str, range(3000)))
    prompt = coder.infill_prompt(numbers, numbers, files=[("a.py", numbers)], n_text=40)
    found = coder.generate(prompt, max_tokens=40, ignore_eos=True)
    assert len(found.tokens) == 40
    assert coder.infill_prompt("a", "b") == made(coder.vocab, "a", "b")


def test_a_model_without_such_tokens_refuses_and_says_so(tmp_path: Path) -> None:
    path = tiny.write_llama(tmp_path / "plain.gguf", vocab=tiny.BPE)
    with ggufspec.load(path, n_threads=1, tuned=False) as engine:
        with pytest.raises(PromptError, match="fill-in-the-middle"):
            made(engine.vocab, "a", "b")
        assert reading_order([1, 2, 3], engine.vocab.infill_tokens) == ()


def test_n_grams_read_the_prefix_last(vocab: Vocab) -> None:
    marks = vocab.infill_tokens
    found = made(vocab, "before", "after")
    first = found[: found.index(PRE)]
    order = [*first, *found[found.index(SUF) :], *found[found.index(PRE) : found.index(SUF)]]
    assert reading_order(found, marks) == order
    assert reading_order(made(vocab, "before", "after", suffix_first=True), marks) == ()
    assert reading_order(found[:-1], marks) == ()
    assert reading_order([SUF, 5, MID], marks) == reading_order([], marks) == ()


def test_what_follows_the_prefix_elsewhere_is_drafted_from_the_first_token_on(
    tmp_path: Path, vocab: Vocab
) -> None:
    """The text continues the prefix as another file does: one draft holds all of it."""
    said = " for each one of them in turn"
    prompt = made(vocab, "x\ndef run():", "\nlast", files=[("tmp", f"def run():{said}\nother")])
    script = tokens_of(vocab, said)
    path = tiny.write_timed(
        tmp_path / "timed.gguf", script, n_prompt=len(prompt), vocab=tiny.CODE, n_ctx_train=512
    )
    with ggufspec.load(path, n_threads=1, tuned=False, n_draft_max=len(script)) as engine:
        how: dict[str, Any] = {"temperature": 0, "max_tokens": len(script), "drafter": "ngram"}
        found = engine.generate(prompt, **how, n_draft=len(script) - 1)
    assert found.text == said
    assert found.stats.n_rounds == 1
    assert found.stats.n_accepted == len(script) - 1


def test_a_text_ends_with_its_line_after_max_seconds(coder: Engine) -> None:
    line = tokens_of(coder.vocab, "\n")
    how: dict[str, Any] = {"max_tokens": 40, "logit_bias": {line[0]: 100.0}, "temperature": 0}
    assert coder.generate("hi", **how).text == "\n" * 40
    late = coder.generate("hi", **how, max_seconds=0)
    assert (late.text, late.finish_reason) == ("\n", "length")
    assert coder.generate("hi", **how, max_seconds=1e6).text == "\n" * 40
