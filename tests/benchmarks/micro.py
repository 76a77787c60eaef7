"""Measures the time of a round without the models: logits -> distributions -> verdict.

    python -m tests.benchmarks.micro

Ours, and llama.cpp's sampler chain (which only samples, without verification; it is timed without
filling its candidates), in alternation on the same rows. Milliseconds per round.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from ggufspec.decoding import verify
from ggufspec.decoding.sampling import Rows, Sampling, draw, to_probs
from ggufspec.decoding.types import Draft
from tests.benchmarks.llama_chain import SamplerChain

Floats = NDArray[np.float32]

_MIN_P = Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.05)
SAMPLINGS = {
    "full softmax": Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0),
    "top-k 40, top-p 0.95": Sampling(temperature=1.0, top_k=40, top_p=0.95, min_p=0.0),
    "min-p 0.05": _MIN_P,
    "min-p 0.05, XTC": replace(_MIN_P, xtc_probability=0.5),
    "XTC": replace(_MIN_P, min_p=0.0, xtc_probability=0.5),
    "dynatemp 0.5": replace(_MIN_P, min_p=0.0, dynatemp_range=0.5),
    "mirostat 1": Sampling(temperature=1.0, mirostat=1),
    "mirostat 2": Sampling(temperature=1.0, mirostat=2),
    "min-p 0.05, adaptive-p": replace(
        _MIN_P, samplers=("min_p", "adaptive_p"), adaptive_target=0.5
    ),
}
_N_SETS = 4  # each round has new rows, as from a model


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table: medians, with the spread from the 10th to the 90th percentile."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m tests.benchmarks.micro")
    parser.add_argument("--vocab", type=int, nargs="+", default=[128_256, 152_064])
    parser.add_argument("--draft-n", type=int, default=8)
    parser.add_argument("--runs", type=int, default=40)
    options = parser.parse_args(arguments)
    sys.stdout.write(
        f"{'vocabulary':>10}  {'sampling':22}{'ours':>20}{'llama.cpp':>20}"
        f"{'x llama.cpp':>13}{'a draft token':>15}\n"
    )
    for n_vocab in options.vocab:
        for name, sampling in SAMPLINGS.items():
            times = measure(n_vocab, sampling, options.draft_n, options.runs)
            ratio = median(b / a for a, b in zip(times[0], times[1], strict=True))
            cells = "".join(f"{_spread(sorted(column)):>20}" for column in times[:2])
            sys.stdout.write(
                f"{n_vocab:>10}  {name:22}{cells}{ratio:>13.1f}{1e3 * median(times[2]):>15.3f}\n"
            )


def measure(n_vocab: int, sampling: Sampling, n_draft: int, n_runs: int) -> list[list[float]]:
    """Seconds of each round by ours and by the chain, and of one token of our draft."""
    rng = np.random.default_rng(n_vocab)
    near = [_logits(rng, n_draft + 1, n_vocab) for _ in range(_N_SETS)]
    sets = [rows + rng.normal(0, 0.5, rows.shape).astype(np.float32) for rows in near]
    chain = SamplerChain(sampling, n_vocab, n_ctx=n_vocab)
    target_rows, draft_rows = Rows(n_draft + 1, n_vocab), Rows(n_draft, n_vocab)
    rule = verify.rule("traversal")
    logits = np.empty_like(sets[0])  # written just before it is read, as by a model
    times: list[list[float]] = [[], [], []]
    for run in range(n_runs + 2):
        fresh, drafts = sets[run % _N_SETS], near[run % _N_SETS]
        draft_rows.keep(0)
        start = perf_counter()
        for i in range(n_draft):
            draw(draft_rows, drafts[i : i + 1], sampling, (), None, 0.0)
        tokens = [draft_rows.pick(i, rng.random()) for i in range(n_draft)]
        token_seconds = (perf_counter() - start) / n_draft
        draft, uniforms = Draft(tokens, draft_rows), rng.random(n_draft + 1).tolist()

        np.copyto(logits, fresh)
        start = perf_counter()
        to_probs(logits, sampling, (), tokens, out=target_rows)
        rule(draft, target_rows, uniforms)
        ours = perf_counter() - start

        np.copyto(logits, fresh)
        before = chain.apply_seconds
        for row in logits:
            chain.apply(row)
        if run >= 2:  # the first are a warm-up
            found = (ours, chain.apply_seconds - before, token_seconds)
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
