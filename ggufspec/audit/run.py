"""The audit itself: writes texts both ways with an engine, and measures how they differ.

Knows the order of the work and what it costs; the mathematics is next door.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ggufspec.audit.distributions import (
    Law,
    distance,
    law_of_rule,
    likeliest,
    place,
    temptation,
    to_laws,
)
from ggufspec.audit.report import (
    AuditOptions,
    AuditReport,
    BatchLaws,
    Greedy,
    Parting,
    RuleLaws,
    Sequences,
)
from ggufspec.audit.statistics import (
    Floats,
    Test,
    energy,
    holm,
    kolmogorov_smirnov,
    smallest_shift,
    text_profiles,
    uniform_shift,
)
from ggufspec.decoding import verify as rules
from ggufspec.engine import scoring
from ggufspec.engine.engine import Engine
from ggufspec.engine.generation import Generation
from ggufspec.engine.options import CheckedOptions, GenerateOptions
from ggufspec.engine.stream import Stream
from ggufspec.errors import OptionError, PromptError

Progress = Callable[[str, int, int], None]  # (what is being done, done, of)

_N_LAW_TEXTS = 8  # whose target laws are computed token by token as well,
_N_LAW_TOKENS = 32  # for as many of their tokens: each law takes n_vocab doubles
_N_GREEDY_TEXTS = 8
_N_RULE_POSITIONS = 8
_N_WHOLE_TEXTS = 500  # of each kind are compared as wholes, each with each
_ORDERS = ("draft/target", "target")  # tokens, falling, by the ratio or by the chance
_PLAIN = "none"
_PLAIN_RULE = "match"  # draws from the target: plain decoding owes nothing to the rule on trial


def audit(
    engine: Engine,
    prompts: Sequence[str | Sequence[int]],
    settings: AuditOptions | None = None,
    *,
    progress: Progress | None = None,
) -> AuditReport:
    """Is what the engine writes speculatively what its target alone would write?

    `prompts` are texts or token ids; they take turns. `progress` hears (what, done, of).
    Raises OptionError (no draft model, n_draft beyond n_draft_max, an unknown rule), PromptError
    (no prompt, or one that leaves too little of the context), DecodeError, ClosedError.
    """
    settings = settings or AuditOptions()
    if settings.seed is None:
        settings = replace(settings, seed=secrets.randbits(32))
    if engine.draft is None:
        raise OptionError("an audit needs a draft model; load the engine with draft= (--draft)")
    work = _Work(engine, _read(engine, prompts, settings), settings, progress)
    greedy = work.greedy()
    if settings.is_greedy:
        return AuditReport(settings, len(prompts), None, None, None, greedy)
    sequences, batch, laws = work.sequences()
    return AuditReport(settings, len(prompts), batch, work.rule(laws), sequences, greedy)


def _read(
    engine: Engine, prompts: Sequence[str | Sequence[int]], settings: AuditOptions
) -> list[list[int]]:
    """The prompts as tokens."""
    if isinstance(prompts, str):
        raise PromptError("the prompts are one text; give a list of them")
    if not prompts:
        raise PromptError("there are no prompts; give at least one")
    texts = [engine.tokenize(prompt) for prompt in prompts]
    for i, text in enumerate(texts, 1):
        if len(text) + settings.n_tokens > engine.n_ctx:
            raise PromptError(
                f"prompt {i} has {len(text):,} tokens, {settings.n_tokens:,} are to be written, "
                f"but the context has {engine.n_ctx:,}; shorten the prompt, write less "
                "(n_tokens, -n), or load with a larger context (n_ctx, -c)"
            )
    return texts


@dataclass
class _Kind:
    """The texts of one way of decoding, and the places of their tokens in the target's laws."""

    texts: list[list[int]] = field(default_factory=list)
    places: list[tuple[float, float]] = field(default_factory=list)  # of each token, by _ORDERS
    n_drafted: int = 0
    n_accepted: int = 0
    n_impossible: int = 0

    def column(self, order: int) -> Floats:
        """The places of all tokens by one order."""
        return np.array(self.places, np.float64)[:, order]


class _Work:
    """An audit under way."""

    def __init__(
        self,
        engine: Engine,
        prompts: list[list[int]],
        settings: AuditOptions,
        progress: Progress | None,
    ) -> None:
        self._engine = engine
        self._prompts = prompts
        self._settings = settings
        self._progress = progress
        assert settings.seed is not None
        seeds, uniforms, choices, labels = np.random.SeedSequence(settings.seed).spawn(4)
        self._seeds = seeds.generate_state(2 * settings.n_runs).tolist()
        self._uniforms = np.random.default_rng(uniforms)
        self._choices = np.random.default_rng(choices)
        self._labels = np.random.default_rng(labels)

    def greedy(self) -> Greedy:
        """Write each prompt's text at temperature 0 both ways, and see where they part."""
        settings = self._settings
        n_most = settings.n_runs if settings.is_greedy else _N_GREEDY_TEXTS
        prompts = self._prompts[:n_most]
        partings = []
        for i, prompt in enumerate(prompts):
            plain, speculative = (
                self._write(prompt, _Kind(), drafter, 0, greedy=True)
                for drafter in (_PLAIN, settings.drafter)
            )
            pairs = zip(plain, speculative, strict=False)
            at = next((k for k, (a, b) in enumerate(pairs) if a != b), None)
            if at is not None:
                tokens = (plain[at], speculative[at])
                (rows,) = scoring.logits(
                    self._engine, [*prompt, *plain[:at]], [tokens[0]], whose="target"
                )
                gap = float(rows[0].max() - rows[0][list(tokens)].min())
                partings.append(Parting(i, at, tokens, gap))
            self._tell("Writing at temperature 0", i + 1, len(prompts))
        return Greedy(len(prompts), settings.near_tie, tuple(partings))

    def sequences(self) -> tuple[Sequences, BatchLaws, list[tuple[Law, Law]]]:
        """Sample texts both ways, in turns, and test whether they have one law.

        Also returns laws (target's, draft's) of some positions, for the rule to be tried on.
        """
        n_runs = self._settings.n_runs
        plain, speculative = _Kind(), _Kind()
        batch: list[float] = []
        laws: list[tuple[Law, Law]] = []
        for i in range(n_runs):
            prompt = self._prompts[i % len(self._prompts)]
            for kind, drafter, seed in (
                (plain, _PLAIN, self._seeds[2 * i]),
                (speculative, self._settings.drafter, self._seeds[2 * i + 1]),
            ):
                text = self._write(prompt, kind, drafter, seed)
                n_kept = _N_LAW_TOKENS if kind is plain and i < _N_LAW_TEXTS else 0
                found = self._place(prompt, text, kind, n_kept)
                batch += self._changes_by_batch(prompt, text, [law for law, _ in found])
                laws += [likeliest(*pair) for pair in found]
            self._tell("Writing texts both ways", i + 1, n_runs)
        summary = BatchLaws(len(batch), float(np.median(batch)), max(batch))
        return self._test(plain, speculative), summary, self._choose(laws)

    def rule(self, laws: list[tuple[Law, Law]]) -> RuleLaws:
        """Integrate the rule on trial over uniforms and drafted tokens, for each pair of laws."""
        verify = rules.rule(self._settings.verify)
        distances, resolutions = [], []
        for i, (target_law, draft_law) in enumerate(laws, 1):
            found, resolution = law_of_rule(verify, target_law, draft_law)
            distances.append(found)
            resolutions.append(resolution)
            self._tell("Trying the rule", i, len(laws))
        return RuleLaws(len(laws), float(np.median(distances)), max(distances), max(resolutions))

    def _write(
        self,
        prompt: list[int],
        kind: _Kind,
        drafter: str,
        seed: int,
        *,
        greedy: bool = False,
    ) -> list[int]:
        """One text: token ids as they were drawn, with the one that ends it."""
        settings = self._settings
        options: GenerateOptions = {
            **settings.options,
            "max_tokens": settings.n_tokens,
            "n_draft": settings.n_draft,
            "seed": seed,
            "drafter": drafter,
            "verify": _PLAIN_RULE if drafter == _PLAIN else settings.verify,
        }
        if greedy:
            options["temperature"] = 0.0
        checked = CheckedOptions.of(options, allow_test_rules=True)
        stream = Stream(Generation(self._engine, prompt, checked))
        for _ in stream:
            pass
        text = [int(token) for turn in stream.rounds for token in turn.tokens]
        kind.texts.append(text)
        kind.n_drafted += sum(turn.n_drafted for turn in stream.rounds)
        kind.n_accepted += sum(turn.n_accepted for turn in stream.rounds)
        return text

    def _place(
        self, prompt: list[int], text: list[int], kind: _Kind, n_kept: int
    ) -> list[tuple[Law, Law]]:
        """Note the places of a text's tokens; returns the laws of the first (target's, draft's)."""
        kept: list[tuple[Law, Law]] = []
        draft_laws = self._laws(prompt, text, whose="draft")
        laws = self._laws(prompt, text, whose="target", n_together=self._settings.n_together)
        for token, law, draft_law in zip(text, laws, draft_laws, strict=True):
            uniforms = self._uniforms.random(2)
            kind.places.append(
                (
                    place(token, law, temptation(law, draft_law), uniforms[0]),
                    place(token, law, law, uniforms[1]),
                )
            )
            kind.n_impossible += int(law[token] == 0)
            if len(kept) < n_kept:
                kept.append((law, draft_law))
        return kept

    def _changes_by_batch(
        self, prompt: list[int], text: list[int], batched: list[Law]
    ) -> list[float]:
        """How far the target's laws are from those that it has token by token."""
        laws = self._laws(prompt, text[: len(batched)], whose="target")
        return [distance(law, other) for law, other in zip(laws, batched, strict=True)]

    def _laws(
        self, prompt: list[int], text: list[int], *, whose: str, n_together: int = 1
    ) -> Iterator[Law]:
        """A model's law before each token of a text."""
        sampling = scoring.sampling(self._engine, prompt, **self._settings.options)
        tokens, at = [*prompt, *text], len(prompt)
        for piece in scoring.logits(self._engine, prompt, text, whose=whose, n_together=n_together):
            ahead = tokens[at : at + len(piece) - 1]
            yield from to_laws(piece, sampling, tokens[:at], ahead)
            at += len(piece)

    def _choose(self, laws: list[tuple[Law, Law]]) -> list[tuple[Law, Law]]:
        """Positions to try the rule on: at random, but not where both models say the same."""
        open_ones = [pair for pair in laws if 0.02 < distance(*pair) < 0.98] or laws
        n = min(_N_RULE_POSITIONS, len(open_ones))
        chosen = self._choices.choice(len(open_ones), n, replace=False)
        return [open_ones[i] for i in sorted(chosen)]

    def _test(self, plain: _Kind, speculative: _Kind) -> Sequences:
        alpha = self._settings.alpha
        n_tests = 2 * len(_ORDERS) + 1
        each = alpha / n_tests  # so that all intervals hold together with confidence 1 - alpha
        tests: list[Test] = []
        for i, order in enumerate(_ORDERS):
            columns = plain.column(i), speculative.column(i)
            tests.append(uniform_shift(f"mean shift, by {order}", *columns, each))
            tests.append(kolmogorov_smirnov(f"KS distance, by {order}", *columns, each))
        n_texts = min(len(plain.texts), _N_WHOLE_TEXTS)
        prompts = np.tile(np.arange(n_texts) % len(self._prompts), 2)
        tests.append(
            energy(
                "energy of whole texts",
                text_profiles([*plain.texts[:n_texts], *speculative.texts[:n_texts]]),
                np.arange(2 * n_texts) >= n_texts,
                prompts,
                self._labels,
            )
        )
        n_tokens = len(plain.places), len(speculative.places)
        return Sequences(
            n_texts=len(plain.texts),
            n_tokens_plain=n_tokens[0],
            n_tokens_speculative=n_tokens[1],
            n_drafted=speculative.n_drafted,
            n_accepted=speculative.n_accepted,
            n_impossible=(plain.n_impossible, speculative.n_impossible),
            alpha=alpha,
            smallest_shift=smallest_shift(*n_tokens, alpha, n_tests),
            tests=holm(tests),
        )

    def _tell(self, what: str, done: int, of: int) -> None:
        if self._progress is not None:
            self._progress(what, done, of)
