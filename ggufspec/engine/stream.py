"""One generation under way: rounds in, chunks of text out, statistics at any time.

Knows tokens and text; neither how the rounds are made, nor who reads the chunks, nor with whom it
shares its passes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from time import perf_counter
from typing import Literal, NamedTuple

from ggufspec.decoding.loop import Steps, timed
from ggufspec.decoding.stats import Stats, summarize
from ggufspec.decoding.types import Ask, Round, Scored
from ggufspec.engine.text import TextStream
from ggufspec.llama.session import LlamaSession

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
    """What a stream runs on. `begin` finds a place for it and `leave` gives that back; in between,
    `session()` is what its passes are made by.

    `read(n_most)` reads the prompt a piece at a time (n_most() tokens, None: many), and returns
    how much of it was known; `share(n)`: its next pass is to be one with those of n texts in all.
    `decode_seconds` is the time spent inside llama_decode up to now; `notes` are what the drafter
    tells of itself, `advice` what to do if it does not pay; `with lock():` is around each step.
    """

    begin: Callable[[], None]
    leave: Callable[[], None]
    session: Callable[[], LlamaSession]
    read: Callable[[Callable[[], int | None]], Generator[None, None, int]]
    steps: Callable[[], Steps]
    share: Callable[[int], None]
    decode_seconds: Callable[[], float]
    notes: Callable[[], Mapping[str, float]]
    advice: Callable[[], str | None]
    lock: Callable[[], AbstractContextManager[object]]


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
        self.is_over = False  # no more chunks will come than are there
        self.is_reading = True  # its prompt, or has not begun
        self.has_begun = False
        self.n_piece: int | None = None  # prompt tokens at a time; None: many
        self._work = work
        self._n_prompt = n_prompt
        self._text_stream = text
        self._piece = piece
        self._stop_tokens = stop_tokens
        self._text: list[str] = []
        self._tokens: list[int] = []
        self._rounds: list[Round] = []
        self._chunks: deque[Chunk] = deque()
        self._asked: Ask | None = None  # and not answered
        self._n_reused = 0
        self._prompt_seconds = self._decode_seconds = 0.0
        self._started_at = self._ended_at = 0.0
        self._steps = self._run()

    def __next__(self) -> Chunk:
        while not self._chunks:
            if self.is_over:
                raise StopIteration
            with self._work.lock():
                self._step_alone()
        return self._chunks.popleft()

    def taken(self) -> list[Chunk]:
        """The chunks that are there and that nobody has taken."""
        chunks = list(self._chunks)
        self._chunks.clear()
        return chunks

    def advance(self, answer: Scored | None = None) -> Ask | None:
        """To the next Ask, which the next call answers; or, None, to the end of a piece of the
        prompt, of a round, or of the text. For who holds the turn, and shares passes.
        """
        if self._asked is not None and answer is None:
            return self._asked  # whoever was to answer was interrupted
        try:
            self._asked = self._steps.send(answer)
        except BaseException as end:
            self.is_over, self._asked = True, None
            if isinstance(end, StopIteration):
                return None
            raise
        return self._asked

    def share(self, n_sharers: int) -> None:
        """The next pass is one with those of `n_sharers` texts in all."""
        self._work.share(n_sharers)

    @property
    def session(self) -> LlamaSession:
        """What answers an Ask of it."""
        return self._work.session()

    def close(self) -> None:
        """Let go of what it holds, before its end. Twice is fine.

        Waits for the round that another thread has under way. Raises OptionError in a callback.
        """
        with self._work.lock():
            self.end()

    def end(self) -> None:
        """The same, for who holds the turn."""
        self.is_over, self._asked = True, None
        self._steps.close()

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

    def _step_alone(self) -> None:
        """The prompt, or a round."""
        is_reading = self.is_reading
        ask = self.advance()
        while ask is None and is_reading and self.is_reading:
            ask = self.advance()
        if ask is None:
            return
        try:
            answer = timed(self.session.score, ask)
        except BaseException:
            self.end()
            raise
        self.advance(answer)

    def _run(self) -> Generator[Ask | None, Scored | None, None]:
        start = perf_counter()
        try:
            self._work.begin()
            self.has_begun = True
            self._n_reused = yield from self._work.read(lambda: self.n_piece)
            self.is_reading = False
            self._started_at = self._ended_at = perf_counter()
            self._prompt_seconds = self._started_at - start
            yield from self._write_all(self._work.steps())
        finally:
            self._work.leave()

    def _write_all(self, steps: Steps) -> Generator[Ask | None, Scored | None, None]:
        decoded_before = self._work.decode_seconds()
        answer: Scored | None = None
        try:
            while self.finish_reason is None:
                try:
                    step = steps.send(answer)
                except StopIteration:
                    self.finish_reason = "length"
                    self._chunks += self._written(self._text_stream.finish(), [], drafted=False)
                    return
                if isinstance(step, Ask):
                    answer = yield step
                    continue
                answer = None
                self._rounds.append(step)
                self._chunks += self._chunks_of(step)
                if self.finish_reason is None:
                    yield None
        finally:
            steps.close()
            self._decode_seconds = self._work.decode_seconds() - decoded_before

    def _chunks_of(self, round_: Round) -> list[Chunk]:
        n_accepted = round_.n_accepted
        chunks = self._write(round_.tokens[:n_accepted], drafted=True) if n_accepted else []
        if self.finish_reason is None:
            chunks += self._write(round_.tokens[n_accepted:], drafted=False)
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
