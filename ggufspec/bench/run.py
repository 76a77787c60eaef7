"""Who writes when, and what the clock says: contenders in turns, each text a Measurement.

Knows engines, peers and clocks; prints nothing and concludes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any
from zlib import crc32

from ggufspec.bench.baselines import Peer
from ggufspec.bench.contenders import in_turn
from ggufspec.bench.energy import Meter
from ggufspec.bench.prompts import Prompt
from ggufspec.bench.records import Contender, Key, Measurement, Parting, Results, Turn
from ggufspec.engine import scoring
from ggufspec.engine.engine import Engine
from ggufspec.engine.text import Message
from ggufspec.errors import OptionError, PromptError

Heard = Callable[[int, int, str], None]  # tokens written, of how many in all, what is going on
Told = Callable[[str], None]  # why a peer has left out a text

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
        for run in range(self.n_runs):
            for i, prompt in enumerate(self.prompts):
                turn = in_turn(self.contenders, run * len(self.prompts) + i)
                yield from (Key(each.name, prompt.name, run) for each in turn)


def measure(
    engine: Engine,
    plan: Plan,
    *,
    done: Collection[Key] = (),
    heard: Heard | None = None,
    peers: Sequence[Peer] = (),
    told: Told | None = None,
) -> Iterator[Measurement]:
    """Warm up, then write every text that is not `done`; each is yielded when it is finished.

    Every text begins with an empty cache, so that the time to the first token is a real one.
    `peers`: those that contenders name. A prompt that is too long is left out, and one that a peer
    cannot read as we do, for that peer; `told` hears why. Raises GgufspecError, and PromptError
    where no prompt is left.
    """
    contenders = {each.name: each for each in plan.contenders}
    prompts = {each.name: each for each in plan.prompts}
    left = [key for key in plan.order() if key not in done]
    if not left:
        return
    writer = _Writer(engine, plan, heard, peers)
    unread = _unread(writer, plan.prompts)
    for name, error in unread.items():
        if len(unread) == len(prompts):
            raise error
        if told is not None:
            told(f"prompt {name} is left out: {error}")
    left = [key for key in left if key.prompt not in unread]
    n_turns = sum(len(prompts[key.prompt].turns) for key in left)
    warm = [name for name in contenders if any(key.contender == name for key in left)]
    writer.total = len(warm) * plan.n_warm_up + n_turns * plan.n_tokens
    first = next(each for each in plan.prompts if each.name not in unread)
    for name in warm:
        try:
            writer.warm_up(contenders[name], first)
        except PromptError as error:
            if told is not None:
                told(f"{name}, warm-up: {error}")
    left_out: set[Key] = set()
    for key in left:
        try:
            text = writer.write(contenders[key.contender], prompts[key.prompt], key.run)
        except PromptError as error:  # of a peer, or of an answer that left no room for the next
            once = key._replace(run=0)
            if told is not None and once not in left_out:
                told(f"{key.contender} leaves out prompt {key.prompt}: {error}")
            left_out.add(once)
        else:
            yield text


def _unread(writer: _Writer, prompts: Sequence[Prompt]) -> dict[str, PromptError]:
    """The prompts that cannot be continued, and why: to be known before hours are spent."""
    unread = {}
    for prompt in prompts:
        try:
            writer.check(prompt)
        except PromptError as error:
            unread[prompt.name] = error
    return unread


class _Writer:
    """Has texts written by the pair, the draft alone, or a peer, and holds the clock."""

    def __init__(
        self,
        engine: Engine,
        plan: Plan,
        heard: Heard | None,
        peers: Sequence[Peer] = (),
    ) -> None:
        self._engine = engine
        self._engines = {"pair": engine}
        if any(contender.model == "draft" for contender in plan.contenders):
            self._engines["draft"] = scoring.draft_alone(engine)
        self._peers = {peer.name: peer for peer in peers}
        self._plan = plan
        self._heard = heard
        self._n_done = 0
        self.total = 1  # tokens, which who asks for texts knows
        self._meter = Meter()
        self._started_at = perf_counter()

    def check(self, prompt: Prompt) -> None:
        """Raises PromptError where its first turn cannot be read, or leaves no room for a token."""
        self._read(self._engine, prompt, prompt.turns[:1])

    def warm_up(self, contender: Contender, prompt: Prompt) -> None:
        """The first texts of all are slower: they count for nobody."""
        n_tokens = min(self._plan.n_warm_up, self._plan.n_tokens)
        try:
            if n_tokens:
                self._forget()
                tokens = self._read(self._engine_of(contender), prompt, [prompt.turns[0]])
                self._one(contender, tokens, n_tokens, f"warm-up: {contender.name}")
        finally:
            self._n_done += self._plan.n_warm_up

    def write(self, contender: Contender, prompt: Prompt, run: int) -> Measurement:
        """All turns of a prompt, which count as one text. Raises PromptError."""
        self._forget()
        at = perf_counter() - self._started_at
        n_end = self._n_done + len(prompt.turns) * self._plan.n_tokens
        joules = self._meter.joules()
        try:
            parts = self._parts(contender, prompt, run)
        finally:
            self._n_done = n_end
        used = self._meter.joules() if all(part.has_energy for part in parts) else None
        return Measurement(
            contender=contender.name,
            prompt=prompt.name,
            run=run,
            category=prompt.category,
            at=at,
            n_prompt=sum(part.n_prompt for part in parts),
            n_generated=sum(part.n_generated for part in parts),
            n_rounds=sum(part.n_rounds for part in parts),
            n_drafted=sum(part.n_drafted for part in parts),
            n_accepted=sum(part.n_accepted for part in parts),
            drafted_by_position=_added([part.drafted_by_position for part in parts]),
            accepted_by_position=_added([part.accepted_by_position for part in parts]),
            prompt_seconds=sum(part.prompt_seconds for part in parts),
            first_token_seconds=parts[0].first_token_seconds,
            generation_seconds=sum(part.generation_seconds for part in parts),
            joules=None if joules is None or used is None else used - joules,
            tokens=[token for part in parts for token in part.tokens],
            rounds=[turn for part in parts for turn in part.rounds],
        )

    def _parts(self, contender: Contender, prompt: Prompt, run: int) -> list[_Part]:
        """The answers to the turns of a prompt, one behind the other."""
        label = f"{contender.name}: {prompt.name}, run {run + 1} of {self._plan.n_runs}"
        said: list[str] = []
        parts: list[_Part] = []
        for turn in prompt.turns:
            said.append(turn)
            tokens = self._read(self._engine_of(contender), prompt, said)
            part = self._one(contender, tokens, self._plan.n_tokens, label)
            said.append(part.text)
            parts.append(part)
            self._n_done += self._plan.n_tokens
        return parts

    def _one(self, contender: Contender, tokens: list[int], n_tokens: int, label: str) -> _Part:
        seed = crc32(f"{self._plan.seed} {label}".encode())
        if contender.peer is None:
            return self._by_engine(contender, tokens, n_tokens, label, seed)
        if self._heard is not None:
            self._heard(self._n_done, self.total, label)
        return self._by_peer(contender, tokens, n_tokens, seed)

    def _by_engine(
        self, contender: Contender, tokens: list[int], n_tokens: int, label: str, seed: int
    ) -> _Part:
        # As people mostly run `auto`: a text with a seed would learn nothing of what passes cost.
        learns = contender.options.get("n_draft") == "auto"
        options: dict[str, Any] = {
            "seed": None if learns else seed,
            "ignore_eos": self._plan.ignore_eos,
            **contender.options,
            "max_tokens": n_tokens,
        }
        stream = self._engine_of(contender).stream(tokens, **options)
        started = perf_counter()
        first: float | None = None
        n_written = 0
        for chunk in stream:
            first = perf_counter() - started if first is None else first
            n_written += len(chunk.tokens)
            if self._heard is not None:
                self._heard(self._n_done + n_written, self.total, label)
        done = stream.completion
        stats = done.stats
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
        return _Part(
            text=done.text,
            tokens=list(done.tokens),
            n_prompt=stats.n_prompt,
            n_generated=stats.n_generated,
            n_rounds=stats.n_rounds,
            n_drafted=stats.n_drafted,
            n_accepted=stats.n_accepted,
            drafted_by_position=stats.drafted_by_position,
            accepted_by_position=stats.accepted_by_position,
            prompt_seconds=stats.seconds.prompt,
            first_token_seconds=first or 0.0,
            generation_seconds=stats.seconds.generation,
            rounds=rounds,
        )

    def _by_peer(self, contender: Contender, tokens: list[int], n_tokens: int, seed: int) -> _Part:
        peer = self._peers.get(contender.peer or "")
        if peer is None:
            raise OptionError(f"there is no peer {contender.peer!r} to write as {contender.name!r}")
        done = peer.write(
            tokens,
            text_of(self._engine, tokens),
            options={"ignore_eos": self._plan.ignore_eos, **contender.options},
            n_tokens=n_tokens,
            seed=seed,
        )
        pieces = b"".join(self._engine.vocab.piece(token) for token in done.tokens)
        return _Part(
            text=pieces.decode("utf-8", "replace") if done.tokens else done.text,
            tokens=list(done.tokens),
            n_prompt=done.n_prompt,
            n_generated=done.n_generated,
            n_rounds=done.n_rounds,
            n_drafted=done.n_drafted,
            n_accepted=done.n_accepted,
            prompt_seconds=done.prompt_seconds,
            first_token_seconds=done.first_token_seconds,
            generation_seconds=done.generation_seconds,
            has_energy=peer.is_resident,
        )

    def _engine_of(self, contender: Contender) -> Engine:
        """Who writes; of a peer, who reads its prompts for it."""
        return self._engine if contender.peer is not None else self._engines[contender.model]

    def _forget(self) -> None:
        for engine in self._engines.values():
            engine.forget()

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
    """The answer to one turn."""

    text: str
    tokens: list[int]
    n_prompt: int
    n_generated: int
    n_rounds: int
    n_drafted: int
    n_accepted: int
    prompt_seconds: float
    first_token_seconds: float
    generation_seconds: float
    drafted_by_position: Sequence[int] = ()
    accepted_by_position: Sequence[int] = ()
    rounds: Sequence[Turn] = ()
    has_energy: bool = True


def text_of(engine: Engine, tokens: Sequence[int]) -> str | None:
    """The text that tokenizes to these tokens, special ones by their names; None: there is none."""
    vocab = engine.vocab
    added = vocab.tokenize("", add_special=True, parse_special=True)
    rest = tokens[len(added) :] if list(tokens[: len(added)]) == added else tokens
    shown = [vocab.shown(token) for token in rest]
    is_special = [vocab.piece(token) != text for token, text in zip(rest, shown, strict=True)]
    # Some vocabularies put a space in front of a text, and behind each special token.
    bare = [
        text.removeprefix(b" ") if i == 0 or is_special[i - 1] else text
        for i, text in enumerate(shown)
    ]
    for pieces in (shown, bare):
        text = b"".join(pieces).decode("utf-8", "replace")
        if text and vocab.tokenize(text, add_special=True, parse_special=True) == list(tokens):
            return text
    return None


def partings(engine: Engine, plan: Plan, results: Results) -> list[Parting]:
    """Where texts at temperature 0 left plain's, and how near to a tie that was.

    Of each contender, the first few are looked into, those of one turn alone.
    """
    prompts = {each.name: each for each in plan.prompts if len(each.turns) == 1}
    writer = _Writer(engine, plan, None)
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
            row = next(scoring.logits(engine, before, [other.tokens[n_same]], whose="target"))[0]
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
