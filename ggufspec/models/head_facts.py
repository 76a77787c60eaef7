"""Facts about a draft head, and the errors for a head that does not fit its target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal

from ggufspec.common.toml import read_toml
from ggufspec.errors import ModelError, VocabError
from ggufspec.models.header import Header
from ggufspec.models.vocabulary_overlap import has_same_tokens

MTP: Final = "mtp"  # as a draft: the head in the target's file; a file of that name is ./mtp
EAGLE3, ASSISTANT, DFLASH = "eagle3", "gemma4-assistant", "dflash"  # architectures
KINDS = {
    EAGLE3: "an EAGLE-3 head",
    ASSISTANT: "a Gemma 4 assistant",
    DFLASH: "a DFlash head",
}
# llama.cpp computes logits of each token of an EAGLE-3 head's batch, and allocates logits for each
# encoded row of hidden states.
EAGLE3_BATCH, EAGLE3_ROWS = 128, 32
DFLASH_BATCH = 64  # llama.cpp computes logits of each token of this batch, too


@dataclass(frozen=True)
class Block:
    """The input with which a DFlash head drafts: the text's last token, then `mask` tokens.

    n_tokens: length of a block in training. first: index of the first place that predicts, namely
    the next token of the text. n_candidates: number of tokens that DFlash2 scores per place, given
    the token before; 0: logits of all tokens. is_causal: a token of a block sees no later ones.
    """

    n_tokens: int
    mask: int
    first: int = 1
    n_candidates: int = 0
    is_causal: bool = False


@dataclass(frozen=True)
class HeadFacts:
    """A head that drafts from the target's hidden states.

    n_layers: number of its layers that draft one token each. target_layers: the target's layers
    whose inputs it reads (EAGLE-3, DFlash). shares_cache: it reads the target's KV cache instead
    of its own. borrows_output: it uses the target's output matrix. block: of DFlash heads only.
    """

    kind: Literal["mtp", "eagle3", "dflash"]
    n_layers: int = 1
    target_layers: tuple[int, ...] = ()
    shares_cache: bool = False
    borrows_output: bool = False
    block: Block | None = None

    def n_rows(self, n_draft_max: int) -> int:
        """Tokens, each with a row of logits, in a pass of the head that drafts `n_draft_max`."""
        return min(self.block.n_tokens, self.block.first + n_draft_max) if self.block else 1


@cache
def architectures() -> Mapping[str, Any]:
    """The table of architectures that llama.cpp can run with each kind of head."""
    return read_toml(Path(__file__).with_name("architectures.toml"))["heads"]  # type: ignore[no-any-return]


def is_dspark(header: Header) -> bool:
    """Whether a DFlash head has a Markov head, too."""
    return "markov_w1.weight" in header.tensor_names


def kind_of(header: Header) -> str:
    """The kind of a head in words, with an article."""
    if header.architecture == DFLASH:
        if is_dspark(header):
            return "a DSpark head"
        if "selector_hidden.weight" in header.tensor_names:
            return "a DFlash2 head"
    return KINDS.get(header.architecture, "an MTP head")


def check_tokens(target: Header, draft: Header) -> None:
    """Raise VocabError if the target may write a token that the head does not have."""
    if not has_same_tokens(target, draft) or len(draft.tokens) < len(target.tokens):
        raise VocabError(
            f"{draft.paths[0]} is {kind_of(draft)} for another vocabulary ({len(draft.tokens):,} "
            f"tokens) than the target's ({len(target.tokens):,}). Use the head that was made for "
            "this target"
        )


def misfit(draft: Header, what: str) -> ModelError:
    return ModelError(
        f"{draft.paths[0]} is {kind_of(draft)} {what}. Use the head that was made for this target"
    )


def damaged(draft: Header, what: str) -> ModelError:
    return ModelError(
        f"{draft.paths[0]} cannot be used as {kind_of(draft)}: {what}. Convert it again"
    )
