"""Hidden states of a target's tokens, kept until a head has read them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ggufspec.decoding.tree import path_along
from ggufspec.decoding.types import n_same
from ggufspec.llama.batch_part import BatchPart
from ggufspec.llama.extension import Hidden


class _Tree(NamedTuple):
    """The tree at the end of the target's last batch, of which one path is accepted."""

    position: int
    tokens: Sequence[int]
    parents: Sequence[int]
    states: Hidden


class GivenStates:
    """States of the tokens from `first` to `end` of one text, and of a tree after them.

    Changes are ordered so that Ctrl-C between two steps loses states, but never mixes tokens up.
    """

    def __init__(self, n_usual: int) -> None:
        """`n_usual`: tokens that are usually kept; memory for many more is given back."""
        self.first = 0
        self._n_usual = n_usual
        self._tokens = array("i")  # from `first` on
        self._states = np.empty((0, 0), np.float32)  # of these tokens, with room for more
        self._tree: _Tree | None = None

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def end(self) -> int:
        """Length of the prefix of the text for which the target has given states."""
        return self.first + len(self._tokens)

    def take(self, position: int, part: BatchPart, states: Hidden) -> Sequence[int]:
        """The target has decoded `part` at `position`; `states` is copied.

        Returns its tokens that are not part of a tree.
        """
        self._tree, tokens = None, part.tokens
        n_chain = len(tokens) - len(part.parents)
        tree = None
        if part.parents:
            behind = position + n_chain
            tree = _Tree(behind, tokens[n_chain:], part.parents, states[n_chain:].copy())
        n = position - self.first
        if not 0 <= n <= len(self._tokens):
            n = 0
            del self._tokens[:]
            self.first = position
        del self._tokens[n:]
        self._keep(n, states[:n_chain])
        self._tokens.extend(tokens[:n_chain])
        self._tree = tree
        return tokens[:n_chain]

    def choose_path(self, tokens: array[int]) -> None:
        """Keep the path of a tree that follows `tokens`."""
        tree, self._tree = self._tree, None
        if tree is None:
            return
        path = path_along(tree.parents, tree.tokens, tokens[tree.position :])
        n = tree.position - self.first
        del self._tokens[n:]
        self._keep(n, tree.states[path])
        self._tokens.extend(tree.tokens[node] for node in path)

    def n_known(self, tokens: array[int]) -> int:
        """Length of the prefix of `tokens` for which the target has given states."""
        return self.first + n_same(tokens[self.first :], self._tokens)

    def cut(self, tokens: array[int]) -> None:
        """Drop the states of tokens that differ from `tokens`."""
        del self._tokens[n_same(tokens[self.first :], self._tokens) :]
        self.first = min(self.first, len(tokens))

    def tokens(self, start: int, end: int) -> array[int]:
        """The tokens at positions `start` to `end`."""
        return self._tokens[start - self.first : end - self.first]

    def between(self, start: int, end: int) -> Hidden:
        """The states at positions `start` to `end`: (end - start, width). Valid until a change."""
        return self._states[start - self.first : end - self.first]

    def drop_before(self, position: int) -> None:
        """Drop the states before a position."""
        if (n := position - self.first) > 0:
            kept = self._tokens[n:]
            del self._tokens[:]
            self._states[: len(kept)] = self._states[n : n + len(kept)].copy()
            n_most = 2 * self._n_usual
            if len(self._states) > 2 * n_most:
                self._states = self._states[: max(n_most, len(kept))].copy()
            self.first = position
            self._tokens.extend(kept)

    def forget(self) -> None:
        """Drop all."""
        self._tree = None
        del self._tokens[:]
        self.first = 0

    def _keep(self, n: int, states: Hidden) -> None:
        """Keep `states` behind the first `n` that are kept."""
        n_all = n + len(states)
        if n_all > len(self._states):
            larger = np.empty((2 * n_all, states.shape[1]), np.float32)
            if n:
                larger[:n] = self._states[:n]
            self._states = larger
        self._states[n:n_all] = states
