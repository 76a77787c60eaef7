"""Processes a prompt with a target and its drafts: at the same time, where that is possible."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial

from ggufspec.common.progress import NamedProgress, Progress
from ggufspec.engine.slots import DraftSession
from ggufspec.llama.beside import feeding_beside
from ggufspec.llama.mapped_session import MappedSession
from ggufspec.llama.session import LlamaSession


def reading(
    tokens: Sequence[int],
    sessions: Mapping[str, DraftSession],
    progress: NamedProgress | None,
    n_most: Callable[[], int | None],
    *,
    together: bool,
) -> Generator[None, None, None]:
    """Feed `tokens` to sessions, by name, piece by piece: the "target", the "draft" and others.

    progress, n_most: see LlamaSession.feeding. together: target and draft compute on different
    devices, so both decode a piece at the same time; but a head reads what the target gives.
    """

    def how(name: str) -> tuple[Sequence[int], Progress | None, Callable[[], int | None]]:
        return tokens, progress and partial(progress, name), n_most

    left = dict(sessions)
    target, draft = left["target"], left.get("draft")
    if (
        together
        and isinstance(target, LlamaSession)
        and isinstance(draft, (LlamaSession, MappedSession))
    ):
        del left["target"], left["draft"]
        yield from feeding_beside(target.pieces(*how("target")), draft.pieces(*how("draft")))
    for name, session in left.items():
        yield from session.feeding(*how(name))
