"""Prompts for the text between two others, in the order that models for code were trained with."""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import TypedDict, Unpack

from ggufspec.errors import PromptError
from ggufspec.llama.vocab import InfillTokens, Vocab

N_TEXT = 512  # most tokens that are left for the text
N_AROUND = 2048  # most tokens before and after the gap, together; llama.cpp's n_batch
_STEP_SHARE = 8  # a cut moves by this share of them
_REPOSITORY, _FILE = "myproject\n", "filename\n"  # llama.cpp's names, to which caches refer
_BETWEEN_FILES = "\n\n--- snippet ---\n\n"  # for models without a token for it


class InfillOptions(TypedDict, total=False):
    """What a prompt for text between two others may have besides them.

    n_text: tokens of the context that are left for the text: at most N_TEXT, and a quarter of the
    context. suffix_first: the order suffix, prefix, where typing keeps the cells of the suffix.
    """

    files: Sequence[tuple[str, str]]  # names and texts, which come first
    begun: str  # what is already written of the text
    n_text: int | None
    suffix_first: bool


def infill_prompt(
    vocab: Vocab, prefix: str, suffix: str, *, n_ctx: int, **how: Unpack[InfillOptions]
) -> list[int]:
    """The tokens of: files, prefix, what is already written of the text, suffix.

    As in llama.cpp's server, 3/4 of N_AROUND tokens are for the prefix, whose end is kept, and 1/4
    for the suffix, whose beginning is kept; the files fill the rest, and the last ones are kept.
    Unlike there, what is cut changes in steps, so that the cells before it serve for several
    keystrokes. Raises PromptError for a model without such tokens.
    """
    files, begun = how.get("files", ()), how.get("begun", "")
    marks = vocab.infill_tokens
    if marks is None:
        raise PromptError(
            "this model has no tokens for the text between two others (fill-in-the-middle); send a "
            "prompt alone, or use a model for code that has them, such as Qwen2.5-Coder"
        )

    def tokens_of(text: str) -> list[int]:
        return vocab.tokenize(text, add_special=False, parse_special=False) if text else []

    n_text = min(n for n in (how.get("n_text"), N_TEXT, n_ctx // 4) if n is not None)
    n_room = n_ctx - n_text - _STEP_SHARE
    n_around = max(min(N_AROUND, 3 * (n_room // 4) if files else n_room), _STEP_SHARE)
    after, before = tokens_of(suffix), tokens_of(prefix)
    written = vocab.tokenize(begun, add_special=False, parse_special=True) if begun else []
    n_before, step = 3 * (n_around // 4), n_around // _STEP_SHARE
    excess = max(len(before) - n_before, 0)
    before = before[-(-excess // step) * step :]
    after = after[: max(n_around // 4 - 2 - len(written), 0)]
    others: list[int] = [marks.repository, *tokens_of(_REPOSITORY)] if marks.repository >= 0 else []
    for name, text in [*((f"{name}\n", text) for name, text in files), (_FILE, "")]:
        if marks.file >= 0:
            others += [marks.file, *tokens_of(name)]
        elif text:
            others += tokens_of(_BETWEEN_FILES)
        others += tokens_of(text)
    around = [marks.prefix, *before, *written], [marks.suffix, *after]
    n_taken = -(-sum(map(len, around)) // step) * step  # in steps, as typing changes it
    n_others = max(n_ctx - n_taken - 2 - n_text, 0)  # 2: BOS, and the last token
    others = others[max(len(others) - n_others, 0) :]
    first, second = around[::-1] if how.get("suffix_first") else around
    begins = [vocab.bos] if vocab.adds_bos else []
    return [*others, *begins, *first, *second, marks.middle]


def reading_order(tokens: Sequence[int], marks: InfillTokens | None) -> Sequence[int]:
    """A prompt with its prefix last, where the text continues it; empty if it already is.

    n-grams look for the end of a text: in a prompt for the text between two others, that is the
    end of the prefix, not of the suffix.
    """
    if marks is None or not len(tokens) or tokens[-1] != marks.middle:
        return ()
    last = len(tokens) - 1
    first = next((i for i in range(last, -1, -1) if tokens[i] == marks.prefix), None)
    between = next((i for i in range(last, -1, -1) if tokens[i] == marks.suffix), None)
    if first is None or between is None or between < first:
        return ()
    return [*tokens[:first], *tokens[between:], *tokens[first:between]]
