"""One generation, from the tokens of a prompt to the end of the text, in steps."""

from __future__ import annotations

import secrets
from array import array
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from ggufspec.common.progress import NamedProgress
from ggufspec.decoding import verify as rules
from ggufspec.decoding.loop import Steps, speculate
from ggufspec.decoding.rng import by_position, stage_streams, uniform_streams
from ggufspec.decoding.stats import summarize
from ggufspec.decoding.types import Ask, Drafter, Logits, Round, Scored
from ggufspec.drafting import strategies as drafters
from ggufspec.drafting.draft_length import AutoLength, LengthPolicy
from ggufspec.drafting.fixed_length import FixedLength
from ggufspec.drafting.forced_text import ForcedText
from ggufspec.drafting.pair_profile import fixed_length
from ggufspec.engine.calibration import calibrate, calibrate_draft
from ggufspec.engine.completion import Chunk, Completion, FinishReason
from ggufspec.engine.constraints import sampling_of
from ggufspec.engine.logprobs import TokenLogprobs, logprobs_of
from ggufspec.engine.options import CheckedOptions
from ggufspec.engine.pair import Pair
from ggufspec.engine.reading import reading
from ggufspec.engine.slots import DraftSession, SlotLease
from ggufspec.engine.text import TextStream
from ggufspec.llama.session import LlamaSession


class Generation:
    """A text under way: it owns its tokens, slot, drafter, loop and statistics.

    Call `read` until `is_reading` is false; then `ask` and `answer`, alternately, until `is_over`.
    The caller holds the engine's lock during each call. A generation that raised is over.
    """

    def __init__(
        self,
        pair: Pair,
        tokens: Sequence[int],
        options: CheckedOptions,
        *,
        seed: int | None = None,
        progress: NamedProgress | None = None,
        n_top: int | None = None,
    ) -> None:
        """`tokens`: as Engine.tokenize returns them. `seed`, `progress`: instead of the options'.

        `n_top`: chunks have the log-probabilities of their tokens and of the so many likeliest
        instead, before sampling, from the logits that verify the draft. None: they have none.

        Raises OptionError, DecodeError, ClosedError.
        """
        seed = options.seed if seed is None else seed
        self.seed = secrets.randbits(32) if seed is None else seed
        self.finish_reason: FinishReason | None = None
        self.is_over = False  # no further chunks will be added
        self.is_reading = True  # its prompt is not processed yet
        self.has_begun = False  # it has a slot
        self.session: LlamaSession  # of the target, once it has begun
        self.chunks: deque[Chunk] = deque()  # not taken yet
        self.rounds: list[Round] = []
        self.lock = pair.lock
        self._pair = pair
        self._prompt = tokens
        self._n_top = n_top
        self.n_prompt = len(tokens)
        self.arrived_at = perf_counter()
        self._all_tokens = array("i", tokens)  # with the text, and its stop token
        self._lease = SlotLease(pair.slots)
        below = pair.draft_of_draft
        drafter_name = options.drafter_name(
            has_draft=pair.draft is not None, has_draft_of_draft=below is not None
        )
        self._has_model = pair.draft is not None and drafters.uses_model(drafter_name)
        self._has_third_model = below is not None and drafters.uses_stage(drafter_name)
        can_stage = pair.draft is not None and pair.head is None
        self._has_stage = self._has_third_model or (can_stage and drafter_name == "staged")
        self._temperature = options.sampling.effective_temperature
        self._progress = options.progress if progress is None else progress
        in_blocks = rules.known(options.verify) == "traversal"
        self._policy: LengthPolicy = FixedLength()
        self._policy_of_draft: LengthPolicy = FixedLength()
        if options.tree == "on":
            self._policy = fixed_length(self._temperature, in_blocks=in_blocks)
        if options.n_draft == "auto" and drafter_name != "none":
            repeats = seed is not None and (self._temperature > 0 or pair.repeats_greedy_texts)
            how = {"repeats": repeats, "in_blocks": in_blocks}
            if repeats:
                calibrate(pair, self._progress)
            self._policy = pair.profile.policy(self._temperature, has_model=self._has_model, **how)
            if self._has_stage:
                if repeats:
                    calibrate_draft(pair)
                self._policy_of_draft = pair.profile_of_draft.policy(
                    self._temperature, has_model=self._has_third_model, **how
                )
        self._n_sharers = 1
        self._drafter, self._loop = self._made(options, drafter_name)
        self._asked: Ask | None = None  # not answered yet
        self._pieces = self._read()
        self._n_piece: int | None = None
        self._text_stream = TextStream(
            options.stop,
            b"".join(map(pair.vocab.piece, tokens[-3:])),  # a character has four bytes at most
        )
        self._piece_of = pair.vocab.piece
        if shown := options.shown_tokens:
            vocab = pair.vocab
            self._piece_of = lambda token: (vocab.shown if token in shown else vocab.piece)(token)
        self._end_tokens = {*pair.vocab.stop_tokens, *options.stop_tokens}
        self._text: list[str] = []
        self._tokens: list[int] = []
        self._n_reused = 0
        self._n_left = 0  # tokens of the prompt that the first pass reads, but for the last one
        self._begun_at = self._prompt_seconds = self._started_at = self._ended_at = 0.0
        self._decode_seconds_before = self._decode_seconds = 0.0

    def set_n_sharers(self, n_sharers: int) -> None:
        """So many texts are written at the same time."""
        if n_sharers != self._n_sharers:
            self._n_sharers = n_sharers
            self._policy.set_n_sharers(n_sharers)

    def read(self, n_most: int | None = None) -> None:
        """Process a piece of the prompt of at most `n_most` tokens; None: as many as are quick."""
        self._n_piece = n_most
        try:
            self.is_reading = next(self._pieces, False) is None  # False: that was the last piece
        except BaseException:
            self.end()
            raise

    def unread(self) -> Sequence[int]:
        """The tokens that the target has to process before the last one of the prompt.

        Takes a slot first. Another part of a shared pass may process them, instead of `read`.
        """
        try:
            if not self.has_begun:
                self._begin()
            return self.session.unread(self._prompt[:-1])
        except BaseException:
            self.end()
            raise

    @property
    def reads_alone(self) -> bool:
        """Whether only `read` may process the prompt: it reports progress."""
        return self._progress is not None

    @property
    def draft_reads_ahead(self) -> bool:
        """Whether a draft model has to read the prompt; else `leave_unread` may be called."""
        if not (self._has_model or self._has_third_model):
            return False
        # A head reads hidden states, which the target does not keep.
        return self._pair.head is not None or self._policy.reads_ahead(self.n_prompt)

    def leave_unread(self, n_left: int) -> None:
        """Leave the last tokens of the prompt to the pass of the first `ask`."""
        self._n_left = n_left
        self._pieces.close()
        self.is_reading = False
        self._end_reading()

    def ask(self, n_sharers: int = 1) -> Ask | None:
        """What it needs of the target next, or None at the end of the text.

        The same again until it is answered. `n_sharers`: how many texts have the pass together.
        """
        if self._asked is not None or self.is_over:
            return self._asked
        self.set_n_sharers(n_sharers)
        try:
            if self._pair.target.options.is_exact:  # another text may have used the slot
                self.session.feed(self._all_tokens[: len(self._prompt) - 1])
            step = next(self._loop, None)
            if step is None:
                self._finish()
            else:
                assert isinstance(step, Ask)
                self._asked = step
        except BaseException:
            self.end()
            raise
        return self._asked

    def answer(self, scored: Scored) -> None:
        """Complete the round of the last `ask`, and add its chunks."""
        self._asked = None
        if self._n_left:  # the tokens of its prompt shared the pass
            scored = scored._replace(n_sharers=scored.n_sharers * (self._n_left + 1))
            self._n_left = 0
            self._end_reading()
        try:
            round_ = self._loop.send(scored)
            assert isinstance(round_, Round)
            self._policy.observe_round(round_)
            self.rounds.append(round_)
            self._write(round_, scored.logits)
            if self.finish_reason is not None:
                self.end()
            elif len(self._all_tokens) >= self._n_end:
                self._finish()
        except BaseException:
            self.end()
            raise

    def _finish(self) -> None:
        constraint = self._constraint
        is_complete = constraint is not None and constraint.is_over(self._all_tokens)
        self.finish_reason = "stop" if is_complete else "length"
        self._write_run((), (), drafted=False)  # the text that was held back
        self.end()

    def end(self) -> None:
        """Give the slot back and store what was learned of the pair. Twice is fine."""
        self._lease.leave()
        self._asked = None
        if self.is_over:
            return
        self.is_over = True
        self._pieces.close()
        self._loop.close()
        if not self.is_reading:
            self._decode_seconds = self._pair.decode_seconds - self._decode_seconds_before
        if isinstance(self._policy, AutoLength):
            self._pair.profile.keep(self._policy, self._temperature)
        if isinstance(self._policy_of_draft, AutoLength):
            self._pair.profile_of_draft.keep(self._policy_of_draft, self._temperature)

    def close(self) -> None:
        """End it from outside: waits for a round that another thread has under way.

        Raises OptionError in a progress callback.
        """
        with self.lock.held():
            self.end()

    @property
    def completion(self) -> Completion:
        """Text, tokens and statistics so far; the time in llama_decode once it is over."""
        notes: Mapping[str, float] = getattr(self._drafter, "notes", dict)()
        stats = summarize(
            self.rounds,
            n_prompt=len(self._prompt),
            n_prompt_reused=self._n_reused,
            n_generated=len(self._tokens),
            prompt_seconds=self._prompt_seconds,
            generation_seconds=self._ended_at - self._started_at,
            decode_seconds=self._decode_seconds,
            notes=notes,
        )
        text, tokens = "".join(self._text), tuple(self._tokens)
        return Completion(text, tokens, self.finish_reason, stats, self._policy.advice())

    def _made(self, options: CheckedOptions, drafter_name: str) -> tuple[Drafter, Steps]:
        """The drafter and the loop. Raises OptionError."""
        pair, n_prompt = self._pair, self.n_prompt
        n_draft = pair.n_draft(options)
        progress = self.lock.callback(self._progress)
        heard = progress and partial(progress, "vocabulary")
        sampling = sampling_of(options, pair.vocab, n_prompt, heard)
        self._constraint = sampling.constraint
        ends = () if options.ignore_eos else pair.vocab.stop_tokens
        stop_tokens = frozenset((*ends, *options.stop_tokens))
        verify_uniforms, draft_uniforms = uniform_streams(self.seed)
        if pair.target.options.is_exact and rules.known(options.verify) == "match":
            verify_uniforms = by_position(verify_uniforms, self._all_tokens)
        materials = drafters.Materials(
            sampling,
            draft_uniforms,
            stop_tokens,
            self._lease if pair.draft else None,
            draft_temperature=options.initial_draft_temperature,
            n_draft_max=n_draft,
            tree=options.tree,
            n_leaves=pair.n_leaves(options),
            policy=self._policy,
            forced=ForcedText(sampling.constraint),
        )
        if self._has_stage:
            materials = replace(materials, stage=self._stage(materials, options))
        drafter: Drafter = drafters.make(drafter_name, materials)
        n_most = pair.target.n_ctx if options.max_tokens is None else options.max_tokens
        self._n_end = min(n_prompt + n_most, pair.target.n_ctx)
        loop = speculate(
            self._all_tokens,
            drafter=drafter,
            verify=rules.rule(options.verify),
            sampling=sampling,
            uniforms=verify_uniforms,
            n_draft=n_draft,
            n_end=self._n_end,
            stop_tokens=stop_tokens,
        )
        return drafter, loop

    def _stage(self, materials: drafters.Materials, options: CheckedOptions) -> drafters.Stage:
        """How the draft model's tokens are drafted: by its own draft, else by n-grams."""
        verify_uniforms, draft_uniforms = stage_streams(self.seed)
        below = replace(
            materials,
            uniforms=draft_uniforms,
            session=self._lease.draft_of_draft if self._has_third_model else None,
            n_draft_max=max(self._pair.n_rows_draft - 1, 1),
            policy=self._policy_of_draft,
            forced=ForcedText(materials.sampling.constraint),
            n_leaves=1,  # the draft's session reads chains
        )
        drafter_name = "model" if self._has_third_model else "ngram"
        return drafters.Stage(drafter_name, below, rules.rule(options.verify), verify_uniforms)

    def _read(self) -> Generator[None, None, None]:
        """Process the prompt but for its last token, yielding after each piece."""
        if not self.has_begun:
            self._begin()
        slot, reads_ahead = self._lease.slot, self.draft_reads_ahead
        sessions: dict[str, DraftSession] = {"target": slot.target}
        if slot.draft is not None and reads_ahead and self._has_model:
            sessions["draft"] = slot.draft
        if slot.draft_of_draft is not None and reads_ahead and self._has_third_model:
            sessions["draft of the draft"] = slot.draft_of_draft
        progress = self.lock.callback(self._progress)
        together = self._pair.are_apart
        yield from reading(
            self._prompt[:-1], sessions, progress, lambda: self._n_piece, together=together
        )
        self._end_reading()

    def _begin(self) -> None:
        self._begun_at = perf_counter()
        self.session, self.has_begun = self._lease.take(self._prompt).target, True
        if self._pair.head is not None:
            self._pair.head.use(self.session.sequence, is_used=self._has_model)
        n_prompt = len(self._prompt) - 1
        self._n_reused = n_prompt - len(self.session.unread(self._prompt[:-1]))

    def _end_reading(self) -> None:
        self._decode_seconds_before = self._pair.decode_seconds
        self._started_at = self._ended_at = perf_counter()
        self._prompt_seconds = self._started_at - self._begun_at

    def _write(self, round_: Round, logits: Logits) -> None:
        n, rows = round_.n_accepted, []
        if self._n_top is not None:  # the first token follows the text, each other one a node
            rows = [logits[0], *(logits[node + 1] for node in round_.nodes)]
        if n:
            self._write_run(round_.tokens[:n], rows[:n], drafted=True)
        if self.finish_reason is None:
            self._write_run(round_.tokens[n:], rows[n:], drafted=False)
        self._ended_at = perf_counter()

    def _write_run(
        self, run: Sequence[int], rows: Sequence[NDArray[np.float32]], *, drafted: bool
    ) -> None:
        """Add a chunk of tokens, each with the logits that it was drawn from.

        Sets finish_reason if the text ends among them.
        """
        tokens: list[int] = []
        text = ""
        for token in run:
            if token in self._end_tokens:
                self.finish_reason = "stop"
                break
            tokens.append(token)
            text += self._text_stream.push(self._piece_of(token))
            if self._text_stream.stopped:  # a stop string is complete
                self.finish_reason = "stop"
                break
        if self.finish_reason is not None:
            text += self._text_stream.finish()
        if text or tokens:
            self._text.append(text)
            self._tokens += tokens
            logprobs = self._logprobs(tokens, rows)
            self.chunks.append(Chunk(text, tuple(tokens), (drafted,) * len(tokens), logprobs))

    def _logprobs(
        self, tokens: Sequence[int], rows: Sequence[NDArray[np.float32]]
    ) -> tuple[TokenLogprobs, ...]:
        if (n_top := self._n_top) is None:
            return ()
        of, vocab = zip(rows, tokens, strict=False), self._pair.vocab
        return tuple(logprobs_of(row, token, n_top, vocab) for row, token in of)
