"""The `ggufspec` command: finds its subcommands, and turns errors into messages and exit codes.

Exit codes: 0 done, 1 an error that is explained on stderr, or a difference that an audit found,
2 wrong usage, 130 interrupted.
Nothing heavy is imported before a subcommand runs, so that --help is instant.
"""

from __future__ import annotations

import importlib
import os
import sys

import click

from ggufspec import __version__
from ggufspec.cli.exits import ERROR, INTERRUPTED, USAGE
from ggufspec.errors import GgufspecError, OptionError

_COMMANDS = {
    "audit": "Test whether speculative text is what the target alone would write.",
    "batch": "Answer a file of prompts by several processes, and go on after a crash.",
    "bench": "Measure plain and speculative decoding side by side.",
    "compare": "Plain and speculative decoding side by side: a race, to watch or to record.",
    "demo": "Watch a large model write with the help of a small one; nothing to download.",
    "models": "Models by name: list, show, download, verify and remove them.",
    "plan": "Where layers of a pair would go, and how fast that would be.",
    "run": "Continue a prompt, or answer it, with a target and a draft model.",
    "serve": "Serve a pair by OpenAI's API, with a page to try it.",
    "standin": "Write a file of any model's shape, to try its speed before the download.",
    "tune": "Measure what passes cost here, and remember how a pair runs fastest.",
}


class _Commands(click.Group):
    """Imports a subcommand's module when it is asked for."""

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


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="ggufspec")
def cli() -> None:
    """Speculative decoding for GGUF models.

    A small draft model writes ahead, the large target model checks, and rejection sampling keeps
    exactly the text, or the distribution of texts, that the target alone would have written.
    """


def main() -> None:
    """Run the command line and exit."""
    code = run()
    try:
        sys.stdout.flush()
    except OSError:
        # It was told, if there was anybody to tell: now Python would try once more, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def run() -> int:
    _open_closed_streams()
    try:
        result = cli.main(prog_name="ggufspec", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        _complain("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output went away (`ggufspec run ... | head`): nobody is left to tell.
        return ERROR
    except OptionError as error:
        _complain(str(error))
        return USAGE
    except GgufspecError as error:
        _complain(str(error))
        return ERROR
    except OSError as error:
        _complain(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}")
        return ERROR
    except MemoryError:
        _complain("out of memory: use smaller models or a smaller context (-c)")
        return ERROR


def _open_closed_streams() -> None:
    """Python has None for a stream that its caller closed (`<&-`, `>&-`): nothing is there."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


def _complain(message: str) -> None:
    click.echo(f"ggufspec: {message}", err=True)
