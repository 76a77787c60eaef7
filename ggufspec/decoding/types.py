"""The data and the interfaces of speculative decoding."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ggufspec.decoding.tree import depths, n_equal

Logits = NDArray[np.float32]  # (n, n_vocab), before sampling
Uniforms = Sequence[float]  # (n), uniforms in [0, 1)
Masks = NDArray[np.uint32]  # (n, n_words): bit i % 32 of word i // 32 says if token i may follow


class Probs(Protocol):
    """Distributions over the vocabulary, one a row; numpy.asarray(probs): (n, n_vocab) float32.

    A numpy array is one. Rows from `to_probs` are evaluated when they are read.
    """

    def __len__(self) -> int: ...

    def __array__(self, dtype: Any = ..., /) -> NDArray[Any]: ...


# A pass over gigabytes of weights empties the processor's caches. So a text is an array, not a list
# of a thousand int objects, and the facts of a round are tuples.


def token_array(tokens: Iterable[int] = ()) -> array[int]:
    """Tokens as an array of int32; the same object if they are one already."""
    if isinstance(tokens, array) and tokens.typecode == "i":
        return tokens
    return array("i", tokens)


def n_same(a: array[int], b: array[int]) -> int:
    """How many tokens at the start are the same."""
    n = min(len(a), len(b))
    if n == 0:
        return 0
    differs = np.frombuffer(a, np.int32, n) != np.frombuffer(b, np.int32, n)
    return int(differs.argmax()) if differs.any() else n


class Verdict(NamedTuple):
    """So many drafted tokens are accepted, and `next_token` follows them.

    `path`: the accepted nodes of a tree, from its root on; None: the first `n_accepted` tokens.
    """

    n_accepted: int
    next_token: int
    path: Sequence[int] | None = None

    @property
    def nodes(self) -> Sequence[int]:
        """The accepted nodes: their indices in the draft."""
        return range(self.n_accepted) if self.path is None else self.path

    @property
    def n_accepted_of_chain(self) -> int:
        """How many of the nodes 0, 1 ... that follow one another were accepted."""
        return n_equal(self.nodes, range(self.n_accepted))


class Draft(NamedTuple):
    """Tokens that a drafter proposes: a chain, or a tree of which one path can be accepted.

    `probs` (n_draft, n_vocab): the distributions that the tokens were drawn from, after temperature
    and truncation; None: every token was certain (argmax, n-gram). Valid until the next draft.
    `expected`: how many are accepted on average, if known. `why`: the reason for its length.
    `parents`: for each node of a tree, the earlier node that it follows, -1 for the text itself;
    empty for a chain. The children of a node are different tokens, and verified in their order:
    each was drawn from its row of `probs`, which leaves out those before it.
    """

    tokens: Sequence[int]
    probs: Probs | None = None
    expected: float | None = None
    why: str = ""
    parents: Sequence[int] = ()

    @property
    def n_chain(self) -> int:
        """The nodes at the start that follow one another; further nodes are beside them."""
        in_order = range(-1, len(self.parents))
        return n_equal(self.parents, in_order) if self.parents else len(self.tokens)

    def accepted(self, verdict: Verdict) -> list[int]:
        """The accepted tokens."""
        return [self.tokens[node] for node in verdict.nodes]


class Ask(NamedTuple):
    """What a text needs next: the target's logits, as from `Session.score`.

    `wants_rows`: False for a piece of a prompt, which is only to be held. `n_read`: so many tokens
    of its prompt are in the pass, beside those of a round.
    """

    tokens: Sequence[int]
    draft: Sequence[int] = ()
    parents: Sequence[int] = ()
    wants_rows: bool = True
    n_read: int = 0


class Scored(NamedTuple):
    """The answer to an Ask. `logits`: None where it wanted no rows.

    `seconds`: of the pass, which `n_sharers` texts shared.
    """

    logits: Logits | None
    seconds: float
    n_sharers: int = 1


class Round(NamedTuple):
    """One round. The last of `tokens` is the target's own, unless a stop token came first.

    `n_drafted`: nodes of the draft; `nodes`: those that were accepted, as the Verdict has them.
    `target_seconds` are those of the pass, which `n_sharers` texts shared; 0 where it processed the
    last tokens of the prompt, too.
    """

    tokens: Sequence[int]
    n_drafted: int
    n_accepted: int
    draft_seconds: float
    target_seconds: float
    verify_seconds: float
    expected: float | None = None  # as the Draft has it
    why: str = ""
    n_sharers: int = 1
    drafted_tokens: Sequence[int] = ()  # of a tree, by node; empty for a chain, as `parents`
    parents: Sequence[int] = ()  # as the Draft has them
    nodes: Sequence[int] = ()

    @property
    def depth(self) -> int:
        """Tokens of the draft's longest path."""
        return max(depths(self.parents), default=self.n_drafted)


class Session(Protocol):
    """A model as a function from tokens to logits; it manages its own KV cache."""

    def score(self, tokens: Sequence[int], draft: Sequence[int] = ()) -> Logits:
        """Logits after the last of `tokens`, then after each of `draft`: (n_draft + 1, n_vocab).

        `tokens` must not be empty. The array is valid until the next score. Raises NoRoomError if
        the model cannot read so long a text: a drafter then ends its draft.
        """
        ...


@runtime_checkable
class BlockSession(Protocol):
    """A Session whose next distributions are computed together, before a token is drawn."""

    def gaps(self, tokens: Sequence[int], n_most: int) -> Sequence[float]:
        """Logit gaps of the distributions after `tokens`, and behind the likeliest next ones.

        At most `n_most`, as far as they are computed. Raises as `score`.
        """
        ...


class TargetSession(Protocol):
    """A Session that can also score trees."""

    def score(
        self, tokens: Sequence[int], draft: Sequence[int] = (), parents: Sequence[int] = ()
    ) -> Logits:
        """As Session.score; with `parents`, the draft is a tree: see Draft."""
        ...


class Constraint(Protocol):
    """What may follow in a text. Each method takes the whole text, with its prompt."""

    def masks(self, tokens: Sequence[int], draft: Sequence[int] = ()) -> Masks:
        """Which tokens may follow `tokens`, then each of `draft`: (n_draft + 1, n_words)."""
        ...

    def n_allowed(self, tokens: Sequence[int], draft: Sequence[int]) -> int:
        """How many of `draft` may follow `tokens`, one after the other."""
        ...

    def forced(self, tokens: Sequence[int]) -> Sequence[int]:
        """The usual tokens of the text that has to follow; empty where there is a choice."""
        ...

    def is_over(self, tokens: Sequence[int]) -> bool:
        """Whether only the end can follow `tokens`."""
        ...


class Drafter(Protocol):
    """Proposes tokens, and may learn from the verdicts."""

    def draft(self, tokens: Sequence[int], n_max: int) -> Draft:
        """Propose 0 to `n_max` tokens to follow `tokens`."""
        ...

    def observe(self, draft: Draft, target_probs: Probs, verdict: Verdict) -> None:
        """Learn from the target's distributions and from the verdict on the draft."""
        ...


# A pure rule: which drafted tokens are accepted, and what follows them. It judges a draft by the
# target's distributions (n_draft + 1, n_vocab), after the text and after each node, and by uniforms
# (n_draft + 1).
Verify = Callable[[Draft, Probs, Uniforms], Verdict]
