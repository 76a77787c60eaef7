"""Measures the time of a round without the models: logits -> distributions -> verdict.

    python -m tests.benchmarks.micro

Ours, the same in numpy, and llama.cpp's sampler chain (which only samples, without verification; it
is timed without filling its candidates), in alternation on the same rows. Milliseconds per round.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from statistics import median
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from ggufspec import _native
from ggufspec.decoding import verify
from ggufspec.decoding.sampling import Rows, Sampling, draw, to_probs
from ggufspec.decoding.types import Draft
from tests.benchmarks.llama_chain import SamplerChain

Floats = NDArray[np.float32]

SAMPLINGS = {
    "full softmax": Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0),
    "top-k 40, top-p 0.95": Sampling(temperature=1.0, top_k=40, top_p=0.95, min_p=0.0),
    "min-p 0.05": Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.05),
}
_N_SETS = 4  # each round has new rows, as from a model


def numpy_probs(logits: Floats, sampling: Sampling) -> Floats:
    """The distributions (n, n_vocab) of rows, in plain numpy."""
    kept = logits
    if sampling.top_k:
        least = np.partition(logits, -sampling.top_k, axis=1)[:, -sampling.top_k, None]
        kept = np.where(logits >= least, logits, -np.inf)
    weights = np.exp((kept - kept.max(axis=1, keepdims=True)) / sampling.temperature)
    if sampling.min_p:
        weights[weights < sampling.min_p] = 0
    if sampling.top_p < 1:
        order = np.argsort(-weights, axis=1)[:, : sampling.top_k or None]
        ranked = np.take_along_axis(weights, order, axis=1)
        before = ranked.cumsum(axis=1) - ranked
        ranked[before >= sampling.top_p * ranked.sum(axis=1, keepdims=True)] = 0
        weights = np.zeros_like(weights)
        np.put_along_axis(weights, order, ranked, axis=1)
    probs: Floats = (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32, copy=False)
    return probs


def numpy_block(
    tokens: Sequence[int], draft: Floats, target: Floats, uniforms: Sequence[float]
) -> tuple[int, int]:
    """Block verification, in plain numpy."""
    ratios = [1.0]
    for i, token in enumerate(tokens):
        ratios.append(min(ratios[-1] * target[i, token] / draft[i, token], 1.0))
    n = len(tokens)
    if uniforms[n - 1] < ratios[n]:
        rest = target[n]
    else:
        for i in range(n - 1, -1, -1):
            rest = np.maximum(ratios[i] * target[i] - draft[i], 0)
            excess = rest.sum()
            if i == 0 or uniforms[i - 1] * (excess + 1 - ratios[i]) < excess:
                n = i
                break
    return n, int(np.searchsorted(rest.cumsum(), uniforms[-1] * rest.sum(), side="right"))


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table: medians, with the spread from the 10th to the 90th percentile."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m tests.benchmarks.micro")
    parser.add_argument("--vocab", type=int, nargs="+", default=[128_256, 152_064])
    parser.add_argument("--draft-n", type=int, default=8)
    parser.add_argument("--runs", type=int, default=40)
    options = parser.parse_args(arguments)
    sys.stdout.write(
        f"{'vocabulary':>10}  {'sampling':22}{'ours':>20}{'numpy':>20}{'llama.cpp':>20}"
        f"{'x numpy':>9}{'x llama.cpp':>13}{'a draft token':>15}\n"
    )
    for n_vocab in options.vocab:
        for name, sampling in SAMPLINGS.items():
            times = measure(n_vocab, sampling, options.draft_n, options.runs)
            ours, theirs, chain, token = (sorted(column) for column in times)
            ratios = [
                median(b / a for a, b in zip(times[0], other, strict=True)) for other in times[1:3]
            ]
            cells = "".join(f"{_spread(column):>20}" for column in (ours, theirs, chain))
            sys.stdout.write(
                f"{n_vocab:>10}  {name:22}{cells}{ratios[0]:>9.1f}{ratios[1]:>13.1f}"
                f"{1e3 * median(token):>15.3f}\n"
            )


def measure(n_vocab: int, sampling: Sampling, n_draft: int, n_runs: int) -> list[list[float]]:
    """Seconds of each round by ours, numpy and the chain, and of one token of our draft."""
    rng = np.random.default_rng(n_vocab)
    near = [_logits(rng, n_draft + 1, n_vocab) for _ in range(_N_SETS)]
    sets = [rows + rng.normal(0, 0.5, rows.shape).astype(np.float32) for rows in near]
    chain = SamplerChain(sampling, n_vocab, n_ctx=n_vocab)
    target_rows, draft_rows = Rows(n_draft + 1, n_vocab), Rows(n_draft, n_vocab)
    rule = verify.rule("traversal")
    logits = np.empty_like(sets[0])  # written just before it is read, as by a model
    times: list[list[float]] = [[], [], [], []]
    for run in range(n_runs + 2):
        fresh, drafts = sets[run % _N_SETS], near[run % _N_SETS]
        draft_rows.keep(0)
        start = perf_counter()
        for i in range(n_draft):
            draw(draft_rows, drafts[i : i + 1], sampling, (), _native.LengthRule(), 0.0)
        tokens = [draft_rows.pick(i, rng.random()) for i in range(n_draft)]
        token_seconds = (perf_counter() - start) / n_draft
        draft, uniforms = Draft(tokens, draft_rows), rng.random(n_draft + 1).tolist()
        numpy_draft = np.asarray(draft_rows)

        np.copyto(logits, fresh)
        start = perf_counter()
        to_probs(logits, sampling, (), tokens, out=target_rows)
        verdict = rule(draft, target_rows, uniforms)
        ours = perf_counter() - start

        np.copyto(logits, fresh)
        start = perf_counter()
        other = numpy_block(tokens, numpy_draft, numpy_probs(logits, sampling), uniforms)
        theirs = perf_counter() - start
        if abs(verdict.n_accepted - other[0]) > 0 and run < 2:
            raise AssertionError(f"ours says {verdict}, numpy {other}: not the same work")

        np.copyto(logits, fresh)
        before = chain.apply_seconds
        for row in logits:
            chain.apply(row)
        if run >= 2:  # the first are a warm-up
            found = (ours, theirs, chain.apply_seconds - before, token_seconds)
            for column, seconds in zip(times, found, strict=True):
                column.append(seconds)
    chain.close()
    return times


def _logits(rng: np.random.Generator, n: int, n_vocab: int) -> Floats:
    """Rows as models have them: most tokens far below a few."""
    rows = rng.normal(0, 2.5, (n, n_vocab))
    rows[:, rng.integers(0, n_vocab, 300)] += rng.gamma(2.0, 3.0, (n, 300))
    return rows.astype(np.float32)


def _spread(ordered: Sequence[float]) -> str:
    low, high = ordered[len(ordered) // 10], ordered[-1 - len(ordered) // 10]
    return f"{1e3 * median(ordered):.2f} ({1e3 * low:.2f}-{1e3 * high:.2f})"


if __name__ == "__main__":
    main()
