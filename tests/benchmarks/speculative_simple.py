"""Runs llama-speculative-simple, an example program of llama.cpp, for one text."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ggufspec.bench.llama_server import (
    LlamaCppProgram,
    environment,
    loading_options,
    log_tail,
    sampler_names,
)
from ggufspec.decoding.sampling import Sampling
from ggufspec.errors import OptionError, PromptError
from ggufspec.llama.python_llama import BaselineRequest, BaselineText
from ggufspec.llama.vocab import Vocab

_N_TRIES = 6  # sometimes its last lines are missing: it does not flush its log at exit
_N_BATCH = 2048  # llama.cpp's default; the program reads a prompt in one batch
_BEFORE_TEXT = "\n\n"  # printed before the prompt, and after the text
_AFTER_TEXT = "\n\n\n\n"
_PROMPT_LINE = re.compile(r"encoded\s+(\d+) tokens in\s+([\d.]+) seconds")
_TEXT_LINE = re.compile(r"decoded\s+(\d+) tokens in\s+([\d.]+) seconds, speed:\s+([\d.]+) t/s")
_DRAFTED_LINE = re.compile(r"n_drafted = (\d+)")
_ACCEPTED_LINE = re.compile(r"n_accept  = (\d+)")


@dataclass(frozen=True)
class SpeculativeSimple:
    """llama-speculative-simple: a process for each text, which loads the models first.

    Its "decoding" is our generation: it begins when target and draft have read the prompt but its
    last token, and ends after the last round, which may exceed the requested number of tokens.
    """

    program: LlamaCppProgram
    vocab: Vocab  # of the target

    def write(self, request: BaselineRequest) -> BaselineText:
        """Raises PromptError for tokens that no text has, and OptionError if the program fails."""
        text = text_of(self.vocab, request.tokens)
        if text is None or "\0" in text:
            raise PromptError(
                f"it takes a text, and no text has these {len(request.tokens):,} tokens"
            )
        found, printed = run(text_command(self.program, request, text))
        if found.n_prompt != len(request.tokens):
            raise PromptError(
                f"it is {found.n_prompt:,} tokens for llama.cpp, {len(request.tokens):,} for "
                "ggufspec"
            )
        written = printed.partition(text)[2]
        tokens = self.vocab.tokenize(written, add_special=False, parse_special=False)
        return replace(found, tokens=tokens)


def run(arguments: Sequence[str]) -> tuple[BaselineText, str]:
    """Run a command of `text_command`: its numbers, and prompt and text. Raises OptionError."""
    for left in reversed(range(_N_TRIES)):
        log, printed = _output(arguments)
        try:
            return parse(log), printed.removeprefix(_BEFORE_TEXT).removesuffix(_AFTER_TEXT)
        except OptionError:
            if not left:
                raise
    raise AssertionError


def _output(arguments: Sequence[str]) -> tuple[str, str]:
    """All output of a command, and its stdout alone."""
    try:
        done = subprocess.run(
            arguments, capture_output=True, text=True, errors="replace", env=environment()
        )
    except OSError as error:
        raise OptionError(
            f"{arguments[0]} cannot be run: {error.strerror}; give the path of a "
            "llama-speculative-simple"
        ) from error
    log = done.stdout + done.stderr
    if done.returncode:
        raise OptionError(
            f"{arguments[0]} failed with exit code {done.returncode}; its output ends with:\n"
            f"{log_tail(log)}\nRun it by hand: {shlex.join(arguments)}"
        )
    return log, done.stdout


def text_command(program: LlamaCppProgram, request: BaselineRequest, text: str) -> list[str]:
    """The command line of one text."""
    n_prompt = len(request.tokens)
    return [
        str(program.binary),
        *loading_options(program),
        *("-p", text, "--no-escape"),
        *(["--ignore-eos"] if request.ignore_eos else []),
        *("--seed", str(request.seed)),
        *("-n", str(request.n_tokens - 1)),  # it stops after the round that writes more than n
        *(["-b", str(n_prompt)] if n_prompt > _N_BATCH else []),
        *sampling_flags(request.sampling),
        *("--log-colors", "off"),
    ]


def sampling_flags(sampling: Sampling) -> list[str]:
    """Temperature and truncation as llama.cpp options; it has no penalties by default."""
    return [
        *("--temp", str(sampling.temperature), "--top-k", str(sampling.top_k)),
        *("--top-p", str(sampling.top_p), "--min-p", str(sampling.min_p)),
        *("--samplers", ";".join(sampler_names(sampling)), "--mirostat", "0"),
    ]


def parse(log: str) -> BaselineText:
    """The numbers in a log. Raises OptionError if it does not have the expected lines."""
    lines = (_PROMPT_LINE, _TEXT_LINE, _DRAFTED_LINE, _ACCEPTED_LINE)
    prompt, text, drafted, accepted = (line.search(log) for line in lines)
    if not (prompt and text and drafted and accepted):
        raise OptionError(
            "the log has no lines 'encoded ...', 'decoded ... speed ...', 'n_drafted', 'n_accept' "
            f"as llama-speculative-simple writes them; it ends with:\n{log_tail(log)}"
        )
    n_generated, n_accepted = int(text[1]), int(accepted[1])
    prompt_seconds, seconds = float(prompt[2]), float(text[2])
    return BaselineText(
        n_prompt=int(prompt[1]),
        n_generated=n_generated,
        n_drafted=int(drafted[1]),
        n_accepted=n_accepted,
        prompt_seconds=prompt_seconds,
        # Not in the log: estimated as one round of average length after the prompt.
        first_token_seconds=prompt_seconds + seconds / max(n_generated - n_accepted, 1),
        generation_seconds=seconds,
    )


def text_of(vocab: Vocab, tokens: Sequence[int]) -> str | None:
    """The text that tokenizes to these tokens, special ones by their names; None: no text does."""
    added = vocab.tokenize("", add_special=True, parse_special=True)
    rest = tokens[len(added) :] if list(tokens[: len(added)]) == added else tokens
    shown = [vocab.shown(token) for token in rest]
    is_special = [vocab.piece(token) != text for token, text in zip(rest, shown, strict=True)]
    # Some vocabularies add a space before a text, and after each special token.
    bare = [
        text.removeprefix(b" ") if i == 0 or is_special[i - 1] else text
        for i, text in enumerate(shown)
    ]
    for pieces in (shown, bare):
        text = b"".join(pieces).decode("utf-8", "replace")
        if text and vocab.tokenize(text, add_special=True, parse_special=True) == list(tokens):
            return text
    return None
