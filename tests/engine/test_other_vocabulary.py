"""A draft of another vocabulary changes nothing of what the target writes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import gguf
import numpy as np
import pytest
import tiny
from engine.test_distribution import N_DRAFT, Pair, Remembering, chi_square, limit

import ggufspec
from ggufspec.audit import PROMPTS, AuditOptions, audit
from ggufspec.decoding import verify
from ggufspec.decoding.sampling import Sampling
from ggufspec.decoding.types import Draft, Drafter, Probs, Verdict
from ggufspec.engine.engine import Engine
from ggufspec.llama.context import Context
from ggufspec.llama.context_options import ContextOptions
from ggufspec.llama.mapped_session import MappedSession
from ggufspec.llama.model import Model
from ggufspec.llama.session import LlamaSession
from ggufspec.llama.vocab_map import VocabMap

TEXT = " hello world, a model of the end."
DRAFTS = {
    "subset": tiny.spm_vocab(words=tiny.WORDS[::2]),
    "foreign": tiny.bpe_vocab(words=(*tiny.WORDS, " zebra", " quilt", "tion", "ably")),
    "starts otherwise": tiny.bpe_vocab(bos="<|im_start|>", add_bos=True),
}
WRITERS = [tiny.write_llama, tiny.write_mamba]


def without_digits(vocab: tiny.Vocab) -> tiny.Vocab:
    kinds = [
        int(gguf.TokenType.UNUSED) if vocab.bytes_of(token).isdigit() else kind
        for token, kind in enumerate(vocab.types)
    ]
    return dataclasses.replace(vocab, types=tuple(kinds))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_llama(tmp_path_factory.mktemp("target") / "target.gguf")


@pytest.fixture(scope="module", params=["subset", "foreign"])
def draft(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("draft") / "draft.gguf"
    return tiny.write_llama(path, vocab=DRAFTS[request.param], n_layer=1)


@pytest.fixture
def pair(target: Path, draft: Path) -> Iterator[Engine]:
    with ggufspec.load(target, draft, n_threads=1, n_draft_max=4, n_slots=2) as engine:
        yield engine


# Texts


@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__[6:])
@pytest.mark.parametrize("vocab", DRAFTS.values(), ids=DRAFTS)
def test_greedy_texts_are_those_of_the_target(
    write: Callable[..., Path], vocab: tiny.Vocab, target: Path, tmp_path: Path
) -> None:
    draft = write(tmp_path / "draft.gguf", vocab=vocab)
    with ggufspec.load(target, draft, n_threads=1) as engine:
        for prompt in (TEXT, [1], [40, 1, 300]):
            plain = engine.generate(prompt, temperature=0, max_tokens=40, drafter="none")
            for n_draft in (1, 3, "auto"):
                found = engine.generate(prompt, temperature=0, max_tokens=40, n_draft=n_draft)
                assert found.tokens == plain.tokens
        assert found.stats.n_generated == 40


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


def test_texts_in_slots_are_those_of_texts_alone(pair: Engine) -> None:
    prompts = [TEXT, TEXT + " say", " the end", TEXT]
    options = {"temperature": 0, "max_tokens": 16, "n_draft": 3}
    alone = [pair.generate(prompt, **options).text for prompt in prompts]  # type: ignore[arg-type]
    pair.forget()
    found = pair.generate_batch(prompts, **options)  # type: ignore[arg-type]
    assert [done.text for done in found] == alone


def test_seeds_repeat_their_texts(pair: Engine) -> None:
    """The measured cost of a step includes the mapping."""
    first, again = (pair.generate(TEXT, seed=5, max_tokens=20, temperature=1) for _ in range(2))
    assert first.tokens == again.tokens
    assert pair.pair.profile.is_settled


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


# What the draft does not have


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


def test_all_that_is_not_banned_may_be_what_the_draft_lacks(target: Path, tmp_path: Path) -> None:
    digits = {tiny.SPM.id_of(digit) for digit in "0123456789"}
    bans = {token: -np.inf for token in range(len(tiny.SPM)) if token not in digits}
    draft = tiny.write_llama(tmp_path / "draft.gguf", vocab=without_digits(tiny.BPE))
    with ggufspec.load(target, draft, n_threads=1) as engine:
        found = engine.generate(TEXT, n_draft=3, max_tokens=8, logit_bias=bans, temperature=1.0)
    assert len(found.text) == 8
    assert found.text.isdigit()


def test_the_engine_says_what_the_draft_has(pair: Engine, target: Path) -> None:
    assert pair.pair.vocab_map is not None
    assert pair.pair.vocab_map.note in pair.notes
    with ggufspec.load(target, target, n_threads=1) as same:
        assert same.pair.vocab_map is None
        assert same.notes == []


# Distributions

# A few tokens of each kind: both have six, the target alone has four.
ALLOWED = [
    *map(tiny.SPM.id_of, ("a", "b", "c", "d", "e", "f", *(f"<0x{byte:02X}>" for byte in b"wxyz")))
]
BANS = {token: -np.inf for token in range(len(tiny.SPM)) if token not in ALLOWED}
SAMPLING = Sampling(temperature=2.0, top_k=0, top_p=1.0, min_p=0.0, logit_bias=BANS)
N_RUNS = 20_000


@dataclasses.dataclass
class Mapped:
    """A pair to sample from, the draft's own session, and the map."""

    pair: Pair
    own: Remembering
    map: VocabMap


@pytest.fixture(scope="module")
def mapped(target: Path, draft: Path) -> Iterator[Mapped]:
    with ExitStack() as stack:
        models = [stack.enter_context(closing(Model(path))) for path in (target, draft)]
        options = ContextOptions(n_ctx=64, n_rows=N_DRAFT + 1, n_threads=1)
        contexts = [Context(model, options) for model in (*models, models[1])]
        for context in contexts:
            stack.callback(context.close)
        vocab_map = VocabMap(models[0].vocab, models[1].vocab)
        sessions = [LlamaSession(context) for context in contexts]
        pair = Pair(
            Remembering(sessions[0]),
            Remembering(MappedSession(sessions[1], vocab_map)),
            models[0].vocab,
        )
        yield Mapped(pair, Remembering(sessions[2]), vocab_map)


@pytest.mark.parametrize("name", ["traversal", "rejection"])
def test_texts_have_the_targets_distribution(name: str, mapped: Mapped) -> None:
    statistic, n_free = chi_square(
        mapped.pair, verify.rule(name), N_RUNS, 1, sampling=SAMPLING, n_tokens=3
    )
    assert n_free > 30
    assert statistic < limit(n_free)


class NotRenormalised:
    """A known mistake: states probabilities over all tokens of the draft that are not banned.

    Those that the target does not have are stated as a token that is never drafted.
    """

    def __init__(self, drafter: Drafter, mapped: Mapped) -> None:
        self._drafter = drafter
        self._mapped = mapped

    def draft(self, tokens: Sequence[int], n_max: int) -> Draft:
        draft = self._drafter.draft(tokens, n_max)
        if draft.probs is None:
            return draft
        probs = np.array(draft.probs)
        for i in range(len(probs)):
            probs[i] = self._own([*tokens, *draft.tokens[:i]])
        return Draft(draft.tokens, probs)

    def _own(self, tokens: Sequence[int]) -> np.ndarray:
        found = self._mapped.map
        read = [there for token in tokens for there in found.spelled(token)]
        row = self._mapped.own.score([*found.start(tokens[0]), *read])[0] / SAMPLING.temperature
        common = [token for token in ALLOWED if found.to_draft[token] >= 0]
        weights = np.exp(row - row.max())
        probs = np.zeros(len(tiny.SPM))
        probs[common] = weights[found.to_draft[common]]
        probs[0] = weights[found.to_target < 0].sum()
        return probs

    def observe(self, draft: Draft, target_probs: Probs, verdict: Verdict) -> None: ...


@pytest.mark.parametrize("draft", ["foreign"], indirect=True)
@pytest.mark.parametrize("name", ["traversal", "rejection"])
def test_so_many_texts_detect_probabilities_that_are_not_renormalised(
    name: str, mapped: Mapped
) -> None:
    statistic, n_free = chi_square(
        mapped.pair,
        verify.rule(name),
        N_RUNS // 4,
        1,
        sampling=SAMPLING,
        n_tokens=3,
        changed=partial(NotRenormalised, mapped=mapped),
    )
    assert statistic > limit(n_free)


def test_an_audit_passes(pair: Engine) -> None:
    settings = AuditOptions(n_runs=6, n_tokens=8, seed=0)
    for options in ({}, {"temperature": 0.0}, {"regex": "[0-9a-f ]+", "temperature": 1.0}):
        report = audit(pair, PROMPTS, replace(settings, options=options))  # type: ignore[arg-type]
        assert report.differences == ()
        assert len(report.greedy.divergences) == 0
