"""The `ggufspec` command: imports a subcommand when it is called; turns errors into exit codes."""

from __future__ import annotations

import errno
import importlib
import io
import os
import sys

import click

from ggufspec import __version__
from ggufspec.cli import CLOSED_PIPE, ERROR, INTERRUPTED, USAGE, render
from ggufspec.cli.interrupts import end_at_interrupt, end_at_second_interrupt
from ggufspec.common.facts import visible
from ggufspec.errors import GgufspecError, OptionError

_COMMANDS = {
    "audit": "Test whether speculative text has the target's distribution.",
    "batch": "Run a file of prompts in several processes; continue after a crash.",
    "bench": "Measure plain and speculative decoding in alternation.",
    "chat": "Talk with a model in the terminal.",
    "compare": "Watch plain and speculative decoding side by side.",
    "demo": "Watch a large model generate faster, without a download.",
    "devices": "Show what llama.cpp can run on, and what it was built with.",
    "models": "List, show, download, verify and remove models.",
    "plan": "Predict where the layers of a pair go, and how fast it is.",
    "run": "Continue or answer a prompt with a target and a draft model.",
    "serve": "Serve a pair over APIs of OpenAI, Anthropic and Ollama, with a web page.",
    "standin": "Write a file with the shape of a model, to try its speed.",
    "trim": "Make a cheaper draft out of a model: fewer tokens, layers or bits.",
    "tune": "Measure a pair on this machine, and keep its fastest settings.",
}
_OUTPUT_FAILURES = {
    errno.ENOSPC: "no space left on that disk; make room there",
    errno.EBADF: "stdout is closed; to drop the output, redirect it to /dev/null",
}


_HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


class _Commands(click.Group):
    """Imports a subcommand's module on demand, so that --help is instant."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"ggufspec.cli.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(sorted(_COMMANDS.items()))


@click.group(cls=_Commands, context_settings=_HELP)
@click.version_option(__version__, prog_name="ggufspec")
def cli() -> None:
    """Speculative decoding for GGUF models.

    A small draft model proposes tokens, the large target model verifies them in one pass, and
    rejection sampling keeps exactly the target's distribution.
    """


def main() -> None:
    _open_closed_streams()
    try:
        end_at_second_interrupt()
        code = run()
    except KeyboardInterrupt:  # raised before or during the handling in `run`
        code = INTERRUPTED
    end_at_interrupt()
    try:
        sys.stdout.flush()
    except OSError:
        # The failure is reported already: without this, Python's flush at exit would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def run() -> int:
    try:
        result = cli.main(prog_name="ggufspec", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except click.ClickException as error:
        shown = io.StringIO()
        error.show(shown)
        sys.stderr.write(visible(shown.getvalue()))
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        render.note("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        return CLOSED_PIPE  # such as `ggufspec run ... | head`
    except SystemExit as error:
        if error.code != 1:
            raise
        return CLOSED_PIPE  # click has caught the BrokenPipeError
    except GgufspecError as error:
        render.note(str(error))
        return USAGE if isinstance(error, OptionError) else ERROR
    except OSError as error:
        if error.errno in _OUTPUT_FAILURES and not error.filename:
            render.note(f"cannot write the output: {_OUTPUT_FAILURES[error.errno]}")
            return ERROR
        render.note(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}")
        return ERROR
    except MemoryError:
        render.note("out of memory: use smaller models or a smaller context (-c)")
        return ERROR


def _open_closed_streams() -> None:
    """Open the streams that the caller closed (`<&-`, `>&-`); writing to such a stdout fails."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            flags = os.O_WRONLY if name == "stderr" else os.O_RDONLY
            file = os.open(os.devnull, flags)  # takes the free descriptor, so no other file can
            setattr(sys, name, open(file, mode, encoding="utf-8"))  # noqa: SIM115
