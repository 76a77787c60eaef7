"""A draft of another vocabulary: its tokens matched with the target's."""

from __future__ import annotations

import ctypes
from array import array
from collections import defaultdict
from collections.abc import Iterable, Sequence

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from ggufspec.decoding.types import Logits
from ggufspec.errors import VocabError
from ggufspec.llama.vocab import Vocab
from ggufspec.models.vocabulary_overlap import MAX_PADDING

_BYTE = llama_cpp.LLAMA_TOKEN_ATTR_BYTE
_CONTROL = llama_cpp.LLAMA_TOKEN_ATTR_CONTROL
_TEXT = llama_cpp.LLAMA_TOKEN_ATTR_NORMAL | llama_cpp.LLAMA_TOKEN_ATTR_USER_DEFINED | _BYTE
_MOST_OF_FIRST = 1 - 1e-6  # rounding must not leave a negative rest
_N_SAMPLE = 128  # tokens of an English text
# Share of the target's ids, in order of falling frequency, that is searched for compounds: all take
# a second, and the last 7/8 have two fifths of the compounds of code.
_COMPOUND_SHARE = 1 / 8
_MIN_COMPOUND_IDS = 1024
_N_TAIL = 64  # tokens of a text
_TAIL_SHARE = 1 / 16  # share of compounds above which looking for more pays: in code, not in prose
_CODE = """\
class Cache:
    def __init__(self, size: int = 10) -> None:
        self._items: dict[str, float] = {}
        self.size = size

    def get(self, name):
        if name in self._items:
            return self._items[name]
        for i in range(len(self._items)):
            if i > 0 and not name.startswith("_"):
                print(f"{i}: {name}", file=sys.stderr)
        raise KeyError(name)  # not found
"""
_LEAST_COVERAGE = 0.5  # below, two drafted tokens in a row are mostly impossible


class VocabMap:
    """One-to-one matches of target and draft tokens, and spellings of the target's other tokens.

    Tokens match if they write the same bytes (first those of the same name, if the tokenizers are
    of one type), control tokens if they have the same name; padding and unknown tokens never match.
    End-of-text tokens of different names match by their role. A draft proposes only tokens that
    match and `compounds`, frequent tokens that it writes in two; all other logits are -inf, so the
    softmax is the distribution that tokens are drawn from.
    Timor et al., https://arxiv.org/abs/2502.05202
    """

    def __init__(self, target: Vocab, draft: Vocab, difference: str = "") -> None:
        """`difference`: in words, for messages. Raises VocabError if no text token matches."""
        self._target, self._draft = target, draft
        self._difference = difference
        ours, theirs = _usable(target), _usable(draft)
        pairs = _pairs(target, ours, draft, theirs)
        self.to_target: NDArray[np.int32] = np.full(draft.n_tokens, -1, np.int32)
        self.to_draft: NDArray[np.int32] = np.full(target.n_tokens, -1, np.int32)
        for here, there in pairs:
            self.to_draft[here], self.to_target[there] = there, here
        if not any(ours[here] & _TEXT for here, _ in pairs):
            raise VocabError(
                f"target and draft have no token in common: {difference}. Use a draft of the "
                "target's model family, with the same tokenizer"
            )
        # Without padding and unknown tokens.
        self.n_common, self.n_target, self.n_draft = len(pairs), len(ours), len(theirs)
        # Share of a text's tokens that match, estimated from a short text.
        self.coverage_of_prose = self._coverage(filler_tokens(target, _N_SAMPLE))
        self.coverage_of_code = self._coverage(target.tokenize_inside(_CODE))
        self._here = np.flatnonzero(self.to_draft >= 0)
        self._there = self.to_draft[self._here].astype(np.intp)
        self._spelled: dict[int, tuple[int, ...]] = {}
        self.compounds = self._compounds()
        self._is_compound = np.zeros(target.n_tokens, bool)
        for tokens, _ in self.compounds.values():
            self._is_compound[tokens] = True
        self._compound_tokens = np.flatnonzero(self._is_compound)

    @property
    def note(self) -> str:
        """One line: the share of tokens that the draft can propose; with advice if that is low."""
        found = (
            f"the draft has another vocabulary ({self._difference}). It drafts only the "
            f"{self.n_common:,} tokens that both have: {self.n_common / self.n_target:.0%} of the "
            f"target's, {self.n_common / self.n_draft:.0%} of its own, "
            f"{self.coverage_of_prose:.0%} of those in an English text, "
            f"{self.coverage_of_code:.0%} in Python code"
        )
        if max(self.coverage_of_prose, self.coverage_of_code) >= _LEAST_COVERAGE:
            return found
        return f"{found}. That will hardly pay: use a draft of the target's model family"

    def spelled(self, token: int) -> tuple[int, ...]:
        """The draft's tokens for a token of the target: its match, else the usual ones of its text.

        A control token without a match is read as the draft's token of the same role (beginning or
        end of a text), or not at all.
        """
        known = self._spelled.get(token)
        if known is None:
            known = self._spelled[token] = tuple(self._spell(token))
        return known

    def start(self, first: int) -> tuple[int, ...]:
        """The draft's tokens before a text that starts with `first`: its own BOS token, or none."""
        bos = self._draft.bos
        wants_bos = self._draft.adds_bos and self.spelled(first)[:1] != (bos,)
        return (bos,) if wants_bos else ()

    def _coverage(self, tokens: Sequence[int]) -> float:
        return float(np.mean(self.to_draft[tokens] >= 0)) if tokens else 0.0

    def _compounds(self) -> dict[int, tuple[NDArray[np.intp], NDArray[np.intp]]]:
        """Frequent tokens that the draft writes in two, such as `:` with a line break.

        For each first token of the draft: the target's tokens, and the second tokens of the draft.
        """
        n_most = max(int(_COMPOUND_SHARE * self._target.n_tokens), _MIN_COMPOUND_IDS)
        found = defaultdict(list)
        for token in np.flatnonzero(self.to_draft[:n_most] < 0).tolist():
            if len(read := self.spelled(token)) == 2:
                found[read[0]].append((token, read[1]))
        lists = {first: np.array(pairs, np.intp) for first, pairs in found.items()}
        return {first: (pairs[:, 0], pairs[:, 1]) for first, pairs in lists.items()}

    def has_compounds(self, text: array[int]) -> bool:
        """Whether the last tokens of a text of the target make further compounds likely."""
        tail = text[-_N_TAIL:]
        return bool(self._is_compound[tail].sum() >= max(_TAIL_SHARE * len(tail), 1))

    @property
    def anchor(self) -> int:
        """The draft's token for a text of which it has no token."""
        return max(self._draft.bos if self._draft.bos >= 0 else self._draft.eos, 0)

    def empty_rows(self, n_rows: int) -> Logits:
        """Rows (n_rows, n_vocab of the target) for `widen`."""
        return np.full((n_rows, self._target.n_tokens), -np.inf, np.float32)

    def widen(self, rows: Logits, out: Logits) -> Logits:
        """Write the draft's logits into rows of `empty_rows`; tokens that it lacks stay -inf."""
        for row, wide in zip(rows, out, strict=True):
            wide[self._here] = row.take(self._there)
            wide[self._compound_tokens] = -np.inf
        return out

    def add_compounds(self, first: int, logit: float, ahead: Logits, out: Logits) -> None:
        """Give the compounds that begin with the draft's token `first` logits in a row `out`.

        `logit` is the draft's logit of `first`, and the row `ahead` has its logits after `first`.
        The probability of `first` is split between its compounds and `first` itself.
        """
        tokens, seconds = self.compounds[first]
        largest = np.max(ahead)
        log_probs = ahead[seconds] - largest - np.log(np.exp(ahead - largest).sum())
        out[tokens] = logit + log_probs
        if (here := self.to_target[first]) >= 0:
            out[here] = logit + np.log1p(-min(float(np.exp(log_probs).sum()), _MOST_OF_FIRST))

    def _spell(self, token: int) -> Iterable[int]:
        if (match := int(self.to_draft[token])) >= 0:
            return (match,)
        draft = self._draft
        if data := self._target.piece(token):
            try:
                found = draft.tokenize_inside(data.decode())
            except UnicodeDecodeError:  # part of a character
                found = []
            return found or [draft.byte_tokens[byte] for byte in data if byte in draft.byte_tokens]
        if token == self._target.bos and draft.adds_bos:
            return (draft.bos,)
        if token in self._target.stop_tokens:
            ends = [end for end in (draft.eot, draft.eos) if end >= 0]
            return ends[:1]
        return ()


def map_of(target: Vocab, draft: Vocab) -> VocabMap | None:
    """The map between two vocabularies; None if they are the same. Raises VocabError."""
    difference = first_difference(target, draft)
    return VocabMap(target, draft, difference) if difference else None


def _usable(vocab: Vocab) -> dict[int, int]:
    """The kinds (bits of llama_token_attr) of all tokens but unknown and unused ones."""
    attribute, pointer = llama_cpp.llama_vocab_get_attr, vocab.pointer
    kinds = ((token, attribute(pointer, token)) for token in range(vocab.n_tokens))
    return {token: kind & (_TEXT | _CONTROL) for token, kind in kinds if kind & (_TEXT | _CONTROL)}


def _pairs(
    target: Vocab, ours: dict[int, int], draft: Vocab, theirs: dict[int, int]
) -> list[tuple[int, int]]:
    """The matching tokens (of the target, of the draft), each at most once."""
    found: dict[int, int] = {}
    if target.type == draft.type:
        found = _matches(_by_name(target, ours), _by_name(draft, theirs))
    taken = set(found.values())
    if theirs := {token: kind for token, kind in theirs.items() if token not in taken}:
        ours = {token: kind for token, kind in ours.items() if token not in found}
        found |= _matches(_by_bytes(target, ours), _by_bytes(draft, theirs))
        taken = set(found.values())
    for here, there in ((target.eos, draft.eos), (target.eot, draft.eot)):
        are_ends = here in target.stop_tokens and there in draft.stop_tokens
        if are_ends and here not in found and there not in taken:
            found[here] = there
            taken.add(there)
    return sorted(found.items())


def _matches(ours: dict[object, int], theirs: dict[object, int]) -> dict[int, int]:
    return {ours[key]: theirs[key] for key in ours.keys() & theirs.keys()}


def _by_name(vocab: Vocab, kinds: dict[int, int]) -> dict[object, int]:
    """Tokens by kind and name as stored; of several, the first."""
    name, pointer = llama_cpp.llama_vocab_get_text, vocab.pointer
    return {(kinds[token], name(pointer, token)): token for token in reversed(kinds)}


def _by_bytes(vocab: Vocab, kinds: dict[int, int]) -> dict[object, int]:
    """Tokens by the bytes that they write, control tokens by their names.

    The first of several tokens is taken, a byte token only if there is no other: models do not
    write ASCII in byte tokens.
    """
    found: dict[object, int] = {}
    buffer = ctypes.create_string_buffer(256)
    to_piece, pointer, size = llama_cpp.llama_token_to_piece, vocab.pointer, len(buffer)
    for token in sorted(kinds, key=lambda token: kinds[token] & _BYTE):  # stable
        n = to_piece(pointer, token, buffer, size, 0, True)
        if piece := buffer[:n] if n >= 0 else vocab.shown(token):
            found.setdefault((kinds[token] & _CONTROL, piece), token)
    return found


def first_difference(target: Vocab, draft: Vocab) -> str:
    """The first difference of two vocabularies; empty if all tokens but padding are the same."""
    if target.type != draft.type:
        return f"the target's tokenizer is {target.type}, the draft's {draft.type}"
    if abs(target.n_tokens - draft.n_tokens) > MAX_PADDING:
        return f"the target has {target.n_tokens:,} tokens, the draft {draft.n_tokens:,}"
    for token in range(min(target.n_tokens, draft.n_tokens)):
        ours, theirs = target.name(token), draft.name(token)
        if ours != theirs:
            return f"token {token} is {ours!r} in the target and {theirs!r} in the draft"
    for name, ours_id, theirs_id in (
        ("beginning-of-text", target.bos, draft.bos),
        ("end-of-text", target.eos, draft.eos),
    ):
        if ours_id != theirs_id:
            return f"the {name} token is {ours_id} in the target and {theirs_id} in the draft"
    return ""


# Real text, because random tokens would make a mixture-of-experts model read all its experts.
_PROSE = """\
In the year of the great frost the river stood still from one bridge to the other, and people who \
had never met each other walked across it with lanterns. A baker sold warm bread from a sledge; \
two boys had built a tower out of ice (it was 12 feet high, they said, or nearly), and an old \
captain, who trusted no water that he could not hear, watched them from the quay. "It will not \
hold," he told everybody. "Nothing holds that begins so suddenly." But it held until March.
"""


def filler_tokens(vocab: Vocab, n_tokens: int) -> list[int]:
    """`n_tokens` of English text; arbitrary tokens if the vocabulary cannot write it."""
    for known in (vocab.plain_tokens(_PROSE), range(vocab.n_tokens)):
        ids = (token for token in known if 0 <= token < vocab.n_tokens)
        tokens = [token for token in ids if token not in vocab.stop_tokens]
        if len(set(tokens)) > 1:
            break
    tokens = tokens or list(range(vocab.n_tokens))
    return [tokens[i % len(tokens)] for i in range(n_tokens)]
