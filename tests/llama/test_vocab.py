"""What text becomes, token by token, and when two vocabularies are one."""

from __future__ import annotations

import dataclasses
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
import pytest
import tiny
from head_pairs import Interrupted
from patience import PATIENCE, at_most

import ggufspec
from ggufspec.errors import ClosedError, ModelError, PromptError
from ggufspec.llama.model import Model
from ggufspec.llama.vocab import Vocab
from ggufspec.llama.vocab_map import first_difference
from ggufspec.models.vocabulary_overlap import MAX_PADDING
from ggufspec.structured.constraint import GrammarConstraint
from ggufspec.structured.grammar import of_regex

Load = Callable[[tiny.Vocab], Vocab]

TEXTS = [
    "hello world",
    " of the model",
    "héllo wörld",
    "🙂",
    "👩‍👩‍👧 zero-width joiners",
    "日本語 and עברית",
    "a\0b",
    "\n\n\t  tabs",
    "<0x41> <s> </s>",
    "x" * 3000,
    "",
]


@pytest.fixture
def load(tmp_path: Path) -> Iterator[Load]:
    models: list[Model] = []

    def loaded(vocab: tiny.Vocab) -> Vocab:
        models.append(
            Model(tiny.write_llama(tmp_path / f"{len(models)}.gguf", vocab=vocab, n_layer=1))
        )
        return models[-1].vocab

    yield loaded
    for model in models:
        model.close()


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[ggufspec.Engine]:
    with ggufspec.load(tiny.write_llama(tmp_path / "a.gguf"), n_threads=1, n_ctx=64) as loaded:
        yield loaded


def text_of(vocab: Vocab, tokens: Sequence[int]) -> str:
    return b"".join(map(vocab.piece, tokens)).decode()


# The same vocabulary


OTHER = tiny.SPM.with_text(290, "one").with_text(280, "two").with_text(300, "three")


@pytest.mark.parametrize(
    ("draft", "difference"),
    [
        (tiny.SPM, ""),
        (tiny.SPM.with_size(len(tiny.SPM) + MAX_PADDING), ""),
        (
            tiny.SPM.with_size(len(tiny.SPM) + MAX_PADDING + 1),
            f"the target has {len(tiny.SPM)} tokens, the draft {len(tiny.SPM) + 129}",
        ),
        (
            tiny.BPE.with_size(len(tiny.SPM)),
            "the target's tokenizer is SPM, the draft's BPE",
        ),
        (
            dataclasses.replace(OTHER, bos=2),
            f"token 280 is {tiny.SPM.tokens[280]!r} in the target and 'two' in the draft",
        ),
        (
            dataclasses.replace(tiny.SPM, bos=300),
            "the beginning-of-text token is 1 in the target and 300 in the draft",
        ),
        (
            dataclasses.replace(tiny.SPM, eos=301),
            "the end-of-text token is 2 in the target and 301 in the draft",
        ),
    ],
)
def test_the_first_difference_of_two_vocabularies_is_named(
    draft: tiny.Vocab, difference: str, load: Load
) -> None:
    assert first_difference(load(tiny.SPM), load(draft)) == difference


# Text and tokens


def test_bytes_survive_a_round_trip(load: Load) -> None:
    bpe, spm = load(tiny.BPE), load(tiny.SPM)
    for text in TEXTS:
        assert text_of(bpe, bpe.tokenize(text, add_special=False, parse_special=False)) == text
        tokens = spm.tokenize(text, add_special=True, parse_special=False)
        assert tokens[0] == spm.bos == tiny.SPM.bos
        assert text_of(spm, tokens) in (text, f" {text}"), "at most a space before"


@pytest.mark.parametrize("tiny_vocab", [tiny.SPM, tiny.BPE], ids=["spm", "bpe"])
def test_pieces_and_names_are_those_of_the_file(load: Load, tiny_vocab: tiny.Vocab) -> None:
    vocab = load(tiny_vocab)
    assert vocab.n_tokens == len(tiny_vocab)
    for token in range(len(tiny_vocab)):
        assert vocab.piece(token) == vocab.piece(token) == tiny_vocab.bytes_of(token)
        assert vocab.name(token) == tiny_vocab.tokens[token]
    for token in (-1, len(tiny_vocab), 2**31 - 1):
        assert vocab.name(token) == ""


def test_a_long_token_is_written_out(load: Load) -> None:
    long = "z" * 500
    vocab = load(tiny.SPM.with_token(long))
    assert vocab.piece(len(tiny.SPM)) == long.encode()


def test_names_of_special_tokens_are_parsed_only_when_asked(load: Load) -> None:
    vocab, text = load(tiny.BPE), "hello<|im_end|>"
    end = tiny.BPE.id_of("<|im_end|>")
    parsed = vocab.tokenize(text, add_special=False, parse_special=True)
    plain = vocab.tokenize(text, add_special=False, parse_special=False)
    assert parsed[-1] == end
    assert text_of(vocab, parsed) == "hello", "a control token writes nothing"
    assert end not in plain
    assert text_of(vocab, plain) == text


def test_special_tokens_have_a_text_for_templates(load: Load) -> None:
    vocab = load(tiny.SPM)
    assert vocab.special_text(vocab.bos) == "<s>"
    assert vocab.special_text(vocab.eos) == "</s>"
    assert vocab.special_text(-1) == ""


@pytest.mark.parametrize("kind", [tiny.SPM, tiny.BPE], ids=["spm", "bpe"])
def test_under_a_constraint_every_token_that_may_follow_writes_its_text(
    load: Load, kind: tiny.Vocab
) -> None:
    """Not the names of control tokens, of the unknown token, or of what a chat template uses."""
    made = kind.with_token("<think>", gguf.TokenType.USER_DEFINED).with_token(
        "zz", gguf.TokenType.USER_DEFINED
    )
    vocab = load(made.with_size(len(made) + 40))
    constraint = GrammarConstraint(vocab.token_table(), of_regex(r"[ -~]+"), 1)
    bits = np.unpackbits(constraint.masks([5])[0].view(np.uint8), bitorder="little")
    found = np.flatnonzero(bits).tolist()
    assert all(made.bytes_of(token).isascii() and made.bytes_of(token) for token in found)
    texts = {made.bytes_of(token) for token in found}
    assert {b"<", b"z", b"zz", b" hello"} <= texts
    assert b"<think>" not in texts
    ends = constraint.masks([5, found[0]])[0]
    assert all(ends[token // 32] >> token % 32 & 1 for token in vocab.stop_tokens)


def test_the_beginning_is_marked_where_the_model_wants_it(load: Load) -> None:
    for add_bos in (True, False):
        vocab = load(dataclasses.replace(tiny.SPM, add_bos=add_bos))
        tokens = vocab.tokenize("hello", add_special=True, parse_special=True)
        assert (tokens[0] == vocab.bos) is add_bos
        assert vocab.bos not in vocab.tokenize("hello", add_special=False, parse_special=True)


def test_stop_tokens_are_all_that_end_a_text(load: Load) -> None:
    tiny_vocab = tiny.spm_vocab(control=("<|im_end|>", "<stop>", "<|other|>"), eos="<stop>")
    wanted = {tiny_vocab.id_of(name) for name in ("</s>", "<|im_end|>", "<stop>")}
    assert load(tiny_vocab).stop_tokens == wanted


# Prompts that are none


def test_text_that_is_not_unicode_is_refused(load: Load) -> None:
    with pytest.raises(PromptError, match="not valid Unicode at character 3"):
        load(tiny.SPM).tokenize("abc\ud800def", add_special=True, parse_special=True)


def without_bytes(*kept: int) -> tiny.Vocab:
    """A SentencePiece vocabulary with tokens for these bytes and ASCII but "=", and <|a=b|>."""
    kept_names = {f"<0x{byte:02X}>" for byte in kept}
    assert tiny.SPM.scores is not None
    rows = [
        (name, kind, score)
        for name, kind, score in zip(tiny.SPM.tokens, tiny.SPM.types, tiny.SPM.scores, strict=True)
        if name != "=" and (kind != gguf.TokenType.BYTE or name in kept_names)
    ]
    rows.append(("<|a=b|>", int(gguf.TokenType.CONTROL), 0.0))
    tokens, types, scores = zip(*rows, strict=True)
    return dataclasses.replace(tiny.SPM, tokens=tokens, types=types, scores=scores)


@pytest.mark.parametrize(
    ("text", "named"),
    [("a\nb", r"'\\n', U\+000A \(character 1"), ("hé", "'é'"), ("<|a=b|>=", "'=', U.003D")],
)
def test_a_character_that_the_vocabulary_cannot_write_is_refused(
    load: Load, text: str, named: str
) -> None:
    vocab = load(without_bytes(0xC3))  # llama.cpp would end the process
    with pytest.raises(PromptError, match=f"cannot write {named}"):
        vocab.tokenize(text, add_special=True, parse_special=True)
    assert vocab.tokenize_inside(text) == []
    assert vocab.tokenize_after(b"h", text.encode()) == []
    vocab.sequence_breakers((text,))


def test_other_texts_are_tokenized_without_byte_tokens(load: Load) -> None:
    vocab, whole = load(without_bytes()), load(tiny.SPM)
    for text in ("hello world", "x y", ""):
        tokens = vocab.tokenize(text, add_special=False, parse_special=True)
        wanted = whole.tokenize(text, add_special=False, parse_special=True)
        assert list(map(vocab.name, tokens)) == list(map(whole.name, wanted))
    named = vocab.tokenize("<|a=b|>", add_special=False, parse_special=True)
    assert list(map(vocab.name, named)) == ["<|a=b|>"]
    with pytest.raises(PromptError):  # its name is text here
        vocab.tokenize("<|a=b|>", add_special=False, parse_special=False)
    accented = load(without_bytes(0xC3, 0xA9))
    assert text_of(accented, accented.tokenize("é", add_special=False, parse_special=False)) == " é"


@pytest.mark.parametrize("kind", ["SPM", "BPE"])
def test_many_names_of_special_tokens_take_little_time(load: Load, kind: str) -> None:
    if kind == "SPM":
        made = tiny.spm_vocab(control=("<|im_end|>", "<|im", "\n\n"))
        made = made.with_token("<|b|>", gguf.TokenType.USER_DEFINED)
    else:
        made = tiny.bpe_vocab(control=("<|endoftext|>", "<|im_end|>", "<|im", "\n\n", "<|b|>"))
    vocab = load(made)
    random = np.random.default_rng(1)
    pieces = ["<|im_end|>", "<|im", "hello ", "world", " ", "\n", "<|", "é", "<|b|>", "<|b|> "]
    lines = ["".join(random.choice(pieces, 40)) + "<|im_end|>" for _ in range(600)]
    alone = [
        vocab.tokenize(line, add_special=not i, parse_special=True) for i, line in enumerate(lines)
    ]
    found = vocab.tokenize("".join(lines), add_special=True, parse_special=True)
    assert found == [token for tokens in alone for token in tokens]
    began = time.thread_time()
    assert (
        len(vocab.tokenize("<|im_end|>" * 60_000, add_special=False, parse_special=True)) == 60_000
    )
    assert time.thread_time() - began < 3


def test_a_vocabulary_that_adds_a_token_it_does_not_have_is_refused(load: Load) -> None:
    with pytest.raises(ModelError, match="does not have"):
        load(
            dataclasses.replace(tiny.SPM, tokens=("a",), types=(1,), scores=(0.0,), eos=0, bos=None)
        )


@pytest.mark.parametrize("bad", [-1, len(tiny.SPM), 10**20])
def test_a_token_outside_the_vocabulary_is_refused(engine: ggufspec.Engine, bad: int) -> None:
    with pytest.raises(PromptError, match=rf"token {bad} at position 2 .*{len(tiny.SPM)} tokens"):
        engine.tokenize([1, 5, bad, 6])
    with pytest.raises(PromptError, match="outside the vocabulary"):
        engine.generate([bad])


def test_a_vocabulary_of_a_closed_model_says_so(engine: ggufspec.Engine) -> None:
    vocab = engine.vocab
    engine.close()
    for use in (
        lambda: vocab.tokenize("hello", add_special=False, parse_special=False),
        lambda: vocab.piece(5),
        lambda: vocab.name(5),
        lambda: vocab.stop_tokens,
    ):
        with pytest.raises(ClosedError, match="closed; load it again"):
            use()


def test_an_engine_may_be_closed_while_another_thread_tokenizes(engine: ggufspec.Engine) -> None:
    vocab, text = engine.vocab, "a long text " * 20_000
    started, errors = threading.Event(), []

    def tokenize() -> None:
        try:
            while True:
                vocab.tokenize(text, add_special=False, parse_special=False)
                started.set()
        except ClosedError as error:
            errors.append(error)

    thread = threading.Thread(target=tokenize)
    thread.start()
    started.wait()
    engine.close()
    thread.join(PATIENCE)
    assert len(errors) == 1


def test_an_engine_may_be_closed_while_another_thread_reads_a_token(
    engine: ggufspec.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocab, started, ended = engine.vocab, threading.Event(), threading.Event()
    real = llama_cpp.llama_token_to_piece

    def slow(*args: object) -> int:
        started.set()
        ended.wait(0.3)
        n: int = real(*args)
        ended.set()
        return n

    monkeypatch.setattr(llama_cpp, "llama_token_to_piece", slow)
    thread = threading.Thread(target=vocab.shown, args=(5,))
    thread.start()
    started.wait(PATIENCE)
    engine.close()
    assert ended.is_set(), "close waits for it"
    thread.join(PATIENCE)


@pytest.mark.parametrize("use", [Vocab.tokenize, Vocab.shown, Vocab.token_table])
def test_an_engine_closes_though_calls_that_ctrl_c_ended_are_kept(
    engine: ggufspec.Engine, use: Callable[..., object]
) -> None:
    """As a cycle of references keeps a traceback, with its frames."""
    given: dict[Any, dict[str, Any]] = {
        Vocab.tokenize: {"text": "hello", "add_special": False, "parse_special": True},
        Vocab.shown: {"token": 5},
        Vocab.token_table: {},
    }
    use(engine.vocab, **given[use])
    kept = []
    for at in count(1):
        interrupted = Interrupted(at, within=use)
        sys.setprofile(interrupted)
        try:
            use(engine.vocab, **given[use])
        except KeyboardInterrupt as error:
            kept.append(error)
        finally:
            sys.setprofile(None)
        if interrupted.is_late:
            break
    assert len(kept) == at - 1 > 0
    with at_most(5):
        engine.close()


def test_a_prompt_has_a_token_and_leaves_room_for_one(engine: ggufspec.Engine) -> None:
    assert engine.tokenize("") == engine.tokenize("hello")[:1], "the BOS token"
    with pytest.raises(PromptError, match="at least one"):
        engine.tokenize([])
    assert len(engine.tokenize([5] * 63)) == 63
    with pytest.raises(PromptError, match=r"64 tokens.*n_ctx"):
        engine.tokenize([5] * 64)
    with pytest.raises(PromptError, match="shorten the prompt"):
        engine.tokenize("hello " * 500)
