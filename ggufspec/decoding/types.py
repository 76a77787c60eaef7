"""The data and the interfaces of speculative decoding."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ggufspec import _native
from ggufspec.decoding.tree import depths, n_equal

Logits = NDArray[np.float32]  # (n, n_vocab), before sampling
Uniforms = Sequence[float]  # (n), uniforms in [0, 1)
Masks = NDArray[np.uint32]  # (n, n_words): token i may follow if bit i % 32 of word i // 32 is set


class Probs(Protocol):
    """Distributions over the vocabulary, one per row; numpy.asarray(probs): (n, n_vocab) float32.

    A numpy array, or the Rows of `to_probs`, which are evaluated when they are read.
    """

    def __len__(self) -> int: ...

    def __array__(self, dtype: Any = ..., /) -> NDArray[Any]: ...


# A pass over gigabytes of weights empties the processor's caches, and reading many small objects
# afterwards is slow. So a text is an array, not a list of int objects, and records are tuples.


def token_array(tokens: Iterable[int] = ()) -> array[int]:
    """Tokens as an array of int32; an array of int32 is returned as it is."""
    if isinstance(tokens, array) and tokens.typecode == "i":
        return tokens
    return array("i", tokens)


# The length of the common prefix.
n_same: Callable[[array[int], array[int]], int] = _native.n_same


class Verdict(NamedTuple):
    """The result of verification: `n_accepted` drafted tokens are kept; `next_token` follows them.

    `path`: the accepted nodes of a tree, in order; None: the first `n_accepted` tokens.
    """

    n_accepted: int
    next_token: int
    path: Sequence[int] | None = None

    @property
    def nodes(self) -> Sequence[int]:
        """Indices of the accepted tokens in the draft."""
        return range(self.n_accepted) if self.path is None else self.path

    @property
    def n_accepted_of_chain(self) -> int:
        """How many of the tokens 0, 1, 2 ... were accepted until the path leaves that order."""
        return n_equal(self.nodes, range(self.n_accepted))


class Draft(NamedTuple):
    """Tokens that a drafter proposes: a chain, or a tree of which one path can be accepted.

    `probs` (n_draft, n_vocab): the distributions that the tokens were drawn from, after temperature
    and truncation; None: every token was certain (argmax, n-gram). Valid until the next draft.
    `expected`: expected number of accepted tokens, if known. `why`: the reason for its length.
    `parents`: in a tree, `parents[i]` is the node before node i, -1 if node i follows the text;
    empty for a chain. The children of a node are different tokens and are verified in their order;
    the row of `probs` of each child excludes the children before it.
    """

    tokens: Sequence[int]
    probs: Probs | None = None
    expected: float | None = None
    why: str = ""
    parents: Sequence[int] = ()

    def accepted(self, verdict: Verdict) -> list[int]:
        return [self.tokens[node] for node in verdict.nodes]


class Ask(NamedTuple):
    """What a text needs next from the target: the logits that `Session.score` would return.

    `wants_rows`: False for a piece of a prompt, whose logits are not needed. `n_read`: number of
    prompt tokens in the pass, in addition to the tokens of a round.
    """

    tokens: Sequence[int]
    draft: Sequence[int] = ()
    parents: Sequence[int] = ()
    wants_rows: bool = True
    n_read: int = 0


class Scored(NamedTuple):
    """The answer to an Ask. `logits`: None if the Ask wanted no rows.

    `seconds`: duration of the pass, which `n_sharers` texts shared.
    """

    logits: Logits | None
    seconds: float
    n_sharers: int = 1


class Round(NamedTuple):
    """One round. `tokens`: accepted tokens, then one of the target, unless a stop token came first.

    `n_drafted`: tokens of the draft; `nodes`: the accepted ones, as in Verdict. `target_seconds`:
    duration of the pass, which `n_sharers` texts shared; 0 if the pass also processed the last
    tokens of the prompt.
    """

    tokens: Sequence[int]
    n_drafted: int
    n_accepted: int
    draft_seconds: float
    target_seconds: float
    verify_seconds: float
    expected: float | None = None  # as in Draft
    why: str = ""
    n_sharers: int = 1
    drafted_tokens: Sequence[int] = ()  # the nodes of a tree; empty for a chain
    parents: Sequence[int] = ()  # as in Draft
    nodes: Sequence[int] = ()

    @property
    def depth(self) -> int:
        """Length of the draft's longest path."""
        return max(depths(self.parents), default=self.n_drafted)


class Session(Protocol):
    """A model as a function from tokens to logits; it manages its own KV cache."""

    def score(self, tokens: Sequence[int], draft: Sequence[int] = ()) -> Logits:
        """Logits after `tokens`, then after each token of `draft`: (n_draft + 1, n_vocab).

        `tokens` must not be empty. The array is valid until the next score. Raises NoRoomError if
        the text is too long for the model; a drafter then ends its draft.
        """


@runtime_checkable
class BlockSession(Protocol):
    """A Session that computes the distributions of several next positions in one pass."""

    def gaps(self, tokens: Sequence[int], n_most: int) -> Sequence[float]:
        """Gaps between the two largest logits, at the positions after `tokens`.

        At most `n_most` gaps, fewer if the pass computes fewer positions. Raises as `score`.
        """


class Constraint(Protocol):
    """Says which tokens may follow. Each method takes the whole text, with its prompt."""

    def masks(self, tokens: Sequence[int], draft: Sequence[int] = ()) -> Masks:
        """Tokens allowed after `tokens`, then after each of `draft`: (n_draft + 1, n_words)."""

    def n_allowed(self, tokens: Sequence[int], draft: Sequence[int]) -> int:
        """Length of the longest prefix of `draft` that may follow `tokens`."""

    def forced(self, tokens: Sequence[int]) -> Sequence[int]:
        """The usual tokens of the text that must follow; empty if several texts may follow."""

    def n_free(self, tokens: Sequence[int]) -> int:
        """A number of next tokens after `tokens` that may be any tokens; 0 if none is known."""

    def is_over(self, tokens: Sequence[int]) -> bool:
        """Whether nothing but the end of the text may follow `tokens`."""


class Drafter(Protocol):
    """Proposes tokens, and may learn from the verdicts."""

    def draft(self, tokens: Sequence[int], n_max: int) -> Draft:
        """Propose 0 to `n_max` tokens to follow `tokens`."""

    def observe(self, draft: Draft, target_probs: Probs, verdict: Verdict) -> None:
        """Learn from the target's distributions and from the verdict on the draft."""


# A verification rule, a pure function of the draft, the target's distributions (n_draft + 1,
# n_vocab) after the text and after each node, and uniforms (n_draft + 1).
Verify = Callable[[Draft, Probs, Uniforms], Verdict]
