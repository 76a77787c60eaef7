"""Vocabularies of tiny models: of SentencePiece, byte-level BPE and WordPiece."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import gguf

WORDS = (" the", " of", " and", " hello", " world", " model", " stop", " end", " say", "ing")
PRINTABLE = "".join(map(chr, range(0x21, 0x7F)))


@dataclass(frozen=True)
class Vocab:
    """The tokenizer section of a GGUF file. A field that is None is left out of the file.

    llama.cpp takes a token for end-of-generation if it is `eos` or `eot`, and also if its text is
    one of those that it knows (`</s>`, `<|im_end|>`, `<|eot_id|>`, `<|endoftext|>` ...).
    """

    model: str  # "llama" (SPM), "gpt2" (byte-level BPE), "bert" (WordPiece)
    tokens: tuple[str, ...]  # as stored: with `▁`, `Ġ`, `<0xC3>`
    types: tuple[int, ...]  # gguf.TokenType
    scores: tuple[float, ...] | None = None
    merges: tuple[str, ...] | None = None
    pre: str | None = None
    bos: int | None = None
    eos: int | None = None
    eot: int | None = None
    unk: int | None = None
    sep: int | None = None
    pad: int | None = None
    mask: int | None = None
    add_bos: bool | None = None
    add_eos: bool | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def id_of(self, token: str) -> int:
        """The id of a token by its stored text, such as `<|im_end|>` or `▁hello`."""
        return self.tokens.index(token)

    def bytes_of(self, token_id: int) -> bytes:
        """What a token adds to the text; nothing for control tokens and padding."""
        text, kind = self.tokens[token_id], self.types[token_id]
        if kind == gguf.TokenType.BYTE:
            return bytes([int(text[3:5], 16)])
        if kind != gguf.TokenType.NORMAL:
            return text.encode() if kind == gguf.TokenType.USER_DEFINED else b""
        if self.model == "gpt2":
            return bytes(_BPE_BYTES[char] for char in text)
        return text.replace("▁", " ").encode()

    def text_of(self, token_ids: Iterable[int]) -> str:
        return b"".join(map(self.bytes_of, token_ids)).decode(errors="replace")

    def spell(self, text: str) -> list[int]:
        """Ids that write `text`, longest token first: for scripts, not what the tokenizer does.

        Whatever is not ASCII comes out as byte tokens, so characters are split over tokens.
        """
        by_bytes: dict[bytes, int] = {}
        for token_id in range(len(self)):
            by_bytes.setdefault(self.bytes_of(token_id), token_id)
        longest = max(map(len, by_bytes))
        rest, token_ids = text.encode(), []
        while rest:
            length = next(n for n in range(longest, 0, -1) if rest[:n] in by_bytes)
            token_ids.append(by_bytes[rest[:length]])
            rest = rest[length:]
        return token_ids

    def with_token(self, text: str, kind: gguf.TokenType = gguf.TokenType.NORMAL) -> Vocab:
        """One more token at the end, id `len(self)`; no merge leads to a normal one."""
        return dataclasses.replace(
            self,
            tokens=(*self.tokens, text),
            types=(*self.types, int(kind)),
            scores=None if self.scores is None else (*self.scores, -1000.0),
        )

    def with_text(self, token_id: int, text: str) -> Vocab:
        """The same vocabulary, but one token reads differently."""
        tokens = list(self.tokens)
        tokens[token_id] = text
        return dataclasses.replace(self, tokens=tuple(tokens))

    def with_size(self, n_vocab: int) -> Vocab:
        """Grown to `n_vocab` by unused padding tokens `[PAD400]`, or cut short at the end."""
        vocab = self
        for token_id in range(len(self), n_vocab):
            vocab = vocab.with_token(f"[PAD{token_id}]", gguf.TokenType.UNUSED)
        return dataclasses.replace(
            vocab,
            tokens=vocab.tokens[:n_vocab],
            types=vocab.types[:n_vocab],
            scores=None if vocab.scores is None else vocab.scores[:n_vocab],
        )


def spm_vocab(
    *,
    control: Sequence[str] = (),
    words: Sequence[str] = WORDS,
    bos: str = "<s>",
    eos: str = "</s>",
    eot: str | None = None,
    add_bos: bool | None = True,
) -> Vocab:
    """A SentencePiece vocabulary: `<unk> <s> </s>`, 256 bytes, printable ASCII, words, control.

    `bos`, `eos` and `eot` name any token by its stored text; `control` adds control tokens.
    """
    special = ["<unk>", "<s>", "</s>"]
    pieces = ["▁", *PRINTABLE, *(piece.replace(" ", "▁") for piece in _prefixes(words))]
    tokens = (*special, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, *control)
    kind = gguf.TokenType
    types = [kind.UNKNOWN, kind.CONTROL, kind.CONTROL, *[kind.BYTE] * 256]
    types += [kind.NORMAL] * len(pieces) + [kind.CONTROL] * len(control)
    ranks = [-float(rank) for rank in range(len(pieces))]
    return Vocab(
        model="llama",
        pre="default",
        tokens=tokens,
        types=tuple(map(int, types)),
        scores=(*[0.0] * 259, *ranks, *[0.0] * len(control)),
        bos=tokens.index(bos),
        eos=tokens.index(eos),
        eot=None if eot is None else tokens.index(eot),
        unk=0,
        add_bos=add_bos,
        add_eos=False,
    )


def bpe_vocab(
    *,
    control: Sequence[str] = ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    words: Sequence[str] = WORDS,
    bos: str | None = "<|endoftext|>",
    eos: str = "<|im_end|>",
    eot: str | None = None,
    add_bos: bool | None = False,
    pre: str = "gpt-2",
) -> Vocab:
    """A byte-level BPE vocabulary: 256 bytes, words with the merges that lead to them, control."""
    pieces = [_bpe_text(piece) for piece in _prefixes(words)]
    tokens = (*_BPE_BYTES, *pieces, *control)
    return Vocab(
        model="gpt2",
        pre=pre,
        tokens=tokens,
        types=(1,) * (256 + len(pieces)) + (int(gguf.TokenType.CONTROL),) * len(control),
        merges=tuple(f"{piece[:-1]} {piece[-1]}" for piece in pieces),
        bos=None if bos is None else tokens.index(bos),
        eos=tokens.index(eos),
        eot=None if eot is None else tokens.index(eot),
        add_bos=add_bos,
        add_eos=False,
    )


def wordpiece_vocab() -> Vocab:
    """The vocabulary of embedding models: `[CLS]`, `[SEP]`, letters that start or continue."""
    special = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    tokens = (*special, *(f"▁{char}" for char in PRINTABLE), *PRINTABLE)
    types = (int(gguf.TokenType.CONTROL),) * 5 + (1,) * (2 * len(PRINTABLE))
    return Vocab("bert", tokens, types, pad=0, unk=1, bos=2, sep=3)


def _prefixes(words: Sequence[str]) -> list[str]:
    """Every prefix of two or more characters, so that merging from the left reaches each word."""
    return list(dict.fromkeys(word[:end] for word in words for end in range(2, len(word) + 1)))


def _bpe_alphabet() -> dict[str, int]:
    """The byte that each of the 256 characters of byte-level BPE stands for.

    Printable Latin-1 stands for itself, the others for U+0100 and up, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    chars = {byte: chr(byte) for byte in printable}
    chars |= {byte: chr(0x100 + rank) for rank, byte in enumerate(others)}
    return {chars[byte]: byte for byte in range(256)}


_BPE_BYTES = _bpe_alphabet()


def _bpe_text(text: str) -> str:
    alphabet = list(_BPE_BYTES)
    return "".join(alphabet[byte] for byte in text.encode())


SPM = spm_vocab()
BPE = bpe_vocab()
SILENT = dataclasses.replace(BPE, types=(int(gguf.TokenType.UNUSED),) * len(BPE))  # no text
# Of models for code: with the tokens of prompts for the text between two others.
INFILL_NAMES = (
    "<|fim_prefix|>",
    "<|fim_suffix|>",
    "<|fim_middle|>",
    "<|repo_name|>",
    "<|file_sep|>",
)
CODE = BPE
for _name in INFILL_NAMES:
    CODE = CODE.with_token(_name, gguf.TokenType.CONTROL)
