"""Texts drafted by real heads in blocks: so many that a wrong distribution is detected."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import head_pairs
import numpy as np
import pytest
from fakes import speculated
from tiny_blocks import SMALL_WITH_MASK
from tiny_heads import Table

from ggufspec import _native
from ggufspec.decoding import verify
from ggufspec.decoding.rng import uniform_streams
from ggufspec.decoding.sampling import Sampling, to_probs
from ggufspec.decoding.types import Draft, Drafter, Logits, Probs, Verdict
from ggufspec.drafting import strategies
from ggufspec.drafting.draft_length import LengthPolicy
from ggufspec.drafting.pair_profile import fixed_length

N_TEXTS = 20_000
N_TOKENS = 3
N_NODES = 4
PROMPT = (1, 12)
Key = tuple[tuple[int, ...], ...]
TABLE = Table(vocab=SMALL_WITH_MASK, n_classes=4, gap=2.0)


@dataclass
class Target:
    """Its rows are kept: the same few texts are scored again and again."""

    contexts: head_pairs.Contexts
    known: dict[Key, Logits] = field(default_factory=dict)

    def score(
        self, tokens: Sequence[int], draft: Sequence[int] = (), parents: Sequence[int] = ()
    ) -> Logits:
        key = (tuple(tokens), tuple(draft), tuple(parents))
        if key not in self.known:
            asked = (tokens, draft, parents) if parents else (tokens, draft)
            self.known[key] = self.contexts.sessions[0].score(*asked).copy()
        return self.known[key]

    @property
    def n_branching(self) -> int:
        return sum(any(parent != i - 1 for i, parent in enumerate(key[2])) for key in self.known)


@dataclass
class Blocks:
    """A head's rows and gaps behind `text`, which the target has decoded up to its last token."""

    contexts: head_pairs.Contexts
    text: tuple[int, ...] = ()
    known: dict[Key, Logits] = field(default_factory=dict)
    known_gaps: dict[Key, Sequence[float]] = field(default_factory=dict)

    def score(self, tokens: Sequence[int], draft: Sequence[int] = ()) -> Logits:
        key = (self.text, tuple(tokens))
        if key not in self.known:
            self._feed()
            self.known[key] = self.contexts.head.sessions[0].score(tokens).copy()
        return self.known[key]

    def gaps(self, tokens: Sequence[int], n_most: int) -> Sequence[float]:
        key = (self.text, tuple(tokens))
        if key not in self.known_gaps:
            self._feed()
            session = self.contexts.head.sessions[0]
            self.known_gaps[key] = session.gaps(tokens, 99)  # type: ignore[attr-defined]
        return self.known_gaps[key][:n_most]

    def _feed(self) -> None:
        """What else was decoded is dropped."""
        self.contexts.sessions[0].feed(self.text[:-1])


@dataclass
class Pair:
    kind: str
    target: Target
    draft: Blocks


@pytest.fixture(scope="module", params=["dflash", "dspark", "dflash2"])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("models")
    files = head_pairs.WRITERS[request.param](folder, TABLE, noise=1.5, right=0.3)
    contexts = head_pairs.Contexts(files, n_ctx=64, n_rows=N_NODES + 1, n_leaves=N_NODES)
    yield Pair(request.param, Target(contexts), Blocks(contexts))
    contexts.close()


class Begun:
    """Tells the head where each round begins."""

    def __init__(self, drafter: Drafter, blocks: Blocks) -> None:
        self._drafter, self._blocks = drafter, blocks
        self.observe = drafter.observe
        self.lengths: Counter[int] = Counter()

    def draft(self, tokens: Sequence[int], n_max: int) -> Draft:
        self._blocks.text = tuple(tokens)
        draft = self._drafter.draft(tokens, n_max)
        self.lengths[len(draft.tokens)] += 1
        return draft


def statistic_of(
    pair: Pair,
    rule: str,
    sampling: Sampling,
    policy: LengthPolicy,
    *,
    n_texts: int = N_TEXTS,
    seed: int = 1,
    tree: str = "off",
    changed: Callable[[Draft], Draft] = lambda draft: draft,
) -> tuple[float, int, Counter[int]]:
    """Chi-square over all texts expected at least 5 times, its degrees of freedom, and lengths."""
    verify_uniforms, draft_uniforms = uniform_streams(seed)
    n_tokens = N_TOKENS if tree == "off" else N_NODES
    materials = strategies.Materials(
        sampling,
        draft_uniforms,
        (),
        pair.draft,
        draft_temperature=sampling.temperature,
        n_draft_max=N_NODES,
        policy=policy,
        tree=tree,
        n_leaves=N_NODES,
    )
    drafter = Begun(Changed(strategies.make("model", materials), changed), pair.draft)
    counts: Counter[tuple[int, ...]] = Counter()
    for _ in range(n_texts):
        tokens = list(PROMPT)
        for _ in speculated(
            tokens,
            target=pair.target,
            drafter=drafter,
            verify=verify.rule(rule),
            sampling=sampling,
            uniforms=verify_uniforms,
            n_draft=N_NODES,
            n_end=len(PROMPT) + n_tokens,
        ):
            pass
        counts[tuple(tokens[len(PROMPT) :])] += 1
    law = distribution_of(pair.target, sampling, n_tokens)
    assert set(counts) <= set(law)
    cells = [(counts[text], p * n_texts) for text, p in law.items() if p * n_texts >= 5]
    return sum((found - n) ** 2 / n for found, n in cells), len(cells) - 1, drafter.lengths


def distribution_of(
    target: Target, sampling: Sampling, n_tokens: int
) -> dict[tuple[int, ...], float]:
    found = {(): 1.0}
    for _ in range(n_tokens):
        longer = {}
        for text, p in found.items():
            tokens = [*PROMPT, *text]
            probs = np.asarray(to_probs(target.score(tokens), sampling, tokens))[0]
            longer.update({(*text, int(x)): p * float(probs[x]) for x in np.flatnonzero(probs)})
        found = longer
    return found


def limit(n_free: int) -> float:
    """What a chi-square statistic exceeds once in 10,000 times (Wilson and Hilferty, 1931)."""
    return n_free * (1 - 2 / (9 * n_free) + 3.719 * (2 / (9 * n_free)) ** 0.5) ** 3


class Changed:
    """A drafter with a mistake."""

    def __init__(self, drafter: Drafter, changed: Callable[[Draft], Draft]) -> None:
        self._drafter, self._changed = drafter, changed
        self._drafted = Draft(())

    def draft(self, tokens: Sequence[int], n_max: int) -> Draft:
        self._drafted = self._drafter.draft(tokens, n_max)
        return self._changed(self._drafted)

    def observe(self, draft: Draft, target_probs: Probs, verdict: Verdict) -> None:
        if draft is self._drafted:
            self._drafter.observe(draft, target_probs, verdict)


def foreseeing() -> LengthPolicy:
    """Stops by what all rows of a block are sure of."""
    policy = LengthPolicy()
    policy.rule = _native.LengthRule(_native.AcceptanceModel(-0.5, 1.0))
    policy.rule.update([1.0, 1.3, 1.5, 1.8, 2.0], 0.01, [0.5, 0.7], 0.0, 3)
    return policy


def sampling_at(temperature: float) -> Sampling:
    return Sampling(temperature=temperature, top_k=4, top_p=1.0, min_p=0.0)


def colder(draft: Draft) -> Draft:
    """A known mistake: names probabilities of half the temperature that it was drawn at."""
    if draft.probs is None:
        return draft
    probs = np.asarray(draft.probs) ** 2
    return draft._replace(probs=probs / probs.sum(axis=1, keepdims=True))


def whole(draft: Draft) -> Draft:
    """A known mistake: a sibling counts as a draw from the whole distribution."""
    if not draft.parents:
        return draft
    probs = np.array(draft.probs)
    for node, parent in enumerate(draft.parents):
        probs[node] = probs[list(draft.parents).index(parent)]
    return draft._replace(probs=probs)


def shorter(draft: Draft) -> Draft:
    """A known mistake: stops before a drawn token, because it is an unlikely one."""
    if draft.probs is None:
        return draft
    probs = np.asarray(draft.probs)
    n = next((i for i, x in enumerate(draft.tokens) if probs[i, x] < 0.5), len(probs))
    return Draft(draft.tokens[:n], probs[:n] if n else None)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_texts_have_the_targets_distribution(temperature: float, pair: Pair) -> None:
    """With a rule that stops by what is foreseen, and judges tokens one by one."""
    statistic, n_free, lengths = statistic_of(
        pair, "rejection", sampling_at(temperature), foreseeing()
    )
    assert set(lengths) == {0, 1, 2}
    assert n_free > 30
    assert statistic < limit(n_free)


@pytest.mark.parametrize("pair", ["dflash", "dflash2"], indirect=True)
def test_texts_of_trees_have_the_targets_distribution(pair: Pair) -> None:
    temperature = 1.0 if pair.kind == "dflash" else 0.7
    statistic, n_free, _ = statistic_of(
        pair, "traversal", sampling_at(temperature), fixed_length(temperature), tree="on"
    )
    assert pair.target.n_branching > 20
    assert n_free > 100
    assert statistic < limit(n_free)


@pytest.mark.parametrize("changed", [colder, shorter, whole])
def test_mistakes_change_the_distribution(changed: Callable[[Draft], Draft], pair: Pair) -> None:
    """Over seeds 1 to 5, the statistics were 105 to 366, 168 to 273 (the limit is 84), 738 to 865
    (128). So 20,000 texts show mistakes of half the size, or of a quarter in trees.
    """
    policy = fixed_length(0.7) if changed is whole else LengthPolicy()
    statistic, n_free, _ = statistic_of(
        pair,
        "traversal",
        sampling_at(0.7),
        policy,
        n_texts=2_000,
        tree="on" if changed is whole else "off",
        changed=changed,
    )
    assert statistic > limit(n_free)
