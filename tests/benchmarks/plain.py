"""Compares our plain decoding loop with llama-bench on the same file, in alternation.

    python -m tests.benchmarks.plain model.gguf --llama-bench path/to/llama-bench

Both report tokens per second of generation, one token at a time.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from statistics import median

from ggufspec.engine.engine import Engine
from ggufspec.engine.load import load
from ggufspec.llama.devices import n_threads_default


def ours(engine: Engine, n_tokens: int) -> float:
    """Tokens per second of the loop without a draft, from a prompt of one token."""
    stats = engine.generate(
        [1], max_tokens=n_tokens, temperature=0, drafter="none", ignore_eos=True
    ).stats
    return stats.tokens_per_second


def theirs(binary: str, model: str, n_tokens: int, n_threads: int) -> float:
    """Tokens per second that llama-bench reports for the same (its test tg)."""
    command = [binary, "-m", model, "-p", "0", "-n", str(n_tokens), "-r", "1", "-o", "json"]
    found = subprocess.run(
        [*command, "-t", str(n_threads), "-fa", "1"], capture_output=True, text=True, check=True
    )
    return float(json.loads(found.stdout)[0]["avg_ts"])


def main(arguments: Sequence[str] | None = None) -> None:
    """Alternate the two, and print medians and the median of the ratios pair by pair."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m tests.benchmarks.plain")
    parser.add_argument("model")
    parser.add_argument("--llama-bench", required=True, help="path of the llama-bench binary")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=n_threads_default())
    options = parser.parse_args(arguments)

    pairs = []
    with load(options.model, n_ctx=512, n_threads=options.threads) as engine:
        ours(engine, 16)  # warm-up: pages, threads
        for _ in range(options.runs):
            theirs_ = theirs(options.llama_bench, options.model, options.tokens, options.threads)
            pairs.append((ours(engine, options.tokens), theirs_))
    ratios = sorted(mine / theirs_ for mine, theirs_ in pairs)
    sys.stdout.write(
        f"ours         {median(mine for mine, _ in pairs):8.1f} tokens/s\n"
        f"llama-bench  {median(theirs_ for _, theirs_ in pairs):8.1f} tokens/s\n"
        f"ratio        {median(ratios):8.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f}, "
        f"{options.runs} pairs)\n"
    )


if __name__ == "__main__":
    main()
