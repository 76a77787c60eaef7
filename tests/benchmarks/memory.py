"""Measures the memory of a run without llama.cpp's own buffers.

    python -m tests.benchmarks.memory target.gguf draft.gguf

Peak resident memory of this process, minus the buffers that llama.cpp reports: weights, KV caches,
compute and output buffers. The rest is Python, numpy, the libraries, and our own arrays.
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
from collections.abc import Sequence

from ggufspec.bench.run import peak_rss
from ggufspec.engine.load import load

_MIB = 2**20
_BUFFER = re.compile(r"buffer size\s*=\s*([\d.]+) MiB")


class _Buffers(logging.Handler):
    """Sums the buffers in llama.cpp's log."""

    def __init__(self) -> None:
        super().__init__()
        self.mib = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        found = _BUFFER.search(record.getMessage())
        self.mib += float(found[1]) if found else 0.0


def main(arguments: Sequence[str] | None = None) -> None:
    """Load, write a text, and print the sum."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m tests.benchmarks.memory")
    parser.add_argument("target")
    parser.add_argument("draft", nargs="?")
    parser.add_argument("--ctx-size", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=256)
    options = parser.parse_args(arguments)

    buffers = _Buffers()
    logger = logging.getLogger("ggufspec.llama")
    logger.addHandler(buffers)
    logger.setLevel(logging.DEBUG)
    with load(options.target, options.draft, n_ctx=options.ctx_size) as engine:
        engine.generate([1] * (options.ctx_size // 2), max_tokens=options.tokens, ignore_eos=True)
        needed = buffers.mib
        peak = (peak_rss() or 0) / _MIB
    sys.stdout.write(
        f"peak resident memory          {peak:8.0f} MiB\n"
        f"llama.cpp's own buffers       {needed:8.0f} MiB\n"
        f"other (at most 143 MiB)       {peak - needed:8.0f} MiB\n"
    )


if __name__ == "__main__":
    main()
