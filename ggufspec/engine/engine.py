"""The engine: a loaded target with its draft, to generate, chat and render prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from typing_extensions import Unpack

from ggufspec.common import validate
from ggufspec.common.facts import counted
from ggufspec.common.files import CACHE_VARIABLE
from ggufspec.drafting import profile_store
from ggufspec.engine import session_file
from ggufspec.engine.chat_template import ChatTemplate, TemplateProcess
from ggufspec.engine.images import Images
from ggufspec.engine.infill import InfillOptions, infill_prompt
from ggufspec.engine.options import CheckedOptions, FileSampling, GenerateOptions
from ggufspec.engine.pair import Pair
from ggufspec.engine.prepared import PreparedText, Reported, prepared
from ggufspec.engine.prompt_cache import CachedText
from ggufspec.engine.reasoning import reasoning_of
from ggufspec.engine.scheduler import Scheduler
from ggufspec.engine.session_file import SessionFacts
from ggufspec.engine.stream import Stream, write_all
from ggufspec.engine.template_probe import Message
from ggufspec.engine.text import Completion
from ggufspec.errors import OptionError, PromptError, PromptTooLongError
from ggufspec.llama import kernels as llama_kernels
from ggufspec.llama.devices import n_threads_most
from ggufspec.llama.image_cells import without_images
from ggufspec.llama.vocab import Vocab, check_tokens

if TYPE_CHECKING:
    from ggufspec.engine.async_stream import AsyncStream

T = TypeVar("T")


class Engine:
    """A target and its draft, ready to generate. Made by `load`; a context manager.

    The models are freed by `close`, and once nothing refers to the engine. Its own thread computes
    all passes; it may be used from any number of threads and tasks, whose texts share them.
    """

    def __init__(
        self,
        pair: Pair,
        *,
        placement: str | None = None,
        kernels: Sequence[str] = (),
        attention: str | None = None,
        file_sampling: FileSampling | None = None,
        chat_template: str | None = None,
        template_variables: Mapping[str, object] | None = None,
    ) -> None:
        """`chat_template` (Jinja) replaces that of the target's file; it is given the variables."""
        self.pair = pair
        self.scheduler = Scheduler(pair)
        self.n_ctx, self.n_draft_max = pair.target.n_ctx, pair.n_draft_max
        self.n_slots = pair.n_slots  # texts that can be written at the same time
        self.placement = placement  # what was decided about memory, for the user; None: nothing
        # What the target's file sets, where a text does not: see `begin`.
        self.file_sampling = file_sampling or FileSampling({})
        # Which kernels the target and the draft use for their weights, and why, in lines.
        refused = llama_kernels.unusable()
        self.kernels = [f"ggufspec's kernels are not used: {refused}"] if refused else [*kernels]
        self.attention = attention  # why flash attention is on or off; None: not measured
        self._templates = TemplateProcess()
        self._variables = template_variables or {}
        model = pair.target.model
        source = chat_template or model.chat_template
        for_tools = None if chat_template else model.chat_template_for_tools
        self.chat_template = self._template_of(source, for_tools) if source else None

    def generate(
        self, prompt: str | Sequence[int], **options: Unpack[GenerateOptions]
    ) -> Completion:
        """Continue a prompt (text, or token ids) to its end. Options: see GenerateOptions.

        Sampling options that are not given come from the target's file (`file_sampling`) if it has
        them, else from llama.cpp.
        Raises PromptError, OptionError, DecodeError, ClosedError.
        """
        return self.stream(prompt, **options).finish()

    async def agenerate(
        self, prompt: str | Sequence[int], **options: Unpack[GenerateOptions]
    ) -> Completion:
        """`generate` for asyncio. Cancelling the task ends the text."""
        return await self.astream(prompt, **options).finish()

    def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, object]] = (),
        variables: Mapping[str, object] | None = None,
        continue_final_message: bool = False,
        **options: Unpack[GenerateOptions],
    ) -> Completion:
        """Answer messages of {"role": ..., "content": ...} with the chat template: see `render`.

        A content may be a list of {"type": "text", "text": ...} and {"type": "image", "path": ...}.
        """
        prompt = self.render(
            messages,
            tools=tools,
            variables=variables,
            continue_final_message=continue_final_message,
        )
        return self.generate(prompt, **options)

    def stream(self, prompt: str | Sequence[int], **options: Unpack[GenerateOptions]) -> Stream:
        """Continue a prompt, chunk by chunk. Options and errors: see generate."""
        return self.begin(prompt, CheckedOptions.of({**self.file_sampling.options, **options}))

    def astream(
        self, prompt: str | Sequence[int], **options: Unpack[GenerateOptions]
    ) -> AsyncStream:
        """`stream` for asyncio: `async for chunk in engine.astream(...)`."""
        from ggufspec.engine.async_stream import AsyncStream  # asyncio takes long to import

        return AsyncStream(partial(self.stream, prompt, **options))

    def begin(self, prompt: str | Sequence[int], options: CheckedOptions) -> Stream:
        """As `stream`, but for options that are complete: nothing comes from the target's file."""
        self.scheduler.check()
        return Stream(self.scheduler, self.prepare(prompt, options))

    def prepare(
        self, prompt: str | Sequence[int], options: CheckedOptions, **reported: Unpack[Reported]
    ) -> PreparedText:
        """A text for `scheduler.submit`: see `prepared`. Raises PromptError, OptionError."""
        tokens = self.tokenize(prompt, n_least=options.n_least)
        return self.prepare_tokens(tokens, options, **reported)

    def prepare_tokens(
        self,
        tokens: Sequence[int],
        options: CheckedOptions,
        like: PreparedText | None = None,
        **reported: Unpack[Reported],
    ) -> PreparedText:
        """As `prepare`, for tokens that `tokenize` returned."""
        reasoning = None
        if options.reasoning_budget >= 0 and self.chat_template is not None:
            reasoning = reasoning_of(self.chat_template, tokens, self.vocab)
        return prepared(self.pair, tokens, options, like=like, reasoning=reasoning, **reported)

    def check(self, options: CheckedOptions) -> None:
        """Raise the OptionError that a text with these options would raise."""
        prepared(self.pair, (), options)

    def generate_batch(
        self, prompts: Sequence[str | Sequence[int]], **options: Unpack[GenerateOptions]
    ) -> list[Completion]:
        """Continue several prompts, as many at once as the engine was loaded for (n_slots).

        They share passes where that is faster. Prompt i has the seed `seed + i`. All prompts are
        checked before the first is processed. Raises what generate raises, of the first that fails.
        """
        self.scheduler.check()
        if isinstance(prompts, str):
            raise PromptError("prompts is one text; give a list of prompts, or use generate")
        _check_list(prompts, "prompts is", "a list of prompts")
        checked = CheckedOptions.of({**self.file_sampling.options, **options})
        seed = checked.seed
        all_tokens = [self.tokenize(prompt, n_least=checked.n_least) for prompt in prompts]
        texts = (
            self.prepare_tokens(tokens, replace(checked, seed=None if seed is None else seed + i))
            for i, tokens in enumerate(all_tokens)
        )
        return write_all(self.scheduler, texts, n_open=2 * self.n_slots)

    def render(
        self,
        messages: Sequence[Message],
        template: str | None = None,
        *,
        tools: Sequence[Mapping[str, object]] = (),
        variables: Mapping[str, object] | None = None,
        continue_final_message: bool = False,
    ) -> list[int]:
        """The token ids of a conversation, up to where the answer begins.

        `template` (Jinja) replaces the engine's own; `tools` and `variables` are passed to it.
        continue_final_message: the text continues the last message, which the assistant began.
        Raises PromptError where there is no template.
        """
        vocab = self.vocab
        used = self._template_of(template) if template else self.chat_template
        if used is None:
            raise PromptError(
                f"{self.pair.target.model.path.name} has no chat template: it is not a chat model. "
                "Use a plain prompt (without --chat and --system; over HTTP, /v1/completions), or "
                "a template of your own: --chat-template-file; in Python load(chat_template=...)"
            )
        images = Images(messages, self.pair.target)
        text = used.render(
            images.messages,
            tools=tools,
            variables=variables,
            continue_final_message=continue_final_message,
        )
        has_bos = bool(used.bos_text) and text.startswith(used.bos_text)
        if images:
            return images.tokens(text, has_bos=has_bos)
        return vocab.tokenize(text, add_special=not has_bos, parse_special=True)

    def infill_prompt(self, prefix: str, suffix: str, **how: Unpack[InfillOptions]) -> list[int]:
        """The token ids of a prompt for the text between two others, such as around a cursor.

        Raises PromptError for a model that has no tokens for such prompts.
        """
        return infill_prompt(self.vocab, prefix, suffix, n_ctx=self.n_ctx, **how)

    def _template_of(self, source: str, for_tools: str | None = None) -> ChatTemplate:
        vocab = self.pair.target.model.vocab
        return ChatTemplate(
            source,
            bos_text=vocab.special_text(vocab.bos),
            eos_text=vocab.special_text(vocab.eos),
            source_for_tools=for_tools,
            variables={**vocab.special_texts, **self._variables},
            process=self._templates,
        )

    def tokenize(self, prompt: str | Sequence[int], *, n_least: int = 1) -> list[int]:
        """The token ids of a prompt, with the beginning-of-text token where the target wants one.

        Names of special tokens in a text become those tokens; token ids are checked and copied.
        Raises PromptError for a prompt without a token, or that leaves no room in the context for
        a text of `n_least` tokens.
        """
        if isinstance(prompt, str):
            tokens = self.vocab.tokenize(prompt, add_special=True, parse_special=True)
        else:
            _check_list(prompt, "the prompt is", "a text, or token ids")
            if {*map(type, tokens := list(prompt))} != {int}:  # 5 times as fast as to check each
                try:
                    tokens = [validate.whole("a token of the prompt", each) for each in tokens]
                except OptionError as error:
                    raise PromptError(str(error)) from error
            projector = self.pair.target.projector
            has_images = projector is not None and projector.check(tokens) > 0
            check_tokens(without_images(tokens) if has_images else tokens, self.vocab)
        if not tokens:
            why = ", and the model has no token for the beginning of a text" if prompt == "" else ""
            raise PromptError(f"the prompt is empty{why}; give at least one character or token")
        if len(tokens) + n_least > self.n_ctx:
            room = ", and at least one must be left for the text" if n_least else ""
            raise PromptTooLongError(
                f"the prompt has {counted(len(tokens), 'token')}, the context {self.n_ctx:,}{room}"
                "; shorten the prompt, or load with a larger context (n_ctx, -c)",
                len(tokens),
                self.n_ctx,
            )
        return tokens

    def save(
        self, path: str | Path, prompt: str | Sequence[int] | Sequence[Message]
    ) -> SessionFacts:
        """Write what target and drafts hold of a text to a file, for `restore`.

        prompt: a text or token ids as for `generate`, or messages as for `chat`. What no slot holds
        of it is processed first, but for its last token. To save a text that was written, give its
        tokens behind those of its prompt, or messages with the answer. An interrupted save leaves
        the file as it was. Raises PromptError, DecodeError, CacheError, ClosedError.
        """
        self.scheduler.check()
        file = validate.path("path", path)
        if isinstance(prompt, (list, tuple)) and prompt and isinstance(prompt[0], Mapping):
            prompt = self.render(prompt)
        tokens = self.tokenize(prompt)  # type: ignore[arg-type]
        if len(tokens) < 2:
            raise PromptError("a text of one token is read at once; save a longer one")
        images = self.pair.encoded_images(tokens)  # are known while it is referred to

        def save() -> CachedText | None:
            with self.pair.slots.lent(tokens) as slot:
                if self.pair.head is not None:
                    self.pair.head.use(slot.target.sequence, is_used=True)
                slot.read(tokens[:-1])
                return slot.saved(tokens)

        text = self.run(save)
        assert text is not None
        del images
        return session_file.write(file, text, self.pair.text_keys)

    def restore(self, path: str | Path) -> SessionFacts:
        """Copy a text that was saved into a slot, so that prompts which begin with it are not read.

        The engine's models, cache types and llama.cpp have to be those of the engine that saved it.
        Another draft model reads the text anew. Only restore files that you trust: a hash protects
        against damage, not against a forger. Raises SessionError, ClosedError.
        """
        self.scheduler.check()
        file = validate.path("path", path)
        text, n_bytes = session_file.read(file, self.pair.text_keys, self.n_ctx)

        def restore() -> None:
            with self.pair.slots.lent(text.tokens) as slot:
                session_file.restore(text, slot, file)

        self.run(restore)
        return SessionFacts(list(text.tokens), n_bytes)

    def run(self, work: Callable[[], T]) -> T:
        """Have the engine's thread call `work` between two rounds, while a slot is free.

        Only there may contexts and slots be used. Raises what `work` raises, ClosedError.
        """
        return self.scheduler.run(work, lambda: bool(self.pair.slots.free))

    def forget(self) -> None:
        """Empty the KV caches, and forget the texts that were written.

        The next prompt is processed from its first token. Named texts (draft_texts) stay.
        """
        self.scheduler.run(self.pair.forget)

    @property
    def vocab(self) -> Vocab:
        """The target's vocabulary. Raises ClosedError."""
        return self.pair.vocab

    @property
    def notes(self) -> list[str]:
        """What the user should read after loading, in lines."""
        mapped = self.pair.vocab_map and self.pair.vocab_map.note
        lines = [self.placement, mapped, self.warning, self._threads_warning]
        if self.pair.stored_profile.facts and (obstacle := profile_store.obstacle()):
            lines.append(
                f"measurements cannot be stored in {obstacle}. Each process measures this pair "
                f"anew, and a seed may give another text there: make room, or set {CACHE_VARIABLE} "
                "to another folder"
            )
        return [line for line in lines if line]

    @property
    def warning(self) -> str | None:
        """A line where the context exceeds what a model was trained for; None: it does not."""
        models = [context.model for context in self.pair.contexts]
        model = min(models, key=lambda model: model.n_ctx_train or self.n_ctx)
        if not 0 < model.n_ctx_train < self.n_ctx:
            return None
        what = "texts" if model is self.pair.target.model else "drafts"
        return (
            f"the context of {self.n_ctx:,} tokens exceeds the {model.n_ctx_train:,} that "
            f"{model.path.name} was trained for: {what} beyond them get worse; use at most "
            f"{model.n_ctx_train} (n_ctx, -c), or another model"
        )

    @property
    def _threads_warning(self) -> str | None:
        n, n_cores = max(each.n_threads for each in self.pair.contexts), n_threads_most()
        if n <= n_cores:
            return None
        return (
            f"{n} threads on {counted(n_cores, 'core')} wait for each other, which is slow; use at "
            f"most {n_cores} (n_threads, n_threads_draft; -t, -td)"
        )

    def close(self) -> None:
        """Free the models. Closing twice is fine; streams of this engine then raise ClosedError.

        In a forked process it does nothing: the models belong to the process that loaded them.
        """
        if not self.pair.is_forked:
            self.scheduler.close()
            self._templates.close()
            self.pair.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _check_list(value: object, what: str, wanted: str) -> None:
    if isinstance(value, (bytes, Mapping, Set)) or not isinstance(value, Iterable):
        raise PromptError(f"{what} of type {type(value).__name__}; give {wanted}")
