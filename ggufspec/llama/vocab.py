"""Text <-> token ids, by the vocabulary of a loaded model. Knows no logits and no context."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cached_property

import llama_cpp

from ggufspec.errors import PromptError, VocabError

# Vocabularies of one family may be padded to different sizes.
MAX_PADDING = 128

_TYPES = {1: "SPM", 2: "BPE", 3: "WPM", 4: "UGM", 5: "RWKV", 6: "PLAMO2"}


class Vocab:
    """The vocabulary of a model; valid as long as the model is."""

    def __init__(self, model: int) -> None:
        self._model = model
        self._vocab = llama_cpp.llama_model_get_vocab(model)
        self.n_tokens: int = llama_cpp.llama_vocab_n_tokens(self._vocab)
        self.type = _TYPES.get(llama_cpp.llama_vocab_type(self._vocab), "none")
        self.bos: int = llama_cpp.llama_vocab_bos(self._vocab)
        self.eos: int = llama_cpp.llama_vocab_eos(self._vocab)
        self._pieces: dict[int, bytes] = {}

    @cached_property
    def stop_tokens(self) -> frozenset[int]:
        """The tokens that end a generation."""
        is_eog = llama_cpp.llama_vocab_is_eog
        return frozenset(token for token in range(self.n_tokens) if is_eog(self._vocab, token))

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Token ids of a text. `add_special`: with the BOS that the model wants in front.

        `parse_special`: names of special tokens in the text become those tokens.
        Raises PromptError for text that cannot be encoded, such as lone surrogates.
        """
        try:
            data = text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise PromptError(
                f"the text is not valid Unicode at character {error.start}: {error.reason}"
            ) from error
        n_max = len(data) + 8
        while True:
            buffer = (llama_cpp.llama_token * n_max)()
            n = llama_cpp.llama_tokenize(
                self._vocab, data, len(data), buffer, n_max, add_special, parse_special
            )
            if n >= 0:
                return list(buffer[:n])
            if -n <= n_max:
                raise PromptError(f"the text ({len(data)} bytes) is too long to be tokenized")
            n_max = -n

    def piece(self, token: int) -> bytes:
        """The bytes that a token stands for; nothing for control tokens."""
        known = self._pieces.get(token)
        if known is None:
            known = self._pieces[token] = self._to_piece(token, special=False)
        return known

    def name(self, token: int) -> str:
        """The text of a token as the model file has it; empty where there is no such token."""
        if not 0 <= token < self.n_tokens:
            return ""
        text: bytes | None = llama_cpp.llama_vocab_get_text(self._vocab, token)
        return (text or b"").decode("utf-8", "replace")

    def special_text(self, token: int) -> str:
        """The text of a special token, for a chat template; empty where there is none."""
        return self._to_piece(token, special=True).decode("utf-8", "replace") if token >= 0 else ""

    def _to_piece(self, token: int, *, special: bool) -> bytes:
        size = 64
        while True:
            buffer = ctypes.create_string_buffer(size)
            n = llama_cpp.llama_token_to_piece(self._vocab, token, buffer, size, 0, special)
            if n >= 0:
                return buffer.raw[:n]
            size = -n


def check_same(target: Vocab, draft: Vocab) -> None:
    """Raise VocabError, naming the first difference, unless both mean the same by every token."""
    difference = _first_difference(target, draft)
    if difference:
        raise VocabError(
            f"target and draft do not share a vocabulary: {difference}. "
            "Use a draft from the target's own family, made with the same tokenizer"
        )


def _first_difference(target: Vocab, draft: Vocab) -> str:
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


def check_tokens(tokens: Sequence[int], vocab: Vocab) -> None:
    """Raise PromptError for a token id outside the vocabulary."""
    for i, token in enumerate(tokens):
        if not 0 <= token < vocab.n_tokens:
            raise PromptError(
                f"token {token} at position {i} of the prompt is outside the vocabulary "
                f"of {vocab.n_tokens:,} tokens"
            )
