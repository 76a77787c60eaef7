"""Makes a draft cheaper: measures drafts with fewer tokens, layers and bits, and chooses one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import geometric_mean
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from ggufspec.bench.layer_search import search_layers
from ggufspec.bench.reference import (
    Chances,
    Reference,
    ReferenceText,
    by_kind,
    chances_of,
    predicted_speedup,
    rows_of,
    text_context,
)
from ggufspec.common.child import exit_on_sigterm
from ggufspec.common.files import temporary_folder
from ggufspec.common.progress import NamedProgress, Progress
from ggufspec.engine.engine import Engine
from ggufspec.errors import OptionError, VocabError
from ggufspec.llama.context import Context
from ggufspec.llama.layer_skip import LayerSkip
from ggufspec.llama.model import Model
from ggufspec.llama.quantize import quantization_number, requantize
from ggufspec.llama.timing import FilledContext, time_interleaved
from ggufspec.models.gguf_file import TYPES, write
from ggufspec.models.header import Header, read_header
from ggufspec.models.heads import check_model
from ggufspec.models.shape import shape_of
from ggufspec.models.trim import required_tokens, trimmed
from ggufspec.models.trim_facts import trim_of
from ggufspec.models.vocabulary_overlap import has_same_tokens

MIN_SECONDS = 0.4  # minimum duration of the measurement of a step
SEARCH_SECONDS = 45.0  # approximate duration of the search for layers
_CLEARLY_FASTER = 1.01  # least speed-up over the best cut so far, to be chosen instead
_DEPTH = 64  # tokens in the cache when a step is measured
_N_REPEATS = 8  # minimum repetitions of a step; the fastest counts
_N_SIZES = 4  # number of vocabulary sizes to try, powers of two
_LARGEST_SHARE = 0.7  # largest size to try, as a share of all tokens
_AUTO_TYPE = "q4_0"  # the fastest type on CPUs


@dataclass(frozen=True)
class DraftCut:
    """What a draft keeps. `n_tokens` None: all tokens. `type` None: types are not changed."""

    n_tokens: int | None
    layers: tuple[int, ...]
    type: str | None = None


@dataclass(frozen=True)
class CutResult:
    """A cut that was measured; mappings are by kind of text."""

    cut: DraftCut
    n_tokens: int  # vocabulary size of its file
    n_bytes: int  # weights that a step reads
    step: float  # seconds
    agreement: Mapping[str, float]  # mean of Chances.greedy
    overlap: Mapping[str, float]  # mean of Chances.sampled
    speedups: Mapping[str, tuple[float, float]]  # predicted, at temperatures 0 and TEMPERATURE

    @property
    def score(self) -> float:
        """The geometric mean of all speed-ups, which is maximized."""
        return _mean(self.speedups)


@dataclass(frozen=True)
class TrimResult:
    """All measured cuts; the first is the unchanged draft."""

    cuts: tuple[CutResult, ...]
    chosen: CutResult
    n_counted: int  # tokens that were compared

    @property
    def is_cut(self) -> bool:
        """Whether something is left out; if not, nothing is written."""
        return self.chosen is not self.cuts[0]


@dataclass(frozen=True)
class WantedCut:
    """What to try. None: nothing is left out. "auto": the value predicted to be fastest."""

    n_tokens: int | str | None = "auto"  # vocabulary size
    layers: tuple[int, ...] | int | str | None = None  # which to keep, or how many
    type: str | None = None  # see `requantize`


def check_wanted(wanted: WantedCut, source: Header, target: Header) -> None:
    """Raise an error for cuts that cannot be tried, before anything is loaded.

    VocabError unless both files have the same tokens, except for padding; OptionError for cuts that
    the draft does not allow; ModelError for a model that cannot be cut.
    """
    check_model(target)
    check_model(source)
    if not has_same_tokens(target, source):
        if trim_of(source):
            raise VocabError(
                f"{source.name} is trimmed already: trim the model that it was made of instead, "
                "with all options at once"
            )
        raise VocabError(
            f"{source.name} has another vocabulary than {target.name}, but cuts are measured with "
            "a target of the same vocabulary. Name another target, or none to measure with text "
            "of the draft itself"
        )
    if wanted.n_tokens is not None:
        n, n_least = wanted.n_tokens, len(required_tokens(source))
        if isinstance(n, int) and not n_least <= n <= source.n_vocab:
            raise OptionError(
                f"{source.name} cannot be trimmed to {n:,} tokens: it has {source.n_vocab:,}, and "
                f"{n_least:,} are always kept (single bytes, control tokens); keep "
                f"{'more' if n < n_least else 'fewer'}, or all (--vocab)"
            )
    if isinstance(wanted.layers, int) and not 2 <= wanted.layers <= source.n_layers:
        raise OptionError(
            f"{source.name} has {source.n_layers} layers: {wanted.layers} of them cannot be kept; "
            f"keep 2 to {source.n_layers} (--layers)"
        )
    if wanted.layers is not None:
        trimmed(source, layers=wanted.layers if isinstance(wanted.layers, tuple) else [0])
    if wanted.type not in (None, "auto"):
        quantization_number(wanted.type)


def trim(
    engine: Engine,
    source: Header,
    reference: Reference,
    wanted: WantedCut,
    path: Path | None = None,
    *,
    force: bool = False,
    progress: NamedProgress | None = None,
) -> TrimResult:
    """Measure cuts of a draft, choose one, and write it to `path` if given.

    `engine`: the draft, loaded without a target; `source`: the header of its file. Nothing is
    written if no cut is predicted to be faster. Temporary files are always removed.
    Raises OptionError for cuts that the draft does not allow, ModelError, CacheError, DecodeError.
    """
    tell: NamedProgress = progress or (lambda what, done, of: None)
    with exit_on_sigterm(), temporary_folder("ggufspec-trim-") as folder:
        trimmer = _Trimmer(engine, source, reference, wanted, folder, tell)
        trimmer.measure(trimmer.vocabulary_cuts, is_asked=wanted.n_tokens != "auto")
        trimmer.measure(trimmer.layer_cuts(wanted.layers), is_asked=wanted.layers != "auto")
        if wanted.type is not None:
            type_ = _AUTO_TYPE if wanted.type == "auto" else wanted.type
            trimmer.measure([replace(trimmer.best.cut, type=type_)], is_asked=wanted.type != "auto")
        n_counted = sum(len(text.best) for text in trimmer.texts)
        result = TrimResult(tuple(trimmer.results), trimmer.best, n_counted)
        if path is not None and result.is_cut:
            writing = partial(tell, "Writing the draft")
            trimmer.write(result.chosen.cut, path, force=force, progress=writing)
    return result


class _Trimmer:
    """A loaded draft, its measured cuts, and a folder for their files."""

    def __init__(
        self,
        engine: Engine,
        source: Header,
        reference: Reference,
        wanted: WantedCut,
        folder: Path,
        tell: NamedProgress,
    ) -> None:
        self._like, self._source, self._reference = engine.pair.target, source, reference
        self._folder, self._tell = folder, tell
        self._n_vocab = engine.pair.target.n_vocab
        self._required = required_tokens(source) if wanted.n_tokens is not None else []
        self._sizes = [self._n_vocab, *self._vocabularies(wanted.n_tokens)]
        # Orders of tokens to keep: for half 0, ranked by half 1; for half 1, by half 0; by both.
        self._orders = [self._ranked(halves) for halves in ((1,), (0,), (0, 1))]
        chooses_layers = isinstance(wanted.layers, (int, str))
        halves = (1,) if chooses_layers else (0, 1)  # half 0 is used to choose layers
        self.texts = [text for text in reference.texts if text.excerpt.half in halves]
        self._chances: dict[tuple[tuple[int, ...], str | None], list[list[Chances]]] = {}
        self._filled = FilledContext(engine.pair.target, depth=_DEPTH, n_most=1)
        as_it_is = DraftCut(None, tuple(range(source.n_layers)))
        self._as_it_is, self._step = as_it_is, min(self._seconds(self._filled)[1])
        self.vocabulary_cuts = [replace(as_it_is, n_tokens=n) for n in self._sizes[1:]]
        self.best = self._measured(as_it_is)
        self.results = [self.best]

    # What to try.

    def _vocabularies(self, wanted: int | str | None) -> list[int]:
        if wanted is None or isinstance(wanted, int):
            return [wanted] if wanted and wanted < self._n_vocab else []
        least, most = len(self._required), _LARGEST_SHARE * self._n_vocab
        powers = (1 << i for i in range(self._n_vocab.bit_length(), 0, -1))
        return [n for n in powers if least < n <= most][:_N_SIZES]

    def _ranked(self, halves: Sequence[int]) -> NDArray[np.int64]:
        """All tokens: first required ones, then by count in these halves, then by frequency."""
        ids = np.arange(self._n_vocab)
        if len(self._sizes) == 1:
            return ids
        is_required, counts = np.zeros(self._n_vocab, bool), np.zeros(self._n_vocab, int)
        is_required[self._required] = True
        for half in halves:
            for token, count in self._reference.counts[half].items():
                if token < self._n_vocab:  # not a padding token that only the target has
                    counts[token] += count
        # Byte-pair tokens are numbered by frequency; other vocabularies have scores.
        scores = np.array(self._like.model.vocab.scores)
        return np.lexsort((ids, -scores, -counts, ~is_required))

    def layer_cuts(self, wanted: tuple[int, ...] | int | str | None) -> list[DraftCut]:
        """Cuts to try: the best cut so far, but with fewer layers."""
        n_layers, cut = self._source.n_layers, self.best.cut
        if wanted is None or wanted == n_layers:
            return []
        if isinstance(wanted, tuple):
            return [replace(cut, layers=wanted)] if len(wanted) < n_layers else []
        best, skip = self.best, LayerSkip()
        n_bytes = [layer.n_active_bytes for layer in shape_of(self._source).layers]
        texts = [text for text in self._reference.texts if text.excerpt.half == 0]
        sizes = [cut.n_tokens or self._n_vocab]
        with closing(text_context(self._like.model, self._like, skip)) as context:

            def score(left_out: frozenset[int]) -> float:
                skip.skip(left_out)
                found = by_kind(texts, [self._chances_in(context, at, sizes)[0] for at in texts])
                saved = sum(n_bytes[i] for i in left_out) / best.n_bytes
                return _mean(self._speedups(found, best.step * (1 - saved)))

            started = perf_counter()
            score(frozenset())
            seconds = (perf_counter() - started) * n_layers
            # The kinds of text alternate, so the first `n_kinds` texts have all of them.
            n_kinds = len({text.excerpt.kind for text in texts})
            texts = texts[: max(int(len(texts) * SEARCH_SECONDS / 2 / seconds), n_kinds)]
            left_out = search_layers(
                score,
                n_layers,
                n_wanted=n_layers - wanted if isinstance(wanted, int) else None,
                seconds=SEARCH_SECONDS,
                progress=partial(self._tell, "Choosing layers"),
            )
        return [
            replace(cut, layers=tuple(i for i in cut.layers if i not in each)) for each in left_out
        ]

    # Measuring.

    def measure(self, cuts: Sequence[DraftCut], *, is_asked: bool) -> None:
        """Measure cuts; the best becomes `self.best` if it is clearly faster or `is_asked`."""
        found = []
        for i, cut in enumerate(cuts):
            found.append(self._measured(cut))
            self._tell("Measuring cuts", i + 1, len(cuts))
        self.results += found
        if found:
            best = max(found, key=lambda result: result.score)
            if is_asked or best.score > _CLEARLY_FASTER * self.best.score:
                self.best = best

    def _measured(self, cut: DraftCut) -> CutResult:
        with self._model(cut) as model:
            shape = shape_of(read_header(model.path))
            step = self._step
            if cut != self._as_it_is:
                made = Context(model, self._like.options, pools=self._like.pools)
                with closing(made) as context:
                    filled = FilledContext(context, depth=_DEPTH, n_most=1)
                    before, after = self._seconds(self._filled, filled).values()
                step *= min(after) / min(before)
        at = self._sizes.index(cut.n_tokens or self._n_vocab)
        found = by_kind(self.texts, [chances[at] for chances in self._chances_by_text(cut)])
        return CutResult(
            cut=cut,
            n_tokens=shape.n_vocab,
            n_bytes=shape.n_pass_bytes,
            step=step,
            agreement={kind: float(each.greedy.mean()) for kind, each in found.items()},
            overlap={kind: float(each.sampled.mean()) for kind, each in found.items()},
            speedups=self._speedups(found, step),
        )

    def _seconds(self, *contexts: FilledContext) -> dict[int, list[float]]:
        """Seconds of repeated steps in each context, measured in alternation."""
        steps = {i: partial(each.score, 1) for i, each in enumerate(contexts, 1)}
        return time_interleaved(steps, _N_REPEATS, at_least=MIN_SECONDS)

    def _chances_by_text(self, cut: DraftCut) -> list[list[Chances]]:
        """The Chances of each text for each vocabulary size, computed with an uncut vocabulary."""
        key = cut.layers, cut.type
        if key not in self._chances:
            with (
                self._model(replace(cut, n_tokens=None)) as model,
                closing(text_context(model, self._like)) as context,
            ):
                self._chances[key] = [
                    self._chances_in(context, text, self._sizes) for text in self.texts
                ]
        return self._chances[key]

    def _chances_in(
        self, context: Context, text: ReferenceText, sizes: Sequence[int]
    ) -> list[Chances]:
        order = self._orders[text.excerpt.half]
        return chances_of(rows_of(context, text.excerpt), text, order, sizes)

    def _speedups(
        self, chances: Mapping[str, Chances], step: float
    ) -> dict[str, tuple[float, float]]:
        speedup = partial(predicted_speedup, passes=self._reference.passes, step=step)
        return {kind: (speedup(of.greedy), speedup(of.sampled)) for kind, of in chances.items()}

    # Files.

    @contextmanager
    def _model(self, cut: DraftCut) -> Iterator[Model]:
        """The model of a cut, loaded from a temporary file."""
        if cut == self._as_it_is:
            yield self._like.model
            return
        path = self._folder / "cut.gguf"
        self.write(cut, path)
        model = Model(path, n_gpu_layers=self._like.model.n_gpu_layers, mmap=False)
        with closing(model):
            yield model
        path.unlink()

    def write(
        self, cut: DraftCut, path: Path, *, force: bool = False, progress: Progress | None = None
    ) -> None:
        """Write the file of a cut; on failure no file is left."""
        tokens = self._orders[2][: cut.n_tokens].tolist() if cut.n_tokens else None
        layers = cut.layers if len(cut.layers) < self._source.n_layers else None
        plain = path if cut.type is None else self._folder / "plain.gguf"
        if tokens is None and layers is None:
            plain = self._source.paths[0]
        else:
            made = trimmed(self._source, tokens=tokens, layers=layers)
            write(made, plain, force=force or plain != path, progress=progress)
        if cut.type is not None:
            output_type = cut.type if cut.type.upper() in TYPES else None
            requantize(plain, path, cut.type, output_type=output_type, force=force)


def _mean(speedups: Mapping[str, tuple[float, float]]) -> float:
    return geometric_mean([each for pair in speedups.values() for each in pair])
