"""Adds branches to a drafted chain if they are expected to pay.

The choice of the next node depends on the tokens and distributions so far, never on the token about
to be drawn: so a text keeps the target's distribution.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from enum import Enum, auto
from operator import itemgetter
from typing import NamedTuple

from ggufspec import _native
from ggufspec.decoding.sampling import Rows, Sampling, draw
from ggufspec.decoding.tree import n_equal, path_to
from ggufspec.decoding.types import Logits, Uniforms
from ggufspec.drafting import constants
from ggufspec.drafting.strategies import Materials
from ggufspec.errors import ConstraintError, NoRoomError


class _Kind(Enum):
    DECLINED = auto()  # the chain's next token, which the length rule declined to draw
    SIBLING = auto()  # drawn from the row of node `after` without that node's token
    NEXT = auto()  # follows a leaf; needs a further step of the draft model


class _Candidate(NamedTuple):
    """A node that could be added below `parent`; `value`: the probability that it is accepted."""

    kind: _Kind
    value: float
    parent: int
    adds_leaf: bool = False
    after: int = -1
    left: float = 0.0  # probability that its parent is accepted and the siblings so far are not


class Growth:
    """The tree of one round: its nodes in the order in which they were added, the chain first."""

    def __init__(self, materials: Materials, rows: Rows, uniforms: Uniforms) -> None:
        """`rows[i]`: the distribution that node i is drawn from. `uniforms`: one for each node."""
        self._policy = materials.policy
        self._rows = rows
        self._uniforms = uniforms
        self._n_leaves_left = materials.n_leaves - 1
        self._stop_tokens = materials.stop_tokens
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._values = {-1: 1.0}  # the probability that each node is accepted; -1: the text
        self._declined: int | None = None  # the node of kind DECLINED
        self._held: Sequence[int] = ()  # the nodes that the draft model has read
        self._prices: dict[int, float] = {}  # of candidates of kind NEXT, by parent, for `_held`
        self._n_opened = 0  # number of chain nodes whose siblings are candidates
        self._candidates: list[_Candidate] = []

    @property
    def result(self) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
        """Tokens and parents as in Draft, and the nodes that the draft model has read."""
        is_chain = self._parents == [*range(-1, len(self._parents) - 1)]
        return self._tokens, () if is_chain else self._parents, self._held

    def add_to_chain(self, token: int, value: float) -> None:
        """Append a token to the chain; it is accepted with probability `value`."""
        self._add_node(token, len(self._tokens) - 1, value)

    def is_better_beside(self) -> bool:
        """Whether there is no room for the chain's next token: likelier branches fill it all."""
        policy = self._policy
        n_room = policy.n_max - len(self._tokens)
        n_deep = n_room if policy.is_fixed else 1  # of a branch, by further draft steps
        if n_room <= 0 or len(self._tokens) * n_deep < n_room:
            return False
        self._open_chain()
        firsts = sorted((each.value for each in self._candidates), reverse=True)
        firsts = firsts[: self._n_leaves_left]
        values = [first * policy.mean_acceptance**k for first in firsts for k in range(n_deep)]
        values.sort(reverse=True)
        weight = 1 + policy.block_bonus * len(self._tokens)  # of the next token: see best_rule
        policy.least = values[n_room - 1] / weight if len(values) >= n_room else 0.0
        return policy.reached * policy.mean_acceptance < policy.least

    def grow(
        self,
        text: Sequence[int],
        sampling: Sampling,
        score: Callable[[Sequence[int]], Logits],
    ) -> None:
        """Add branches to the complete chain as long as the policy expects a gain.

        `score(tokens)`: the draft model's logits.
        """
        policy = self._policy
        n_chain = len(self._tokens)
        leaf, reached = n_chain - 1, self._values[n_chain - 1]
        self._held = range(policy.n_evaluated - 1)
        if self._rows.has_declined:
            value = reached * policy.acceptance.probability(policy.gaps[-1])
            self._candidates.append(_Candidate(_Kind.DECLINED, value, leaf, left=reached))
        else:
            self._add_next(leaf)
        if not policy.n_worth(self._most(), n_chain):
            return
        self._open_chain()
        n_steps = n_read = 0
        while True:
            ranked = self._ranked()
            if not policy.n_worth([value for value, _ in ranked], len(self._tokens)):
                break
            best = ranked.pop(0)[1]
            self._candidates.remove(best)
            if best.kind is not _Kind.NEXT:
                self._draw(best)
                continue
            path = path_to(self._parents, best.parent)
            context = array("i", text)
            context.extend(self._tokens[node] for node in path)
            try:
                logits = score(context)
            except NoRoomError:
                continue
            n_steps += 1
            n_read += len(path) - n_equal(path, self._held) - 1
            self._held, self._prices = path, {}
            self._draw_next(best, [value for value, _ in ranked], logits, sampling, context)
        nodes = range(n_chain, len(self._tokens))
        # The rule has counted the declined token already.
        value = sum(self._values[node] for node in nodes if node != self._declined)
        policy.observe_growth(value, n_steps, n_read)

    def rows_of(self, drawn: Sequence[int]) -> list[int]:
        """For each position in `drawn`, the row that has its distribution."""
        rows = list(drawn)
        if self._declined is not None:
            rows[-1] = self._declined
        elif self._rows.has_declined:
            rows[-1] = len(self._rows)
        return rows

    def _most(self) -> list[float]:
        lefts = (self._values[node - 1] - self._values[node] for node in range(len(self._tokens)))
        others = (value for value, _ in self._ranked())
        return sorted([*lefts, *others], reverse=True)

    def _open_chain(self) -> None:
        for node in range(self._n_opened, len(self._tokens)):
            self._open(node, self._values[node - 1])
        self._n_opened = len(self._tokens)

    def _open(self, node: int, left: float) -> None:
        """Add the sibling after `node`, which is tried with probability `left`."""
        left -= self._values[node]
        gap = self._rows.gap_without(node, self._tokens[node])
        if gap >= 0:  # another token is left
            parent = self._parents[node]
            value = left * self._policy.second.probability(gap)
            value *= constants.FURTHER_CHOICE ** (self._parents.count(parent) - 1)
            new = _Candidate(_Kind.SIBLING, value, parent, adds_leaf=True, after=node, left=left)
            self._candidates.append(new)

    def _add_next(self, leaf: int) -> None:
        if leaf >= 0 and self._tokens[leaf] not in self._stop_tokens:
            value = self._values[leaf] * self._policy.mean_acceptance
            self._candidates.append(_Candidate(_Kind.NEXT, value, leaf))

    def _draw(self, best: _Candidate) -> None:
        node, rows, uniform = len(self._tokens), self._rows, self._uniforms[len(self._tokens)]
        if best.kind is _Kind.DECLINED:
            self._declined = node
            token = rows.draw_declined(self._policy, uniform)
        elif rows.append_without(best.after, self._tokens[best.after]):
            token = rows.pick(node, uniform)
        else:
            return
        self._n_leaves_left -= best.adds_leaf
        self._add_drawn(token, best.parent, best.value, best.left)

    def _draw_next(
        self,
        best: _Candidate,
        others: Sequence[float],
        logits: Logits,
        sampling: Sampling,
        context: Sequence[int],
    ) -> None:
        """Add a token drawn from `logits`, unless candidates of value `others` are better."""
        node, left = len(self._tokens), self._values[best.parent]
        value = left * self._policy.acceptance.probability(_native.gap_of(logits))
        values = sorted([value, *others], reverse=True)
        if values.index(value) >= self._policy.n_worth(values, node):
            return
        try:
            token = draw(self._rows, logits, sampling, context, None, self._uniforms[node])
        except ConstraintError:
            return  # no token of the draft's vocabulary may follow; the target may have others
        self._add_drawn(token, best.parent, value, left)

    def _add_node(self, token: int, parent: int, value: float) -> None:
        self._values[len(self._tokens)] = value
        self._tokens.append(token)
        self._parents.append(parent)

    def _add_drawn(self, token: int, parent: int, value: float, left: float) -> None:
        """Add a node that was drawn, and the candidates that it makes possible."""
        node = len(self._tokens)
        self._add_node(token, parent, value)
        self._open(node, left)
        self._add_next(node)

    def _ranked(self) -> list[tuple[float, _Candidate]]:
        """(value minus price, candidate), best first; new branches only while leaves are left."""
        found = [(each.value - self._price(each), each) for each in self._candidates]
        found.sort(key=itemgetter(0), reverse=True)
        n_left, allowed = self._n_leaves_left, []
        for value, each in found:
            if n_left or not each.adds_leaf:
                n_left -= each.adds_leaf
                allowed.append((value, each))
        return allowed

    def _price(self, candidate: _Candidate) -> float:
        if candidate.kind is not _Kind.NEXT:
            return 0.0
        if (price := self._prices.get(candidate.parent)) is None:
            path = path_to(self._parents, candidate.parent)
            n_common = n_equal(path, self._held)
            n_lost = sum(self._values[node] for node in self._held[n_common:])
            price = self._policy.step_price(len(path) - n_common - 1 + n_lost)
            self._prices[candidate.parent] = price
        return price
