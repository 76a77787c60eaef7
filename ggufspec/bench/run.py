"""Who writes when, and what the clock says: contenders in turns, each text a Measurement.

Knows engines and clocks; prints nothing and concludes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any
from zlib import crc32

from ggufspec.bench.energy import Meter
from ggufspec.bench.prompts import Prompt
from ggufspec.bench.records import Contender, Key, Measurement, Parting, Results, Turn
from ggufspec.engine import Engine
from ggufspec.errors import PromptError
from ggufspec.text import Message

Heard = Callable[[int, int, str], None]  # tokens written, of how many in all, what is going on

_STEPS = (5, 3, 2, 1)  # contenders by which the order moves on in each turn
_N_LOOKED = 3  # partings of a contender that are looked into


@dataclass(frozen=True)
class Plan:
    """What is to be written. `chat`: through the target's chat template; None: where it has one
    and the prompt has more than a text to continue."""

    contenders: Sequence[Contender]
    prompts: Sequence[Prompt]
    n_runs: int
    n_tokens: int
    n_warm_up: int = 16
    seed: int = 0
    ignore_eos: bool = True
    chat: bool | None = None

    @property
    def n_texts(self) -> int:
        return len(self.contenders) * len(self.prompts) * self.n_runs

    def order(self) -> Iterator[Key]:
        """All texts in the order in which they are written: the contenders take turns."""
        n = len(self.contenders)
        step = next(step for step in _STEPS if math.gcd(step, n) == 1)  # so that each begins
        for run in range(self.n_runs):
            for i, prompt in enumerate(self.prompts):
                first = (run * len(self.prompts) + i) * step % n
                turn = [*self.contenders[first:], *self.contenders[:first]]
                yield from (Key(each.name, prompt.name, run) for each in turn)


def measure(
    engine: Engine, plan: Plan, *, done: Collection[Key] = (), heard: Heard | None = None
) -> Iterator[Measurement]:
    """Warm up, then write every text that is not `done`; each is yielded when it is finished.

    Every text begins with an empty cache, so that the time to the first token is a real one.
    Raises GgufspecError.
    """
    contenders = {each.name: each for each in plan.contenders}
    prompts = {each.name: each for each in plan.prompts}
    left = [key for key in plan.order() if key not in done]
    if not left:
        return
    n_turns = sum(len(prompts[key.prompt].turns) for key in left)
    warm = [name for name in contenders if any(key.contender == name for key in left)]
    total = len(warm) * plan.n_warm_up + n_turns * plan.n_tokens
    writer = _Writer(engine, plan, heard, total)
    for name in warm:
        writer.warm_up(contenders[name], plan.prompts[0])
    for key in left:
        yield writer.write(contenders[key.contender], prompts[key.prompt], key.run)


class _Writer:
    """Writes texts with the pair or with the draft alone, and holds the clock."""

    def __init__(self, engine: Engine, plan: Plan, heard: Heard | None, total: int) -> None:
        self._engines = {"pair": engine}
        if any(contender.model == "draft" for contender in plan.contenders):
            self._engines["draft"] = engine.draft_alone()
        self._plan = plan
        self._heard = heard
        self._n_done, self._total = 0, total
        self._meter = Meter()
        self._started_at = perf_counter()

    def warm_up(self, contender: Contender, prompt: Prompt) -> None:
        """The first texts of all are slower: they count for nobody."""
        n_tokens = min(self._plan.n_warm_up, self._plan.n_tokens)
        if n_tokens:
            engine = self._engines[contender.model]
            engine.forget()
            tokens = self._read(engine, prompt, [prompt.turns[0]])
            self._one(engine, contender, tokens, n_tokens, f"warm-up: {contender.name}")
        self._n_done += self._plan.n_warm_up

    def write(self, contender: Contender, prompt: Prompt, run: int) -> Measurement:
        """All turns of a prompt, which count as one text."""
        for engine in self._engines.values():
            engine.forget()
        engine = self._engines[contender.model]
        at = perf_counter() - self._started_at
        label = f"{contender.name}: {prompt.name}, run {run + 1} of {self._plan.n_runs}"
        said: list[str] = []
        parts: list[_Part] = []
        joules = self._meter.joules()
        for turn in prompt.turns:
            said.append(turn)
            tokens = self._read(engine, prompt, said)
            part = self._one(engine, contender, tokens, self._plan.n_tokens, label)
            said.append(part.text)
            parts.append(part)
            self._n_done += self._plan.n_tokens
        used = self._meter.joules()
        return Measurement(
            contender=contender.name,
            prompt=prompt.name,
            run=run,
            category=prompt.category,
            at=at,
            n_prompt=sum(part.stats.n_prompt for part in parts),
            n_generated=sum(part.stats.n_generated for part in parts),
            n_rounds=sum(part.stats.n_rounds for part in parts),
            n_drafted=sum(part.stats.n_drafted for part in parts),
            n_accepted=sum(part.stats.n_accepted for part in parts),
            drafted_by_position=_added([part.stats.drafted_by_position for part in parts]),
            accepted_by_position=_added([part.stats.accepted_by_position for part in parts]),
            prompt_seconds=sum(part.stats.seconds.prompt for part in parts),
            first_token_seconds=parts[0].first_token_seconds,
            generation_seconds=sum(part.stats.seconds.generation for part in parts),
            joules=None if joules is None or used is None else used - joules,
            tokens=[token for part in parts for token in part.tokens],
            rounds=[turn for part in parts for turn in part.rounds],
        )

    def _one(
        self,
        engine: Engine,
        contender: Contender,
        tokens: list[int],
        n_tokens: int,
        label: str,
    ) -> _Part:
        # As people mostly run `auto`: a text with a seed would learn nothing of what passes cost.
        learns = contender.options.get("n_draft") == "auto"
        seed = None if learns else crc32(f"{self._plan.seed} {label}".encode())
        options: dict[str, Any] = {
            "seed": seed,
            "ignore_eos": self._plan.ignore_eos,
            **contender.options,
            "max_tokens": n_tokens,
        }
        stream = engine.stream(tokens, **options)
        started = perf_counter()
        first: float | None = None
        n_written = 0
        for chunk in stream:
            first = perf_counter() - started if first is None else first
            n_written += len(chunk.tokens)
            if self._heard is not None:
                self._heard(self._n_done + n_written, self._total, label)
        done = stream.completion
        rounds = [
            Turn(
                len(turn.tokens),
                turn.n_drafted,
                turn.n_accepted,
                turn.draft_seconds,
                turn.target_seconds + turn.verify_seconds,
            )
            for turn in stream.rounds
        ]
        return _Part(done.text, list(done.tokens), done.stats, rounds, first or 0.0)

    def _read(self, engine: Engine, prompt: Prompt, said: Sequence[str]) -> list[int]:
        """The tokens of a prompt: a chat where the model has a template for it, else a text."""
        chat = self._plan.chat
        if chat is None:
            wants = prompt.system is not None or bool(prompt.category)
            chat = wants and engine.target.model.chat_template is not None
        if not chat:
            text = "\n".join([prompt.system, *said] if prompt.system else said)
            return engine.tokenize(text)
        roles = ("user", "assistant")
        messages: list[Message] = [
            {"role": roles[i % 2], "content": text} for i, text in enumerate(said)
        ]
        if prompt.system is not None:
            messages.insert(0, {"role": "system", "content": prompt.system})
        tokens = engine.render(messages)
        if len(tokens) >= engine.n_ctx:
            raise PromptError(
                f"prompt {prompt.name} has {len(tokens):,} tokens, the context {engine.n_ctx:,}; "
                "load with a larger context (-c), or leave it out"
            )
        return tokens


@dataclass(frozen=True)
class _Part:
    text: str
    tokens: list[int]
    stats: Any
    rounds: list[Turn]
    first_token_seconds: float


def partings(engine: Engine, plan: Plan, results: Results) -> list[Parting]:
    """Where texts at temperature 0 left plain's, and how near to a tie that was.

    Of each contender, the first few are looked into, those of one turn alone.
    """
    prompts = {each.name: each for each in plan.prompts if len(each.turns) == 1}
    writer = _Writer(engine, plan, None, 0)
    found: list[Parting] = []
    for contender in plan.contenders:
        if contender.baseline is None or contender.temperature > 0:
            continue
        plain = {each.key._replace(contender=""): each for each in results.of(contender.baseline)}
        n_looked, seen = 0, set()
        for text in results.of(contender.name):
            other = plain.get(text.key._replace(contender=""))
            if other is None or text.prompt not in prompts or text.prompt in seen:
                continue
            n_same = _n_common(text.tokens, other.tokens)
            if n_same == min(len(text.tokens), len(other.tokens)) or n_looked == _N_LOOKED:
                continue
            seen.add(text.prompt)
            n_looked += 1
            prompt = prompts[text.prompt]
            before = [*writer._read(engine, prompt, prompt.turns), *other.tokens[:n_same]]
            engine.forget()
            row = next(engine.logits(before, [other.tokens[n_same]], whose="target"))[0]
            margin = abs(float(row[other.tokens[n_same]] - row[text.tokens[n_same]]))
            found.append(Parting(contender.name, text.prompt, n_same, margin))
    return found


def _n_common(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _added(counts: Sequence[Sequence[int]]) -> list[int]:
    """Sums by position, of counts that reach more or less far."""
    n = max(map(len, counts), default=0)
    return [sum(each[i] for each in counts if i < len(each)) for i in range(n)]
