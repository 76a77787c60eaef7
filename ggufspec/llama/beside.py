"""Decodes with two contexts at the same time, where they compute on different devices."""

from __future__ import annotations

from collections.abc import Generator

from ggufspec.llama.context import BatchPart, Context, Parts
from ggufspec.llama.log import log
from ggufspec.llama.session import Pieces


def feeding_beside(first: Pieces, second: Pieces) -> Generator[None, None, None]:
    """LlamaSession.feeding of two sessions of different contexts, piece by piece.

    Raises what decode_beside raises.
    """
    while pieces := [piece for each in (first, second) if (piece := next(each, None))]:
        contexts = [piece.context for piece in pieces]
        parts = [[BatchPart(piece.sequence, piece.tokens, 0)] for piece in pieces]
        if len(pieces) == 1:
            contexts[0].decode_together(parts[0])
        else:
            decode_beside(contexts[0], parts[0], contexts[1], parts[1])
        for each in (first, second):
            next(each, None)  # reports progress
        yield


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
