"""Processes a prompt with a target and its drafts: at the same time, where that is possible."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from ggufspec.common.progress import NamedProgress
from ggufspec.engine.slots import DraftSession
from ggufspec.llama.context import BatchPart
from ggufspec.llama.head import HeadSession
from ggufspec.llama.mapped_session import MappedSession
from ggufspec.llama.session import LlamaSession, Pieces


def reading(
    tokens: Sequence[int],
    sessions: Mapping[str, DraftSession],
    progress: NamedProgress | None,
    n_most: Callable[[], int | None],
    *,
    together: bool,
) -> Iterator[None]:
    """Feed `tokens` to sessions, by name, piece by piece: the "target", the "draft" and others.

    progress, n_most: see LlamaSession.pieces. together: target and draft decode each piece at the
    same time; but a head reads what the target computes.
    """
    left = {
        name: session.pieces(tokens, progress and partial(progress, name), n_most)
        for name, session in sessions.items()
        if isinstance(session, (LlamaSession, MappedSession))
    }
    if together and "draft" in left:
        yield from _feeding(left.pop("target"), left.pop("draft"))
    for pieces in left.values():
        yield from _feeding(pieces)
    if isinstance(head := sessions.get("draft"), HeadSession):
        head.read(tokens)


def _feeding(*sessions: Pieces) -> Iterator[None]:
    """Decode the pieces of a session, or of two with different contexts."""
    while pieces := [piece for each in sessions if (piece := next(each, None))]:
        (context, parts), *other = [
            (at.context, [BatchPart(at.sequence, at.tokens, 0)]) for at in pieces
        ]
        if other:
            context.decode_beside(parts, *other[0])
        else:
            context.decode_together(parts)
        for each in sessions:
            next(each, None)  # reports progress
        yield
