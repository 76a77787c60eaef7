"""Runs an audit: generates plain and speculative texts and measures their difference."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from ggufspec.bench.audit import statistics as stats
from ggufspec.bench.audit.report import (
    AuditedDivergence,
    AuditOptions,
    AuditReport,
    Distances,
    Greedy,
    Sequences,
)
from ggufspec.bench.audit.statistics import Distribution, Floats, Test
from ggufspec.common.facts import counted
from ggufspec.common.progress import NamedProgress
from ggufspec.common.reading import read_toml
from ggufspec.decoding import verify as rules
from ggufspec.engine import scoring
from ggufspec.engine.engine import Engine
from ggufspec.engine.options import CheckedOptions, GenerateOptions
from ggufspec.errors import DecodeError, OptionError, PromptError
from ggufspec.llama.context_checks import why_inexact

PROMPTS: Sequence[str] = read_toml(Path(__file__).with_name("prompts.toml"))["prompts"]

_Pair = tuple[Distribution, Distribution]  # (target's, draft's) at one position

_N_SINGLE_TEXTS = 8  # number of texts whose distributions are also computed token by token
_N_SINGLE_TOKENS = 32  # tokens of each such text: each distribution takes n_vocab doubles
_N_GREEDY_TEXTS = 8
_N_RULE_POSITIONS = 8
_N_WHOLE_TEXTS = 500  # maximum texts compared as a whole, for each way of decoding
_ORDERS = ("draft/target ratio", "target probability")  # rankings of the tokens, descending
_PLAIN = "none"
_PLAIN_RULE = "match"  # draws from the target, so plain texts do not depend on the audited rule


def audit(
    engine: Engine,
    prompts: Sequence[str | Sequence[int]],
    settings: AuditOptions | None = None,
    *,
    progress: NamedProgress | None = None,
) -> AuditReport:
    """Test whether an engine's speculative text has the distribution of its target alone.

    `prompts`: texts or token ids, used cyclically. `progress`: see NamedProgress. Raises
    OptionError (no draft model, n_draft above n_draft_max, an unknown rule), PromptError (no
    prompt, or one too long for the context), DecodeError, ClosedError.
    """
    settings = settings or AuditOptions()
    options: GenerateOptions = {**engine.file_sampling.options, **settings.options}
    seed = secrets.randbits(32) if settings.seed is None else settings.seed
    settings = replace(settings, options=options, seed=seed)
    if engine.pair.draft is None:
        raise OptionError("an audit needs a draft model; load the engine with draft= (--draft)")
    run = _Audit(engine, _tokenize(engine, prompts, settings), settings, progress)
    at_0 = run.greedy()
    if settings.is_greedy:
        return AuditReport(settings, len(prompts), None, None, None, at_0)
    sequences, batch, pairs = run.sequences()
    return AuditReport(settings, len(prompts), batch, run.rule(pairs), sequences, at_0)


def _tokenize(
    engine: Engine, prompts: Sequence[str | Sequence[int]], settings: AuditOptions
) -> list[list[int]]:
    if isinstance(prompts, str):
        raise PromptError("prompts is one text; give a list of texts")
    if not prompts:
        raise PromptError("there are no prompts; give at least one")
    texts = [engine.tokenize(prompt) for prompt in prompts]
    for i, text in enumerate(texts, 1):
        if len(text) + settings.n_tokens > engine.n_ctx:
            raise PromptError(
                f"prompt {i} has {counted(len(text), 'token')} and {settings.n_tokens:,} are "
                f"generated, but the context has {engine.n_ctx:,}; shorten the prompt, generate "
                "less (n_tokens, -n), or load with a larger context (n_ctx, -c)"
            )
    return texts


@dataclass
class _TextSet:
    texts: list[list[int]] = field(default_factory=list)
    quantiles: list[tuple[float, float]] = field(default_factory=list)  # one for each of _ORDERS
    n_drafted: int = 0
    n_accepted: int = 0
    n_impossible: int = 0

    def column(self, order: int) -> Floats:
        return np.array(self.quantiles, np.float64)[:, order]


class _Audit:
    def __init__(
        self,
        engine: Engine,
        prompts: list[list[int]],
        settings: AuditOptions,
        progress: NamedProgress | None,
    ) -> None:
        self._engine = engine
        self._prompts = prompts
        self._settings = settings
        self._report: NamedProgress = progress or (lambda what, done, of: None)
        seeds, *others = np.random.SeedSequence(settings.seed).spawn(4)
        self._seeds = seeds.generate_state(2 * settings.n_runs).tolist()
        self._uniforms, self._choices, self._labels = map(np.random.default_rng, others)
        given = CheckedOptions.of({"tree": settings.tree, "verify": settings.verify})
        self._has_trees = engine.pair.n_leaves(given) > 1

    def greedy(self) -> Greedy:
        """Generate each prompt's text at temperature 0 both ways, and find where they diverge."""
        settings = self._settings
        n_most = settings.n_runs if settings.is_greedy else _N_GREEDY_TEXTS
        prompts = self._prompts[:n_most]
        options = CheckedOptions.of(settings.options)
        divergences, near_tie = [], settings.near_tie
        for i, prompt in enumerate(prompts):
            plain, speculative = (
                self._generate(prompt, _TextSet(), drafter, 0, greedy=True)
                for drafter in (_PLAIN, settings.drafter)
            )
            found = scoring.compare(self._engine, prompt, plain, speculative, options)
            if found is not None:
                near_tie = max(near_tie, found.rounding)
                divergences.append(AuditedDivergence(i, found.position, found.tokens, found.gap))
            self._report("Generating at temperature 0", i + 1, len(prompts))
        return Greedy(len(prompts), near_tie if self._rounds() else None, tuple(divergences))

    def _rounds(self) -> bool:
        """Whether batches may change bits of the target's logits. After its first text."""
        return why_inexact(self._engine.pair.target) is not None

    def sequences(self) -> tuple[Sequences, Distances, list[_Pair]]:
        """Sample texts both ways and test them; also returns pairs of distributions for `rule`."""
        n_runs, rounds = self._settings.n_runs, self._rounds()
        plain, speculative = _TextSet(), _TextSet()
        distances: list[float] = []
        roundings: list[float] = []
        pairs: list[_Pair] = []
        for i in range(n_runs):
            prompt = self._prompts[i % len(self._prompts)]
            for texts, drafter, seed in (
                (plain, _PLAIN, self._seeds[2 * i]),
                (speculative, self._settings.drafter, self._seeds[2 * i + 1]),
            ):
                text = self._generate(prompt, texts, drafter, seed)
                n_kept = _N_SINGLE_TOKENS if texts is plain and i < _N_SINGLE_TEXTS else 0
                kept = self._add_quantiles(prompt, text, texts, seed, n_kept)
                singles = self._distributions(prompt, text[: len(kept)], seed, whose="target")
                for single, (batched, _) in zip(singles, kept, strict=True):
                    distances.append(stats.total_variation(single, batched))
                if kept and rounds:
                    roundings += self._rounding(prompt, text[: len(kept)])
                pairs += [stats.likeliest(*pair) for pair in kept if pair[1].any()]
            self._report("Generating texts both ways", i + 1, n_runs)
        batch = Distances.of_batches(distances, roundings if rounds else None)
        return self._test(plain, speculative), batch, self._choose(pairs)

    def rule(self, pairs: list[_Pair]) -> Distances:
        """Integrate the rule over uniforms and drafted tokens; with trees, also two siblings."""
        verify = rules.rule(self._settings.verify)
        found = []
        for i, pair in enumerate(pairs, 1):
            for n_siblings in (1, 2) if self._has_trees else (1,):
                probs = stats.likeliest(*pair, n_siblings)
                found.append(stats.rule_error(verify, *probs, n_siblings))
            self._report("Testing the rule", i, len(pairs))
        errors, resolutions = zip(*found, strict=True)
        return Distances.of_rule(len(pairs), errors, max(resolutions))

    def _generate(
        self, prompt: list[int], texts: _TextSet, drafter: str, seed: int, *, greedy: bool = False
    ) -> list[int]:
        settings = self._settings
        options: GenerateOptions = {
            **settings.options,
            "max_tokens": settings.n_tokens,
            "n_draft": settings.n_draft,
            "tree": settings.tree,
            "seed": seed,
            "drafter": drafter,
            "verify": _PLAIN_RULE if drafter == _PLAIN else settings.verify,
        }
        if greedy:
            options["temperature"] = 0.0
        stream = self._engine.stream(prompt, **options)
        for _ in stream:
            pass
        texts.n_drafted += stream.completion.stats.n_drafted
        texts.n_accepted += stream.completion.stats.n_accepted
        texts.texts.append([int(token) for round_ in stream.rounds for token in round_.tokens])
        return texts.texts[-1]

    def _add_quantiles(
        self, prompt: list[int], text: list[int], texts: _TextSet, seed: int, n_kept: int
    ) -> list[_Pair]:
        """Add the quantiles of a text's tokens; returns the first `n_kept` pairs."""
        kept: list[_Pair] = []
        drafts = self._distributions(prompt, text, seed, whose="draft")
        targets = self._distributions(prompt, text, seed, whose="target", in_batches=True)
        for token, target_probs, draft_probs in zip(text, targets, drafts, strict=True):
            scores = (stats.draft_ratio(target_probs, draft_probs), target_probs)
            by_ratio, by_target = (
                stats.quantile(token, target_probs, score, uniform)
                for score, uniform in zip(scores, self._uniforms.random(2), strict=True)
            )
            texts.quantiles.append((by_ratio, by_target))
            texts.n_impossible += int(target_probs[token] == 0)
            if len(kept) < n_kept:
                kept.append((target_probs, draft_probs))
        return kept

    def _distributions(
        self, prompt: list[int], text: list[int], seed: int, *, whose: str, in_batches: bool = False
    ) -> Iterator[Distribution]:
        """Yields a model's distribution before each token of a text.

        `in_batches`: computes several tokens together, as in verification. Yields zeros where a
        draft of another vocabulary, or a head, cannot predict: it has no token that may follow, its
        context is full, or it needs more than one token (EAGLE-3).
        """
        engine, tokens = self._engine, [*prompt, *text]
        options: GenerateOptions = {**self._settings.options, "seed": seed}  # of adaptive_p's state
        sampling = scoring.sampling(engine, prompt, **options)
        n_together = self._settings.n_together if in_batches else 1
        n_beside = n_together // 3 if self._has_trees else 0  # tokens of another branch
        n_together -= n_beside
        for at in range(len(prompt), len(tokens), n_together):
            before, piece = tokens[:at], tokens[at : at + n_together]
            try:
                batch = {"n_together": n_together, "n_beside": n_beside}
                rows = next(scoring.logits(engine, before, piece, whose=whose, **batch))
                yield from stats.to_distributions(rows, sampling, before, piece[:-1], piece[-1])
            except DecodeError:
                if whose == "target" or (
                    engine.pair.vocab_map is None and engine.pair.head is None
                ):
                    raise
                yield np.zeros(engine.vocab.n_tokens)

    def _rounding(self, prompt: list[int], text: list[int]) -> Iterator[float]:
        """Distances, by rounding alone, of distributions token by token and in prompt batches."""
        self._engine.forget()
        singles = np.concatenate([*scoring.logits(self._engine, prompt, text, whose="target")])
        sampling = scoring.sampling(self._engine, prompt, **self._settings.options)
        n_rows, n_done = self._settings.n_together, 0
        for at, rows in scoring.reprocessed(self._engine, prompt, text, n_rows):
            if at > n_done:
                known, passed = [*prompt, *text[:n_done]], text[n_done:at]
                stats.to_distributions(singles[n_done:at], sampling, known, passed[:-1], passed[-1])
                n_done = at
            before, ahead = [*prompt, *text[:at]], text[at : at + len(rows) - 1]
            both = (singles[at : at + len(rows)], rows)
            probs = (stats.to_distributions(each, sampling, before, ahead) for each in both)
            yield from map(stats.total_variation, *probs)

    def _choose(self, pairs: list[_Pair]) -> list[_Pair]:
        differing = [pair for pair in pairs if 0.02 < stats.total_variation(*pair) < 0.98] or pairs
        n = min(_N_RULE_POSITIONS, len(differing))
        chosen = self._choices.choice(len(differing), n, replace=False)
        return [differing[i] for i in sorted(chosen)]

    def _test(self, plain: _TextSet, speculative: _TextSet) -> Sequences:
        alpha = self._settings.alpha
        n_tests = 2 * len(_ORDERS) + 1
        each = alpha / n_tests  # so that all intervals hold together with confidence 1 - alpha
        tests: list[Test] = []
        for i, order in enumerate(_ORDERS):
            columns = plain.column(i), speculative.column(i)
            tests.append(stats.uniform_shift(f"mean shift, by {order}", *columns, each))
            tests.append(stats.kolmogorov_smirnov(f"KS distance, by {order}", *columns, each))
        n_texts = min(len(plain.texts), _N_WHOLE_TEXTS)
        profiles = stats.text_profiles([*plain.texts[:n_texts], *speculative.texts[:n_texts]])
        tests.append(stats.energy("energy distance of whole texts", profiles, self._labels))
        n_tokens = len(plain.quantiles), len(speculative.quantiles)
        return Sequences(
            n_texts=len(plain.texts),
            n_tokens_plain=n_tokens[0],
            n_tokens_speculative=n_tokens[1],
            n_drafted=speculative.n_drafted,
            n_accepted=speculative.n_accepted,
            n_impossible=(plain.n_impossible, speculative.n_impossible),
            alpha=alpha,
            smallest_shift=stats.smallest_shift(*n_tokens, alpha, n_tests),
            tests=stats.holm(tests),
        )
