"""`--draft auto`: which model beside a target, in the cache or in the registry drafts for it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import tiny
import tiny_heads

from ggufspec.errors import ModelError
from ggufspec.models import draft_proposal, local
from ggufspec.models.draft_proposal import DraftProposal, propose_draft
from ggufspec.models.gguf_file import write
from ggufspec.models.header import read_header
from ggufspec.models.registry import Registry
from ggufspec.models.trim import trimmed
from ggufspec.models.vocabulary_overlap import n_common

NONE = Registry({}, {})
TRIMMED = {
    "ggufspec.trim.source": "Small",
    "ggufspec.trim.source_hash": "ab12",
    "ggufspec.trim.n_vocab": 500,
    "ggufspec.trim.tokens": list(range(300)),
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub: the snapshot of one repository."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    folder = tmp_path / "hub" / "models--lab--small" / "snapshots" / ("0" * 40)
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A target of 24 layers in a folder of its own."""
    (tmp_path / "models").mkdir()
    return tiny.write_llama(tmp_path / "models" / "large.gguf", n_layer=24)


def proposed(target: Path) -> DraftProposal:
    return propose_draft(str(target), NONE)


def check_none(target: Path) -> None:
    with pytest.raises(ModelError, match=r"no draft is known .*--draft, or .* `ggufspec trim"):
        proposed(target)


def words(n: int) -> tiny.Vocab:
    """The target's single characters and bytes, and so many words that it does not have."""
    return tiny.spm_vocab(words=[f" x{i:04}" for i in range(n)])


def test_the_smallest_model_beside_the_target_or_in_the_cache(large: Path, cache: Path) -> None:
    cached = tiny.write_llama(cache / "small.gguf", n_layer=2)
    assert proposed(large).name == str(cached)
    tiny.write_llama(large.with_name("middle.gguf"), n_layer=3)
    small = tiny.write_llama(large.with_name("small.gguf"), n_layer=1)
    found = proposed(large)
    assert found.name == str(small)
    assert "the smallest here" in found.why


def test_what_costs_more_than_half_of_the_target_is_not_proposed(large: Path) -> None:
    tiny.write_llama(large.with_name("other.gguf"), n_layer=14)
    check_none(large)


def test_a_trimmed_draft_comes_first(large: Path) -> None:
    tiny.write_llama(large.with_name("same.gguf"), n_layer=1)
    cut = tiny.SPM.with_size(300)
    paths = [
        tiny.write_llama(large.with_name(f"cut{i}.gguf"), n_layer=3, vocab=cut, header=TRIMMED)
        for i in range(2)
    ]
    os.utime(paths[1], (1, 1))
    found = proposed(large)
    assert found.name == str(paths[0]), "the newest"
    assert "trimmed from Small to 300 of 500 tokens" in found.why


def test_what_trimming_writes_is_known(large: Path) -> None:
    cut = trimmed(read_header(large), tokens=range(300), layers=[0, 1, 2, 9])
    write(cut, large.with_name("cut.gguf"))
    found = proposed(large)
    assert found.name == str(large.with_name("cut.gguf"))
    n_kept = read_header(large.with_name("cut.gguf")).n_vocab
    assert found.why.endswith(f" to {n_kept} of {len(tiny.SPM)} tokens and layers 0-2,9")


def test_a_trimmed_draft_with_tokens_of_its_own_does_not(large: Path) -> None:
    same = tiny.write_llama(large.with_name("same.gguf"), n_layer=1)
    other = words(100)
    tiny.write_llama(large.with_name("cut.gguf"), n_layer=1, vocab=other, header=TRIMMED)
    assert proposed(large).name == str(same)


def test_a_model_of_another_vocabulary_comes_last(large: Path) -> None:
    more, fewer = (
        tiny.write_llama(large.with_name(f"words{n}.gguf"), n_layer=1, vocab=words(n))
        for n in (20, 40)
    )
    assert fewer.exists()
    found = proposed(large)
    assert found.name == str(more)
    assert "another vocabulary" in found.why
    same = tiny.write_llama(large.with_name("same.gguf"), n_layer=3)
    assert proposed(large).name == str(same)


def test_a_vocabulary_with_little_in_common_is_not_proposed(tmp_path: Path) -> None:
    known = tiny.spm_vocab(words=[f" y{i:04}" for i in range(900)])
    large = tiny.write_llama(tmp_path / "large.gguf", n_layer=99, vocab=known)
    tiny.write_llama(tmp_path / "words.gguf", n_layer=1, vocab=words(900))
    headers = [read_header(path) for path in (large, tmp_path / "words.gguf")]
    assert n_common(*headers) < 0.3 * min(len(header.tokens) for header in headers)
    check_none(large)


def test_what_writes_no_text_is_not_proposed(large: Path) -> None:
    tiny.write_bert(large.with_name("bert.gguf"))
    tiny.write_vocab_only(large.with_name("vocab.gguf"))
    tiny.write_t5_encoder_decoder(large.with_name("t5.gguf"))
    large.with_name("broken.gguf").write_bytes(b"GGUF")
    header = {"pooling_type": 1}
    tiny.write_llama(large.with_name("embedding.gguf"), n_layer=1, header=header)
    check_none(large)


def test_few_headers_are_read(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_proposal, "MOST_FILES", 3)
    for i in range(3):
        large.with_name(f"{i}.gguf").write_bytes(b"GGUF")
    tiny.write_llama(large.with_name("small.gguf"), n_layer=1)
    check_none(large)


# What models have in common


def overlaps(folder: Path, vocabs: Sequence[tiny.Vocab]) -> float:
    paths = [
        tiny.write_llama(folder / f"{i}.gguf", n_layer=1, vocab=vocab)
        for i, vocab in enumerate(vocabs)
    ]
    headers = [read_header(path) for path in paths]
    return n_common(*headers) / min(len(header.tokens) for header in headers)


def test_tokens_of_two_tokenizers_are_compared_by_their_bytes(tmp_path: Path) -> None:
    assert overlaps(tmp_path, [tiny.SPM, tiny.SPM]) == 1
    between = overlaps(tmp_path, [tiny.SPM, tiny.BPE])
    # Printable characters and words are in both; the other bytes are stored differently.
    pieces = {tiny.BPE.bytes_of(i) for i in range(len(tiny.BPE))}
    n_shared = len(pieces & {tiny.SPM.bytes_of(i) for i in range(259, len(tiny.SPM))} - {b""})
    assert n_shared > 100
    assert between == pytest.approx(n_shared / len(tiny.BPE), abs=0.005)


def test_a_folder_is_read_without_its_subfolders(large: Path) -> None:
    deeper = large.parent / "deeper"
    deeper.mkdir()
    tiny.write_llama(deeper / "small.gguf", n_layer=1)
    assert [paths[0] for paths in local.models_in(large.parent)] == [large]


TABLE = tiny_heads.Table()
HEAD = tiny_heads.Head(table=TABLE)


def test_the_targets_own_head_comes_first(tmp_path: Path) -> None:
    target = tiny_heads.write_glm4moe(tmp_path / "target.gguf", TABLE, HEAD)
    tiny_heads.write_glm4moe(tmp_path / "mtp-target.gguf", TABLE, HEAD, part="head")
    found = proposed(target)
    assert (found.name, found.why) == ("mtp", "its own multi-token-prediction head")


def test_an_mtp_head_beside_the_target_comes_before_models(tmp_path: Path) -> None:
    target = tiny_heads.write_glm4moe(
        tmp_path / "target.gguf", TABLE, HEAD, n_layer=24, part="trunk"
    )
    tiny_heads.write_llama_table(tmp_path / "small.gguf", TABLE, n_layer=2)
    assert proposed(target).name == str(tmp_path / "small.gguf")
    head = tiny_heads.write_glm4moe(
        tmp_path / "mtp-target.gguf", TABLE, HEAD, n_layer=24, part="head"
    )
    found = proposed(target)
    assert (found.name, found.why) == (str(head), "an MTP head beside the target")


def test_an_eagle3_head_that_fits_comes_before_models(tmp_path: Path) -> None:
    target = tiny_heads.write_llama_table(tmp_path / "target.gguf", TABLE, n_layer=8)
    other = tiny_heads.write_eagle3(tmp_path / "other.gguf", HEAD, target_layers=(1, 2, 8))
    check_none(target)
    head = tiny_heads.write_eagle3(tmp_path / "head.gguf", HEAD)
    found = proposed(target)
    assert (found.name, found.why) == (str(head), "an EAGLE-3 head beside the target")
    for path in (head, other):
        with pytest.raises(ModelError, match="EAGLE-3 head, not a model"):
            proposed(path)
