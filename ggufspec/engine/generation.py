"""One generation, from the tokens of a prompt to the end of the text, in steps."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from ggufspec.decoding import verify as rules
from ggufspec.decoding.loop import Loop, speculate
from ggufspec.decoding.rng import UniformStream, by_position, uniform_streams
from ggufspec.decoding.stats import Threads, summarize, threads_since
from ggufspec.decoding.types import Ask, Drafter, Logits, Round, Scored
from ggufspec.drafting import strategies as drafters
from ggufspec.drafting.draft_length import LengthPolicy
from ggufspec.drafting.forced_text import ForcedText
from ggufspec.drafting.pair_profile import fixed_length
from ggufspec.engine.banned_strings import BannedStrings, HeldToken, drop_tokens
from ggufspec.engine.calibration import calibrate, calibrate_draft
from ggufspec.engine.logprobs import SampledRows, TokenLogprobs, logprobs_of_rows
from ggufspec.engine.pair import Pair
from ggufspec.engine.prepared import PreparedText
from ggufspec.engine.reading import Reading, ReadingSteps
from ggufspec.engine.slots import SlotSession
from ggufspec.engine.text import Chunk, Completion, FinishReason, Room, TextStream
from ggufspec.placement.speeds import experts_note


class Generation:
    """A text under way, in a slot: it owns its tokens, drafter, loop and statistics.

    Call `ask` and, if it returned something, `answer`, until `is_over`, in the engine's thread; and
    `end` before or after an error.
    """

    def __init__(self, pair: Pair, text: PreparedText) -> None:
        """Take a free slot. Raises OptionError, DecodeError, ClosedError."""
        options, self.turn = text.options, text.turn
        self.finish_reason: FinishReason | None = None
        self.is_over = False  # no further chunks will be added
        self.is_reading = True  # its prompt is not processed yet
        self.chunks: deque[Chunk] = deque()  # not yet taken by the consumer
        self.rounds: list[Round] = []
        self._pair, self._prepared, self._n_top = pair, text, text.n_top
        self.n_prompt = len(text.tokens)
        # The log-probabilities that are known so far; complete before the first token.
        known = text.prompt_logprobs
        self.prompt_logprobs = None if known is None else list(known)
        self._all_tokens = array("i", text.tokens)  # prompt, text, and the token that ended it
        self._n_reused = 0  # prompt tokens whose cells the target already had
        drafter_name = options.drafter_name(has_draft=pair.draft is not None)
        self._has_model = pair.draft is not None and drafters.uses_model(drafter_name)
        self._temperature = options.sampling.effective_temperature
        self.repeats = options.seed is not None and (
            self._temperature > 0 or pair.repeats_greedy_texts
        )
        has_stage = drafter_name == "staged" and pair.draft is not None and pair.head is None
        self._policy, self._policy_of_draft = self._policies(drafter_name, has_stage=has_stage)
        # No constraint or bans, whose state counts from the prompt on, and no coins by position.
        can_shift = text.sampling.constraint is None and not options.banned_strings
        can_shift = can_shift and not (pair.is_exact or text.images)
        n_ctx = pair.target.n_ctx
        self._room = Room(options, n_prompt=self.n_prompt, n_ctx=n_ctx, can_shift=can_shift)
        self._text_stream = TextStream(
            options.stop,
            b"".join(map(pair.vocab.piece, text.tokens[-3:])),  # a character has 4 bytes at most
            options.min_indent,
        )
        self._vocab, self._shown_tokens = pair.vocab, options.shown_tokens
        self._end_tokens = {*pair.vocab.stop_tokens, *options.stop_tokens}
        self._text: list[str] = []
        self._tokens: list[int] = []
        self._banned = BannedStrings(options.banned_strings) if options.banned_strings else None
        self._asked: Ask | None = None  # not answered yet
        self._begun_at = perf_counter()
        self._prompt_seconds = self._started_at = self._ended_at = self._line_until = 0.0
        self._threads_before, self._threads = Threads(), Threads()
        ends = () if options.ignore_eos else pair.vocab.stop_tokens
        self._stop_tokens = frozenset((*ends, *options.stop_tokens))
        self._uniforms, draft_uniforms = uniform_streams(text.seed)
        if pair.is_exact and rules.known(options.verify) == "match":
            self._uniforms = by_position(self._uniforms, self._all_tokens)
        rule = rules.rule(options.verify)
        self._sampled = SampledRows(rule) if text.is_sampled else None
        self._rule = self._sampled or rule
        self.slot = pair.slots.take(self._all_tokens)
        self.session = self.slot.target
        try:
            self._drafter = self._made(drafter_name, draft_uniforms, has_stage=has_stage)
            self._loop = self._continued()
            is_all = options.max_tokens == 0
            self.reading = Reading(pair, text.tokens, options.progress, is_all=is_all)
            self._pieces = self._steps(self.prompt_logprobs, self._n_top)
        except BaseException:
            pair.slots.leave(self.slot, None)
            raise

    def _policies(self, drafter_name: str, *, has_stage: bool) -> tuple[LengthPolicy, LengthPolicy]:
        """How many tokens to draft for the target, and for a draft model that n-grams draft for."""
        pair, options = self._pair, self._prepared.options
        of_target, of_draft = LengthPolicy(), LengthPolicy()
        in_blocks = rules.known(options.verify) == "traversal"
        if options.tree == "on":
            of_target = fixed_length(self._temperature, in_blocks=in_blocks)
        if options.n_draft == "auto" and drafter_name != "none":
            how = {"repeats": self.repeats, "in_blocks": in_blocks}
            if self.repeats:
                calibrate(pair, options.progress)
            of_target = pair.profile.policy(self._temperature, has_model=self._has_model, **how)
            if has_stage:
                if self.repeats:
                    calibrate_draft(pair, options.progress)
                of_draft = pair.profile_of_draft.policy(self._temperature, has_model=False, **how)
        return of_target, of_draft

    def ask(self, n_sharers: int = 1, n_most: int | None = None) -> Ask | None:
        """The next Ask to the target; None: nothing in this pass, or the text is over.

        Returns the same Ask until it is answered. `n_sharers`: number of texts in the pass.
        `n_most`: maximum prompt tokens in the pass; None: as many as a batch takes. A call that
        returns None may let a draft model process that many prompt tokens.
        """
        if self._asked is not None or self.is_over:
            return self._asked
        if n_sharers != self.reading.n_sharers:
            self.reading.n_sharers = n_sharers
            self._policy.set_n_sharers(n_sharers)
        self.reading.n_most = self._pair.target.n_batch if n_most is None else n_most
        if self.is_reading:
            try:
                self._asked = next(self._pieces)
                return self._asked
            except StopIteration:
                self.is_reading = False
                if not self.reading.n_left:
                    self._end_reading()
        step = next(self._loop, None)
        if self._policy.failure and self._pair.head is not None:
            self._pair.head.use(self.session.sequence, is_used=False)
        if step is None:
            self._finish()
        else:
            assert isinstance(step, Ask)
            if not self.rounds and (row := self.slot.row_for(step)) is not None:
                self.answer(Scored(row, 0.0))
                return None
            self._asked = step._replace(n_read=self.reading.n_left)
        return self._asked

    def answer(self, scored: Scored) -> None:
        self._asked = None
        if self.is_reading:
            self._pieces.send(scored)
            return
        if self.reading.n_left:
            self.reading.end()
            self._end_reading()
            scored = scored._replace(seconds=0.0)
        assert scored.logits is not None
        if not self.rounds:
            self._pair.slots.keep_row(self.slot, self._all_tokens, scored.logits)
        round_ = self._loop.send(scored)
        assert isinstance(round_, Round)
        self._policy.observe_round(round_)
        self.rounds.append(round_)
        self._write(round_, scored.logits)
        if self.finish_reason is not None:
            self.end()
        elif len(self._all_tokens) >= self._room.n_end:
            if self._room.can_shift:
                self._shift()
            else:
                self._finish()

    def _shift(self) -> None:
        """Drop the older part of a text that fills the context, and read the rest again."""
        self._room.shift(self._all_tokens)
        self._loop.close()
        self._loop = self._continued()
        n_sharers = self.reading.n_sharers
        self.reading = Reading(self._pair, self._all_tokens[:], self._prepared.options.progress)
        self.reading.n_sharers = n_sharers
        self._pieces = self._steps(found=None, n_top=None)
        self.is_reading = True

    def _finish(self) -> None:
        constraint = self._prepared.sampling.constraint
        is_complete = constraint is not None and constraint.is_over(self._all_tokens)
        if self._banned is not None:
            self._write_held(self._banned.release_all())
        if self.finish_reason is None:
            self.finish_reason = "stop" if is_complete else "length"
            self._write_run((), (), drafted=False)  # flush text that was held back
        self.end()

    def end(self) -> None:
        """Give the slot back and store what was learned of the pair. Twice is fine."""
        self._asked = None
        if self.is_over:
            return
        self.is_over = True
        self._pair.slots.leave(self.slot, self._all_tokens)
        self._pieces.close()
        self._loop.close()
        n_prompt = max(self.n_prompt - self._room.n_dropped, 0)
        written = self._all_tokens
        if read_as := self._prepared.read_as:
            written = array("i", read_as) + written[len(read_as) :]
        self._pair.texts.add_written(written, n_prompt)
        if self._started_at:
            self._threads = threads_since(self._threads_before, self._pair.threads)
        self._pair.profile.keep(self._policy, self._temperature)
        self._pair.profile_of_draft.keep(self._policy_of_draft, self._temperature)

    @property
    def is_scoring(self) -> bool:
        """Whether log-probabilities of the prompt are still to be computed."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.n_prompt

    @property
    def n_tokens(self) -> int:
        return len(self._all_tokens)

    @property
    def completion(self) -> Completion:
        """Text, tokens and statistics so far; the time in llama_decode once it is over."""
        stats = summarize(
            self.rounds,
            n_prompt=self.n_prompt,
            n_prompt_reused=self._n_reused if self._room.n_dropped else self.reading.n_reused,
            n_generated=len(self._tokens),
            prompt_seconds=self._prompt_seconds,
            generation_seconds=self._ended_at - self._started_at,
            threads=self._threads,
            notes=getattr(self._drafter, "notes", dict)(),
        )
        text, tokens, stop = "".join(self._text), tuple(self._tokens), self._text_stream.ended_by
        advice, experts = self._policy.advice(), self._pair.target.model.experts
        if advice is not None and experts is not None:
            advice += f". The target is a mixture of experts, {experts_note(*experts)}"
        return Completion(text, tokens, self.finish_reason, stats, advice, stop)

    def _made(self, name: str, draft_uniforms: UniformStream, *, has_stage: bool) -> Drafter:
        """The drafter with this name. Raises OptionError."""
        pair, text, options = self._pair, self._prepared, self._prepared.options
        materials = drafters.Materials(
            text.sampling,
            draft_uniforms,
            self._stop_tokens,
            self.slot.draft,
            draft_temperature=options.draft_temperature,
            n_draft_max=text.n_draft,
            tree=options.tree,
            n_leaves=text.n_leaves,
            policy=self._policy,
            forced=ForcedText(text.sampling.constraint),
            prediction=text.prediction,
            texts=pair.texts.texts(repeats=self.repeats),
            read_as=text.read_as,
        )
        if has_stage:  # the draft model's own tokens are drafted from n-grams
            *_, verify_uniforms = uniform_streams(text.seed, 3)
            below = replace(
                materials,
                n_draft_max=max(pair.n_rows_draft - 1, 1),
                policy=self._policy_of_draft,
                forced=ForcedText(text.sampling.constraint),
                prediction=(),
                read_as=(),  # it may have another vocabulary
            )
            stage = drafters.Stage(below, rules.rule(options.verify), verify_uniforms)
            materials = replace(materials, stage=stage)
        return drafters.make(name, materials)

    def _continued(self) -> Loop:
        """The rounds from here on, until the text fills its room."""
        text = self._prepared
        return speculate(
            self._all_tokens,
            drafter=self._drafter,
            verify=self._rule,
            sampling=text.sampling,
            uniforms=self._uniforms,
            n_draft=text.n_draft,
            n_end=self._room.n_end,
            stop_tokens=self._stop_tokens,
        )

    def _steps(self, found: list[TokenLogprobs] | None, n_top: int | None) -> ReadingSteps:
        draft, drafts = self.slot.draft, dict[str, SlotSession]()
        if draft is not None and self._has_model and self._draft_reads_ahead(draft):
            drafts["draft"] = draft
        return self.reading.steps(
            self.session, drafts, uses_head=self._has_model, found=found, n_top=n_top
        )

    def _draft_reads_ahead(self, draft: SlotSession) -> bool:
        """Whether a draft model must process the prompt before the first round."""
        # A head reads hidden states, which the target does not keep; what is on another device
        # reads while the target does.
        if self._pair.head is not None or self._pair.are_apart:
            return True
        tokens = self._all_tokens
        n_known = 0 if self.repeats else draft.n_common(tokens)  # a seed repeats its draft lengths
        return self._policy.begin_text(len(tokens) - n_known, self._room.n_end - len(tokens))

    def _end_reading(self) -> None:
        if self._room.n_dropped:
            return
        self._n_reused = self.reading.n_reused
        self._threads_before = self._pair.threads
        self._started_at = self._ended_at = perf_counter()
        self._prompt_seconds = self._started_at - self._begun_at
        self._line_until = self._started_at + self._prepared.options.max_seconds
        self._pair.slots.cache.observe_reading(self.n_prompt - self._n_reused, self._prompt_seconds)

    def _write(self, round_: Round, logits: Logits) -> None:
        n, rows = round_.n_accepted, []
        logits = logits if self._sampled is None else self._sampled.logprobs
        if self._n_top is not None:  # the first token follows the text, each other one a node
            rows = [logits[0], *(logits[node + 1] for node in round_.nodes)]
        if self._banned is not None:
            self._write_unbanned(self._banned, round_, rows)
        else:
            if n:
                self._write_run(round_.tokens[:n], rows[:n], drafted=True)
            if self.finish_reason is None:
                self._write_run(round_.tokens[n:], rows[n:], drafted=False)
        self._ended_at = perf_counter()

    def _write_unbanned(
        self, banned: BannedStrings, round_: Round, rows: Sequence[NDArray[np.float32]]
    ) -> None:
        """Write the tokens that cannot belong to a banned string; after one, go back."""
        for i, token in enumerate(round_.tokens):
            row = rows[i].copy() if rows else None  # it is valid until the next pass
            held = HeldToken(token, self._piece(token), row, i < round_.n_accepted)
            if dropped := banned.push(held):
                self._go_back(dropped[0].token, len(dropped) + len(round_.tokens) - i - 1)
                break
            if token in self._end_tokens:
                return self._write_held(banned.release_all())
        self._write_held(banned.release())

    def _go_back(self, token: int, n: int) -> None:
        """Drop the last `n` tokens, and ban the first one of them there."""
        del self._all_tokens[-n:]
        drop_tokens(self.rounds, n)
        assert self._prepared.sampling.state is not None
        self._prepared.sampling.state.rewind(n, len(self._all_tokens), token)
        self._loop.close()
        self._loop = self._continued()

    def _write_held(self, held: Sequence[HeldToken]) -> None:
        for each in held:
            if self.finish_reason is None:
                rows = () if each.row is None else (each.row,)
                self._write_run((each.token,), rows, drafted=each.is_drafted)

    def _write_run(
        self, run: Sequence[int], rows: Sequence[NDArray[np.float32]], *, drafted: bool
    ) -> None:
        """Add a chunk of tokens, each with the logits that it was drawn from.

        Sets finish_reason if the text ends among them.
        """
        tokens, ends, text = list[int](), list[int](), ""
        for token in run:
            if token in self._end_tokens:
                self.finish_reason = "stop"
                break
            tokens.append(token)
            text += self._text_stream.push(self._piece(token))
            ends.append(self._text_stream.n_chars)
            if self._text_stream.has_ended:
                is_stop = self._text_stream.ended_by is not None
                self.finish_reason = "stop" if is_stop else "length"
                break
            if "\n" in text and perf_counter() > self._line_until:
                self.finish_reason = "length"
                break
        if self.finish_reason is not None:
            text += self._text_stream.finish()
        if text or tokens:
            self._text.append(text)
            self._tokens += tokens
            more = logprobs_of_rows(rows, tokens, self._n_top, self._vocab), tuple(ends)
            self.chunks.append(Chunk(text, tuple(tokens), (drafted,) * len(tokens), *more))

    def _piece(self, token: int) -> bytes:
        is_shown = token in self._shown_tokens
        return self._vocab.shown(token) if is_shown else self._vocab.piece(token)
