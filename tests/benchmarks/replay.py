"""Replays recorded texts of a real pair with measured costs: what a draft-length policy would take.

    python -m tests.benchmarks.replay

Each text was recorded by `tests.benchmarks.record`. All its tokens are known, and so is where the
draft model is right: no model runs, and 200 texts take seconds. Every contender writes all texts in
the same mixed order; `auto` learns from each text for the next, from a new pair on.
"""

from __future__ import annotations

import argparse
import random
import sys
from array import array
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import geometric_mean, median
from zlib import crc32

import numpy as np

from ggufspec.common.defaults import N_REMEMBERED
from ggufspec.decoding.types import Round
from ggufspec.drafting.cost_model import CostModel
from ggufspec.drafting.draft_length import Action, LengthPolicy
from ggufspec.drafting.pair_profile import PairProfile
from ggufspec.drafting.strategies.ngram import NgramIndex, Origin, TextStore
from tests.benchmarks.record import ACCEPTANCE_STEPS, GAP_STEPS

RECORDED = Path(__file__).parent / "data" / "texts.npz"
N_MOST = 16  # drafted tokens of a round
LENGTHS = range(1, 9)  # fixed ones
_NOISE = 0.04  # of measured seconds


@dataclass(frozen=True)
class Costs:
    """Milliseconds of target passes over some sizes, of a draft step, and of reading a token."""

    passes: dict[int, float]
    step: float
    read: float

    @property
    def curve(self) -> list[float]:
        """Seconds of passes over 1, 2 ... N_MOST + 1 tokens."""
        seconds = np.interp(range(1, N_MOST + 2), list(self.passes), list(self.passes.values()))
        return [float(each) / 1000 for each in seconds]


# Qwen2.5-Coder 1.5B and 0.5B on two AVX-512 cores, measured by tests.benchmarks.plain, and the
# costs of a GPU, where passes of all sizes take about the same time.
COSTS = {
    "Q4_0": Costs(
        {1: 89.6, 2: 111, 3: 133, 4: 99.8, 5: 135, 6: 146, 8: 169, 16: 231, 17: 240}, 31.4, 7.3
    ),
    "Q4_0 fast": Costs({1: 25, 2: 39, 3: 51, 4: 36, 5: 51, 8: 62, 16: 89, 17: 94}, 11, 2.8),
    "Q4_K_M": Costs(
        {1: 62.7, 2: 97.8, 3: 123, 4: 112, 5: 146, 8: 203, 16: 243, 17: 250}, 36.6, 8.0
    ),
    # Q4_0 on two cores restricted to AVX2: llama.cpp's kernels, and those of native/matmul.
    "AVX2 llama.cpp": Costs({1: 28, 2: 53, 3: 79, 4: 93, 8: 166, 16: 332, 17: 350}, 12.3, 3),
    "AVX2": Costs({1: 27, 2: 29, 3: 32, 4: 40, 8: 77, 16: 150, 17: 160}, 10, 3),
    "GPU": Costs({1: 20, 8: 21, 16: 23, 17: 24}, 4, 0.1),
}


@dataclass(frozen=True)
class Text:
    """A recorded text; the lists have a value for each of its tokens."""

    kind: str
    temperature: float
    prompt: array[int]
    tokens: array[int]
    target_gaps: Sequence[float]
    draft_gaps: Sequence[float]
    acceptances: Sequence[float]

    def __len__(self) -> int:
        return len(self.tokens)


def load(path: Path = RECORDED) -> list[Text]:
    """All recorded texts."""
    with np.load(path) as file:
        n_texts = sum(name.endswith("/kind") for name in file)
        return [_text({name: file[f"{i}/{name}"] for name in _FIELDS}) for i in range(n_texts)]


_FIELDS = ("kind", "temperature", "tokens", "n_prompt", "target_gaps", "draft_gaps", "acceptances")


def _text(fields: dict[str, np.ndarray]) -> Text:
    n_prompt, tokens = int(fields["n_prompt"]), fields["tokens"].tolist()
    n = len(tokens) - n_prompt
    steps = (GAP_STEPS, GAP_STEPS, ACCEPTANCE_STEPS)
    values = ((fields[name][-n:] / k).tolist() for name, k in zip(_FIELDS[4:], steps, strict=True))
    return Text(
        str(fields["kind"]),
        round(float(fields["temperature"]), 3),
        array("i", tokens[:n_prompt]),
        array("i", tokens[n_prompt:]),
        *values,
    )


def half(text: Text) -> int:
    """The half of the texts that a text belongs to, by its prompt, at all temperatures."""
    return crc32(text.prompt.tobytes()) % 2


def joined(first: Text, second: Text, n: int) -> Text:
    """The first `n` tokens of one text, then the last `n` of another, with other token ids."""
    shift = max([*first.prompt, *first.tokens]) + 1
    return replace(
        first,
        tokens=array("i", [*first.tokens[:n], *(token + shift for token in second.tokens[-n:])]),
        target_gaps=[*first.target_gaps[:n], *second.target_gaps[-n:]],
        draft_gaps=[*first.draft_gaps[:n], *second.draft_gaps[-n:]],
        acceptances=[*first.acceptances[:n], *second.acceptances[-n:]],
    )


# Contenders: each takes a text, costs and random numbers, and returns seconds.


class Auto:
    """Our policy, which keeps what it learned from text to text."""

    def __init__(self, *, has_model: bool = True) -> None:
        self.profile = PairProfile(CostModel(N_MOST + 1))
        self.has_model = has_model
        self.texts = TextStore(N_REMEMBERED)  # that it has written
        self.rounds: list[tuple[int, int]] = []  # of the last text: position, tokens drafted

    def __call__(self, text: Text, costs: Costs, rng: random.Random) -> float:
        policy = self.profile.policy(
            text.temperature, repeats=False, in_blocks=False, has_model=self.has_model
        )
        writing = _Writing(text, costs, rng, policy, self.has_model)
        writing.ngrams = NgramIndex(others=self.texts.texts(repeats=False))
        seconds = writing.run()
        self.texts.add_written([*text.prompt, *text.tokens], len(text.prompt))
        self.rounds = writing.rounds
        self.profile.keep(policy, text.temperature)
        return seconds


class _Writing:
    """One text, written as strategies/auto.py does."""

    def __init__(
        self, text: Text, costs: Costs, rng: random.Random, policy: LengthPolicy, has_model: bool
    ) -> None:
        self.text, self.costs, self.rng, self.policy = text, costs, rng, policy
        self.has_model = has_model
        self.curve = costs.curve
        self.ngrams = NgramIndex()
        self.n_written, self.n_unread = 0, 1
        self.rounds: list[tuple[int, int]] = []

    def run(self) -> float:
        seconds = 0.0
        while self.n_written < len(self.text):
            seconds += self._round()
        return seconds

    def _round(self) -> float:
        text, policy, i = self.text, self.policy, self.n_written
        n_max = min(N_MOST, len(text) - i - 1)
        predicted = self.ngrams.predict(array("i", [*text.prompt, *text.tokens[:i]]), n_max)
        prefix = policy.prefix_length(predicted.probs, is_own=predicted.origin != Origin.OTHERS)
        draft_seconds, n_drafted, expected = 0.0, 0, 0.0
        n_read = 0
        if prefix.beats_model or not self.has_model:
            n_drafted, expected = prefix.n_draft, prefix.expected
            n_accepted = self._n_equal(predicted.tokens[:n_drafted])
        else:
            n_drafted, n_accepted, draft_seconds = self._draft(n_max)
            expected = policy.n_expected if policy.n_evaluated else 0.0
            n_read = policy.n_evaluated
        n_tried = min(len(predicted.tokens), n_accepted + 1)
        if n_tried:
            n_right = min(self._n_equal(predicted.tokens), n_tried)
            self.ngrams.observe(n_right, n_tried)
        first = i if n_read else i + n_accepted
        policy.observe_gaps(text.target_gaps[first : i + n_accepted + 1])
        if n_read:
            policy.observe_verdict(
                n_accepted, text.acceptances[i : i + min(n_read, n_accepted + 1)]
            )
            self.n_unread = 2 if n_accepted == n_drafted == n_read else 1
        else:
            self.n_unread += n_accepted + 1
        target_seconds = self.curve[n_drafted]
        policy.observe_round(
            Round(
                list(text.tokens[i : i + n_accepted + 1]),
                n_drafted,
                n_accepted,
                draft_seconds * self._noise(),
                target_seconds * self._noise(),
                0.0,
                expected,
                policy.why,
            )
        )
        self.rounds.append((i, n_drafted))
        self.n_written += n_accepted + 1
        return target_seconds + draft_seconds

    def _draft(self, n_max: int) -> tuple[int, int, float]:
        """Lengths drafted and accepted, and seconds of the draft model."""
        text, policy, i = self.text, self.policy, self.n_written
        seconds = 0.0
        action = policy.start_round(n_max, self.n_unread)
        if action is not Action.DRAFT:
            return 0, 0, seconds
        while policy.should_evaluate() and policy.should_draw(text.draft_gaps[i + policy.n_drawn]):
            pass
        seconds += self._draft_seconds(policy.n_evaluated)
        return policy.n_drawn, _n_accepted(text, i, policy.n_drawn, self.rng), seconds

    def _draft_seconds(self, n_steps: int) -> float:
        if not n_steps:
            return 0.0
        return (n_steps * self.costs.step + (self.n_unread - 1) * self.costs.read) / 1000

    def _n_equal(self, tokens: Sequence[int]) -> int:
        written = self.text.tokens[self.n_written :]
        pairs = enumerate(zip(tokens, written, strict=False))
        return next((n for n, (a, b) in pairs if a != b), min(len(tokens), len(written)))

    def _noise(self) -> float:
        return self.rng.lognormvariate(0, _NOISE)


def _n_accepted(text: Text, i: int, n: int, rng: random.Random) -> int:
    for k in range(n):
        if rng.random() >= text.acceptances[i + k]:
            return k
    return n


def fixed(n: int, text: Text, costs: Costs, rng: random.Random) -> float:
    """Seconds with `n` tokens of the draft model in each round; 0: plain decoding."""
    curve, i, seconds, n_unread = costs.curve, 0, 0.0, 1
    while i < len(text):
        n_drafted = min(n, len(text) - i - 1)
        n_accepted = _n_accepted(text, i, n_drafted, rng)
        seconds += curve[n_drafted]
        if n_drafted:
            seconds += (n_drafted * costs.step + (n_unread - 1) * costs.read) / 1000
        n_unread = 2 if n_accepted == n_drafted else 1
        i += n_accepted + 1
    return seconds


def ngram(n: int, text: Text, costs: Costs, rng: random.Random) -> float:
    """Seconds with `n` tokens of n-grams in each round."""
    index, curve, i, seconds = NgramIndex(), costs.curve, 0, 0.0
    written = array("i", text.prompt)
    while i < len(text):
        written.extend(text.tokens[len(written) - len(text.prompt) : i])
        tokens = index.predict(written, min(n, len(text) - i - 1)).tokens
        pairs = zip(tokens, text.tokens[i:], strict=False)
        n_accepted = next((k for k, (a, b) in enumerate(pairs) if a != b), len(tokens))
        seconds += curve[len(tokens)]
        i += n_accepted + 1
    return seconds


def clairvoyant(text: Text, costs: Costs, rng: random.Random) -> float:
    """Seconds if it is known how many tokens of the draft model and of n-grams will be accepted."""
    curve, n_text = costs.curve, len(text)
    index, written = NgramIndex(), array("i", text.prompt)
    runs, free = [], []
    for i in range(n_text):
        n_most = min(N_MOST, n_text - i - 1)
        runs.append(_n_accepted(text, i, n_most, rng))
        predicted = index.predict(written, n_most).tokens
        written.append(text.tokens[i])
        pairs = zip(predicted, text.tokens[i:], strict=False)
        free.append(next((k for k, (a, b) in enumerate(pairs) if a != b), len(predicted)))
    best = [0.0] * (n_text + 1)
    for i in reversed(range(n_text)):
        drafts = [curve[n] + n * costs.step / 1000 + best[i + n + 1] for n in range(runs[i] + 1)]
        drafts += [curve[n] + best[i + n + 1] for n in range(free[i] + 1)]
        best[i] = min(drafts)
    return best[0]


Contender = Callable[[Text, Costs, random.Random], float]


def contenders() -> dict[str, Contender]:
    """By name; `auto` is one for all texts."""
    return {
        "plain": partial(fixed, 0),
        "auto": Auto(),
        "no model": Auto(has_model=False),
        "n-gram 3": partial(ngram, 3),
        **{f"model {n}": partial(fixed, n) for n in LENGTHS},
        "clairvoyant": clairvoyant,
    }


def speedups(
    texts: Sequence[Text], costs: Costs, without: Collection[str] = ()
) -> dict[str, list[float]]:
    """For each contender but those named in `without`, plain seconds over its own, by text."""
    order = list(range(len(texts)))
    random.Random(0).shuffle(order)
    found: dict[str, list[float]] = {}
    for name, contender in contenders().items():
        if name in without:
            continue
        rng, seconds = random.Random(0), [0.0] * len(texts)
        for i in order:
            seconds[i] = contender(texts[i], costs, rng)
        found[name] = seconds
    return {
        name: [p / s for p, s in zip(found["plain"], seconds, strict=True)]
        for name, seconds in found.items()
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Print speed-ups over plain decoding: medians by kind, and the least of longer texts.

    Of the fixed lengths, it shows the one that is best on average.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.replay")
    parser.add_argument("texts", type=Path, nargs="*", default=[RECORDED])
    parser.add_argument(
        "--half", type=int, choices=(0, 1), help="0: texts to choose constants by, 1: the others"
    )
    options = parser.parse_args(arguments)
    texts = [text for path in options.texts for text in load(path)]
    if options.half is not None:
        texts = [text for text in texts if half(text) == options.half]
    for name, costs in COSTS.items():
        for temperature in sorted({text.temperature for text in texts}):
            chosen = [text for text in texts if text.temperature == temperature]
            found = speedups(chosen, costs)
            sys.stdout.write(f"\n{name}, temperature {temperature}\n")
            means = {each: geometric_mean(found[each]) for each in found}
            best = max((f"model {n}" for n in LENGTHS), key=means.__getitem__)
            names = ["auto", "no model", "n-gram 3", best, "clairvoyant"]
            sys.stdout.write(f"{'kind':10} {'n':>3} " + " ".join(f"{n:>11}" for n in names) + "\n")
            for kind in sorted({text.kind for text in chosen}):
                rows = [i for i, text in enumerate(chosen) if text.kind == kind]
                shown = [median(found[each][i] for i in rows) for each in names]
                sys.stdout.write(f"{kind:10} {len(rows):3} " + _cells(shown))
            sys.stdout.write(f"{'all':10} {len(chosen):3} " + _cells([means[n] for n in names]))
            share = (means["auto"] - 1) / (means["clairvoyant"] - 1)
            sys.stdout.write(f"auto's share of the clairvoyant's gain: {share:.3f}\n")
            least = [
                min(s for s, text in zip(found[each], chosen, strict=True) if len(text) >= 64)
                for each in names
            ]
            sys.stdout.write(f"{'least':10} {'':3} " + _cells(least))


def _cells(values: Sequence[float]) -> str:
    return " ".join(f"{value:11.3f}" for value in values) + "\n"


if __name__ == "__main__":
    main()
