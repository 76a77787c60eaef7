"""Measurements -> what to tell of them: rates, speed-ups with their certainty, and doubts. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev

from ggufspec.bench.records import Contender, Measurement, Results

# 97.5 % points of Student's t for 1, 2 ... 30 degrees of freedom.
_T = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
_T_MANY = 1.96
NOISE = 0.10  # relative spread of the same text's rates, and drift, beyond which nobody trusts them
_N_TELLING = 3  # turns without which an interval says nothing
_NEAR_TIE = 0.1  # logits


@dataclass(frozen=True)
class Speedup:
    """Geometric mean of rate / baseline's rate over texts of the same prompt and run.

    `low` to `high`: its 95 % confidence interval (Student's t of the logarithms); None: too few.
    `n`: of how many values: prompts, each with the mean of its runs; or texts, where there are
    fewer than three prompts and the interval is about these prompts alone.
    """

    ratio: float
    low: float | None
    high: float | None
    n: int

    @property
    def is_open(self) -> bool:
        """Whether it may be faster or slower, for all that is known."""
        return self.low is not None and self.high is not None and self.low < 1 < self.high


@dataclass(frozen=True)
class Row:
    """What is told of one contender. Rates are tokens per second of generation."""

    contender: Contender
    n_texts: int
    n_runs: int
    median: float
    mean: float
    std: float | None  # of the texts' rates; None: there is one
    low: float
    high: float
    ms_per_token: float  # of all seconds by all tokens
    mean_seconds: float  # a text, the prompt included
    std_seconds: float | None
    first_token_seconds: float  # median
    accepted: float | None  # share of the drafted tokens; None: nothing was drafted
    mean_length: float  # tokens a round
    by_position: tuple[float, ...]  # share of drafts accepted that far, of those drafted that far
    joules_per_token: float | None
    speedup: Speedup | None


def rows(results: Results, category: str | None = None) -> list[Row]:
    """A row for each contender that has written anything (of one category)."""
    made = []
    for contender in results.contenders:
        texts = [text for text in results.of(contender.name) if category in (None, text.category)]
        if not texts:
            continue
        plain = None
        if contender.baseline is not None:
            plain = speedup(texts, results.of(contender.baseline))
        made.append(_row(contender, texts, plain))
    return made


def speedup(texts: Sequence[Measurement], baseline: Sequence[Measurement]) -> Speedup | None:
    """How many times as fast; None where no text has its twin."""
    others = {(text.prompt, text.run): text for text in baseline}
    logs = {
        (text.prompt, text.run): math.log(text.tokens_per_second / other.tokens_per_second)
        for text in texts
        if (other := others.get((text.prompt, text.run)))
        and text.tokens_per_second > 0
        and other.tokens_per_second > 0
    }
    return ratio_of_texts(logs)


def ratio_of_texts(logs: Mapping[tuple[str, int], float]) -> Speedup | None:
    """The geometric mean of ratios, given their logarithms by prompt and run.

    Runs of a prompt repeat one text: they tell of the clock's noise, prompts of what other prompts
    would have given.
    """
    by_prompt: dict[str, list[float]] = {}
    for (prompt, _), log in logs.items():
        by_prompt.setdefault(prompt, []).append(log)
    if len(by_prompt) < _N_TELLING:
        return ratio_of(list(logs.values()))
    return ratio_of([fmean(each) for each in by_prompt.values()])


def ratio_of(logs: Sequence[float]) -> Speedup | None:
    """The geometric mean of ratios, given their logarithms."""
    if not logs:
        return None
    mean = fmean(logs)
    if len(logs) < _N_TELLING:
        return Speedup(math.exp(mean), None, None, len(logs))
    reach = t_quantile(len(logs) - 1) * stdev(logs) / math.sqrt(len(logs))
    return Speedup(math.exp(mean), math.exp(mean - reach), math.exp(mean + reach), len(logs))


def t_quantile(n_free: int) -> float:
    """The 97.5 % point of Student's t; beyond 30 degrees of freedom, a little more than normal."""
    return _T[n_free - 1] if n_free <= len(_T) else _T_MANY * (1 + 1.2 / n_free)


def geometric_mean(values: Sequence[float]) -> float:
    """Of positive values; 0 of none."""
    return math.exp(fmean(map(math.log, values))) if values else 0.0


def categories(results: Results) -> list[str]:
    """Those of the prompts, in the order in which they came; empty where there are none."""
    names = dict.fromkeys(text.category for text in results.measurements)
    return [name for name in names if name]


def doubts(results: Results) -> list[str]:
    """Why not to trust these numbers; empty where nothing speaks against them."""
    told = []
    if results.interrupted:
        told.append("it was interrupted: contenders may have written different texts")
    noisy = {
        contender.name: noise
        for contender in results.contenders
        if contender.model == "pair" and (contender.baseline is None or not contender.temperature)
        if (noise := _noise(results.of(contender.name))) is not None and noise > NOISE
    }
    if noisy:
        worst = max(noisy, key=lambda name: noisy[name])
        told.append(
            f"noise: the same text's tokens/s vary by {noisy[worst]:.0%} from run to run "
            f"({worst}; over {NOISE:.0%} is much): close what else runs, and take more --runs"
        )
    drift = _drift(results)
    if drift is not None and abs(drift) > NOISE:
        told.append(
            f"drift: the machine was {abs(drift):.0%} {'faster' if drift > 0 else 'slower'} at the "
            "end than at the beginning (heat, or other work); contenders took turns, so their "
            "ratios suffer less than their tokens/s"
        )
    wide = [row for row in rows(results) if row.speedup and row.speedup.is_open]
    if wide:
        names = ", ".join(row.contender.name for row in wide)
        told.append(f"whether it is faster than plain decoding is not certain of: {names}")
    few = [row for row in rows(results) if row.speedup and row.speedup.low is None]
    if few:
        told.append(
            f"too few texts for a confidence interval: at least {_N_TELLING} (prompts times --runs)"
        )
    return told + _parted(results)


def _parted(results: Results) -> list[str]:
    told = []
    for contender in results.contenders:
        if contender.baseline is None or contender.temperature > 0:
            continue
        plain = {
            (text.prompt, text.run): text.tokens
            for text in results.of(contender.baseline)
            if _has_tokens(text)
        }
        pairs = [
            (text.tokens, plain[text.prompt, text.run])
            for text in results.of(contender.name)
            if (text.prompt, text.run) in plain and _has_tokens(text)
        ]
        n_parted = sum(list(ours) != list(others) for ours, others in pairs)
        if not n_parted:
            continue
        margins = [part.margin for part in results.partings if part.contender == contender.name]
        why = "batches of other sizes round differently"
        if margins:
            why += f"; there, plain's two best tokens were {max(margins):.3g} logits apart at most"
            why += ", a near-tie" if max(margins) < _NEAR_TIE else ": `ggufspec audit` tells more"
        told.append(
            f"{contender.name} parted from plain in {n_parted} of {len(pairs)} texts at "
            f"temperature 0 ({why}): their speeds are those of different texts"
        )
    return told


def _has_tokens(text: Measurement) -> bool:
    """Whether its tokens were not left out."""
    return bool(text.tokens) or not text.n_generated


def _row(contender: Contender, texts: Sequence[Measurement], plain: Speedup | None) -> Row:
    rates = [text.tokens_per_second for text in texts]
    seconds = [text.seconds for text in texts]
    n_drafted = sum(text.n_drafted for text in texts)
    n_tokens = sum(text.n_generated for text in texts)
    n_positions = max(len(text.drafted_by_position) for text in texts)
    drafted, accepted = (
        [sum(counts[i] for counts in all_counts if i < len(counts)) for i in range(n_positions)]
        for all_counts in (
            [text.drafted_by_position for text in texts],
            [text.accepted_by_position for text in texts],
        )
    )
    joules = [text.joules for text in texts if text.joules is not None]
    return Row(
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
        joules_per_token=sum(joules) / n_tokens if len(joules) == len(texts) and n_tokens else None,
        speedup=plain,
    )


def _noise(texts: Sequence[Measurement]) -> float | None:
    """The typical relative spread of the same text's rates; None where none was repeated."""
    spreads = []
    for prompt in dict.fromkeys(text.prompt for text in texts):
        rates = [text.tokens_per_second for text in texts if text.prompt == prompt]
        if len(rates) > 1 and fmean(rates) > 0:
            spreads.append(stdev(rates) / fmean(rates))
    return median(spreads) if spreads else None


def _drift(results: Results) -> float | None:
    """By how much plain decoding was faster in the last third than in the first."""
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
