"""One generation under way: rounds in, chunks of text out, statistics at any time.

Knows tokens and text; neither how the rounds are made, nor who reads the chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from time import perf_counter
from typing import Literal, NamedTuple

from ggufspec.core import Round
from ggufspec.stats import Stats, summarize
from ggufspec.text import TextStream

FinishReason = Literal["stop", "length"]


class Chunk(NamedTuple):
    """A piece of the text by one author: `drafted` says for each token whether the draft wrote it.

    `text` may lag behind `tokens`, by part of a character or of a stop string.
    """

    text: str
    tokens: tuple[int, ...]
    drafted: tuple[bool, ...]


@dataclass(frozen=True)
class Completion:
    """What was written.

    `tokens` are without the end-of-generation token; `finish_reason` is "stop" (the model ended,
    or a stop string came), "length" (max_tokens, or the context is full), None if cut short.
    `advice`: what to change, where a draft of this pair does not pay.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason | None
    stats: Stats
    advice: str | None = None


@dataclass(frozen=True)
class Work:
    """What a stream runs on. `read` reads the prompt and returns how much of it was known;

    `decode_seconds` is the time spent inside llama_decode up to now; `notes` are what the drafter
    tells of itself, `advice` what to do if it does not pay; `turn` is held for each step.
    """

    read: Callable[[], int]
    rounds: Callable[[], Iterator[Round]]
    decode_seconds: Callable[[], float]
    notes: Callable[[], Mapping[str, float]]
    advice: Callable[[], str | None]
    turn: AbstractContextManager[object]


class Stream(Iterator[Chunk]):
    """The chunks of one generation. At any time, `completion` is what there is so far."""

    def __init__(
        self,
        work: Work,
        *,
        n_prompt: int,
        seed: int,
        text: TextStream,
        piece: Callable[[int], bytes],
        stop_tokens: Collection[int],
    ) -> None:
        self.seed = seed
        self.finish_reason: FinishReason | None = None
        self._work = work
        self._n_prompt = n_prompt
        self._text_stream = text
        self._piece = piece
        self._stop_tokens = stop_tokens
        self._text: list[str] = []
        self._tokens: list[int] = []
        self._rounds: list[Round] = []
        self._n_reused = 0
        self._prompt_seconds = self._decode_seconds = 0.0
        self._started_at = self._ended_at = 0.0
        self._chunks = self._run()

    def __next__(self) -> Chunk:
        return next(self._chunks)

    @property
    def completion(self) -> Completion:
        """Text, tokens and statistics so far; the share of llama_decode once it has ended."""
        stats = summarize(
            self._rounds,
            n_prompt=self._n_prompt,
            n_prompt_reused=self._n_reused,
            n_generated=len(self._tokens),
            prompt_seconds=self._prompt_seconds,
            generation_seconds=self._ended_at - self._started_at,
            decode_seconds=self._decode_seconds,
            notes=self._work.notes(),
        )
        text, tokens = "".join(self._text), tuple(self._tokens)
        return Completion(text, tokens, self.finish_reason, stats, self._work.advice())

    @property
    def rounds(self) -> tuple[Round, ...]:
        """The rounds so far: tokens as they were drawn, the end-of-generation token included."""
        return tuple(self._rounds)

    def _run(self) -> Iterator[Chunk]:
        start = perf_counter()
        with self._work.turn:
            self._n_reused = self._work.read()
        self._started_at = self._ended_at = perf_counter()
        self._prompt_seconds = self._started_at - start
        decoded_before = self._work.decode_seconds()
        rounds = self._work.rounds()
        try:
            while self.finish_reason is None:
                with self._work.turn:
                    turn = next(rounds, None)
                if turn is None:
                    self.finish_reason = "length"
                    yield from self._written(self._text_stream.finish(), [], drafted=False)
                else:
                    self._rounds.append(turn)
                    yield from self._chunks_of(turn)
        finally:
            self._decode_seconds = self._work.decode_seconds() - decoded_before

    def _chunks_of(self, turn: Round) -> list[Chunk]:
        n_accepted = turn.n_accepted
        chunks = self._write(turn.tokens[:n_accepted], drafted=True) if n_accepted else []
        if self.finish_reason is None:
            chunks += self._write(turn.tokens[n_accepted:], drafted=False)
        self._ended_at = perf_counter()
        return chunks

    def _write(self, run: Sequence[int], *, drafted: bool) -> list[Chunk]:
        """Tokens by one author -> their chunk; sets finish_reason if the text ends among them."""
        tokens: list[int] = []
        text = ""
        for token in run:
            if token in self._stop_tokens:
                self.finish_reason = "stop"
                text += self._text_stream.finish()
                break
            tokens.append(token)
            text += self._text_stream.push(self._piece(token))
            if self._text_stream.stopped:
                self.finish_reason = "stop"
                break
        return self._written(text, tokens, drafted=drafted)

    def _written(self, text: str, tokens: list[int], *, drafted: bool) -> list[Chunk]:
        if not text and not tokens:
            return []
        self._text.append(text)
        self._tokens += tokens
        return [Chunk(text, tuple(tokens), (drafted,) * len(tokens))]
