"""Measures a target: its texts, predictions and costs, and how often drafts would be accepted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ggufspec.bench.experiment import REFERENCE
from ggufspec.common.progress import NamedProgress
from ggufspec.decoding.types import Logits
from ggufspec.engine.engine import Engine
from ggufspec.errors import OptionError
from ggufspec.llama.context import Context
from ggufspec.llama.layer_skip import LayerSkip
from ggufspec.llama.model import Model
from ggufspec.llama.session import LlamaSession
from ggufspec.llama.timing import measure_costs

TEMPERATURE = 0.7  # of the distributions that are compared
N_DRAFT = 7  # longest draft whose speed-up is predicted
N_CTX = 384  # per text: for a prompt in a chat template, and N_COUNTED tokens
# Arguments to load a target with: half of the texts are generated together. A mapped file would
# stay in memory in addition to the weights that llama.cpp rearranges.
LOAD = {"n_ctx": N_CTX, "n_slots": 4, "n_draft_max": N_DRAFT, "mmap": False}
N_COUNTED = 64  # tokens per text at which predictions are compared
_N_GIVEN = 32  # tokens before them, in a text that the user gives
_N_LEAST = 8  # shorter texts are left out
_N_TEXTS = 8
_N_PROBS = 256  # the overlap is summed over this many of the target's most probable tokens
_SIZES = (1, 2, 3, 4, 6, 8)  # tokens of the passes that are measured

_ASKED = "Continue this text:\n\n"
Counts = tuple[Counter[int], Counter[int]]  # counts of tokens in each half of the texts


class Excerpt(NamedTuple):
    """A text; predictions are compared for its tokens from `n_given` on."""

    kind: str
    half: int  # 0 or 1: trimming chooses the kept tokens by one half and measures on the other
    tokens: Sequence[int]
    n_given: int


@dataclass(frozen=True)
class ReferenceText:
    """The target's predictions in an excerpt."""

    excerpt: Excerpt
    best: NDArray[np.int64]  # (n,): the likeliest tokens
    ids: NDArray[np.int64]  # (n, k): the k likeliest
    probs: NDArray[np.float32]  # (n, k), at TEMPERATURE

    @staticmethod
    def of(excerpt: Excerpt, rows: Logits) -> ReferenceText:
        """The predictions in the target's logits (n, n_vocab)."""
        ids = np.argpartition(rows, -min(_N_PROBS, rows.shape[1]))[:, -_N_PROBS:]
        weights = weights_of(rows)
        probs = np.take_along_axis(weights, ids, 1) / weights.sum(axis=1, keepdims=True)
        return ReferenceText(excerpt, rows.argmax(axis=1), ids, probs)


@dataclass(frozen=True)
class Reference:
    """Texts in two halves, the counts of tokens in each half, and the target's costs."""

    texts: tuple[ReferenceText, ...]
    counts: Counts
    passes: tuple[float, ...]  # seconds of target passes over 1, 2 ... N_DRAFT + 1 tokens


def reference_of(
    engine: Engine, given: Sequence[str] = (), progress: NamedProgress | None = None
) -> Reference:
    """A target's predictions in the `given` texts, or else in texts that it generates.

    `engine`: a target without draft, loaded with LOAD.
    Raises OptionError for texts that are too short, DecodeError, ClosedError.
    """
    tell: NamedProgress = progress or (lambda what, done, of: None)
    excerpts, counts = _taken(engine, given) if given else _written(engine, tell)
    texts = []
    with closing(text_context(engine.pair.target.model, engine.pair.target)) as context:
        for i, excerpt in enumerate(excerpts):
            texts.append(ReferenceText.of(excerpt, rows_of(context, excerpt)))
            tell("Computing the target's predictions", i + 1, len(excerpts))
    passes = measure_costs(
        engine.pair.target,
        _SIZES,
        progress and (lambda done, of: tell("Measuring the target", done, of)),
        n_most=N_DRAFT + 1,
    ).curve
    return Reference(tuple(texts), counts, tuple(passes))


def text_context(model: Model, like: Context, layer_skip: LayerSkip | None = None) -> Context:
    """A context for `rows_of`, with the options of `like` except for its sizes."""
    options = replace(like.options, n_ctx=N_CTX, n_rows=N_COUNTED, n_sequences=1)
    return Context(model, options, layer_skip, pools=like.pools)


def rows_of(context: Context, excerpt: Excerpt) -> Logits:
    """Logits before each token from `n_given` on, until the next decode. Raises DecodeError."""
    session = LlamaSession(context)
    session.forget()
    tokens, n_given = excerpt.tokens, excerpt.n_given
    return session.score(tokens[:n_given], tokens[n_given:-1])


def weights_of(logits: Logits) -> NDArray[np.float32]:
    """Probabilities at TEMPERATURE, before normalization."""
    largest = logits.max(axis=1, keepdims=True)
    found: NDArray[np.float32] = np.exp((logits - largest) / np.float32(TEMPERATURE))
    return found


class Chances(NamedTuple):
    """For each position (n,) of a text, the probability that a drafted token is accepted."""

    greedy: NDArray[np.float64]  # at temperature 0: 1 if both models have the same likeliest token
    sampled: NDArray[np.float64]  # at TEMPERATURE: sum over all tokens of the smaller probability


def mean_length(chances: NDArray[np.float64], n_draft: int) -> float:
    """Average number of tokens per round over a text, with drafts of `n_draft` tokens.

    `chances` (n,): the probability that each token is accepted if the tokens before it are.
    """
    n = len(chances)
    rounds = np.zeros(n + n_draft + 2)  # expected number of rounds from each token on
    for at in range(n - 1, -1, -1):
        reached = np.concatenate([[1.0], np.cumprod(chances[at : at + n_draft])])
        ended = reached - np.append(reached[1:], 0.0)  # after 0, 1 ... accepted tokens
        rounds[at] = 1 + ended @ rounds[at + 1 : at + 1 + len(ended)]
    return float(n / rounds[0]) if n else 1.0


def predicted_speedup(chances: NDArray[np.float64], passes: Sequence[float], step: float) -> float:
    """Speed-up over plain decoding with the best fixed draft length, at least 1.

    `passes`: seconds of target passes over 1, 2 ... tokens. `step`: seconds of a draft step.
    """
    return max(
        mean_length(chances, n) * passes[0] / (passes[n] + n * step) for n in range(1, len(passes))
    )


def chances_of(
    rows: Logits, text: ReferenceText, order: NDArray[np.int64], sizes: Sequence[int]
) -> list[Chances]:
    """The Chances of a text for each vocabulary size in `sizes`, by a draft's logits (n, n_vocab).

    `order`: all tokens; a vocabulary of size n keeps the first n of them.
    """
    kept = order[: max(sizes)]
    place = np.full(len(order), len(kept))
    place[kept] = np.arange(len(kept))
    logits = rows.take(kept, axis=1)
    weights = weights_of(logits)
    places = place[np.minimum(text.ids, len(order) - 1)]
    of_text = np.take_along_axis(weights, np.minimum(places, len(kept) - 1), 1)
    found = []
    for n in sizes:
        best = kept[logits[:, :n].argmax(axis=1)]
        total = np.maximum(weights[:, :n].sum(axis=1, keepdims=True), np.float32(1e-30))
        overlap = np.minimum(of_text * (places < n) / total, text.probs).sum(axis=1)
        found.append(Chances((best == text.best).astype(float), overlap.astype(float)))
    return found


def by_kind(texts: Sequence[ReferenceText], chances: Iterable[Chances]) -> dict[str, Chances]:
    """The Chances of all texts of each kind, concatenated."""
    found: dict[str, list[Chances]] = {}
    for text, each in zip(texts, chances, strict=True):
        found.setdefault(text.excerpt.kind, []).append(each)
    return {
        kind: Chances(*(np.concatenate(part) for part in zip(*each, strict=True)))
        for kind, each in found.items()
    }


def _written(engine: Engine, tell: NamedProgress) -> tuple[list[Excerpt], Counts]:
    """Greedy texts of the target that continue the built-in prompts."""
    excerpts, counts = [], (Counter[int](), Counter[int]())
    for half, prompts in enumerate(REFERENCE):
        asked = [_asked(engine, prompt) for _, prompt in prompts]
        written = engine.generate_batch(asked, max_tokens=N_COUNTED, temperature=0, drafter="none")
        for (kind, _), before, completion in zip(prompts, asked, written, strict=True):
            tokens = [*before, *completion.tokens]
            counts[half].update(tokens)
            if len(completion.tokens) >= _N_LEAST:
                excerpts.append(Excerpt(kind, half, tokens, len(before)))
        tell("Writing text with the target", half + 1, len(REFERENCE))
    if {excerpt.half for excerpt in excerpts} != {0, 1}:
        raise OptionError(
            "the target generates almost no text by itself; give text to measure with (--text FILE)"
        )
    return excerpts, counts


def _asked(engine: Engine, prompt: str) -> list[int]:
    if engine.chat_template is None:
        return engine.tokenize(prompt)
    # Only the end of the prompt: some templates begin with hundreds of tokens.
    return engine.render([{"role": "user", "content": _ASKED + prompt}])[N_COUNTED - N_CTX :]


def _taken(engine: Engine, given: Sequence[str]) -> tuple[list[Excerpt], Counts]:
    """Excerpts spread evenly over the given texts; the first half of them has `half` 0."""
    tokens: list[int] = []
    for text in given:
        tokens += engine.vocab.tokenize(text, add_special=True, parse_special=False)
    each, middle = _N_GIVEN + N_COUNTED, len(tokens) // 2
    n = min(_N_TEXTS, len(tokens) // each) // 2 * 2
    if n == 0:
        raise OptionError(
            f"the text has {len(tokens):,} tokens, too few to choose and to measure with; give at "
            f"least {2 * each} tokens (--text); some thousand are better"
        )
    starts = [i * (len(tokens) - each) // (n - 1) for i in range(n)]
    excerpts = [
        Excerpt("text", int(i >= n // 2), tokens[at : at + each], _N_GIVEN)
        for i, at in enumerate(starts)
    ]
    return excerpts, (Counter(tokens[:middle]), Counter(tokens[middle:]))
