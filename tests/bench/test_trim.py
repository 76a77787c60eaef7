"""What cuts of a draft cost and bring: predictions, the search for layers, the files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import tiny

import ggufspec
from ggufspec.bench import reference, trim
from ggufspec.bench.layer_search import search_layers
from ggufspec.bench.reference import (
    Excerpt,
    Reference,
    ReferenceText,
    chances_of,
    mean_length,
    predicted_speedup,
)
from ggufspec.errors import ModelError, OptionError, VocabError
from ggufspec.models.header import read_header
from ggufspec.standin.embedded import embedded_draft, embedded_target


@pytest.fixture(autouse=True)
def _in_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ggufspec.bench.trim.MIN_SECONDS", 0.0)


# Predictions


@pytest.mark.parametrize("n_draft", [1, 3, 8])
def test_rounds_with_certain_drafts(n_draft: int) -> None:
    n = 30 * (n_draft + 1)
    assert mean_length(np.ones(n), n_draft) == n_draft + 1
    assert mean_length(np.zeros(n), n_draft) == 1


def test_rounds_with_likely_drafts() -> None:
    expected = 1 + 0.8 + 0.8**2 + 0.8**3
    assert mean_length(np.full(3000, 0.8), 3) == pytest.approx(expected, rel=1e-3)


def test_rounds_where_a_draft_is_right_in_turns() -> None:
    # From each rejected token on, the next two are right: rounds of 2 + 1 tokens.
    chances = np.array(100 * [1.0, 1.0, 0.0])
    assert mean_length(chances, 2) == 3
    assert mean_length(chances, 1) == pytest.approx(1.5)


def test_the_best_length_decides() -> None:
    chances = np.ones(1000)
    assert predicted_speedup(chances, [1.0, 1.0, 1.0, 9.0], 0.0) == pytest.approx(3, rel=0.01)
    assert predicted_speedup(np.zeros(9), [1.0, 1.25], 0.75) == 0.5


def test_chances_with_a_part_of_the_tokens() -> None:
    logits = np.log(np.array([[0.1, 0.6, 0.3], [0.2, 0.2, 0.6]], np.float32)) * 0.7
    text = ReferenceText.of(Excerpt("code", 0, (0, 1, 2), 1), logits)
    assert text.best.tolist() == [1, 2]
    order = np.array([2, 0, 1])
    whole, two = chances_of(logits, text, order, [3, 2])
    assert whole.greedy.tolist() == [1, 1]
    assert whole.sampled == pytest.approx([1, 1])
    assert two.greedy.tolist() == [0, 1]
    # The draft's probabilities of tokens 0 and 2: 1/4 and 3/4; the target's: 0.1 and 0.3.
    assert two.sampled == pytest.approx([0.4, 0.8])


# The search for layers

COSTS = {1: 0.3, 2: 0.1, 3: 0.02, 4: 0.05, 5: 0.2, 6: 0.15}


def worth(left_out: frozenset[int]) -> float:
    """Each layer saves 0.06; some cost less, and 3 and 2 cost more together."""
    together = 0.3 if {2, 3} <= left_out else 0.0
    return 1 + sum(0.06 - COSTS[layer] for layer in left_out) - together


def test_layers_go_as_long_as_that_pays() -> None:
    best, other = search_layers(worth, 8, seconds=60)
    assert best == {3, 4}
    assert other == {3}


@pytest.mark.parametrize(("n_wanted", "left_out"), [(1, {3}), (2, {3, 4}), (3, {3, 4, 6})])
def test_as_many_layers_go_as_are_wanted(n_wanted: int, left_out: set[int]) -> None:
    assert search_layers(worth, 8, n_wanted=n_wanted, seconds=60) == [left_out]


def test_without_time_the_middle_goes() -> None:
    (found,) = search_layers(worth, 8, n_wanted=4, seconds=0)
    assert len(found) == 4
    assert found < frozenset(range(1, 7))


def test_the_progress_of_the_search_ends_with_it() -> None:
    calls: list[tuple[int, int]] = []
    search_layers(worth, 8, seconds=60, progress=lambda done, of: calls.append((done, of)))
    assert calls[0][0] == 1
    assert [done < of for done, of in calls] == [True] * (len(calls) - 1) + [False]


# The whole


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of six layers, of which number 3 does nothing."""
    path = tmp_path_factory.mktemp("models") / "model.gguf"
    tiny.write_llama(path, n_layer=6, n_embd=64)
    for tensor in gguf.GGUFReader(path, "r+").tensors:
        if tensor.name in ("blk.3.attn_output.weight", "blk.3.ffn_down.weight"):
            tensor.data[:] = 0
    return path


@pytest.fixture(scope="module")
def found(model: Path) -> Iterator[Reference]:
    with ggufspec.load(model, n_threads=1, **reference.LOAD) as engine:
        yield reference.reference_of(engine)


def trimmed(model: Path, found: Reference, wanted: trim.WantedCut, *, path: Path | None = None):
    with ggufspec.load(model, n_ctx=256, n_threads=1) as engine:
        return trim.trim(engine, read_header(model), found, wanted, path)


def test_text_of_the_target_in_halves(found: Reference) -> None:
    kinds = [(text.excerpt.half, text.excerpt.kind) for text in found.texts]
    assert kinds == [(half, kind) for half in (0, 1) for kind in 2 * ("code", "prose")]
    for text in found.texts:
        written = text.excerpt.tokens[text.excerpt.n_given :]
        same = text.best == np.array(written)
        assert same.mean() > 0.9, "it is greedy; only near-ties differ"
        assert text.probs.sum(axis=1) == pytest.approx(1, abs=0.02)
    assert len(found.passes) == reference.N_DRAFT + 1


def test_a_layer_that_does_nothing_goes_first(model: Path, found: Reference) -> None:
    result = trimmed(model, found, trim.WantedCut(None, "auto"))
    whole, cut = result.cuts[:2]
    assert 3 not in cut.cut.layers
    one = next(each for each in result.cuts if each.cut.layers == (0, 1, 2, 4, 5))
    for kind in ("code", "prose"):
        clear = np.concatenate(
            [
                np.log(top[:, -1] / top[:, -2]) > 0.1
                for text in found.texts
                if text.excerpt.half and text.excerpt.kind == kind
                for top in [np.sort(text.probs)]
            ]
        )
        assert clear.mean() > 0.9
        for each in (whole, one):
            assert each.agreement[kind] >= clear.mean(), "only near-ties may differ"
    assert one.n_bytes < whole.n_bytes


def test_numbers_of_a_cut_vocabulary(model: Path, found: Reference, tmp_path: Path) -> None:
    path = tmp_path / "small.gguf"
    n_vocab = read_header(model).n_vocab
    wanted = trim.WantedCut(n_vocab - 20, (0, 1, 3, 5))
    result = trimmed(model, found, wanted, path=path)
    assert [len(each.cut.layers) for each in result.cuts] == [6, 6, 4]
    assert result.chosen is result.cuts[2]
    header = read_header(path)
    assert (header.n_vocab, header.n_layers) == (result.chosen.n_tokens, 4)
    for each in result.cuts:
        assert all(0 <= share <= 1 for share in (*each.agreement.values(), *each.overlap.values()))
        assert each.score > 0
    assert result.n_counted == sum(len(text.best) for text in found.texts)


def test_layers_are_measured_on_the_other_half(model: Path, found: Reference) -> None:
    result = trimmed(model, found, trim.WantedCut(None, 4))
    assert [len(each.cut.layers) for each in result.cuts] == [6, 4]
    assert result.n_counted == sum(len(at.best) for at in found.texts if at.excerpt.half)


def test_each_half_is_measured_with_the_tokens_of_the_other() -> None:
    with ggufspec.load(embedded_target(), n_threads=1, **reference.LOAD) as engine:
        found = reference.reference_of(engine)
    own = replace(found, counts=(found.counts[1], found.counts[0]))
    honest, biased = (
        trimmed(embedded_draft(), each, trim.WantedCut(512)).chosen for each in (found, own)
    )
    # Code repeats itself: there one half has nearly the tokens of the other.
    for kind, margin in (("code", -0.01), ("prose", 0.02)):
        assert honest.agreement[kind] + margin < biased.agreement[kind]
        assert honest.overlap[kind] + margin < biased.overlap[kind]


def test_text_of_the_user(model: Path) -> None:
    with ggufspec.load(model, n_threads=1, **reference.LOAD) as engine:
        found = reference.reference_of(engine, ["hello world " * 100, "of the model " * 300])
        with pytest.raises(OptionError, match="too few to choose and to measure with"):
            reference.reference_of(engine, ["hello"])
    assert {text.excerpt.kind for text in found.texts} == {"text"}
    assert [text.excerpt.half for text in found.texts] == [0, 0, 0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("wanted", "error", "told"),
    [
        (trim.WantedCut(10), OptionError, "always kept"),
        (trim.WantedCut(None, 7), OptionError, "keep 2 to 6"),
        (trim.WantedCut(None, 1), OptionError, "keep 2 to 6"),
        (trim.WantedCut(None, (0, 9)), OptionError, "has no layers 9"),
        (trim.WantedCut(None, None, "q9_9"), OptionError, "not a quantization"),
    ],
)
def test_cuts_that_cannot_be(
    wanted: trim.WantedCut, error: type[Exception], told: str, model: Path
) -> None:
    header = read_header(model)
    with pytest.raises(error, match=told):
        trim.check_wanted(wanted, header, header)


def test_another_vocabulary(model: Path, tmp_path: Path) -> None:
    other = tiny.write_llama(tmp_path / "other.gguf", vocab=tiny.bpe_vocab())
    with pytest.raises(VocabError, match="another vocabulary"):
        trim.check_wanted(trim.WantedCut(), read_header(model), read_header(other))


def test_architectures_whose_layers_cannot_be_cut(tmp_path: Path) -> None:
    header = read_header(tiny.write_rwkv(tmp_path / "rwkv.gguf"))
    with pytest.raises(ModelError):
        trim.check_wanted(trim.WantedCut(None, "auto"), header, header)
