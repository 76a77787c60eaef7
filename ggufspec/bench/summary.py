"""Computes rates, speed-ups with confidence intervals, and warnings from measurements."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median, stdev
from typing import Any

from ggufspec.bench.records import BenchResults, Contender, Measurement, by_position

# 97.5 % points of Student's t for 1, 2 ... 30 degrees of freedom.
_T = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
_T_MANY = 1.96
# A warning is given if the rates of one text have a larger relative spread, or for a larger drift.
NOISE = 0.10
_MIN_VALUES = 3  # least number of values for a confidence interval


@dataclass(frozen=True)
class Speedup:
    """Geometric mean of rate / baseline's rate over texts of the same prompt and run.

    There is one value per prompt, its mean over runs. With fewer than three prompts there is one
    per text, and the interval says nothing about other prompts.
    """

    ratio: float
    low: float | None  # 95 % interval (Student's t of the logarithms); None: too few values
    high: float | None
    n: int  # number of values

    @property
    def is_uncertain(self) -> bool:
        """Whether the interval includes 1."""
        return self.low is not None and self.high is not None and self.low < 1 < self.high


@dataclass(frozen=True)
class Summary:
    """The numbers of one contender. Rates are tokens per second of generation."""

    contender: Contender
    n_texts: int
    n_runs: int
    median: float
    mean: float
    std: float | None  # standard deviation of the texts' rates; None for a single text
    low: float
    high: float
    ms_per_token: float  # total time / total tokens
    mean_seconds: float  # mean time of a text, with its prompt
    std_seconds: float | None
    first_token_seconds: float  # median
    accepted: float | None  # share of the drafted tokens; None if none were drafted
    mean_length: float  # tokens per round
    by_position: tuple[float, ...]  # [i]: share of drafts longer than i with 0 to i accepted
    speedup: Speedup | None


def summarize(results: BenchResults, category: str | None = None) -> list[Summary]:
    """A summary of each contender that has texts (in `category`, if given)."""
    made = []
    for contender in results.contenders:
        texts = [text for text in results.of(contender.name) if category in (None, text.category)]
        if texts:
            logs = log_ratios(texts, results.of(contender.baseline) if contender.baseline else ())
            made.append(summary_of(contender, texts, ratio_of_texts(logs)))
    return made


@dataclass(frozen=True)
class RankedDraft:
    """One of several drafts: the summary of its fastest contender at a temperature."""

    fastest: Summary
    speedup: Speedup
    ms_per_step: float | None  # milliseconds of a token of the draft alone

    @property
    def document(self) -> dict[str, Any]:
        own = self.fastest.contender
        return {
            "draft": own.pair,
            "contender": own.label,
            "temperature": own.temperature,
            "speedup": asdict(self.speedup),
            "accepted": self.fastest.accepted,
            "tokens_per_round": self.fastest.mean_length,
            "ms_per_step": self.ms_per_step,
        }


def ranked_drafts(results: BenchResults) -> list[RankedDraft]:
    """The drafts of several pairs by temperature, fastest first; empty for a single pair."""
    made = summarize(results)
    steps, found = {}, {}
    for row in sorted(made, key=lambda row: row.speedup.ratio if row.speedup else 0.0):
        key = (row.contender.temperature, row.contender.pair)
        if row.contender.model == "draft":
            steps[key] = row.ms_per_token
        elif row.contender.model == "pair" and row.speedup:
            found[key] = row, row.speedup
    if len({pair for _, pair in found}) < 2:
        return []
    ranked = [RankedDraft(*found[key], steps.get(key)) for key in found]
    return sorted(
        ranked, key=lambda each: (each.fastest.contender.temperature, -each.speedup.ratio)
    )


def log_ratios(
    texts: Sequence[Measurement], others: Sequence[Measurement]
) -> dict[tuple[str, int], float]:
    rates = {(text.prompt, text.run): text.tokens_per_second for text in others}
    return {
        key: math.log(text.tokens_per_second / rates[key])
        for text in texts
        if rates.get(key := (text.prompt, text.run)) and text.tokens_per_second
    }


def ratio_of_texts(logs: Mapping[tuple[str, int], float]) -> Speedup | None:
    """The geometric mean of ratios, given their logarithms by (prompt, run).

    Runs of a prompt repeat one text, so they vary only by timing noise. The interval is over
    prompts, since their spread shows how results vary with the prompt.
    """
    by_prompt: dict[str, list[float]] = {}
    for (prompt, _), log in logs.items():
        by_prompt.setdefault(prompt, []).append(log)
    if len(by_prompt) < _MIN_VALUES:
        return ratio_of(list(logs.values()))
    return ratio_of([fmean(each) for each in by_prompt.values()])


def ratio_of(logs: Sequence[float]) -> Speedup | None:
    if not logs:
        return None
    mean = fmean(logs)
    if len(logs) < _MIN_VALUES:
        return Speedup(math.exp(mean), None, None, len(logs))
    n_free = len(logs) - 1
    # The 97.5 % point of Student's t; above 30 degrees of freedom, approximated.
    quantile = _T[n_free - 1] if n_free <= len(_T) else _T_MANY * (1 + 1.2 / n_free)
    reach = quantile * stdev(logs) / math.sqrt(len(logs))
    return Speedup(math.exp(mean), math.exp(mean - reach), math.exp(mean + reach), len(logs))


def warnings_of(results: BenchResults, n_missing: int | None = None) -> list[str]:
    """Warnings about the numbers. `n_missing`: number of texts not measured; None: unknown."""
    found = []
    if results.interrupted:
        n = len(results.measurements)
        missing = "texts" if n_missing is None else f"{n_missing} of {n + n_missing} texts"
        found.append(f"interrupted: {missing} are missing; contenders may lack different texts")
    noisy = {
        contender.name: noise
        for contender in results.contenders
        if contender.model == "pair" and (contender.baseline is None or not contender.temperature)
        if (noise := _noise(results.of(contender.name))) is not None and noise > NOISE
    }
    if noisy:
        worst = max(noisy, key=lambda name: noisy[name])
        found.append(
            f"noise: tokens/s of the same text vary by {noisy[worst]:.0%} between runs ({worst}; "
            f"expected: up to {NOISE:.0%}); close other programs, or use more --runs"
        )
    drift = _drift(results)
    if drift is not None and abs(drift) > NOISE:
        found.append(
            f"drift: the machine was {abs(drift):.0%} {'faster' if drift > 0 else 'slower'} at the "
            "end than at the start (heat, or other programs); contenders alternate, so speed-ups "
            "are affected less than tokens/s"
        )
    summaries = summarize(results)
    uncertain = (each for each in summaries if each.speedup and each.speedup.is_uncertain)
    if names := ", ".join(each.contender.name for each in uncertain):
        found.append(f"not shown to be faster than plain: {names} (the interval includes 1)")
    if any(each.speedup and each.speedup.low is None for each in summaries):
        found.append(
            f"too few texts for a confidence interval: it needs {_MIN_VALUES} (prompts x --runs)"
        )
    return found + _divergence_warnings(results)


def _divergence_warnings(results: BenchResults) -> list[str]:
    found = []
    for contender in results.contenders:
        pairs = results.greedy_with_plain(contender)
        n_different = sum(list(ours.tokens) != list(other.tokens) for ours, other in pairs)
        if not n_different:
            continue
        known = [each for each in results.divergences if each.contender == contender.name]
        why = "batches of other sizes round differently"
        if known:
            margin = max(each.margin for each in known)
            is_tie = all(each.is_near_tie for each in known)
            why += f"; the logits of the two tokens differ by at most {margin:.3g} there"
            why += ", a near-tie" if is_tie else "; check with `ggufspec audit`"
        found.append(
            f"{contender.name} differs from plain in {n_different} of {len(pairs)} texts at "
            f"temperature 0 ({why}); the speeds compare different texts"
        )
    return found


def summary_of(
    contender: Contender, texts: Sequence[Measurement], plain: Speedup | None = None
) -> Summary:
    """The summary of a contender's texts; `plain`: its speed-up over plain decoding."""
    rates = [text.tokens_per_second for text in texts]
    seconds = [text.seconds for text in texts]
    n_drafted = sum(text.n_drafted for text in texts)
    n_tokens = sum(text.n_generated for text in texts)
    drafted, accepted = by_position(texts)
    return Summary(
        contender=contender,
        n_texts=len(texts),
        n_runs=len({text.run for text in texts}),
        median=median(rates),
        mean=fmean(rates),
        std=stdev(rates) if len(rates) > 1 else None,
        low=min(rates),
        high=max(rates),
        ms_per_token=1e3 * sum(text.generation_seconds for text in texts) / max(n_tokens, 1),
        mean_seconds=fmean(seconds),
        std_seconds=stdev(seconds) if len(seconds) > 1 else None,
        first_token_seconds=median(text.first_token_seconds for text in texts),
        accepted=sum(text.n_accepted for text in texts) / n_drafted if n_drafted else None,
        mean_length=n_tokens / max(sum(text.n_rounds for text in texts), 1),
        by_position=tuple(a / d if d else 0.0 for a, d in zip(accepted, drafted, strict=True)),
        speedup=plain,
    )


def _noise(texts: Sequence[Measurement]) -> float | None:
    """The median relative spread of the same text's rates; None without repeated texts."""
    spreads = []
    for prompt in dict.fromkeys(text.prompt for text in texts):
        rates = [text.tokens_per_second for text in texts if text.prompt == prompt]
        if len(rates) > 1 and fmean(rates) > 0:
            spreads.append(stdev(rates) / fmean(rates))
    return median(spreads) if spreads else None


def _drift(results: BenchResults) -> float | None:
    """Relative change of plain decoding's speed from the first third of the texts to the last."""
    for contender in results.contenders:
        texts = [text for text in results.of(contender.name) if text.tokens_per_second > 0]
        n = len(texts) // 3
        if contender.baseline is None and contender.model == "pair" and n:
            by_prompt = {
                prompt: median(t.tokens_per_second for t in texts if t.prompt == prompt)
                for prompt in {text.prompt for text in texts}
            }
            scaled = [text.tokens_per_second / by_prompt[text.prompt] for text in texts]
            return median(scaled[-n:]) / median(scaled[:n]) - 1
    return None
