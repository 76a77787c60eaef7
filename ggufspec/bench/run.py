"""Measures contenders in alternation: each text becomes one Measurement."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from zlib import crc32

from ggufspec.bench.baselines import Baseline
from ggufspec.bench.contenders import rotated
from ggufspec.bench.machine import EnergyMeter
from ggufspec.bench.records import (
    COUNTS,
    BenchResults,
    Contender,
    FirstDifference,
    Measurement,
    RoundTiming,
    TextKey,
    sum_by_position,
)
from ggufspec.common.prompts import Prompt
from ggufspec.engine import scoring
from ggufspec.engine.chat_template import conversation
from ggufspec.engine.engine import Engine
from ggufspec.engine.greedy import compare
from ggufspec.engine.options import CheckedOptions
from ggufspec.errors import PromptError

OnTokens = Callable[[int, int, str], None]  # tokens generated, in all, what is being written
Warn = Callable[[str], None]  # why something is left out

_N_DIVERGENCES = 3  # of a contender, whose logits are compared


@dataclass(frozen=True)
class Experiment:
    """The texts to write with one pair.

    `chat`: use the target's chat template; None: if it has one and the prompt has a category or a
    system message.
    """

    contenders: Sequence[Contender]
    prompts: Sequence[Prompt]
    n_runs: int
    n_tokens: int
    n_warm_up: int = 16
    seed: int = 0
    ignore_eos: bool = True
    chat: bool | None = None

    def of_pair(self, pair: str) -> Experiment:
        """The same experiment for one of several pairs; "": the only one."""
        if not pair:
            return self
        return replace(self, contenders=[each.of_pair(pair) for each in self.contenders])

    def order(self) -> Iterator[TextKey]:
        """All texts in the order in which they are written: the contenders alternate."""
        for run in range(self.n_runs):
            for i, prompt in enumerate(self.prompts):
                order = rotated(self.contenders, run * len(self.prompts) + i)
                yield from (TextKey(each.name, prompt.name, run) for each in order)


def measure(
    engine: Engine,
    experiment: Experiment,
    *,
    done: Collection[TextKey] = (),
    progress: OnTokens | None = None,
    baselines: Sequence[Baseline] = (),
    warn: Warn = lambda message: None,
) -> Iterator[Measurement]:
    """Warm up, then write each text that is not in `done`; yield it when it is finished.

    Each text starts with an empty cache, so the time to first token includes the whole prompt.
    Contenders whose program is not among `baselines` are left out. So is a prompt that is too long,
    or that a baseline tokenizes differently, for that baseline; then `warn` gets the reason.
    Raises GgufspecError, and PromptError if no prompt can be used.
    """
    contenders = {each.name: each for each in experiment.contenders}
    prompts = {each.name: each for each in experiment.prompts}
    able = {None, *(each.name for each in baselines)}
    left = [
        key
        for key in experiment.order()
        if key not in done and contenders[key.contender].program in able
    ]
    if not left:
        return
    writer = _Writer(engine, experiment, progress, baselines)
    usable = []
    for prompt in experiment.prompts:
        try:
            writer.read(engine, prompt, prompt.turns[:1])
            usable.append(prompt.name)
        except PromptError as error:
            if not usable and prompt is experiment.prompts[-1]:
                raise
            warn(f"prompt {prompt.name} is left out: {error}")
    left = [key for key in left if key.prompt in usable]
    n_turns = sum(len(prompts[key.prompt].turns) for key in left)
    warm = [name for name in contenders if any(key.contender == name for key in left)]
    writer.n_tokens_in_all = len(warm) * experiment.n_warm_up + n_turns * experiment.n_tokens
    for name in warm:
        try:
            writer.warm_up(contenders[name], prompts[usable[0]])
        except PromptError as error:
            warn(f"{name}, warm-up: {error}")
    left_out: set[TextKey] = set()
    for key in left:
        try:
            text = writer.write(contenders[key.contender], prompts[key.prompt], key.run)
        except PromptError as error:  # of a baseline, or if no room is left for the next turn
            once = key._replace(run=0)
            if once not in left_out:
                warn(f"{key.contender} leaves out prompt {key.prompt}: {error}")
            left_out.add(once)
        else:
            yield text


class _Writer:
    """Writes and times texts with the pair, the draft alone, or a baseline."""

    def __init__(
        self,
        engine: Engine,
        experiment: Experiment,
        progress: OnTokens | None,
        baselines: Sequence[Baseline] = (),
    ) -> None:
        self._engine = engine
        self._engines = {"pair": engine}
        if any(contender.model == "draft" for contender in experiment.contenders):
            self._engines["draft"] = scoring.draft_alone(engine)
        self._baselines = {baseline.name: baseline for baseline in baselines}
        self._experiment = experiment
        self._progress: OnTokens = progress or (lambda done, of, label: None)
        self._n_done = 0
        self.n_tokens_in_all = 1
        self._meter = EnergyMeter()
        self._started_at = perf_counter()

    def warm_up(self, contender: Contender, prompt: Prompt) -> None:
        """Write a short text that is not measured: the first one is slower."""
        n_tokens = min(self._experiment.n_warm_up, self._experiment.n_tokens)
        try:
            if n_tokens:
                self._forget()
                tokens = self.read(self._engine_of(contender), prompt, [prompt.turns[0]])
                self._one(contender, tokens, n_tokens, f"warm-up: {contender.name}")
        finally:
            self._n_done += self._experiment.n_warm_up

    def write(self, contender: Contender, prompt: Prompt, run: int) -> Measurement:
        """All turns of a prompt, measured as one text. Raises PromptError."""
        self._forget()
        at = perf_counter() - self._started_at
        n_tokens, n_before = self._experiment.n_tokens, self._n_done
        label = f"{contender.name}: {prompt.name}, run {run + 1} of {self._experiment.n_runs}"
        joules = self._meter.joules()
        said: list[str] = []
        parts: list[Measurement] = []
        try:
            for turn in prompt.turns:
                said.append(turn)
                tokens = self.read(self._engine_of(contender), prompt, said)
                reply, part = self._one(contender, tokens, n_tokens, label)
                said.append(reply)
                parts.append(part)
                self._n_done += n_tokens
        finally:
            self._n_done = n_before + len(prompt.turns) * n_tokens
        used = self._meter.joules()
        summed = (*COUNTS, "prompt_seconds", "generation_seconds")
        return Measurement(
            contender=contender.name,
            prompt=prompt.name,
            run=run,
            category=prompt.category,
            at=at,
            **{name: sum(getattr(part, name) for part in parts) for name in summed},
            drafted_by_position=sum_by_position([part.drafted_by_position for part in parts]),
            accepted_by_position=sum_by_position([part.accepted_by_position for part in parts]),
            first_token_seconds=parts[0].first_token_seconds,
            joules=None if joules is None or used is None else used - joules,
            tokens=[token for part in parts for token in part.tokens],
            rounds=[round_ for part in parts for round_ in part.rounds],
        )

    def _one(
        self, contender: Contender, tokens: list[int], n_tokens: int, label: str
    ) -> tuple[str, Measurement]:
        """A reply, and how it was written."""
        seed = crc32(f"{self._experiment.seed} {label}".encode())
        if contender.program is not None:
            self._progress(self._n_done, self.n_tokens_in_all, label)
            options = {"ignore_eos": self._experiment.ignore_eos, **contender.options}
            baseline = self._baselines[contender.program]
            found = baseline.write(tokens, options=options, n_tokens=n_tokens, seed=seed)
            text = b"".join(map(self._engine.vocab.piece, found.tokens)).decode("utf-8", "replace")
            return text, Measurement(
                contender=contender.name, n_rounds=found.n_rounds, **vars(found)
            )
        # Without a seed, as `auto` is mostly used: a text with a seed updates no measured costs.
        learns = contender.options.get("n_draft") == "auto"
        options = {
            "seed": None if learns else seed,
            "ignore_eos": self._experiment.ignore_eos,
            **contender.options,
            "max_tokens": n_tokens,
        }
        stream = self._engine_of(contender).begin(tokens, CheckedOptions.of(options))  # type: ignore[arg-type]
        started = perf_counter()
        first: float | None = None
        n_written = 0
        for chunk in stream:
            first = perf_counter() - started if first is None else first
            n_written += len(chunk.tokens)
            self._progress(self._n_done + n_written, self.n_tokens_in_all, label)
        done = stream.completion
        measured = replace(
            Measurement.of_stats(done.stats, contender.name, label),
            first_token_seconds=first or 0.0,
            tokens=done.tokens,
            rounds=[
                RoundTiming(
                    len(round_.tokens),
                    round_.n_drafted,
                    round_.n_accepted,
                    round_.draft_seconds,
                    round_.target_seconds + round_.verify_seconds,
                )
                for round_ in stream.rounds
            ],
        )
        return done.text, measured

    def _engine_of(self, contender: Contender) -> Engine:
        """The engine that writes; for a baseline, the one that tokenizes its prompts."""
        return self._engine if contender.program is not None else self._engines[contender.model]

    def _forget(self) -> None:
        for engine in self._engines.values():
            engine.forget()

    def read(self, engine: Engine, prompt: Prompt, said: Sequence[str]) -> list[int]:
        """The tokens of a prompt: as a chat if the model has a template, else as text."""
        if (chat := self._experiment.chat) is None:
            wants = prompt.system is not None or bool(prompt.category)
            chat = wants and engine.chat_template is not None
        if not chat:
            text = "\n".join([prompt.system, *said] if prompt.system else said)
            return engine.tokenize(text)
        tokens = engine.render(conversation(said, prompt.system))
        if len(tokens) >= engine.n_ctx:
            raise PromptError(
                f"prompt {prompt.name} has {len(tokens):,} tokens, the context {engine.n_ctx:,}; "
                "use a larger context (-c), or leave it out"
            )
        return tokens


def divergences(
    engine: Engine, experiment: Experiment, results: BenchResults
) -> list[FirstDifference]:
    """Where texts at temperature 0 differ from plain's, by how much, and what rounding changes.

    Of each contender, the first few texts of one turn.
    """
    prompts = {each.name: each for each in experiment.prompts if len(each.turns) == 1}
    writer = _Writer(engine, experiment, None)
    by_name = {each.name: each for each in experiment.contenders}
    found: list[FirstDifference] = []
    for contender in experiment.contenders:
        if contender.baseline is None or not contender.is_greedy:
            continue
        plain = by_name[contender.baseline].options
        options = CheckedOptions.of({"ignore_eos": experiment.ignore_eos, **plain})  # type: ignore[typeddict-item]
        seen: set[str] = set()
        for text, other in results.with_plain(contender):
            if text.prompt not in prompts or text.prompt in seen:
                continue
            if not (text.has_tokens and other.has_tokens):
                continue
            if list(text.tokens) == list(other.tokens):  # most are: their prompts are not read
                continue
            if len(seen) == _N_DIVERGENCES:
                break
            prompt = prompts[text.prompt]
            tokens = writer.read(engine, prompt, prompt.turns)
            if difference := compare(engine, tokens, other.tokens, text.tokens, options):
                seen.add(text.prompt)
                at, gap, rounding = difference.position, difference.gap, difference.rounding
                found.append(FirstDifference(contender.name, text.prompt, at, gap, rounding))
    return found
