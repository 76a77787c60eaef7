"""Which tokens of two vocabularies are one, and how a draft reads the tokens that it lacks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import gguf
import numpy as np
import pytest
import tiny

from ggufspec.errors import VocabError
from ggufspec.llama.model import Model
from ggufspec.llama.vocab import Vocab
from ggufspec.llama.vocab_map import VocabMap

Map = Callable[[tiny.Vocab, tiny.Vocab], VocabMap]

FEW = tiny.spm_vocab(words=tiny.WORDS[::2])
OTHERS = {"subset": FEW, "foreign": tiny.BPE}
KIND = gguf.TokenType


@pytest.fixture
def mapped(tmp_path: Path) -> Iterator[Map]:
    models: list[Model] = []

    def load(vocab: tiny.Vocab) -> Vocab:
        path = tmp_path / f"{len(models)}.gguf"
        models.append(Model(tiny.write_llama(path, vocab=vocab, n_layer=1)))
        return models[-1].vocab

    yield lambda target, draft: VocabMap(load(target), load(draft), "they differ")
    for model in models:
        model.close()


def without(vocab: tiny.Vocab, texts: Sequence[bytes]) -> tiny.Vocab:
    """The same, but no token writes these texts."""
    types = [
        int(KIND.UNUSED) if vocab.bytes_of(token) in texts else kind
        for token, kind in enumerate(vocab.types)
    ]
    return dataclasses.replace(vocab, types=tuple(types))


def text_of(vocab: tiny.Vocab, tokens: Sequence[int]) -> bytes:
    return b"".join(map(vocab.bytes_of, tokens))


@pytest.mark.parametrize("draft", OTHERS.values(), ids=OTHERS)
def test_tokens_match_one_to_one_and_write_the_same(mapped: Map, draft: tiny.Vocab) -> None:
    found = mapped(tiny.SPM, draft)
    matched = np.flatnonzero(found.to_target >= 0)
    there = found.to_target[matched]
    assert len(set(there)) == len(there) > 200
    np.testing.assert_array_equal(found.to_draft[there], matched)
    assert np.count_nonzero(found.to_draft >= 0) == len(matched)
    for here, other in zip(matched, there, strict=True):
        assert draft.bytes_of(here) == tiny.SPM.bytes_of(other)


def test_text_in_another_tokenizer_matches_by_its_bytes(mapped: Map) -> None:
    found = mapped(tiny.SPM, tiny.BPE)
    for ours, theirs in (("\u2581hello", "\u0120hello"), ("A", "A"), ("<0x0A>", "\u010a")):
        here, there = tiny.SPM.id_of(ours), tiny.BPE.id_of(theirs)
        assert (found.to_draft[here], found.to_target[there]) == (there, here)
    assert found.to_draft[tiny.SPM.id_of("<0x41>")] == -1, "A is written in another token"


def test_control_tokens_match_by_name_and_never_text(mapped: Map) -> None:
    names = ("<|im_start|>", " hello", "<|other|>")
    target = tiny.spm_vocab(control=names)
    found = mapped(target, tiny.BPE)
    here = [target.id_of(name) for name in names]
    assert found.to_draft[here].tolist() == [tiny.BPE.id_of("<|im_start|>"), -1, -1]
    assert [found.spelled(token) for token in here[1:]] == [(), ()]


def test_the_ends_of_texts_match_by_their_role(mapped: Map) -> None:
    found = mapped(tiny.SPM, tiny.BPE)
    assert found.to_target[tiny.BPE.eos] == tiny.SPM.eos
    assert found.spelled(tiny.SPM.eos) == (tiny.BPE.eos,)
    target = tiny.spm_vocab(control=("<|eot_id|>",))  # an end of its own
    ends = [(tiny.BPE.id_of(name),) for name in ("<|im_end|>", "<|endoftext|>")]
    assert mapped(target, tiny.BPE).spelled(target.id_of("<|eot_id|>")) in ends


def test_padding_matches_nothing(mapped: Map) -> None:
    padded = tiny.BPE.with_size(len(tiny.BPE) + 300)
    for target, draft in ((tiny.SPM.with_size(len(tiny.SPM) + 300), padded), (padded, tiny.SPM)):
        found = mapped(target, draft)
        for own, other, of in ((target, draft, found.to_draft), (draft, target, found.to_target)):
            unused = [i for i, kind in enumerate(own.types) if kind == KIND.UNUSED]
            assert set(of[unused]) <= {-1}
            assert all(other.types[token] != KIND.UNUSED for token in of[of >= 0])


@pytest.mark.parametrize(
    ("target", "draft"),
    [(tiny.SPM, FEW), (tiny.SPM, tiny.BPE), (tiny.BPE, tiny.SPM)],
    ids=["fewer", "bpe", "spm"],
)
def test_every_text_token_is_read_with_its_bytes(
    mapped: Map, target: tiny.Vocab, draft: tiny.Vocab
) -> None:
    found = mapped(target, draft)
    for token in range(len(target)):
        assert text_of(draft, found.spelled(token)) == target.bytes_of(token)
    assert found.spelled(5) is found.spelled(5)


def test_compounds_are_tokens_that_the_draft_writes_in_two(mapped: Map) -> None:
    found = mapped(tiny.SPM, FEW)
    n_found = 0
    for first, (tokens, seconds) in found.compounds.items():
        for token, second in zip(tokens, seconds, strict=True):
            assert found.to_draft[token] == -1
            assert found.spelled(int(token)) == (first, second)
            n_found += 1
    missing = [tiny.SPM.tokens[token] for token in np.flatnonzero(found.to_draft < 0)]
    assert n_found == sum(len(found.spelled(tiny.SPM.id_of(name))) == 2 for name in missing) > 3


@pytest.mark.parametrize("draft_adds", [True, False])
@pytest.mark.parametrize("named_alike", [True, False])
def test_a_text_begins_as_the_draft_expects(
    mapped: Map, draft_adds: bool, named_alike: bool
) -> None:
    target = tiny.SPM if named_alike else tiny.spm_vocab(control=("<start>",), bos="<start>")
    draft = tiny.spm_vocab(words=tiny.WORDS[::2], add_bos=draft_adds)
    found = mapped(target, draft)
    read = [*found.start(target.bos), *found.spelled(target.bos)]
    assert read == ([draft.bos] if draft_adds or named_alike else [])
    assert found.start(40) == ((draft.bos,) if draft_adds else ())


def test_logits_go_to_the_tokens_that_both_have(mapped: Map) -> None:
    found = mapped(tiny.SPM, tiny.BPE)
    rng = np.random.default_rng(0)
    out = found.empty_rows(2)
    for _ in range(2):
        rows = rng.normal(size=(2, len(tiny.BPE))).astype(np.float32)
        assert found.widen(rows, out) is out
        for here in range(len(tiny.SPM)):
            there = found.to_draft[here]
            expected = rows[:, there] if there >= 0 else -np.inf
            np.testing.assert_array_equal(out[:, here], expected)


def test_the_overlap_is_reported_with_advice_where_it_is_small(mapped: Map) -> None:
    found = mapped(tiny.SPM, tiny.BPE)
    n_common = np.count_nonzero(found.to_draft >= 0)
    assert f"(they differ). It drafts only the {n_common} tokens that both have" in found.note
    assert f"{found.n_common / found.n_target:.0%} of the target's" in found.note
    assert f"{found.coverage_of_prose:.0%} of those in an English text" in found.note
    assert f"{found.coverage_of_code:.0%} in Python code" in found.note
    assert "hardly pay" not in found.note
    letters = [bytes([byte]) for byte in b"abcdefghijklmnopqrstuvwxyz "]
    assert "will hardly pay: use a draft" in mapped(tiny.SPM, without(tiny.BPE, letters)).note


def test_nothing_in_common_is_refused(mapped: Map) -> None:
    with pytest.raises(VocabError, match=r"no token in common: they differ\. Use a draft of"):
        mapped(tiny.SPM, tiny.SILENT)
