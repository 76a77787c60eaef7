"""A draft of another vocabulary changes nothing of what the target writes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import gguf
import pytest
import tiny

import ggufspec

TEXT = " hello world, a model of the end."
DRAFTS = {
    "subset": tiny.spm_vocab(words=tiny.WORDS[::2]),
    "foreign": tiny.bpe_vocab(words=(*tiny.WORDS, " zebra", " quilt", "tion", "ably")),
    "starts otherwise": tiny.bpe_vocab(bos="<|im_start|>", add_bos=True),
}


def without_digits(vocab: tiny.Vocab) -> tiny.Vocab:
    kinds = [
        int(gguf.TokenType.UNUSED) if vocab.bytes_of(token).isdigit() else kind
        for token, kind in enumerate(vocab.types)
    ]
    return dataclasses.replace(vocab, types=tuple(kinds))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_llama(tmp_path_factory.mktemp("target") / "target.gguf")


@pytest.mark.parametrize("vocab", DRAFTS.values(), ids=DRAFTS)
def test_greedy_texts_are_those_of_the_target(
    vocab: tiny.Vocab, target: Path, tmp_path: Path
) -> None:
    draft = tiny.write_llama(tmp_path / "draft.gguf", vocab=vocab)
    with ggufspec.load(target, draft, n_threads=1, n_slots=2) as engine:
        prompts: list[Any] = [TEXT, [1], [40, 1, 300]]
        plain = engine.generate_batch(prompts, temperature=0, max_tokens=40, drafter="none")
        found = engine.generate_batch(prompts, temperature=0, max_tokens=40, n_draft=3)
        assert [text.tokens for text in found] == [text.tokens for text in plain]
        assert found[0].stats.n_generated == 40
        assert engine.pair.vocab_map is not None
        assert engine.pair.vocab_map.note in engine.notes


def test_what_both_write_is_drafted_and_accepted(tmp_path: Path) -> None:
    script = "abcdefghij"
    paths = [
        tiny.write_scripted(
            tmp_path / f"{vocab.model}.gguf", [*map(vocab.id_of, script)], vocab=vocab
        )
        for vocab in (tiny.SPM, tiny.BPE)
    ]
    for target, draft in (paths, paths[::-1]):
        with ggufspec.load(target, draft, n_threads=1) as engine:
            done = engine.generate("hello", temperature=0, max_tokens=40, n_draft=4)
        assert done.text == 4 * script
        assert done.stats.acceptance == 1


def test_a_token_that_the_draft_writes_in_two_is_drafted(tmp_path: Path) -> None:
    draft_vocab = tiny.spm_vocab(words=("zz",))  # without "in"
    target = tiny.write_scripted(
        tmp_path / "target.gguf", [*map(tiny.SPM.id_of, ("x", "in", "g", "y"))]
    )
    draft = tiny.write_scripted(
        tmp_path / "draft.gguf", [*map(draft_vocab.id_of, "xingy")], vocab=draft_vocab
    )
    with ggufspec.load(target, draft, n_threads=1) as engine:
        prompt = [1, *map(tiny.SPM.id_of, ("x", "in", "g", "y", "x"))]
        for temperature in (0.0, 1.0):
            done = engine.generate(prompt, max_tokens=40, n_draft=4, temperature=temperature)
            assert done.text == "ingyx" * 10
            assert done.stats.acceptance == 1


def test_a_text_goes_on_where_the_drafts_context_is_full(target: Path, tmp_path: Path) -> None:
    vocab = tiny.bpe_vocab(words=("zz",))  # reads each letter
    draft = tiny.write_llama(tmp_path / "draft.gguf", vocab=vocab)
    with ggufspec.load(target, draft, n_threads=1, n_ctx=64) as engine:
        prompt = [1, *[tiny.SPM.id_of("\u2581hello")] * 8]
        options = {"temperature": 0, "max_tokens": 60}
        plain = engine.generate(prompt, drafter="none", **options)  # type: ignore[arg-type]
        stream = engine.stream(prompt, n_draft=3, **options)  # type: ignore[arg-type]
        for _ in stream:
            pass
        assert stream.completion.tokens == plain.tokens
        drafted = [round_.n_drafted for round_ in stream.rounds]
        assert drafted[0] == 3
        assert drafted[-20:] == [0] * 20
        long = engine.generate([1, *prompt[1:2] * 40], n_draft=3, **options)  # type: ignore[arg-type]
        assert long.stats.n_drafted == 0
        assert len(long.tokens) == 64 - 41


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grammar_may_need_tokens_that_the_draft_lacks(
    temperature: float, target: Path, tmp_path: Path
) -> None:
    """The draft then ends; the target goes on."""
    draft = tiny.write_llama(tmp_path / "draft.gguf", vocab=without_digits(tiny.BPE))
    with ggufspec.load(target, draft, n_threads=1) as engine:
        options = {"temperature": temperature, "max_tokens": 12, "regex": "[0-9]{3}[a-c]{3}"}
        found = engine.generate(TEXT, n_draft=3, seed=1, **options)  # type: ignore[arg-type]
        assert len(found.text) == 6
        assert found.text[:3].isdigit()
        if temperature == 0:
            plain = engine.generate(TEXT, drafter="none", **options)  # type: ignore[arg-type]
            assert found.text == plain.text
