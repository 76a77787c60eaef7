"""Measures pairs: contenders generate texts in alternation; each text gives one Measurement."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any
from zlib import crc32

from ggufspec.bench.baselines import Baseline
from ggufspec.bench.experiment import Experiment
from ggufspec.bench.records import (
    BenchResults,
    Contender,
    FirstDifference,
    Measurement,
    RoundTiming,
    TextKey,
    by_position,
)
from ggufspec.common.facts import differences, plain
from ggufspec.common.prompts import Prompt
from ggufspec.decoding.stats import COUNTS
from ggufspec.engine import scoring
from ggufspec.engine.chat_template import conversation
from ggufspec.engine.engine import Engine
from ggufspec.engine.options import CheckedOptions
from ggufspec.engine.scoring import compare
from ggufspec.errors import OptionError, PromptError
from ggufspec.llama import devices
from ggufspec.models.heads import DraftFile

OnTokens = Callable[[int, int, str], None]  # (tokens generated, total tokens, label of the text)
Warn = Callable[[str], None]  # (reason why a text or prompt is left out)

_N_DIVERGENCES = 3  # texts per contender whose logits are compared


@dataclass(frozen=True)
class PairBenchmark:
    target: Path
    draft: DraftFile | None
    experiment: Experiment
    pair: str = ""  # name of the pair in the results; "" for a single pair
    target_label: str = ""
    draft_label: str = ""
    load: Mapping[str, Any] = field(default_factory=dict)


def perform(
    benchmark: PairBenchmark,
    engine: Engine,
    results: BenchResults,
    progress: OnTokens,
    *,
    baselines: Sequence[Baseline],
    warn: Warn,
    on_text: Callable[[], None],
) -> None:
    """Measure the texts that are not in the results yet, and add them.

    `warn` gets the reason for each text that is left out. `on_text` is called after each text,
    outside of all measured times. Results are kept on KeyboardInterrupt. Raises GgufspecError.
    """
    experiment = benchmark.experiment
    results.models[benchmark.pair] = _model_facts(benchmark, engine)
    done = {text.key for text in results.measurements}
    n_before = len(done)
    try:
        for text in measure(
            engine, experiment, done=done, progress=progress, baselines=baselines, warn=warn
        ):
            results.measurements.append(text)
            on_text()
        if len(results.measurements) > n_before:
            names = {each.name for each in experiment.contenders}
            others = [each for each in results.divergences if each.contender not in names]
            results.divergences = others + divergences(engine, experiment, results)
    finally:
        if (peak := peak_rss()) is not None:
            results.memory["peak_rss_bytes"] = peak


def n_left(benchmark: PairBenchmark, results: BenchResults) -> int:
    """Number of a pair's texts that are not in the results yet."""
    done: set[TextKey] = {text.key for text in results.measurements}
    return sum(key not in done for key in benchmark.experiment.order())


def check_resumed(before: BenchResults, now: BenchResults) -> None:
    """Raise OptionError if results are of another benchmark, so that they cannot be resumed."""
    if found := list(differences(_conditions(before), _conditions(now))):
        raise OptionError(
            f"these results are of another benchmark: {'; '.join(found)}. Give the same "
            "options to --resume, or another file to --json"
        )


def measure(
    engine: Engine,
    experiment: Experiment,
    *,
    done: Collection[TextKey] = (),
    progress: OnTokens | None = None,
    baselines: Sequence[Baseline] = (),
    warn: Warn = lambda message: None,
) -> Iterator[Measurement]:
    """Warm up, then generate each text that is not in `done`, and yield its measurement.

    Each text starts with an empty cache, so the time to first token includes the whole prompt.
    Contenders whose program is not in `baselines` are left out, and so are prompts that are too
    long. A baseline also leaves out prompts that it tokenizes differently. `warn` is called with
    the reason. Raises GgufspecError, and PromptError if no prompt can be used.
    """
    able = {None, *(each.name for each in baselines)}
    contenders = {each.name: each for each in experiment.contenders if each.program in able}
    left = [key for key in experiment.order() if key not in done and key.contender in contenders]
    if not left:
        return
    writer = _Writer(engine, experiment, progress, baselines)
    prompts: dict[str, Prompt] = {}
    for prompt in experiment.prompts:
        try:
            _read(engine, experiment, prompt, prompt.turns[:1])
            prompts[prompt.name] = prompt
        except PromptError as error:
            if not prompts and prompt is experiment.prompts[-1]:
                raise
            warn(f"prompt {prompt.name} is left out: {error}")
    left = [key for key in left if key.prompt in prompts]
    warm = [name for name in contenders if any(key.contender == name for key in left)]
    n_each = {name: len(prompts[name].turns) * experiment.n_tokens for name in prompts}
    n_planned = len(warm) * experiment.n_warm_up
    writer.n_tokens_in_all = n_planned + sum(n_each[key.prompt] for key in left)
    for i, name in enumerate(warm):
        writer.n_done = i * experiment.n_warm_up
        try:
            writer.warm_up(contenders[name], next(iter(prompts.values())))
        except PromptError as error:
            warn(f"{name}, warm-up: {error}")
    left_out: set[TextKey] = set()
    for key in left:
        writer.n_done = n_planned
        n_planned += n_each[key.prompt]
        try:
            text = writer.write(contenders[key.contender], prompts[key.prompt], key.run)
        except PromptError as error:  # raised by a baseline, or if the next turn does not fit
            once = key._replace(run=0)
            if once not in left_out:
                warn(f"{key.contender} leaves out prompt {key.prompt}: {error}")
            left_out.add(once)
        else:
            yield text


class _Writer:
    def __init__(
        self,
        engine: Engine,
        experiment: Experiment,
        progress: OnTokens | None,
        baselines: Sequence[Baseline],
    ) -> None:
        # A baseline gets the tokens that the pair's engine makes of a prompt.
        self._engines = {"pair": engine, "baseline": engine}
        if any(contender.model == "draft" for contender in experiment.contenders):
            self._engines["draft"] = scoring.draft_alone(engine)
        self._baselines = {baseline.name: baseline for baseline in baselines}
        self._experiment = experiment
        self._progress: OnTokens = progress or (lambda done, of, label: None)
        self.n_done, self.n_tokens_in_all = 0, 1  # for the progress
        self._started_at = perf_counter()

    def warm_up(self, contender: Contender, prompt: Prompt) -> None:
        """Generate a short text without measuring it: a contender's first text is slower."""
        n_tokens = min(self._experiment.n_warm_up, self._experiment.n_tokens)
        if n_tokens:
            self._one(contender, prompt, prompt.turns[:1], n_tokens, f"warm-up: {contender.name}")

    def write(self, contender: Contender, prompt: Prompt, run: int) -> Measurement:
        """Generate all turns of a prompt; measures them as one text. Raises PromptError."""
        at = perf_counter() - self._started_at
        label = f"{contender.name}: {prompt.name}, run {run + 1} of {self._experiment.n_runs}"
        said: list[str] = []
        parts: list[Measurement] = []
        for turn in prompt.turns:
            said.append(turn)
            reply, part = self._one(contender, prompt, said, self._experiment.n_tokens, label)
            said.append(reply)
            parts.append(part)
            self.n_done += self._experiment.n_tokens
        summed = (*COUNTS, "prompt_seconds", "generation_seconds")
        drafted, accepted = by_position(parts)
        return Measurement(
            contender=contender.name,
            prompt=prompt.name,
            run=run,
            category=prompt.category,
            at=at,
            **{name: sum(getattr(part, name) for part in parts) for name in summed},
            drafted_by_position=drafted,
            accepted_by_position=accepted,
            first_token_seconds=parts[0].first_token_seconds,
            tokens=[token for part in parts for token in part.tokens],
            rounds=[round_ for part in parts for round_ in part.rounds],
        )

    def _one(
        self, contender: Contender, prompt: Prompt, said: Sequence[str], n_tokens: int, label: str
    ) -> tuple[str, Measurement]:
        """Generate one reply, which may reuse the cache of a first turn: (text, measurement)."""
        if len(said) == 1:
            for each in self._engines.values():
                each.forget()
        engine = self._engines[contender.model]
        tokens = _read(engine, self._experiment, prompt, said)
        seed = crc32(f"{self._experiment.seed} {label}".encode())
        options = {"ignore_eos": self._experiment.ignore_eos, **contender.options}
        if contender.program is not None:
            self._progress(self.n_done, self.n_tokens_in_all, label)
            baseline = self._baselines[contender.program]
            found = baseline.write(tokens, options=options, n_tokens=n_tokens, seed=seed)
            text = b"".join(map(engine.vocab.piece, found.tokens)).decode("utf-8", "replace")
            return text, Measurement(
                contender=contender.name, n_rounds=found.n_rounds, **vars(found)
            )
        options["max_tokens"] = n_tokens
        if options.get("n_draft") != "auto":  # a text with a seed would not update measured costs
            options.setdefault("seed", seed)
        first: float | None = None
        n_written = 0
        with engine.begin(tokens, CheckedOptions.of(options)) as stream:  # type: ignore[arg-type]
            started = perf_counter()
            for chunk in stream:
                first = perf_counter() - started if first is None else first
                n_written += len(chunk.tokens)
                self._progress(self.n_done + n_written, self.n_tokens_in_all, label)
        done, stats = stream.completion, stream.completion.stats
        return done.text, Measurement(
            contender=contender.name,
            **{name: getattr(stats, name) for name in COUNTS},
            drafted_by_position=stats.drafted_by_position,
            accepted_by_position=stats.accepted_by_position,
            prompt_seconds=stats.seconds.prompt,
            first_token_seconds=first or 0.0,
            generation_seconds=stats.seconds.generation,
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


def _read(engine: Engine, experiment: Experiment, prompt: Prompt, said: Sequence[str]) -> list[int]:
    """The tokens of a prompt: as a chat if the model has a template, else as text."""
    if (chat := experiment.chat) is None:
        wants = prompt.system is not None or bool(prompt.category)
        chat = wants and engine.chat_template is not None
    if not chat:
        return engine.tokenize("\n".join([prompt.system, *said] if prompt.system else said))
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
    """First differences of single-turn texts from plain decoding's at temperature 0; not of all."""
    options_of = {each.name: each.options for each in experiment.contenders}
    found: list[FirstDifference] = []
    for contender in experiment.contenders:
        prompts = {each.name: each for each in experiment.prompts if len(each.turns) == 1}
        n_most = _N_DIVERGENCES
        for text, other in results.greedy_with_plain(contender):
            is_equal = list(text.tokens) == list(other.tokens)
            if is_equal or text.prompt not in prompts or not n_most:
                continue
            given = {"ignore_eos": experiment.ignore_eos, **options_of[contender.baseline or ""]}
            options = CheckedOptions.of(given)  # type: ignore[arg-type]
            prompt = prompts.pop(text.prompt)
            n_most -= 1
            tokens = _read(engine, experiment, prompt, prompt.turns)
            if difference := compare(engine, tokens, other.tokens, text.tokens, options):
                at, gap, rounding = difference.position, difference.gap, difference.rounding
                found.append(FirstDifference(contender.name, text.prompt, at, gap, rounding))
    return found


def describe_machine() -> dict[str, Any]:
    """The processor, GPUs and operating system, on which measured seconds depend."""
    return {"platform": platform.platform(), **devices.machine()}


def peak_rss() -> int | None:
    """Peak resident memory of this process so far, in bytes; None on systems without getrusage."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _conditions(results: BenchResults) -> dict[str, Any]:
    # `platform` may change, as by an update of the system's kernel.
    machine = {name: value for name, value in results.machine.items() if name != "platform"}
    names = [each.name for each in results.contenders]
    options = {
        f"{each.name}: {name}": value
        for each in results.contenders
        for name, value in plain(each.options).items()
    }
    return {**results.settings, "contenders": names, **options, **machine, **results.versions}


def _model_facts(benchmark: PairBenchmark, engine: Engine) -> dict[str, Any]:
    has_gpu = bool(devices.gpus())
    facts: dict[str, Any] = {"placement": engine.placement}
    for whose, context, label in (
        ("target", engine.pair.target, benchmark.target_label),
        ("draft", engine.pair.draft, benchmark.draft_label),
    ):
        if context is None:
            continue
        model = context.model
        n_layers = min(model.n_gpu_layers, model.n_layers) if has_gpu else 0
        facts |= {
            whose: plain(model.path.name),
            f"{whose}_label": label or plain(model.path.name),
            f"{whose}_description": model.description,
            f"{whose}_bytes": model.n_bytes,
            f"{whose}_params": model.n_params,
            f"{whose}_layers": f"{n_layers}/{model.n_layers}",
            f"{whose}_threads": context.n_threads,
        }
    return facts
