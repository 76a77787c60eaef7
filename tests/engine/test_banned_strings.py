"""A text never contains a banned string, and has the same distribution with and without drafts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chi_square import chi_square

import ggufspec
from ggufspec.decoding.sampling import Sampling, to_probs
from ggufspec.engine import scoring
from ggufspec.engine.engine import Engine
from ggufspec.engine.options import CheckedOptions
from ggufspec.engine.stream import Stream
from ggufspec.errors import ConstraintError, OptionError
from ggufspec.llama import kernels
from ggufspec.standin import embedded

PROMPT = "hello"
N_TOKENS = 3
OPTIONS: dict[str, Any] = {"temperature": 1.5, "top_k": 3, "top_p": 1.0, "min_p": 0.0}
Law = dict[tuple[int, ...], float]


@pytest.fixture(scope="module")
def engine(files: tuple[Path, Path]) -> Iterator[Engine]:
    with ggufspec.load(*files, n_threads=1, n_draft_max=4) as made:
        pieces = enumerate(map(made.vocab.piece, range(made.vocab.n_tokens)))
        others = [i for i, piece in pieces if not piece.isascii() or not piece.strip()]
        OPTIONS["logit_bias"] = dict.fromkeys({*others} - {*made.vocab.stop_tokens}, -np.inf)
        yield made


@pytest.fixture(scope="module")
def banned(engine: Engine) -> tuple[str, ...]:
    """Three likely texts of two tokens, two of which begin with the same token."""
    first, second = likely(engine, ())[:2]
    ends = likely(engine, (first,))[:2]
    other = text_of(engine, second, likely(engine, (second,))[0])
    return (*(text_of(engine, first, end).upper() for end in ends), other)


def text_of(engine: Engine, *tokens: int) -> str:
    return b"".join(map(engine.vocab.piece, tokens)).decode()


def probs_after(
    engine: Engine, text: tuple[int, ...], bans: frozenset[int] = frozenset()
) -> np.ndarray:
    """A ban comes before all samplers, as a bias does."""
    prompt = engine.tokenize(PROMPT)
    (*_, rows) = scoring.logits(engine, prompt, [*text, 5], whose="target")
    biases = {**OPTIONS["logit_bias"], **dict.fromkeys(bans, -np.inf)}
    sampling = Sampling(**{**OPTIONS, "logit_bias": biases})
    return np.asarray(to_probs(rows[-1:], sampling, [*prompt, *text]))[0]


def likely(engine: Engine, text: tuple[int, ...]) -> list[int]:
    """The likeliest tokens that have a text."""
    order = np.argsort(-probs_after(engine, text)).tolist()
    return [token for token in order if engine.vocab.piece(token)]


def law_of(engine: Engine, banned: tuple[str, ...]) -> Law:
    """By the definition: a token that completes a string takes the text back to its beginning."""

    @cache
    def after(text: tuple[int, ...], bans: frozenset[int]) -> np.ndarray:
        return probs_after(engine, text, bans)

    found: Law = {}

    def go_on(text: tuple[int, ...], bans: tuple[frozenset[int], ...], chance: float) -> None:
        if len(text) == N_TOKENS or (text and text[-1] in engine.vocab.stop_tokens):
            found[text] = found.get(text, 0.0) + chance
            return
        probs = after(text, bans[len(text)]).astype(float)
        for token in np.nonzero(probs)[0].tolist():
            longer = (*text, token)
            pieces = [engine.vocab.piece(each) for each in longer]
            whole = b"".join(pieces).lower()
            starts = [at for each in banned if (at := whole.find(each.lower().encode())) >= 0]
            if not starts:
                go_on(longer, (*bans[: len(longer)], frozenset()), chance * probs[token])
                continue
            ends = np.cumsum([len(piece) for piece in pieces])
            i = int(np.argmax(ends > min(starts)))
            kept = (*bans[:i], bans[i] | {longer[i]})
            go_on(longer[:i], kept, chance * probs[token])

    go_on((), (frozenset(),), 1.0)
    return found


@pytest.fixture(scope="module")
def laws(engine: Engine, banned: tuple[str, ...]) -> tuple[Law, Law]:
    """With the strings banned, and without; texts that end have -1 for their last token."""

    def merged(law: Law) -> Law:
        found: Law = {}
        for text, chance in law.items():
            ended = text[-1] in engine.vocab.stop_tokens
            key = (*text[:-1], -1) if ended else text
            found[key] = found.get(key, 0.0) + chance
        return found

    return merged(law_of(engine, banned)), merged(law_of(engine, ()))


@pytest.mark.parametrize(
    ("drafter", "tree"), [("none", "off"), ("model", "off"), ("model", "on"), ("staged", "off")]
)
def test_texts_have_the_law_of_going_back(
    drafter: str, tree: str, engine: Engine, banned: tuple[str, ...], laws: tuple[Law, Law]
) -> None:
    """So many texts detect that whole texts are drawn again until one has no banned string."""
    (law, free), n_texts = laws, 600
    assert sum(law.values()) == pytest.approx(1)
    rest = {text: chance for text, chance in free.items() if text in law}
    assert sum(rest.values()) < 0.95
    how: dict[str, Any] = {"drafter": drafter, "tree": tree, "max_tokens": N_TOKENS, **OPTIONS}
    if drafter != "none":
        how["n_draft"] = 2
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(n_texts):
        done = engine.generate(PROMPT, banned_strings=banned, seed=seed, **how)
        assert not any(each.lower() in done.text.lower() for each in banned)
        stops = [] if done.finish_reason == "length" else [-1]
        counts[(*done.tokens, *stops)] += 1
    assert counts.keys() <= law.keys()
    for text, chance in law.items():
        deviation = (chance * (1 - chance) / n_texts) ** 0.5
        assert abs(counts[text] / n_texts - chance) < 4.5 * deviation + 1e-3
    statistic, limit = chi_square(counts, law)
    assert statistic < limit
    other = {text: chance / sum(rest.values()) for text, chance in rest.items()}
    statistic, limit = chi_square(counts, other)
    assert statistic > limit


def test_chunks_never_have_what_is_taken_back(engine: Engine, banned: tuple[str, ...]) -> None:
    """Nor do their log-probabilities: one for each token."""
    for drafter in ("none", "model"):
        for seed in range(20):
            options: Any = {"seed": seed, "drafter": drafter, "max_tokens": 20, **OPTIONS}
            checked = CheckedOptions.of({"banned_strings": banned, **options})
            stream = Stream(engine.scheduler, engine.prepare(PROMPT, checked, n_top=1))
            chunks = list(stream)
            assert "".join(chunk.text for chunk in chunks) == stream.completion.text
            tokens = [token for chunk in chunks for token in chunk.tokens]
            assert tuple(tokens) == stream.completion.tokens
            assert sum(len(chunk.logprobs) for chunk in chunks) == len(tokens)
            written = [token for round_ in stream.rounds for token in round_.tokens]
            assert written[: len(tokens)] == tokens


def test_the_state_of_mirostat_goes_back_too(engine: Engine, banned: tuple[str, ...]) -> None:
    for seed in range(10):
        options: Any = {"seed": seed, "mirostat": 2, "mirostat_tau": 3.0, "max_tokens": 20}
        for drafter in ("none", "model"):
            done = engine.generate(PROMPT, banned_strings=banned, drafter=drafter, **options)
            assert not any(each.lower() in done.text.lower() for each in banned)


def test_an_error_names_the_bans_that_leave_no_token(engine: Engine) -> None:
    allowed = likely(engine, ())[:2]
    others = dict.fromkeys({*range(engine.vocab.n_tokens)} - {*allowed}, -np.inf)
    texts = [text_of(engine, token) for token in allowed]
    with pytest.raises(ConstraintError, match="or banned_strings ban every token"):
        engine.generate(PROMPT, banned_strings=texts, logit_bias=others)
    with pytest.raises(ConstraintError, match="or banned_strings ban"):
        engine.generate(PROMPT, banned_strings=["YES"], choices=["yes"], temperature=0)
    done = engine.generate(PROMPT, banned_strings=["ye"], choices=["yes", "no"], temperature=0)
    assert done.text == "no"


@pytest.mark.skipif(kernels.attention_refusal() is not None, reason="exact cannot be used here")
def test_a_sampled_text_cannot_be_repeated_exactly() -> None:
    pair = embedded.embedded_target(), embedded.embedded_draft()
    with ggufspec.load(*pair, n_ctx=64, n_threads=1, exact=True) as engine:
        with pytest.raises(OptionError, match="cannot repeat"):
            engine.generate("hi", banned_strings=["a"], temperature=1.0)
        assert "a" not in engine.generate("hi", banned_strings=["a"], temperature=0).text
