"""Wires a target, a draft, a drafter and a rule: prompt in, stream of chunks out.

Knows no command line and prints nothing.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from types import TracebackType

from typing_extensions import Unpack

from ggufspec.common import defaults, validate
from ggufspec.decoding import verify as rules
from ggufspec.decoding.loop import Steps, speculate
from ggufspec.decoding.rng import uniform_streams
from ggufspec.decoding.sampling import Sampling
from ggufspec.decoding.types import Drafter, Logits, Round, Scored
from ggufspec.drafting import strategies as drafters
from ggufspec.drafting.cost_model import CostModel
from ggufspec.drafting.draft_length import AutoLength, FixedLength
from ggufspec.drafting.pair_profile import PairProfile, StoredProfile
from ggufspec.engine.constraints import sampling_of
from ggufspec.engine.lock import EngineLock
from ggufspec.engine.options import GenerateOptions, PromptProgress, Request
from ggufspec.engine.scheduler import Scheduler, write_all
from ggufspec.engine.slots import LeasedSession, SlotLease, Slots
from ggufspec.engine.stream import Completion, Stream, Work
from ggufspec.engine.text import Message, TextStream, render_chat
from ggufspec.errors import ClosedError, OptionError, PromptError
from ggufspec.llama.context import Context
from ggufspec.llama.timing import measured
from ggufspec.llama.vocab import Vocab, check_tokens

_SETTLED_SIZES = (1, 2, 3, 4, 6, 8, 12, 17)  # of passes that are measured before a text
_READS_NOTHING = ("none", "ngram")  # drafters that do not ask the draft model


class Engine:
    """A target and its draft, ready to write. Made by `load`; a context manager.

    May be used from several threads: rounds of different streams take turns.
    """

    def __init__(
        self,
        target: Context,
        draft: Context | None = None,
        *,
        n_draft_max: int,
        stored_profile: StoredProfile | None = None,
        placement: str | None = None,
        resources: ExitStack,
    ) -> None:
        self.placement = placement  # what was decided about memory, for the user; None: nothing
        self.target = target
        self.draft = draft
        self.n_ctx = target.n_ctx
        self.n_draft_max = n_draft_max
        self._slots = Slots(target, draft)
        self._stored_profile = stored_profile
        n_most, n_sharers = n_draft_max + 1, target.n_sequences
        known = stored_profile and stored_profile.recall(n_most, n_sharers)
        self._profile = known or PairProfile(CostModel(n_most, n_sharers))
        self._is_settled_for_all = False  # at temperature 0 too, a seed repeats a text
        self._resources = resources
        self._closed = False
        self._lock = EngineLock()

    def generate(
        self, prompt: str | Sequence[int], **options: Unpack[GenerateOptions]
    ) -> Completion:
        """Continue a prompt (text, or token ids) to its end. Options: see GenerateOptions.

        Raises PromptError, OptionError, DecodeError, ClosedError.
        """
        stream = self.stream(prompt, **options)
        for _ in stream:
            pass
        return stream.completion

    def chat(self, messages: Sequence[Message], **options: Unpack[GenerateOptions]) -> Completion:
        """Answer a conversation of {"role": ..., "content": ...} by the target's own template."""
        return self.generate(self.render(messages), **options)

    def stream(self, prompt: str | Sequence[int], **options: Unpack[GenerateOptions]) -> Stream:
        """Continue a prompt, chunk by chunk. Options and errors: see generate."""
        self._lock.check()
        tokens = self.tokenize(prompt)
        request = Request.of(options)
        seed = secrets.randbits(32) if request.seed is None else request.seed
        end_tokens = self.vocab.stop_tokens
        policy = self._policy(request)
        lease = SlotLease(self._slots)
        drafter, steps = self._loop(tokens, request, seed, policy, lease)
        return Stream(
            Work(
                begin=partial(lease.take, tokens),
                leave=lease.leave,
                session=lambda: lease.slot.target,
                read=partial(self._read, tokens[:-1], request, lease),
                steps=steps,
                share=policy.set_n_sharers,
                decode_seconds=self._decode_seconds,
                notes=getattr(drafter, "notes", dict),
                advice=policy.advice,
                lock=self._lock.held,
            ),
            n_prompt=len(tokens),
            seed=seed,
            text=TextStream([request.stop] if isinstance(request.stop, str) else request.stop),
            piece=self.vocab.piece,
            stop_tokens=end_tokens,
        )

    def generate_batch(
        self, prompts: Sequence[str | Sequence[int]], **options: Unpack[GenerateOptions]
    ) -> list[Completion]:
        """Continue several prompts at the same time, scheduler passes where that is faster.

        As many at once as the engine was loaded for (n_slots). A seed becomes seed + i for prompt
        i. Raises what generate raises, of the first prompt that fails.
        """
        self._lock.check()
        if isinstance(prompts, str):
            raise PromptError("prompts is one text; give a list of prompts, or use generate")
        seed = Request.of(options).seed

        def stream(i: int, tokens: Sequence[int]) -> Stream:
            own: GenerateOptions = {**options, "seed": None if seed is None else seed + i}
            return self.stream(tokens, **own)

        known = [self.tokenize(prompt) for prompt in prompts]  # what is wrong is told at once
        streams = (stream(i, tokens) for i, tokens in enumerate(known))
        return write_all(self.scheduler(), streams, len(self._slots))

    def scheduler(self) -> Scheduler:
        """What takes streams of this engine further together."""
        return Scheduler(self.target, lambda: self._profile.costs, self._slots, self._lock.held)

    @property
    def n_slots(self) -> int:
        """How many texts can be written at the same time, each in its own place."""
        return len(self._slots)

    def render(
        self,
        messages: Sequence[Message],
        template: str | None = None,
        *,
        tools: Sequence[Mapping[str, object]] = (),
    ) -> list[int]:
        """The token ids of a conversation, up to where the answer begins.

        `template` (Jinja) replaces the target's own; `tools` are for those that know of them.
        Raises PromptError where there is no template.
        """
        model, vocab = self.target.model, self.vocab
        template = template or model.chat_template
        if template is None:
            raise PromptError(
                f"{model.path} has no chat template: it was not made for chat. "
                "Give it a plain prompt, or a template of your own"
            )
        bos_text = vocab.special_text(vocab.bos)
        text = render_chat(
            template,
            messages,
            bos_text=bos_text,
            eos_text=vocab.special_text(vocab.eos),
            tools=tools,
        )
        has_bos = bool(bos_text) and text.startswith(bos_text)
        return vocab.tokenize(text, add_special=not has_bos, parse_special=True)

    def tokenize(self, prompt: str | Sequence[int]) -> list[int]:
        """The token ids of a prompt, with the beginning-of-text token where the target wants one.

        Names of special tokens in the text become those tokens; token ids are checked and copied.
        Raises PromptError for a prompt that is empty or leaves no room in the context.
        """
        if isinstance(prompt, str):
            wanted = "the prompt is empty; give at least one character to continue"
            tokens = (
                self.vocab.tokenize(prompt, add_special=True, parse_special=True) if prompt else []
            )
        else:
            wanted = "the prompt has no tokens; give at least one to continue"
            if isinstance(prompt, (bytes, Mapping)) or not isinstance(prompt, Iterable):
                raise PromptError(
                    f"the prompt is of type {type(prompt).__name__}; give a text, or token ids"
                )
            try:
                tokens = [validate.whole("a token of the prompt", token) for token in prompt]
            except OptionError as error:
                raise PromptError(str(error)) from error
            check_tokens(tokens, self.vocab)
        if not tokens:
            raise PromptError(wanted)
        if len(tokens) >= self.n_ctx:
            raise PromptError(
                f"the prompt has {len(tokens):,} tokens, the context {self.n_ctx:,}, and at least "
                "one must be left to write; shorten the prompt, or load with a larger context "
                "(n_ctx, -c)"
            )
        return tokens

    def forget(self) -> None:
        """Drop what is held of former texts: the next prompt is read anew."""
        with self._lock.held():
            self._slots.forget()

    def settle(self, known: Mapping[str, object] | None = None) -> dict[str, object]:
        """Have all texts with a seed begin from the same costs and chances from now on.

        Those in `known`, which another engine's `settle` returned, or else this one's, measured now
        if nobody has; at temperature 0 too. Returns them, for JSON. So engines in several processes
        write the same text from the same seed. Raises ValueError where `known` is nothing like it.
        """
        self._lock.check()
        n_most = self.n_draft_max + 1
        if known is None:
            if not self._profile.is_settled:
                self._settle(None)
            known = self._profile.to_document()
        self._profile = PairProfile.of_document(known, n_most, len(self._slots))
        self._is_settled_for_all = True
        return dict(known)

    def draft_alone(self) -> Engine:
        """An engine that writes with this one's draft alone, in the same memory.

        Valid until this one closes. Texts of the two may alternate, each behind a `forget` of the
        other. Raises OptionError where there is no draft.
        """
        if self.draft is None:
            raise OptionError("there is no draft in this engine to write with")
        alone = Engine(self.draft, n_draft_max=1, resources=ExitStack())
        alone._lock = self._lock
        return alone

    def logits(
        self, prompt: Sequence[int], text: Sequence[int], *, whose: str, n_together: int = 1
    ) -> Iterator[Logits]:
        """Logits before each token of `text`, which follows `prompt`: pieces (n, n_vocab).

        `whose`: "target" or "draft". Each piece is a copy, from one batch of `n_together` rows (the
        last: of what is left): 1 is plain decoding, more is a verification; at most n_draft_max + 1
        of the target, 1 of the draft. Raises OptionError, DecodeError, ClosedError.
        """
        if whose not in ("target", "draft") or (whose == "draft" and self.draft is None):
            raise OptionError(f"there is no {whose!r} to score with in this engine")
        n_most = self.n_draft_max + 1 if whose == "target" else 1
        if not 1 <= n_together <= n_most:
            raise OptionError(f"n_together is {n_together}; for the {whose} it is 1 to {n_most}")
        tokens = array("i", [*prompt, *text])
        for start in range(len(prompt), len(tokens), n_together):
            ahead = tokens[start : min(start + n_together, len(tokens)) - 1]
            with self._lock.held():
                slot = self._slots.nearest(tokens[:start])
                session = slot.target if whose == "target" else slot.draft
                assert session is not None
                rows = session.score(tokens[:start], ahead).copy()
            yield rows

    def sampling(self, prompt: Sequence[int], **options: Unpack[GenerateOptions]) -> Sampling:
        """What turns logits into distributions when `prompt` is continued with these options."""
        return sampling_of(Request.of(options), self.vocab, len(prompt))

    @property
    def vocab(self) -> Vocab:
        """The vocabulary that target and draft share. Raises ClosedError."""
        if self._closed:
            raise ClosedError("this engine is closed; load it again")
        return self.target.model.vocab

    @property
    def plain_seconds(self) -> float | None:
        """What a token costs where nothing is drafted, as measured so far; None: not measured."""
        costs = self._profile.costs
        return costs.plain if costs.n_measured(1) else None

    def close(self) -> None:
        """Give the memory back. Closing twice is fine; its streams then raise ClosedError."""
        with self._lock.held():
            if not self._closed and self._stored_profile and self._profile.is_new:
                self._stored_profile.remember(self._profile)
            self._closed = True
            self._resources.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _drafter_name(self, request: Request) -> str:
        if request.drafter is not None:
            return request.drafter
        if request.n_draft == "auto":
            return "auto"
        return "model" if self.draft else "none"

    def _asks_the_draft(self, request: Request) -> bool:
        return bool(self.draft) and self._drafter_name(request) not in _READS_NOTHING

    def _read(
        self,
        tokens: list[int],
        request: Request,
        lease: SlotLease,
        n_most: Callable[[], int | None],
    ) -> Generator[None, None, int]:
        """Read a prompt's tokens, a piece at a time, into whatever will be asked to go on."""
        progress = self._heard(request.progress)
        draft = lease.slot.draft
        if draft and self._asks_the_draft(request):
            yield from draft.feeding(tokens, progress and partial(progress, "draft"), n_most)
        heard = progress and partial(progress, "target")
        return (yield from lease.slot.target.feeding(tokens, heard, n_most))

    def _loop(
        self,
        tokens: list[int],
        request: Request,
        seed: int,
        policy: FixedLength | AutoLength,
        lease: SlotLease,
    ) -> tuple[Drafter, Callable[[], Steps]]:
        """The drafter and the loop of one request, ready to start."""
        n_draft = self.n_draft_max if isinstance(request.n_draft, str) else request.n_draft
        if n_draft > self.n_draft_max and self.draft:
            raise OptionError(
                f"n_draft is {n_draft}, but this engine was loaded for at most "
                f"{self.n_draft_max}; load it with a larger n_draft_max "
                f"(at most {defaults.N_DRAFT_LIMIT})"
            )
        end_tokens = self.vocab.stop_tokens
        sampling = sampling_of(request, self.vocab, len(tokens))
        stop_tokens = frozenset() if request.ignore_eos else end_tokens
        verify_uniforms, draft_uniforms = uniform_streams(seed)
        materials = drafters.Materials(
            sampling,
            draft_uniforms,
            stop_tokens,
            LeasedSession(lease) if self.draft else None,
            draft_temperature=request.learned_temperature,
            n_draft_max=n_draft,
            policy=policy,
        )
        n_most = self.n_ctx if request.max_tokens is None else request.max_tokens
        drafter = drafters.make(self._drafter_name(request), materials)
        steps = partial(
            speculate,
            array("i", tokens),
            drafter=drafter,
            verify=rules.rule(request.verify),
            sampling=sampling,
            uniforms=verify_uniforms,
            n_draft=min(n_draft, self.n_draft_max),
            n_end=min(len(tokens) + n_most, self.n_ctx),
            stop_tokens=stop_tokens,
        )
        if isinstance(policy, FixedLength):
            return drafter, steps
        return drafter, partial(self._learn, steps, policy, sampling.temperature)

    def _policy(self, request: Request) -> FixedLength | AutoLength:
        """How far to draft in one text."""
        if request.n_draft != "auto" or self._drafter_name(request) == "none":
            return FixedLength()
        temperature = request.sampling.temperature
        repeats = request.seed is not None and (temperature > 0 or self._is_settled_for_all)
        if repeats and not self._profile.is_settled:
            self._settle(request.progress)
        has_model = self._asks_the_draft(request)
        return self._profile.policy(
            temperature,
            repeats=repeats,
            in_blocks=request.verify == "block",
            has_model=has_model,
        )

    def _heard(self, progress: PromptProgress | None) -> PromptProgress | None:
        """The same, as a callback of whose turn it is."""
        if progress is None:
            return None

        def tell(whose: str, done: int, total: int) -> None:
            with self._lock.calling_back():
                progress(whose, done, total)

        return tell

    def _settle(self, progress: PromptProgress | None) -> None:
        """Measure a pair that nobody has measured, so that a seed repeats a text from now on."""
        with self._lock.held():
            told = self._heard(progress)
            heard = told and partial(told, "costs")
            n_most = min(self._profile.costs.n_most, self.n_ctx)
            sizes = [n for n in _SETTLED_SIZES if n <= n_most]
            self._profile.settle(measured(self.target, self.draft, sizes, heard))

    def _learn(self, steps: Callable[[], Steps], policy: AutoLength, temperature: float) -> Steps:
        """The same steps; what they cost, and how they went, is known to the next text."""
        under_way = steps()
        answer: Scored | None = None
        try:
            while True:
                step = under_way.send(answer)
                if isinstance(step, Round):
                    policy.observe_round(step)
                answer = yield step
        except StopIteration:
            return
        finally:
            under_way.close()
            self._profile.keep(policy, temperature)

    def _decode_seconds(self) -> float:
        return self.target.decode_seconds + (self.draft.decode_seconds if self.draft else 0.0)
