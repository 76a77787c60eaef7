"""Computes which tokens may follow a text under a grammar, and which text must follow."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from time import thread_time

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from ggufspec.decoding.types import n_same
from ggufspec.errors import ConstraintError, OptionError
from ggufspec.structured.keys import JsonStart, KeyPlace, KeyTokens, clear
from ggufspec.structured.limits import TokenTexts, limited_matcher, summary

# Next tokens that are tried, to see whether the last forced token merges with them.
_N_CONTINUATIONS = 8
# Longer forced texts are drafted in parts of this size: a{1000000} forces a million bytes.
_MAX_FORCED_BYTES = 1024

# Limits of processor time for a mask and for a forced text. llguidance's own limits end a mask
# after some hundredths of a second, but it computes a forced text to its end, for up to a second.
MAX_STEP_SECONDS = 1.0
_SLOW_FORCED_SECONDS = 0.1

_STACK_BYTES = 64 * 1024 * 1024  # 4,000 nested references overflow 8 MB
_stack_size = threading.Lock()  # threading.stack_size applies to the whole process

Tokenize = Callable[[bytes, bytes], Sequence[int]]  # (bytes before the text, text) -> token ids


class TokenTable:
    """A vocabulary for matchers. Making one takes about a second for 200,000 tokens: reuse it."""

    def __init__(
        self,
        pieces: Sequence[bytes],
        *,
        special: Collection[int],
        stop_tokens: Collection[int],
        tokenize: Tokenize,
    ) -> None:
        """`pieces`: the bytes of each token, or the name of a `special` token.

        `stop_tokens`: tokens that end a text, at least one.
        """
        self.pieces = pieces
        self.tokenize = tokenize
        self.n_words = (len(pieces) + 31) // 32
        ends = sorted(stop_tokens)
        self._tokenizer = LLTokenizer(
            TokenizerWrapper(TokenTexts(pieces, special, ends[0])), None, ends
        )

    @cached_property
    def keys(self) -> KeyTokens:
        return KeyTokens(self.pieces)

    def matcher(self, grammar: str) -> LLMatcher:
        """A matcher at the beginning of a text. Raises OptionError if `grammar` cannot be compiled.

        Copies of a matcher share its limits.
        """
        made = _with_deep_stack(lambda: limited_matcher(self._tokenizer, grammar))
        if made.is_error():
            raise OptionError(f"the grammar cannot be used: {summary(made.get_error())}")
        return made


class GrammarConstraint:
    """A decoding.types.Constraint that follows a grammar. Not for two threads at once.

    Each method takes the whole text, which may be any other text than before; the matcher moves
    there from its last position.

    llguidance lets an object repeat a key that its schema does not list. So, in a text that is
    JSON, a token is not allowed if it completes a key that its object has, or if only such keys
    could follow it.
    """

    def __init__(
        self,
        table: TokenTable,
        grammar: str,
        n_start: int,
        *,
        max_step_seconds: float = MAX_STEP_SECONDS,
        compiled: LLMatcher | None = None,
    ) -> None:
        """`grammar`: made by `structured.grammar`; applies after the prompt of `n_start` tokens.

        `max_step_seconds`: processor time limit for one token. `compiled`: see `for_another_text`.
        Raises OptionError for a grammar that cannot be compiled, or matches no text.
        """
        self._table, self._grammar, self._n_start = table, grammar, n_start
        self._max_step_seconds, self._step_seconds = max_step_seconds, 0.0
        self._compiled = compiled or table.matcher(grammar)  # reads nothing itself
        self._shares_limits = compiled is not None  # with other texts
        self._matcher = self._compiled.deep_copy()
        self._text = array("i")  # tokens that the matcher has read
        self._json_start = JsonStart.of(grammar)
        # The position in JSON before the first token and after each; None: there is no JSON.
        self._places = [self._json_start and self._json_start.place(b"")]
        self._has_few_keys = '"patternProperties"' in grammar  # names could run out
        self._masks: dict[int, NDArray[np.uint32]] = {}  # n: mask after n tokens of _text
        self._forced: tuple[array[int], list[int]] | None = None  # (text, its forced tokens)
        self._forced_seconds = 0.0
        mask = self._allowed()
        if self._matcher.is_error() or not mask.any():
            raise OptionError("no text can match the constraint: its parts contradict each other")

    def for_another_text(self, n_start: int) -> GrammarConstraint:
        """The same after another prompt, without compiling the grammar. For any thread.

        The texts share llguidance's limits until one reaches them: then each compiles the grammar
        again, and so fails only if it reaches them alone.
        """
        self._shares_limits = True
        return GrammarConstraint(
            self._table,
            self._grammar,
            n_start,
            max_step_seconds=self._max_step_seconds,
            compiled=self._compiled,
        )

    def masks(self, tokens: Sequence[int], draft: Sequence[int] = ()) -> NDArray[np.uint32]:
        """Tokens allowed after `tokens`, then after each of `draft`: (n_draft + 1, n_words).

        Bit i % 32 of word i // 32 is set if token i is allowed. Rows after a token that is not
        allowed are 0, as are rows after the matcher fails: it reaches a limit, or needs bytes that
        no token has. Raises ConstraintError if it fails before the draft.
        """
        n = len(tokens) - self._n_start
        text = array("i", tokens[self._n_start :])
        text.extend(draft)
        n_known = n_same(text, self._text)
        self._masks = {at: mask for at, mask in self._masks.items() if n <= at <= n_known}
        rows = []
        for at in range(n, len(text) + 1):
            if at not in self._masks:
                mask = self._allowed() if self._read(text[:at]) else None
                if at == n and (self._matcher.is_error() or (mask is not None and not mask.any())):
                    complaint = summary(self._matcher.get_error()) or "no token is allowed"
                    raise ConstraintError(
                        f"the text cannot continue ({complaint}): the grammar or schema is too "
                        "complex, or requires what no token of this vocabulary has; simplify it"
                    )
                if self._step_seconds > self._max_step_seconds:
                    raise ConstraintError(
                        "the text cannot continue: the grammar or schema takes longer than "
                        f"{self._max_step_seconds:g} s for one token; simplify it"
                    )
                if mask is None or self._matcher.is_error():
                    rows += [np.zeros(self._table.n_words, np.uint32)] * (len(text) + 1 - at)
                    break
                self._masks[at] = mask
            rows.append(self._masks[at])
        return rows[0][None] if len(rows) == 1 else np.stack(rows)

    def n_allowed(self, tokens: Sequence[int], draft: Sequence[int]) -> int:
        return self._n_next(draft) if self._stand_after(tokens) else 0

    def forced(self, tokens: Sequence[int]) -> Sequence[int]:
        """See Constraint. The last token is left out if the tokenizer would merge it with most
        continuations, such as " " before "true"."""
        if not self._stand_after(tokens):
            return ()
        if self._forced is not None:
            text, forced = self._forced
            begun = self._text[len(text) :].tolist()
            has_rest = not begun or len(begun) < len(forced)
            if has_rest and self._text[: len(text)] == text and forced[: len(begun)] == begun:
                return forced[len(begun) :]
        if self._forced_seconds > _SLOW_FORCED_SECONDS:
            return ()
        text, began = self._text[:], thread_time()
        data, special, _ = self._matcher.compute_ff_bytes().partition(b"\xff")
        self._forced_seconds = thread_time() - began
        if special:  # llguidance would now expect the special token's name, not the token
            self._read(text, again=True)
        data = data[:_MAX_FORCED_BYTES].decode("utf-8", "ignore").encode()  # whole characters
        before = self._table.pieces[text[-1]] if text else b""
        forced = list(self._table.tokenize(before, data)) if data else []
        del forced[self._n_next(forced) :]
        if forced and self._merges_last(forced, before, data):
            del forced[-1]
        self._forced = text, forced
        return forced

    def _merges_last(self, forced: Sequence[int], before: bytes, data: bytes) -> bool:
        """Whether most continuations of `data` are tokenized in another way than `forced`."""
        if not self._read(self._text + array("i", forced)) or self._matcher.is_stopped():
            return False
        at = len(self._text)
        mask = self._masks[at] if at in self._masks else self._allowed()
        if self._matcher.is_error():
            return False
        self._masks[at] = mask
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits[: len(self._table.pieces)])
        few = allowed[:: -(-len(allowed) // _N_CONTINUATIONS)]  # evenly spaced
        tokenized = [self._table.tokenize(before, data + self._table.pieces[i]) for i in few]
        return 2 * sum(list(each[: len(forced)]) == forced for each in tokenized) < len(few)

    def n_free(self, tokens: Sequence[int]) -> int:
        return 0

    def is_over(self, tokens: Sequence[int]) -> bool:
        return self._stand_after(tokens) and self._matcher.is_stopped()

    def _stand_after(self, tokens: Sequence[int]) -> bool:
        """Move the matcher to the end of `tokens`; returns False if they are not allowed."""
        return self._read(array("i", tokens[self._n_start :]))

    def _read(self, text: array[int], *, again: bool = False) -> bool:
        if again or self._matcher.is_error():  # a matcher does not recover from an error
            if self._matcher.is_error():
                self._compiled = self._table.matcher(self._grammar)
            self._matcher = self._compiled.deep_copy()
            del self._text[:]
            self._masks = {}
        n_common, began = n_same(text, self._text), thread_time()
        if n_common < len(self._text):
            self._matcher.rollback(len(self._text) - n_common)
            del self._text[n_common:]
            self._masks = {at: mask for at, mask in self._masks.items() if at <= n_common}
        del self._places[n_common + 1 :]
        places = self._places_after(new := text[n_common:])
        n = self._matcher.try_consume_tokens(new[: len(places)].tolist())
        self._text.extend(new[:n])
        self._places += places[:n]
        if self._has_failed_by_others():
            return self._read(text)
        self._step_seconds = max(self._step_seconds, thread_time() - began)
        return len(self._text) == len(text) and not self._matcher.is_error()

    def _has_failed_by_others(self) -> bool:
        """Whether a limit was reached that other texts shared; True once: `_read` ends that."""
        if not (self._shares_limits and self._matcher.is_error()):
            return False
        self._shares_limits = False
        return True

    def _n_next(self, tokens: Sequence[int]) -> int:
        n: int = self._matcher.validate_tokens(list(tokens))
        return len(self._places_after(tokens[:n]))

    def _places_after(self, tokens: Sequence[int]) -> list[KeyPlace | None]:
        """The place after each of the next tokens, up to one that repeats a key."""
        place, places = self._places[-1], list[KeyPlace | None]()
        for token in tokens:
            if place is not None and (place := self._after(place, token)) is None:
                break
            places.append(place)
        return places

    def _after(self, place: KeyPlace, token: int) -> KeyPlace | None:
        piece = self._table.pieces[token]
        if not place.is_json:
            assert self._json_start is not None
            return self._json_start.place(place.begun + piece)
        return place.after(piece)

    def _allowed(self) -> NDArray[np.uint32]:
        mask, place, known = self._without_repetition(), self._places[-1], dict[KeyPlace, bool]()
        if place is not None and place.is_json and self._has_few_keys:
            towards = self._table.keys.towards(place, mask)
            clear(mask, [token for token in towards if not self._leads_on(token, known)])
        return mask

    def _without_repetition(self) -> NDArray[np.uint32]:
        mask, place = self._mask(), self._places[-1]
        if place is not None and place.is_json:
            clear(mask, list(self._table.keys.repeating(place, mask)))
        return mask

    def _leads_on(self, token: int, known: dict[KeyPlace, bool]) -> bool:
        """Whether an object may continue after a token that ends before or in a key.

        Not if only keys that it has could follow. `known`: answers for places in the same key.
        """
        text, before = self._text[:], self._places[-1]
        place = before and self._after(before, token)
        if place is None:
            return False
        if place not in known:
            known[place] = self._read(text + array("i", [token])) and self._goes_on(place, known)
            self._read(text)
        return known[place]

    def _goes_on(self, place: KeyPlace, known: dict[KeyPlace, bool]) -> bool:
        mask, keys = self._without_repetition(), self._table.keys
        return keys.lead_elsewhere(place, mask) or any(
            self._leads_on(token, known) for token in list(keys.towards(place, mask))
        )

    def _mask(self) -> NDArray[np.uint32]:
        mask, began = np.zeros(self._table.n_words, np.uint32), thread_time()
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self._has_failed_by_others() and self._read(self._text[:]):
            return self._mask()
        self._step_seconds = max(self._step_seconds, thread_time() - began)
        return mask


def _with_deep_stack(work: Callable[[], LLMatcher]) -> LLMatcher:
    with ThreadPoolExecutor(1, "ggufspec-compilation") as pool:
        with _stack_size:
            before = threading.stack_size(_STACK_BYTES)
            try:
                made = pool.submit(work)  # starts the thread, with this stack size
            finally:
                threading.stack_size(before)
        return made.result()
