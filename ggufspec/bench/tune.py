"""Finds the fastest settings for a pair on this machine, and measures the cost of its passes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from ggufspec.common import defaults
from ggufspec.common.progress import NamedProgress
from ggufspec.drafting import cost_model, profile_store
from ggufspec.drafting.cost_model import CostModel
from ggufspec.drafting.pair_profile import StoredProfile
from ggufspec.drafting.profile_store import TunedSettings
from ggufspec.engine.calibration import MOST_TOKENS, spare_slot, time_drafts
from ggufspec.engine.engine import Engine
from ggufspec.engine.pair import Pair
from ggufspec.errors import ModelError, OutOfMemoryError
from ggufspec.llama.context import Context
from ggufspec.llama.devices import n_logical_cores, n_threads_default
from ggufspec.measure import passes, table
from ggufspec.measure.attention import Attention, measure_attention
from ggufspec.measure.pairs import profile_key
from ggufspec.models.head_facts import MTP
from ggufspec.models.heads import DraftFile
from ggufspec.placement.speeds import Shares

CLEARLY_FASTER = 0.96  # a setting is chosen only below this share of the default's seconds
PROMPT_TOKENS = (512, 2048)  # prompt length in trials of n_batch, on slow and fast machines
MIN_SECONDS = 1.5  # minimum of each measurement, so that short passes are repeated more often
_N_PROMPTS = 2  # repetitions of a prompt
_BATCHES = (32, 2048)  # the smallest and largest n_batch to try


@dataclass(frozen=True)
class Trial:
    """One setting that was tried; `what`: its name in TunedSettings."""

    what: str
    value: int
    target_seconds: dict[int, float]  # medians, by number of tokens in the pass
    draft_seconds: float | None  # median of a draft step
    is_chosen: bool
    reading_seconds: float | None = None  # per token of a prompt, in trials of n_batch


@dataclass(frozen=True)
class Pass:
    """Seconds of passes of one size: median, minimum and maximum."""

    n_tokens: int
    seconds: float
    least: float
    most: float

    @staticmethod
    def of(n_tokens: int, times: Sequence[float]) -> Pass:
        return Pass(n_tokens, median(times), min(times), max(times))


@dataclass(frozen=True)
class Tuned:
    chosen: TunedSettings  # all settings
    settings: TunedSettings  # only those that were not given
    trials: tuple[Trial, ...]
    depth: int
    passes: tuple[Pass, ...]  # over 1, 2 ... n_most + 1 tokens
    step: Pass | None  # a draft step, of one token or of a block; None without a draft
    reading: Pass | None  # the draft's pass over one batch
    attention: str | None  # the choice of flash attention and its reason, if it was measured
    facts: dict[str, Any]  # the conditions of the measurement
    tables: Sequence[tuple[dict[str, object], table.Table, Shares]]  # see measure.table.add

    @property
    def costs(self) -> CostModel:
        n_per_step = self.step.n_tokens if self.step else 1
        costs = CostModel(len(self.passes), n_per_step=n_per_step)
        for measured in self.passes:
            costs.observe_target(measured.n_tokens, measured.seconds)
        if self.step is not None:
            costs.observe_draft(1, self.step.seconds)
        if self.reading is not None:
            costs.observe_draft(1, self.reading.seconds, n_further=self.reading.n_tokens - 1)
        return costs


def tune(
    engine: Engine,
    given: TunedSettings,
    *,
    n_most: int = defaults.TUNE_N_MOST,
    depth: int = defaults.TUNE_DEPTH,
    n_runs: int = defaults.TUNE_RUNS,
    progress: NamedProgress | None = None,
) -> Tuned:
    """Measure passes of a pair that was loaded for drafts of up to `n_most` tokens.

    The engine may write no text meanwhile: its thread does not do this.
    `given`: settings that are not changed; None: tried. `depth`: tokens in the cache, fewer if the
    context is small. `n_runs`: least number of measurements of each kind. Raises OptionError if the
    context is too small, DecodeError, ClosedError.
    """
    pair, tell = engine.pair, progress or (lambda what, done, of: None)
    target, draft = pair.target, pair.draft
    depth = max(min(depth, target.n_ctx - n_most - 1), 0)
    trials = _Trials(depth, max(n_runs, 2), tell)
    sizes = range(1, n_most + 2)
    with ExitStack() as stack:
        filling = partial(tell, "Filling the cache of the target")
        passes.FilledContext(target, depth=depth, n_most=n_most + 1, progress=filling)
        attention = Attention(target.options.flash_attention)
        if given.flash_attention is None:
            of_draft = draft.model if draft else None
            attention = measure_attention(target.model, of_draft, target.options)
        if attention.setting != target.options.flash_attention:
            n_ctx = min(depth + max(n_most + 1, MOST_TOKENS), target.n_ctx)
            changed = {"flash_attention": attention.setting, "n_ctx": n_ctx}
            target = stack.enter_context(closing(_changed(target, changed)))
            draft = draft and stack.enter_context(closing(_changed(draft, changed)))
            if draft and pair.head is None:
                own = ExitStack()
                pair = Pair(
                    target, draft, n_draft_max=n_most, vocab_map=pair.vocab_map, resources=own
                )
        if given.n_threads is None:
            few = [1, min(defaults.N_DRAFT_FIXED, n_most) + 1] if draft else [1]
            trials.threads("target", target, few, n_logical_cores())
        if draft and given.n_threads_draft is None:
            trials.threads("draft", draft, [1], n_threads_default())
        chosen = TunedSettings(
            n_threads=target.n_threads,
            n_threads_draft=draft.n_threads if draft else None,
            flash_attention=target.options.flash_attention,
            n_batch=trials.batches("target", target, given.n_batch),
            n_batch_draft=trials.batches("draft", draft, given.n_batch_draft) if draft else None,
        )
        seconds = passes.time_target(
            target,
            sizes,
            depth=depth,
            n_repeats=n_runs,
            at_least=MIN_SECONDS,
            progress=partial(tell, "Measuring the target"),
        )
        step, reading = _of_draft(pair, depth, n_runs, tell) if draft else (None, None)
        is_given = {name: None for name, value in asdict(given).items() if value}
        of_target = {n: median(each) for n, each in seconds.items()}
        of_draft_model = {1: step.seconds} if step and pair.head is None else {}
        measured = zip(
            (target, draft), (of_target, of_draft_model), engine.pair.assumed, strict=False
        )
        return Tuned(
            chosen=chosen,
            settings=replace(chosen, **is_given),
            trials=tuple(trials.made),
            depth=depth,
            passes=tuple(Pass.of(size, seconds[size]) for size in sizes),
            step=step,
            reading=reading,
            attention=attention.reason,
            facts=profile_key(target, draft),
            tables=[
                (table.key_in(context), table.rows_in(context, found, depth), assumed)
                for context, found, assumed in measured
                if context is not None
            ],
        )


def _of_draft(
    pair: Pair, depth: int, n_runs: int, tell: NamedProgress
) -> tuple[Pass | None, Pass | None]:
    """A draft step, and a batch that the draft reads; None: nothing was drafted, or read."""
    slot = spare_slot(pair)
    steps, readings = time_drafts(pair, slot, depth, n_runs, partial(tell, "Measuring the draft"))
    slot.forget()
    n_per_step = pair.profile.costs.n_per_step
    step = Pass.of(n_per_step, [each.per_step for each in steps]) if steps else None
    if not readings:
        return step, None
    n_read = readings[0].n_further + 1
    return step, Pass.of(n_read, [each.seconds for each in readings])


def keep(tuned: Tuned) -> bool:
    """Store the result, for loads without settings; returns False if it cannot be written."""
    for about, rows, assumed in tuned.tables:
        table.add(about, rows, assumed._asdict())
    known = StoredProfile(tuned.facts).recall(len(tuned.passes))
    document = {
        **(known.to_document() if known else {}),
        "costs": cost_model.to_document(tuned.costs),
        "settled_costs": cost_model.to_document(tuned.costs),
        "settings": asdict(tuned.chosen),
        "measured": "tune",
    }
    return profile_store.remember(tuned.facts, document) and profile_store.remember_settings(
        tuned.facts["pair"], tuned.settings
    )


def forget(target: Path | None = None, draft: DraftFile | None = None) -> int:
    """Delete the records of a target, of a pair, or all; returns how many. Raises ModelError.

    The tables of passes of a target go with the target, not with a pair.
    """
    if target is None and draft is None:
        return profile_store.forget()
    files = {"target": target, "draft": draft}
    wanted = {of: _identity(file) for of, file in files.items() if file is not None}
    found = [each for each in profile_store.records() if _is_about(each.facts, wanted)]
    return sum(profile_store.forget(record.key) for record in found)


# When drafting pays off


def speedup(costs: CostModel, acceptance: float, n_draft: int) -> float:
    """Speed-up of this draft length if each drafted token is accepted with this probability."""
    n_expected = sum(acceptance**i for i in range(n_draft + 1))  # expected tokens per round
    return n_expected * costs.curve[0] / (costs.curve[n_draft] + costs.drafting(n_draft))


def best_length(costs: CostModel, acceptance: float) -> tuple[int, float]:
    """The best draft length and its speed-up; (0, 1.0) if plain decoding is fastest."""
    best = max(range(costs.n_most), key=lambda n: speedup(costs, acceptance, n))
    return best, speedup(costs, acceptance, best)


def break_even_acceptance(costs: CostModel, n_draft: int) -> float | None:
    """The acceptance rate above which this draft length is faster than plain; None: never."""
    if speedup(costs, 1.0, n_draft) <= 1:
        return None
    shares = range(10_001)
    return bisect_left(shares, True, key=lambda n: speedup(costs, n / 1e4, n_draft) > 1) / 1e4


@dataclass
class _Trials:
    depth: int
    n_runs: int
    tell: NamedProgress
    made: list[Trial] = field(default_factory=list)

    def threads(self, whose: str, context: Context, sizes: Sequence[int], n_most: int) -> None:
        """Find and set the number of threads that is fastest for passes of these sizes."""
        usual = context.n_threads
        times = passes.time_threads(
            context,
            thread_ladders(usual, n_most),
            sizes,
            depth=self.depth,
            n_repeats=self.n_runs,
            at_least=MIN_SECONDS / 2,
            progress=partial(self.tell, f"Trying threads of the {whose}"),
        )
        medians = {n: {size: median(times[n][size]) for size in sizes} for n in sorted(times)}
        chosen = choose({n: sum(found.values()) for n, found in medians.items()}, usual)
        for n, found in medians.items():
            if whose == "target":
                self.made.append(Trial("n_threads", n, found, None, n == chosen))
            else:
                self.made.append(Trial("n_threads_draft", n, {}, found[1], n == chosen))
        context.use_threads(chosen)

    def batches(self, whose: str, context: Context, given: int | None) -> int:
        """The n_batch that is given, or else the fastest that fits.

        Tries smaller, then larger ones, while they are clearly faster.
        """
        usual = context.options.n_batch
        if given is not None:
            return usual
        seconds: dict[int, float] = {}
        n_tokens = 0
        try:
            for n_tokens in (min(n, context.model.n_ctx_max or n) for n in PROMPT_TOKENS):
                seconds[usual] = self._reading(whose, context, usual, n_tokens)
                if seconds[usual] >= MIN_SECONDS:
                    break
        except OutOfMemoryError:
            return usual
        for ladder in batch_ladders(usual, n_tokens):
            for n in ladder:
                best = min(seconds.values())
                try:
                    seconds[n] = self._reading(whose, context, n, n_tokens)
                except OutOfMemoryError:
                    break
                if seconds[n] > CLEARLY_FASTER * best:
                    break
        chosen = choose(seconds, usual)
        what = "n_batch" if whose == "target" else "n_batch_draft"
        self.made += [
            Trial(what, n, {}, None, n == chosen, seconds[n] / n_tokens) for n in sorted(seconds)
        ]
        return chosen

    def _reading(self, whose: str, like: Context, n_batch: int, n_tokens: int) -> float:
        sizes = {"n_ctx": n_tokens, "n_batch": n_batch, "n_rows": 1, "n_sequences": 1, "n_kept": 0}
        progress = partial(self.tell, f"Trying n_batch {n_batch} of the {whose}")
        with closing(_changed(like, {**sizes, "n_threads": like.n_threads})) as context:
            return min(passes.time_reading(context, n_tokens, _N_PROMPTS, progress))


def thread_ladders(usual: int, n_most: int) -> list[list[int]]:
    """Numbers of threads to try: from the default down by halves, and up by doubles to `n_most`."""
    down = [usual >> i for i in range(usual.bit_length())]
    up = [usual << i for i in range(n_most.bit_length()) if usual << i < n_most]
    return [down, [*up, max(usual, n_most)]]


def batch_ladders(usual: int, n_tokens: int) -> list[list[int]]:
    """Batch sizes to try besides the default: down by halves, and up by doubles."""
    least, most = _BATCHES
    down = [usual >> i for i in range(1, usual.bit_length()) if usual >> i >= least]
    up = [usual << i for i in range(1, most.bit_length()) if usual << i <= min(most, n_tokens)]
    return [down, up]


def choose(seconds: Mapping[int, float], usual: int) -> int:
    """The fastest setting if it is clearly faster than the default, else the default."""
    best = min(seconds, key=lambda setting: seconds[setting])
    return best if seconds[best] < CLEARLY_FASTER * seconds[usual] else usual


def _changed(context: Context, options: Mapping[str, Any]) -> Context:
    changed = replace(context.options, **options)
    return Context(context.model, changed, link=context.link, pools=context.pools)


def _identity(file: DraftFile) -> dict[str, str]:
    """What a record says about a model: its fingerprint, or that it is the target's own head."""
    if file == MTP:
        return {"head": MTP}
    if (found := profile_store.fingerprint(Path(file))) is None:
        raise ModelError(
            f"{file} cannot be read, so its records cannot be found; give a model file that can be "
            "read, or none to delete all records"
        )
    return {"fingerprint": found}


def _is_about(facts: Mapping[str, Any], wanted: Mapping[str, Mapping[str, str]]) -> bool:
    if [*wanted] == ["target"] and facts.get("model") == wanted["target"]["fingerprint"]:
        return True
    try:
        found = {of: facts["pair"][of] for of in wanted}
        return all(
            found[of].items() >= each.items() and found[of].get("head") == each.get("head")
            for of, each in wanted.items()
        )
    except (KeyError, AttributeError):  # a record of another kind, or without a draft
        return False
