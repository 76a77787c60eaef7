"""Decodes with two contexts at the same time, where they compute on different devices."""

from __future__ import annotations

from ggufspec.llama.context import Context, Parts
from ggufspec.llama.log import log


def decode_beside(first: Context, parts: Parts, second: Context, of_second: Parts) -> None:
    """Context.decode_together of two contexts; the second one in a thread of its own.

    Not for a head, or its target. Raises DecodeError, of the first one where both fail, and
    KeyboardInterrupt, which ends both; a sequence holds all of its tokens then, or none.
    """
    natives = first.checked(parts), second.checked(of_second)
    log.inside += 1
    try:
        results = natives[0].decode_beside(parts, natives[1], of_second)
    finally:
        log.inside -= 1
    first.finish(parts, results[0])
    second.finish(of_second, results[1])
