"""`ggufspec chat`: a conversation in the terminal; answers on stdout, all else on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ggufspec.cli import ERROR, chat_messages, render, shared, text_settings
from ggufspec.cli.chat_messages import AnswerForm, Entry, Keyboard, read_entry
from ggufspec.cli.loading import PairOptions
from ggufspec.cli.options import added, load_options, options
from ggufspec.cli.run import Run, generate, loaded, report
from ggufspec.common.facts import counted, json_object, plain
from ggufspec.common.files import check_writable, format_bytes, write_file
from ggufspec.common.image_files import check_image
from ggufspec.common.reading import read_text
from ggufspec.errors import (
    GgufspecError,
    OptionError,
    PromptError,
    PromptTooLongError,
    SessionError,
)

if TYPE_CHECKING:
    from ggufspec.engine.engine import Engine
    from ggufspec.engine.template_probe import Message

_COMMANDS = {  # argument and help text of each command; Chat has a method for each
    "help": ("", "list the commands"),
    "system": ("TEXT", "replace the system message; without TEXT, remove it"),
    "file": ("PATH", "put the text of a file in the next message"),
    "image": ("PATH", "put an image in the next message"),
    "undo": ("", "drop the last question and its answer"),
    "save": ("PATH", "write the chat, and the sampling options that were changed, to a file"),
    "load": ("PATH", "continue a chat that was saved"),
    "stats": ("", "show statistics after each answer, or no longer"),
    "exit": ("", "end the chat; so does Ctrl-D"),
}
_HELP = (
    'A line that ends with \\ goes on in the next one; lines between two """ are one message.\n'
    "Ctrl-C stops an answer, and clears a line."
)
_FULL = (
    "drop the last question and answer with /undo, or save the chat with /save, start again with "
    "a larger context (-c), and continue it with /load"
)


@click.command(name="chat", cls=shared.SectionedCommand)
@shared.pair_options("target", "draft", "offline", "yes", draft={"more": shared.LOOKUP})
@text_settings.text_options(*options("text"))
@load_options("texts", "chats", "images")
@added(*options("chat"), *options("output", "color"), *options("run", "verbose"))
def command(
    pair: PairOptions,
    system: str | None,
    settings: dict[str, Any],
    load_settings: dict[str, Any],
    color: str,
    verbose: bool,
) -> int:
    """Talk with a target model, accelerated by a draft model.

    Answers go to stdout, statistics to stderr. /help lists the commands of a chat. If stdin or
    stdout is no terminal, each line of stdin is a message.

    \b
      ggufspec chat --target large.gguf --draft small.gguf
      ggufspec chat --target large.gguf --draft auto --system "Answer briefly." --temp 0.7
    """
    text_settings.check(pair, settings)
    given = {name: settings[name] for name in chat_messages.KEPT if text_settings.was_given(name)}
    with loaded(pair, settings, load_settings, verbose=verbose) as (engine, _, settings):
        chat = Chat(engine, system or "", settings, given, color=color, verbose=verbose)
        if not (sys.stdin.isatty() and sys.stdout.isatty()):
            return _follow(chat)
        render.echo("Write a message; /help lists the commands, Ctrl-D ends.", err=True)
        _converse(chat, Keyboard(color=render.wants_color(color, sys.stdout)))
    return 0


def _converse(chat: Chat, keyboard: Keyboard) -> None:
    """Answer what is typed, until Ctrl-D or a second Ctrl-C."""
    was_interrupted = False
    while not chat.is_over:
        try:
            entry = read_entry(keyboard.line)
        except EOFError:
            render.echo(err=True)
            return
        except KeyboardInterrupt:
            render.echo("" if was_interrupted else "\nCtrl-C again or Ctrl-D ends", err=True)
            if was_interrupted:
                return
            was_interrupted = True
            continue
        was_interrupted = False
        try:
            chat.take(entry)
        except GgufspecError as error:
            render.note(str(error))
        except KeyboardInterrupt:
            render.note("interrupted: the conversation is as it was before")


def _follow(chat: Chat) -> int:
    """Answer each line of stdin; the exit code is ERROR if one of them failed."""
    code = 0
    while not chat.is_over:
        try:
            if (
                run := chat.take(read_entry(chat_messages.piped_line))
            ) is not None and run.interrupted:
                raise KeyboardInterrupt
        except EOFError:
            break
        except GgufspecError as error:
            render.note(str(error))
            code = ERROR
    return code


class Chat:
    """A conversation with an engine. An entry that fails leaves the conversation as it was."""

    def __init__(
        self,
        engine: Engine,
        system: str,
        settings: Mapping[str, Any],
        given: Mapping[str, Any],
        *,
        color: str,
        verbose: bool,
    ) -> None:
        """`given`: sampling options of the command line, which a loaded chat does not replace.

        Raises OptionError, PromptError.
        """
        self.is_over = False
        self._engine = engine
        self._given = self._changed = given
        self._color, self._verbose, self._has_stats = color, verbose, verbose
        self._messages: list[Message] = []
        self._files: list[str] = []  # texts of /file, for the next message
        self._images: list[Path] = []  # of /image, for the next message
        self._last: Run | None = None
        self._system(system)
        options = text_settings.checked(settings)
        engine.check(options)
        self._form = AnswerForm(engine, is_free=options.constraint_grammar is None)
        self._settings = {**settings, "shown_tokens": self._form.shown_tokens}
        self._options = replace(options, shown_tokens=self._form.shown_tokens)

    def take(self, entry: Entry) -> Run | None:
        """Execute a command, or answer a message. Raises GgufspecError, KeyboardInterrupt."""
        if entry.command is None:
            return self._answer(entry.text) if entry.text.strip() else None
        if entry.command not in _COMMANDS:
            known = ", ".join(f"/{name}" for name in _COMMANDS)
            raise PromptError(
                f"there is no command /{entry.command}; there are {known}. A message that begins "
                "with a slash needs a blank before it"
            )
        getattr(self, f"_{entry.command}")(entry.text)
        return None

    def _answer(self, text: str) -> Run:
        """Write the answer to a message, and add both to the chat. Raises as `take`."""
        from ggufspec.engine.images import with_images

        content = "".join([*self._files, text])
        question = with_images({"role": "user", "content": content}, self._images)
        self._files.clear()
        self._images.clear()
        messages: list[Message] = [*self._messages, question]
        seed = self._options.seed
        options = replace(self._options, seed=None if seed is None else seed + len(messages) // 2)
        while True:
            prompt = self._engine.render(messages)
            writer = render.TextWriter(color=render.wants_color(self._color, sys.stdout))
            try:
                run = generate(self._engine, prompt, options, writer)
                break
            except PromptTooLongError as error:
                first = int(messages[0]["role"] == "system")
                if options.context_shift and len(messages) > first + 1:
                    del messages[first : first + 2]  # the oldest question, and its answer
                    continue
                raise PromptError(
                    "the conversation with this message has "
                    f"{counted(error.n_prompt, 'token')}, the context {error.n_ctx:,}; the message "
                    f"was left out. Shorten it, or {_FULL}"
                ) from error
        if (n_dropped := (len(self._messages) + 1 - len(messages)) // 2) > 0:
            _say(f"the context is full: {counted(n_dropped, 'question')} dropped, the oldest")
        self._messages = [*messages, self._form.message(prompt, run.completion.text)]
        self._last = run
        if self._has_stats:
            report(self._engine, run, color=self._color, verbose=self._verbose)
        n_tokens = len(prompt) + len(run.completion.tokens)
        is_full = n_tokens >= self._engine.n_ctx and not options.context_shift
        if run.completion.finish_reason == "length" and is_full:
            render.note(f"the answer was cut: the context of {n_tokens:,} tokens is full; {_FULL}")
        return run

    def _help(self, _: str) -> None:
        for name, (argument, text) in _COMMANDS.items():
            render.echo(f"{f'/{name} {argument}':<14}{text}", err=True)
        render.echo(_HELP, err=True)

    def _system(self, text: str) -> None:
        rest = [message for message in self._messages if message["role"] != "system"]
        messages = [*([{"role": "system", "content": text}] if text else []), *rest]
        self._check(messages)
        self._messages = messages

    def _file(self, argument: str) -> None:
        path = _path(argument)
        text = read_text(path, "the file")
        self._files.append(f"{path.name}:\n{text}\n\n")
        _say(f"{counted(len(text), 'character')} of {path} will be in the next message")

    def _image(self, argument: str) -> None:
        from ggufspec.engine.images import bytes_of

        path = _path(argument).absolute()
        check_image(bytes_of({"path": path}))
        if self._engine.pair.target.projector is None:
            raise PromptError("this model reads no images: name its projector (--mmproj)")
        self._images.append(path)
        _say(f"{path.name} will be in the next message")

    def _undo(self, _: str) -> None:
        if not self._messages or self._messages[-1]["role"] != "assistant":
            raise PromptError("there is no question to drop")
        self._messages = self._messages[:-2]
        _say(f"dropped; {counted(self._n_answers, 'answer')} left")

    def _save(self, argument: str) -> None:
        path = _path(argument)
        document = {"messages": self._messages, "sampling": plain(self._changed)}
        text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
        check_writable(path)
        write_file(path, text.encode("utf-8", "replace"))
        _say(f"{counted(self._n_answers, 'answer')} in {path}")
        if self._n_answers:
            try:
                found = self._engine.save(_cells_of(path), self._messages)
            except PromptError:  # the context is full: saved cells would be useless
                return
            size = format_bytes(found.n_bytes)
            _say(f"{_cells_of(path)}: KV caches ({size}), which /load restores")

    def _load(self, argument: str) -> None:
        path = _path(argument)
        document = json_object(read_text(path, "the chat"))
        try:
            messages, sampling = chat_messages.parts_of(document or {})
            self._check(messages)
            changed = {**sampling, **self._given}
            options = text_settings.checked({**self._settings, **changed})
            self._engine.check(options)
        except (OptionError, PromptError) as error:
            raise PromptError(
                f"{path} cannot be loaded: {error}. Name a file that /save has written"
            ) from error
        self._messages, self._changed, self._options = messages, changed, options
        _say(f"{counted(self._n_answers, 'answer')} from {path}")
        if _cells_of(path).exists():
            try:
                self._engine.restore(_cells_of(path))
            except SessionError as error:
                _say(f"the chat must be read again: {error}")

    def _stats(self, _: str) -> None:
        self._has_stats = not self._has_stats
        _say(f"statistics after each answer: {'on' if self._has_stats else 'off'}")
        if self._has_stats and self._last is not None:
            report(self._engine, self._last, color=self._color, verbose=self._verbose)

    def _exit(self, _: str) -> None:
        self.is_over = True

    def _check(self, messages: list[Message]) -> None:
        """Raise PromptError if the template cannot render the messages with a further question."""
        self._engine.render([*messages, {"role": "user", "content": "?"}])

    @property
    def _n_answers(self) -> int:
        return sum(message["role"] == "assistant" for message in self._messages)


def _path(text: str) -> Path:
    """The path in the argument of a command. Raises PromptError if it is not a valid path."""
    try:
        if text and "\0" not in text:
            return Path(text).expanduser()
    except RuntimeError:  # ~, and no home folder
        pass
    raise PromptError(f"{text!r} is no path; name a file, such as /save chat.json")


def _cells_of(path: Path) -> Path:
    """The file beside a saved chat that has the models' KV caches."""
    return path.with_name(f"{path.name}.kv")


def _say(text: str) -> None:
    render.echo(text, err=True)
