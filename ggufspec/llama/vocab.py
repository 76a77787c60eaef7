"""Converts between text and token ids with the vocabulary of a loaded model."""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Callable, Sequence, Set
from functools import cached_property
from itertools import pairwise
from time import sleep
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import llama_cpp

from ggufspec import _native
from ggufspec.common.progress import Progress
from ggufspec.errors import ClosedError, PromptError
from ggufspec.llama.breakers import Words, breakers_of

if TYPE_CHECKING:
    from ggufspec.structured.constraint import TokenTable

_PROGRESS_EVERY = 4096  # tokens
_SECONDS_BETWEEN = 0.001  # while the last calls end

_MOST_BREAKERS = 16  # sets of texts that are kept

_MARK = "\x02"  # no text has it
_SPACE = "\u2581"  # how SentencePiece writes one
_MIN_PARTED_BYTES = 16_384  # a longer text is tokenized in parts
_N_NAMES = 1000  # names of special tokens in a part
_N_START = 4  # characters; many names start alike
_MAX_TEXT_BYTES = 2**31 - 16  # llama.cpp counts them in an int32_t

_BYTE_NAME = re.compile("<0x[0-9A-F]{2}>")
_USER_DEFINED = llama_cpp.LLAMA_TOKEN_ATTR_USER_DEFINED
_TEXTLESS = llama_cpp.LLAMA_TOKEN_ATTR_CONTROL | llama_cpp.LLAMA_TOKEN_ATTR_UNKNOWN
_TYPES = {1: "SPM", 2: "BPE", 3: "WPM", 4: "UGM", 5: "RWKV", 6: "PLAMO2"}

Result = TypeVar("Result")


class InfillTokens(NamedTuple):
    """The tokens between the parts of a prompt for text between two others; below 0: none."""

    prefix: int
    suffix: int
    middle: int
    repository: int
    file: int


class Vocab:
    """The vocabulary of a model; after the model is closed, it raises ClosedError."""

    def __init__(self, model: int) -> None:
        self._pointer: int | None = llama_cpp.llama_model_get_vocab(model)
        # The running calls of its functions. Not counted under a Condition: if Ctrl-C comes while
        # the main thread takes that, it stays locked, and the engine's thread waits forever.
        self._users: set[object] = set()
        self._tabling = threading.Lock()
        self._table: TokenTable | None = None
        self.n_tokens: int = llama_cpp.llama_vocab_n_tokens(self.pointer)
        self.type = _TYPES.get(llama_cpp.llama_vocab_type(self.pointer), "none")
        self.bos: int = llama_cpp.llama_vocab_bos(self.pointer)
        self.eos: int = llama_cpp.llama_vocab_eos(self.pointer)
        self.eot: int = llama_cpp.llama_vocab_eot(self.pointer)
        self.adds_bos: bool = llama_cpp.llama_vocab_get_add_bos(self.pointer)
        # Before a text, and after a special token.
        self._adds_space = meta_text(model, "tokenizer.ggml.add_space_prefix") != "false"
        self._pieces: dict[int, bytes] = {}
        self._breakers: dict[tuple[str, ...], _native.Breakers] = {}

    @property
    def pointer(self) -> int:
        """The llama_vocab pointer. Raises ClosedError once the model is closed."""
        if self._pointer is None:
            raise ClosedError("the model of this vocabulary is closed; load it again")
        return self._pointer

    def close(self) -> None:
        """Called before the model is freed: waits for other threads that use the vocabulary."""
        self._pointer = None
        while self._users:
            sleep(_SECONDS_BETWEEN)

    @property
    def has_added_tokens(self) -> bool:
        """Whether the tokens that it adds to texts exist; if not, llama.cpp ends the process."""
        added = [self.bos] if self.adds_bos or self.type == "WPM" else []
        if llama_cpp.llama_vocab_get_add_eos(self.pointer):
            added.append(self.eos)
        if self.type == "WPM":
            added.append(llama_cpp.llama_vocab_sep(self.pointer))
        return all(0 <= token < self.n_tokens for token in added)

    @cached_property
    def stop_tokens(self) -> frozenset[int]:
        """The tokens that end a generation."""
        is_eog = llama_cpp.llama_vocab_is_eog
        return frozenset(token for token in range(self.n_tokens) if is_eog(self.pointer, token))

    @cached_property
    def infill_tokens(self) -> InfillTokens | None:
        """Those of llama.cpp, which reads the file's header and knows usual names; or None."""
        read = ("fim_pre", "fim_suf", "fim_mid", "fim_rep", "fim_sep")
        found = [getattr(llama_cpp, f"llama_vocab_{name}")(self.pointer) for name in read]
        return InfillTokens(*found) if min(found[:3]) >= 0 else None

    def token_table(self, progress: Progress | None = None) -> TokenTable:
        """The vocabulary for constraints; 200,000 tokens take 1 s the first time."""
        with self._tabling:
            if self._table is None:
                self._table = self._while_open(self._made_table, progress)
            return self._table

    def _made_table(self, progress: Progress | None) -> TokenTable:
        from ggufspec.structured.constraint import TokenTable  # llguidance takes long to import

        pieces, special = [], []
        for token in range(self.n_tokens):
            if progress and token % _PROGRESS_EVERY == 0:
                progress(token // 2, self.n_tokens)  # the table takes as long as the rest
            pieces.append(self._to_piece(token, True))
            if self._is_special(token, pieces[-1]):
                special.append(token)
        ends = self.stop_tokens
        table = TokenTable(pieces, special=special, stop_tokens=ends, tokenize=self.tokenize_after)
        if progress:
            progress(self.n_tokens, self.n_tokens)
        return table

    def specials_in(self, text: str) -> dict[str, int]:
        """The special tokens named in a text, by name: ids that ordinary text never gets."""
        tokens = set(self.tokenize(text, add_special=False, parse_special=True))
        pieces = {token: self.shown(token) for token in tokens}
        special = [token for token in tokens if self._is_special(token, pieces[token])]
        return {pieces[token].decode("utf-8", "replace"): token for token in special}

    def _is_special(self, token: int, piece: bytes) -> bool:
        """Whether a token writes no text (control, unknown), or is a name such as <think>."""
        attributes = llama_cpp.llama_vocab_get_attr(self.pointer, token)
        is_name = piece.startswith(b"<") and piece.endswith(b">")
        return bool(attributes & _TEXTLESS or (attributes & _USER_DEFINED and is_name))

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Token ids of a text. `add_special`: with the BOS token, if the model expects one.

        `parse_special`: names of special tokens in the text become those tokens.
        Raises PromptError for text that cannot be encoded, such as lone surrogates, and for
        characters that the vocabulary has no tokens for.
        """
        try:
            data = text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise PromptError(
                f"the text is not valid Unicode at character {error.start}: {error.reason}"
            ) from error
        if len(data) > _MAX_TEXT_BYTES:
            raise PromptError(f"the text ({len(data):,} bytes) is too long to tokenize")
        self._check_is_written(text, parse_special=parse_special)
        parts = self._parts(text) if parse_special and len(data) > _MIN_PARTED_BYTES else [text]
        tokens: list[int] = []
        for i, part in enumerate(parts):
            adds = add_special and not i
            tokens += self._while_open(self._tokenized, part.encode(), adds, parse_special)
        return tokens

    def _tokenized(self, data: bytes, add_special: bool, parse_special: bool) -> list[int]:
        n_max = len(data) + 8
        while True:
            buffer = (llama_cpp.llama_token * n_max)()
            n = llama_cpp.llama_tokenize(
                self.pointer, data, len(data), buffer, n_max, add_special, parse_special
            )
            if n >= 0:
                return list(buffer[:n])
            if -n <= n_max:
                raise PromptError(f"the text ({len(data):,} bytes) is too long to tokenize")
            n_max = -n

    def _while_open(self, call: Callable[..., Result], *arguments: object) -> Result:
        """Call a function of ours, for whose end `close` waits; several threads may at a time.

        No context manager: one that Ctrl-C interrupts stays entered as long as its frame is kept.
        """
        user = object()
        try:
            self._users.add(user)
            return call(*arguments)
        finally:
            self._users.discard(user)

    def _parts(self, text: str) -> list[str]:
        """A text in parts, each but the last of which ends with the name of a special token.

        Their tokens are those of the text. llama.cpp's time grows with the square of the number of
        such names in a text: 100,000 of them, in 1 MB, take minutes.
        """
        if llama_cpp.llama_vocab_get_add_eos(self.pointer):
            return [text]
        starts = {name[:_N_START] for name, _ in self._special_names}
        starts = {start for start in starts if start in text}
        names = [name for name, _ in self._special_names if name[:_N_START] in starts]
        names = [re.escape(name) for name in names if name in text]
        if not names:
            return [text]
        ends = [match.end() for match in re.finditer("|".join(names), text)]
        # Some special tokens take the white space behind them.
        cuts = [end for end in ends[_N_NAMES::_N_NAMES] if not text[end : end + 1].isspace()]
        return [text[start:end] for start, end in pairwise([0, *cuts, len(text)]) if start < end]

    def _check_is_written(self, text: str, *, parse_special: bool) -> None:
        """Raise PromptError for a character without tokens, at which llama.cpp ends the process."""
        if self._spelling is None or not text:
            return
        parts = [text]
        for name, is_parsed in self._special_names:
            if is_parsed or parse_special:
                parts = [rest for part in parts for rest in part.split(name)]
        names, has_byte = self._spelling
        for char in dict.fromkeys((" " if self._adds_space else "") + "".join(parts)):
            data = char.replace(" ", _SPACE).encode()
            if data not in names and not has_byte >= set(data):
                where = f" (character {text.index(char)} of the text)" if char in text else ""
                raise PromptError(
                    f"the model's vocabulary cannot write {char!r}, U+{ord(char):04X}{where}: it "
                    "has no such token, and no tokens for its bytes. Leave the character out, or "
                    "use another model"
                )

    @cached_property
    def _spelling(self) -> tuple[Set[bytes], Set[int]] | None:
        """The names of all tokens, and the bytes that have tokens; None if each byte has one."""
        if self.type != "SPM":
            return None  # other tokenizers leave out what they cannot write, or have a token for it
        name = llama_cpp.llama_vocab_get_text
        names = {name(self.pointer, token) for token in range(self.n_tokens)}
        bytes_ = {byte for byte in range(256) if b"<0x%02X>" % byte in names}
        bytes_ |= {byte for byte in range(1, 256) if bytes([byte]) in names}
        return None if len(bytes_) == 256 else (names, bytes_)

    @cached_property
    def _special_names(self) -> list[tuple[str, bool]]:
        """The names that llama.cpp seeks first, in its order; whether also without parsing."""
        found = {}
        for token in range(self.n_tokens):
            attributes = llama_cpp.llama_vocab_get_attr(self.pointer, token)
            if attributes & (_USER_DEFINED | _TEXTLESS) and (name := self.name(token)):
                found[name] = bool(attributes & _USER_DEFINED)
        return sorted(found.items(), key=lambda each: len(each[0].encode()), reverse=True)

    def tokenize_after(self, before: bytes, text: bytes) -> list[int]:
        """The usual tokens of a text after `before`; empty if unknown. Bad UTF-8 is U+FFFD."""
        tail = text.decode("utf-8", "replace")
        try:
            head = before.decode()
        except UnicodeDecodeError:
            head = ""
        for known in (head, ""):
            tokens = self.tokenize_inside(known + tail)
            n_bytes = len(known.encode())
            while tokens and n_bytes > 0:
                n_bytes -= len(self.shown(tokens.pop(0)))
            if n_bytes == 0:
                return tokens
        return []

    def tokenize_inside(self, text: str) -> list[int]:
        """The tokens of a text in the middle of another one; empty where that is impossible."""
        if self.type in ("BPE", "RWKV"):
            return self.plain_tokens(text)
        n = len(mark := self._mark)
        tokens = self.plain_tokens(_MARK + text) if mark else []
        return tokens[n:] if tokens[:n] == mark else []

    def plain_tokens(self, text: str) -> list[int]:
        """The tokens of a text, none of them special; empty if the vocabulary cannot write it."""
        try:
            return self.tokenize(text, add_special=False, parse_special=False)
        except PromptError:
            return []

    @cached_property
    def byte_tokens(self) -> dict[int, int]:
        """The token of each single byte that has one."""
        found: dict[int, int] = {}
        for token in range(self.n_tokens):
            name = self.name(token)
            if len(name) == 1 or _BYTE_NAME.fullmatch(name):
                piece = self.piece(token)
                if len(piece) == 1:
                    found.setdefault(piece[0], token)
        return found

    @cached_property
    def _mark(self) -> list[int]:
        """The tokens of a character that never merges with later ones; empty if unknown."""
        return self.plain_tokens(_MARK) if self.type == "SPM" else []

    def shown(self, token: int) -> bytes:
        """The bytes of a token; for control tokens, their names."""
        return self._while_open(self._to_piece, token, True)

    def piece(self, token: int) -> bytes:
        """The bytes of a token; empty for control tokens."""
        known = self._pieces.get(token)
        if known is None:
            known = self._pieces[token] = self._while_open(self._to_piece, token, False)
        return known

    def name(self, token: int) -> str:
        """The text of a token as stored in the model file; empty if there is no such token."""
        if not 0 <= token < self.n_tokens:
            return ""
        text: bytes | None = llama_cpp.llama_vocab_get_text(self.pointer, token)
        return (text or b"").decode("utf-8", "replace")

    def special_text(self, token: int) -> str:
        """The text of a special token, for a chat template; empty for an id below 0."""
        return self.shown(token).decode("utf-8", "replace") if token >= 0 else ""

    @property
    def special_texts(self) -> dict[str, str]:
        """The texts of further special tokens, by their names in chat templates."""
        at = self.pointer
        tokens = {
            "pad_token": llama_cpp.llama_vocab_pad(at),
            "sep_token": llama_cpp.llama_vocab_sep(at),
            "mask_token": llama_cpp.llama_vocab_mask(at),
        }
        return {name: self.special_text(token) for name, token in tokens.items() if token >= 0}

    def sequence_breakers(self, texts: tuple[str, ...]) -> _native.Breakers:
        """The sequence breakers of DRY as tokens; see `breakers_of`."""
        if (known := self._breakers.get(texts)) is not None:
            return known
        if len(self._breakers) >= _MOST_BREAKERS:  # of a server, whose clients choose them
            self._breakers.clear()
        found = breakers_of(texts, self._words, self.plain_tokens)
        made = self._breakers[texts] = _native.Breakers(found)
        return made

    @cached_property
    def _words(self) -> Words:
        texts = self._while_open(lambda: [self._to_piece(i, True) for i in range(self.n_tokens)])
        return Words(texts)

    def _to_piece(self, token: int, special: bool) -> bytes:
        if not 0 <= token < self.n_tokens:
            return b""  # llama.cpp would end the process
        size = 64
        while True:
            buffer = ctypes.create_string_buffer(size)
            n = llama_cpp.llama_token_to_piece(self.pointer, token, buffer, size, 0, special)
            if n >= 0:
                return buffer.raw[:n]
            size = -n


def meta_text(model: int, key: str) -> str:
    """A value of a model file's header as text; empty if there is none."""
    text = ctypes.create_string_buffer(64)
    llama_cpp.llama_model_meta_val_str(model, key.encode(), text, len(text))
    return text.value.decode("utf-8", "replace")


def check_tokens(tokens: Sequence[int], vocab: Vocab) -> None:
    """Raise PromptError for a token id outside the vocabulary."""
    if 0 <= min(tokens, default=0) <= max(tokens, default=0) < vocab.n_tokens:
        return
    for i, token in enumerate(tokens):
        if not 0 <= token < vocab.n_tokens:
            raise PromptError(
                f"token {token} at position {i} of the prompt is outside the vocabulary "
                f"of {vocab.n_tokens:,} tokens"
            )
