"""Rows of heads that draft blocks are those of their planted tables, whatever came before.

See also test_head.py, where all that they compute depends on all that they read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import head_pairs
import numpy as np
import pytest
import tiny_blocks
import tiny_heads
from head_pairs import Contexts, Pair
from tiny_blocks import SMALL_WITH_MASK, BlockHead
from tiny_heads import Table

from ggufspec.decoding.types import Logits
from ggufspec.errors import NoRoomError
from ggufspec.llama.head_sessions import BlockHeadSession

TABLE = Table(vocab=SMALL_WITH_MASK, n_classes=4)
N_CTX, N_BATCH, N_DRAFT, N_SLOTS, N_LEAVES, N_PLACES = 96, 12, 7, 2, 3, 6
TOLERANCE = 1e-2  # another row differs by 1 or more
TEXT = [3, 5, 7, 2, 9, 11, 8, 14, 20, 1]
KINDS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "dflash_d2t": {"n_kept": 15},
    "dspark": {"kind": "dspark"},
    "dspark_d2t": {"kind": "dspark", "n_kept": 15, "has_confidence": False},
    "dspark_masks": {"kind": "dspark", "from_anchor": False},
    "dflash2": {"kind": "dflash2"},
    "dflash2_single": {"kind": "dflash2", "top_k": 1},
}
# Planted attention looks back over no more than N_PLACES + 1 tokens.
HEADERS: dict[str, dict[str, Any]] = {
    "mrope": {"rope.dimension_sections": [tiny_heads.N_ROT // 2, 0, 0, 0]},
    "window": {"attention.sliding_window": 16, "attention.sliding_window_pattern": [True]},
    "causal": {"attention.causal": True},
}

Tokens = list[int]


def written(folder: Path, name: str, **how: Any) -> Pair:
    options: dict[str, Any] = {"right": 0.7, "noise": 0.3, "block_size": N_PLACES}
    head = BlockHead(table=TABLE, **{**options, **KINDS.get(name, {}), **how})
    target = tiny_heads.write_llama_table(folder / "llama.gguf", TABLE)
    draft = tiny_blocks.write_dflash(folder / f"{name}.gguf", head, header=HEADERS.get(name))
    return Pair(target, draft, TABLE, head)


def made(pair: Pair, **options: int) -> Contexts:
    how = {"n_ctx": N_CTX, "n_batch": N_BATCH, "n_rows": N_DRAFT + 1, "n_leaves": N_LEAVES}
    return Contexts(pair, **{**how, "n_sequences": N_SLOTS, **options})


@pytest.fixture(scope="module", params=[*KINDS, *HEADERS])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return written(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture
def contexts(pair: Pair) -> Iterator[Contexts]:
    with closing(made(pair)) as contexts:
        yield contexts


def head_in(pair: Pair) -> BlockHead:
    assert isinstance(pair.head, BlockHead)
    return pair.head


def session_in(contexts: Contexts, sequence: int = 0) -> BlockHeadSession:
    session = contexts.head.sessions[sequence]
    assert isinstance(session, BlockHeadSession)
    return session


def wanted_row(head: BlockHead, text: Tokens, drafted: Sequence[int]) -> Logits:
    """What the head gives after `drafted`, which DSpark takes for its own likeliest tokens."""
    is_own = head.kind == "dspark"
    row: Logits = head.row(text, head.drafted(text, len(drafted)) if is_own else drafted)
    return row


def gap(row: Logits) -> float:
    second, first = np.sort(row)[-2:]
    return float(first - second) if np.isfinite(second) else float("inf")


def assert_rows(session: BlockHeadSession, head: BlockHead, text: Tokens, drafted: Tokens) -> None:
    """All rows of the block behind `text`, along `drafted` and then along the likeliest tokens."""
    along = list(drafted)
    for n in range(head.n_max):
        before = along[:n]
        found, wanted = session.score([*text, *before])[0], wanted_row(head, text, before)
        drafts = np.isfinite(wanted)
        assert np.array_equal(np.isfinite(found), drafts)
        assert np.abs(found[drafts] - wanted[drafts]).max() < TOLERANCE
        gaps = session.gaps([*text, *before], 3)
        assert len(gaps) == min(head.n_max - n, 3)
        assert gaps[0] == pytest.approx(gap(wanted), abs=TOLERANCE)
        along = along if len(along) > n else [*along, int(wanted.argmax())]
    with pytest.raises(NoRoomError, match=f"drafts {head.n_max} tokens at once"):
        session.score([*text, *along])


def test_a_block_is_computed_once_and_its_cells_are_dropped(contexts: Contexts, pair: Pair) -> None:
    """Its gaps are known before any of its tokens."""
    session, head, text = session_in(contexts), head_in(pair), [*TEXT]
    context = contexts.context
    for _ in range(2):
        contexts.sessions[0].score(text[:-1])
        gaps = list(session.gaps(text, N_DRAFT))
        assert len(gaps) == head.n_max
        before = context.decode_seconds
        assert context.n_cells(0) == len(text) - 1
        drafted: Tokens = []
        for i in range(head.n_max):
            row = session.score([*text, *drafted])[0]
            assert gap(row) == pytest.approx(gaps[i], abs=TOLERANCE)
            assert list(session.gaps([*text, *drafted], 2)) == gaps[i : i + 2]
            drafted.append(int(row.argmax()))
        rows = session.score(text, drafted[:2])
        assert np.array_equal(rows[1], session.score([*text, drafted[0]])[0])
        assert context.decode_seconds == before
        text = [*text, *drafted[:2], 7]


@pytest.fixture
def read(contexts: Contexts, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many states the head reads, by batch."""
    found: list[int] = []
    decode_hidden = contexts.context.decode_hidden

    def spied(tokens: Sequence[int], *args: Any) -> None:
        found.append(len(tokens))
        decode_hidden(tokens, *args)

    monkeypatch.setattr(contexts.context, "decode_hidden", spied)
    return found


def test_each_state_is_read_once(contexts: Contexts, pair: Pair, read: list[int]) -> None:
    """A prompt in pieces, in batches of the head; later tokens, of which some are rejected."""
    target, session, text = contexts.sessions[0], session_in(contexts), TEXT * 6
    target.feed(text[:-1])
    for n_accepted in (0, 1, 3, 4):
        drafted = head_in(pair).drafted(text, 4)
        assert_rows(session, head_in(pair), text, drafted)
        assert sum(read) == len(text) - 1
        target.score(text, drafted)
        text = [*text, *drafted[:n_accepted], 5]
    assert max(read) == N_BATCH


def test_states_of_drafted_tokens_wait_for_the_verdict(
    contexts: Contexts, pair: Pair, read: list[int]
) -> None:
    """Also where so many are kept that they are read before the next draft."""
    text = TEXT[:2]
    for _ in range(80):
        contexts.sessions[0].score(text, [4, 6])
        text = [*text, 5]
    assert sum(read) > 60
    assert_rows(session_in(contexts), head_in(pair), text, [])
    assert sum(read) == len(text) - 1


def test_rows_are_computed_again_after_another_text_was_read(
    contexts: Contexts, pair: Pair
) -> None:
    """Its states are too many to be kept."""
    contexts.sessions[0].feed(TEXT[:-1])
    assert_rows(session_in(contexts), head_in(pair), TEXT, [])
    contexts.sessions[1].feed(TEXT[::-1] * 8)
    assert session_in(contexts, 1).n_common(TEXT[::-1] * 8) > 60
    assert_rows(session_in(contexts), head_in(pair), TEXT, [])


def test_a_borrowed_text_is_drafted_from_at_once(contexts: Contexts, pair: Pair) -> None:
    if not contexts.context.can_share_passes:
        pytest.skip("windows: sequences share no cells")
    contexts.sessions[0].feed([*TEXT, 4])
    session_in(contexts, 0).feed([*TEXT, 4])
    contexts.sessions[1].borrow(0, TEXT[:-1])
    session_in(contexts, 1).borrow(0, TEXT[:-1])
    assert contexts.sessions[1].unread(TEXT[:-1]) == ()
    assert_rows(session_in(contexts, 1), head_in(pair), TEXT, [])


def test_a_block_ends_with_the_context(pair: Pair) -> None:
    head = head_in(pair)
    with closing(made(pair, n_ctx=32, n_sequences=1, n_leaves=1)) as contexts:
        session = session_in(contexts)
        for n_left in (4, 3, 2, 1, 0):
            text = [*TEXT * 3, 3, 5][: 32 - n_left]
            contexts.sessions[0].feed(text[:-1])
            n_rows = min(n_left + 1, N_PLACES) - head.first
            for n in range(head.n_max):
                drafted = head.drafted(text, n)
                if n < n_rows:
                    row = session.score([*text, *drafted])[0]
                    assert row.argmax() == wanted_row(head, text, drafted).argmax()
                    assert len(session.gaps([*text, *drafted], 9)) == n_rows - n
                else:
                    with pytest.raises(NoRoomError, match=f"drafts {max(n_rows, 0)} tokens"):
                        session.score([*text, *drafted])


def test_dflash2_has_no_row_behind_a_token_that_is_no_candidate(tmp_path: Path) -> None:
    pair = written(tmp_path, "dflash2")
    with closing(made(pair)) as contexts:
        session, head = session_in(contexts), head_in(pair)
        contexts.sessions[0].feed(TEXT[:-1])
        candidates = head.candidates(TEXT, 0)
        for token in range(24):
            if token in candidates:
                assert np.isfinite(session.score([*TEXT, token]).max())
            else:
                for method in (session.score, lambda tokens: session.gaps(tokens, 2)):
                    with pytest.raises(NoRoomError, match="no distribution after this token"):
                        method([*TEXT, token])


def test_a_causal_block_does_not_see_what_is_behind(tmp_path: Path) -> None:
    """A block of fewer tokens has the same first rows, which it has not if all see each other."""
    for name, is_causal in (("dflash", False), ("causal", True)):
        pair = head_pairs.perturbed(written(tmp_path, name))
        rows = []
        for n_rows in (3, 8):
            with closing(made(pair, n_rows=n_rows)) as contexts:
                contexts.sessions[0].feed(TEXT[:-1])
                rows.append(session_in(contexts).score(TEXT).copy())
        assert (np.abs(rows[0] - rows[1]).max() < 1e-4) == is_causal


def test_states_of_a_text_that_was_not_taken_are_missing(contexts: Contexts, pair: Pair) -> None:
    """Where texts are written without drafts; the target decodes it again for the next draft."""
    target, session = contexts.sessions[0], session_in(contexts)
    target.feed(TEXT[:3])
    contexts.head.use(0, is_used=False)
    target.feed(TEXT[:-1])
    with pytest.raises(NoRoomError):
        session.score(TEXT)
    contexts.head.use(0, is_used=True)
    target.feed(TEXT[:-1])
    assert_rows(session, head_in(pair), TEXT, [])
