"""A loaded target with what drafts for it: contexts, slots, and costs of passes."""

from __future__ import annotations

import os
import re
from array import array
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from weakref import finalize

from ggufspec.common import defaults
from ggufspec.common.facts import counted
from ggufspec.common.progress import NamedProgress
from ggufspec.decoding import verify as rules
from ggufspec.decoding.stats import Threads
from ggufspec.drafting import constants
from ggufspec.drafting.pair_profile import StoredProfile
from ggufspec.drafting.strategies.ngram import TextStore
from ggufspec.engine.options import CheckedOptions
from ggufspec.engine.prompt_cache import PromptCache
from ggufspec.engine.slots import Slots
from ggufspec.errors import ClosedError, OptionError, PromptError
from ggufspec.llama.context import Context
from ggufspec.llama.head import Head
from ggufspec.llama.image_cells import images_in
from ggufspec.llama.projector import Encoded
from ggufspec.llama.saved_text import text_key
from ggufspec.llama.vocab import Vocab
from ggufspec.llama.vocab_map import VocabMap
from ggufspec.measure import table
from ggufspec.placement.speeds import Shares

_BLOCK = re.compile(r"(?s:.{1,65536})[^\n]*\n?")  # whole lines, so that Ctrl-C is heard between

_MOST_THREADS = 512  # of a context


class Pair:
    """State that the texts of an engine share. Only the engine's thread decodes and changes it.

    The models are freed by `close`, and once nothing refers to the pair.
    """

    def __init__(
        self,
        target: Context,
        draft: Context | Head | None = None,
        *,
        n_draft_max: int,
        vocab_map: VocabMap | None = None,
        stored_profile: StoredProfile | None = None,
        stored_profile_of_draft: StoredProfile | None = None,
        assumed: Sequence[Shares] = (),
        texts: TextStore | None = None,
        n_cache_bytes: int = 0,
        is_exact: bool = False,
        resources: ExitStack,
    ) -> None:
        """`resources` are closed with the pair.

        `texts`: that n-grams draft from. `n_cache_bytes`: for texts that have left their slots.
        `is_exact`: see `check_exact`.
        `stored_profile_of_draft`: of the draft as a target of n-grams (staged drafts). `assumed`:
        seconds of a token with each model: see speeds.PairCosts.
        """
        self.target = target
        self.head = draft if isinstance(draft, Head) else None
        self.draft = draft.context if isinstance(draft, Head) else draft
        self.vocab_map = vocab_map  # None: target and draft have the same vocabulary
        # Target and draft compute on different devices, so both at the same time.
        self.are_apart = not (self.draft and target.model.places & self.draft.model.places)
        self.n_draft_max = n_draft_max
        self.is_exact = is_exact
        self.n_slots = target.n_sequences  # texts that can be written at the same time
        self._pid = os.getpid()
        self.contexts = [context for context in (target, self.draft) if context]
        self.slots = Slots(target, self.draft, self.head, vocab_map, PromptCache(n_cache_bytes))
        self.stored_profile = stored_profile or StoredProfile()
        self.profile = self.stored_profile.profile(n_draft_max + 1, self.n_slots)
        # The draft as a target of n-grams; each of its passes serves one text.
        self.n_rows_draft = self.draft.n_rows if self.draft else 1
        self._stored_profile_of_draft = stored_profile_of_draft or StoredProfile()
        self.profile_of_draft = self._stored_profile_of_draft.profile(self.n_rows_draft)
        self.assumed = assumed
        self.texts = texts or TextStore()
        self.repeats_greedy_texts = False  # with a seed, at temperature 0 too: see calibration
        self._free = finalize(self, _free, self._pid, resources)  # neither refers to the pair
        self._free.atexit = False
        self._closed = False

    @property
    def is_forked(self) -> bool:
        """Whether this process is a fork of the one that loaded the models."""
        return self._pid != os.getpid()

    def check_open(self) -> None:
        """Raise ClosedError, also in a fork, which has no threads of llama.cpp and the engine."""
        if self.is_forked:
            raise ClosedError(
                "this process was forked after the engine was loaded, and cannot use it: load the "
                "engine here, or start processes by multiprocessing's spawn method"
            )
        if self._closed:
            raise ClosedError("this engine is closed; load it again")

    @property
    def vocab(self) -> Vocab:
        """The target's vocabulary. Raises ClosedError."""
        self.check_open()
        return self.target.model.vocab

    def encoded_images(
        self,
        tokens: Sequence[int],
        progress: NamedProgress | None = None,
        *,
        for_draft: bool = True,
    ) -> Sequence[Encoded]:
        """The images of a prompt, encoded in this thread: see Projector.encode."""
        if (projector := self.target.projector) is None:
            return ()
        n_batch = self.target.n_batch
        for cells in images_in(tokens):
            is_one = self.head is not None or not projector.is_causal
            if is_one and len(cells) > n_batch:
                raise PromptError(
                    f"an image takes {len(cells):,} tokens, but a batch has {n_batch:,}, and this "
                    "model reads it in one; load with a larger one (n_batch, -b)"
                )
        return projector.encode(tokens, progress, for_draft=for_draft)

    def keep_threads(self, keeps: bool) -> None:
        """Whether the next passes use all threads, since their number may change what is written.

        Texts with a seed repeat only then; others use fewer threads where that is faster.
        """
        for context in self.contexts:
            context.keeps_threads = keeps

    def use_costs(self, depth: int) -> None:
        """Let the next measured costs be those of passes at about this depth, in tokens, with as
        many threads as the last passes have used.
        """
        circumstances = (depth >> constants.SHALLOW_BITS).bit_length()
        for context in self.contexts:
            n_fewer = context.n_threads - context.n_threads_now
            circumstances = _MOST_THREADS * circumstances + n_fewer
        self.profile.costs.use(circumstances, self.target.is_disturbed)

    @property
    def text_keys(self) -> Sequence[dict[str, object] | None]:
        """Per session of a slot: the facts that a saved text must match to be restored."""
        return [text_key(each) if each else None for each in (self.target, self.draft)]

    @property
    def chains_only(self) -> str | None:
        """Why drafts for this target cannot be trees; None: they can."""
        if self.target.n_leaves > 1:
            return None
        model = self.target.model
        what = f"drafts for {model.path.name} are chains"
        if self.target.reads_trees:
            slots, tokens = counted(self.n_slots, "slot"), counted(self.n_draft_max, "token")
            return f"{what}: drafts of {tokens} and {slots} leave no room for branches"
        why = "layers with a sliding window" if model.has_windows else "recurrent layers"
        return f"{what}: it has {why}, which read no trees"

    def n_leaves(self, options: CheckedOptions) -> int:
        """The most leaves of a draft; 1: chains only. Raises OptionError."""
        why = self.chains_only
        if not rules.judges_trees(options.verify):
            why = f"the verification rule {options.verify!r} judges chains"
        if why and options.tree == "on":
            raise OptionError(f"tree is 'on', but {why}; use 'auto' or 'off' (--tree)")
        return 1 if why or options.tree == "off" else self.target.n_leaves

    def n_draft(self, options: CheckedOptions) -> int:
        """The most tokens that a round may draft. Raises OptionError."""
        if isinstance(options.n_draft, str):
            return self.n_draft_max
        if options.n_draft > self.n_draft_max:
            raise OptionError(
                f"n_draft is {options.n_draft}, but this engine was loaded for at most "
                f"{self.n_draft_max}; load it with a larger n_draft_max "
                f"(at most {defaults.N_DRAFT_LIMIT})"
            )
        return options.n_draft

    def tokens_inside(self, text: str) -> list[int]:
        """The token ids of a text in the middle of another text, as far as the tokenizer allows."""
        # Some tokenizers add a space before it, which makes only the first tokens differ.
        return self.vocab.tokenize_inside(text) or self.vocab.tokenize(
            text, add_special=False, parse_special=False
        )

    def prediction(self, options: CheckedOptions) -> Sequence[int]:
        """The tokens of the predicted text; empty without one. Raises OptionError."""
        found = options.prediction or ()
        if isinstance(found, str):
            found = self.tokens_inside(found)
        else:
            outside = [token for token in found if not 0 <= token < self.vocab.n_tokens]
            if outside:
                raise OptionError(
                    f"token {outside[0]} of the prediction is outside the vocabulary of "
                    f"{self.vocab.n_tokens:,} tokens"
                )
        if len(found) >= self.target.n_ctx:
            raise OptionError(
                f"the prediction has {len(found):,} tokens, the context {self.target.n_ctx:,}; "
                "shorten it, or load with a larger context (n_ctx, -c)"
            )
        return found

    @property
    def plain_seconds(self) -> float | None:
        """Seconds of a token without drafting, as measured so far; None: not measured."""
        costs = self.profile.costs
        return costs.plain if costs.n_measured(1) else None

    @property
    def decode_seconds(self) -> float:
        """Seconds spent in llama_decode so far, by target and drafts."""
        return sum(context.decode_seconds for context in self.contexts)

    @property
    def threads(self) -> Threads:
        """Seconds of `decode_seconds` by whose they are, and by the number of threads."""
        return {
            name: dict(context.seconds_by_threads)
            for name, context in zip(("target", "draft"), self.contexts, strict=False)
        }

    def forget(self) -> None:
        """Empty the KV caches, and forget earlier texts."""
        self.slots.forget()
        self.texts.forget()

    def _keep_passes(self) -> None:
        """Add the costs of short texts with all threads to the tables of the models."""
        costs = self.profile.costs
        costs.use(0)
        of_draft = {1: costs.step} if costs.knows_draft and self.head is None else {}
        for context, seconds, assumed in zip(
            self.contexts, (costs.sizes, of_draft), self.assumed, strict=False
        ):
            rows = table.rows_in(context, seconds, table.LEARNED_DEPTH)
            table.add(table.key_in(context), rows, assumed._asdict(), replaces=True)

    def close(self) -> None:
        try:
            if not self._closed:
                if self.profile.is_new and self.stored_profile.facts is not None:
                    self._keep_passes()
                self.stored_profile.remember(self.profile)
                self._stored_profile_of_draft.remember(self.profile_of_draft)
        finally:
            self._closed = True
            self._free()


def _free(pid: int, resources: ExitStack) -> None:
    if pid == os.getpid():  # not in a fork, to which the models do not belong
        resources.close()


def add_texts(
    pair: Pair, texts: Sequence[str], progress: Callable[[str, float], None] | None
) -> None:
    """Let a pair draft from these texts; `progress` as in `load`."""
    n_done, n_all = 0, sum(map(len, texts))
    for text in texts:
        tokens = array("i")
        for block in _BLOCK.findall(text):
            tokens.extend(pair.tokens_inside(block))
            n_done += len(block)
            if progress is not None:
                progress("draft texts", n_done / n_all)
        pair.texts.add_named(tokens)
