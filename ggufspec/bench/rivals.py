"""llama.cpp's own speculative decoding, run as a command: its options in, its own numbers out.

Knows llama-speculative-simple's command line and log; no statistics, and none of our models.

What it calls decoding is what we call generation: it begins when target and draft have read the
prompt but its last token, and ends behind the last round. That round may pass the number of tokens
asked for; the rate counts what it gave.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import NamedTuple

from ggufspec.errors import OptionError

_N_MAX = (2, 3, 5, 7, 11, 15)
_P_MIN = (0.0, 0.3, 0.5, 0.75, 0.9)
_N_TRIES = 6  # now and then its last lines are lost: it does not flush its log as it ends
_READ = re.compile(r"encoded\s+(\d+) tokens in")
_WRITTEN = re.compile(r"decoded\s+(\d+) tokens in\s+([\d.]+) seconds, speed:\s+([\d.]+) t/s")
_DRAFTED = re.compile(r"n_drafted = (\d+)")
_ACCEPTED = re.compile(r"n_accept  = (\d+)")


class Combination(NamedTuple):
    """How it drafts: the most tokens, and the probability below which it stops."""

    n_max: int
    p_min: float

    @property
    def name(self) -> str:
        """What the tables call it."""
        return f"llama n {self.n_max} p {self.p_min:g}"


GRID = tuple(Combination(n_max, p_min) for n_max, p_min in product(_N_MAX, _P_MIN))
_BY_NAME = {combination.name: combination for combination in GRID}  # any other name: as it comes


@dataclass(frozen=True)
class Rival:
    """A build of llama-speculative-simple with a pair of models."""

    binary: Path
    target: Path
    draft: Path
    n_ctx: int
    n_threads: int
    n_threads_draft: int


@dataclass(frozen=True)
class Outcome:
    """What it says of one text; `n_prompt` counts the beginning-of-text token, as ours."""

    n_prompt: int
    n_generated: int
    n_drafted: int
    n_accepted: int
    tokens_per_second: float


def run(
    rival: Rival, name: str, prompt: str, *, sampling: str, n_tokens: int, seed: int
) -> Outcome:
    """One text, at its defaults or as a combination of the grid. Raises OptionError."""
    arguments = command(rival, name, prompt, sampling=sampling, n_tokens=n_tokens, seed=seed)
    for _ in range(_N_TRIES - 1):
        if outcome := _outcome(log := _log(arguments)):
            return outcome
    return parse(log)


def _log(arguments: Sequence[str]) -> str:
    # What the user's shell says of llama.cpp would change what is compared.
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("LLAMA_ARG_")
    }
    try:
        done = subprocess.run(
            arguments, capture_output=True, text=True, errors="replace", env=environment
        )
    except OSError as error:
        raise OptionError(
            f"{arguments[0]} cannot be run: {error.strerror}; give the path of a "
            "llama-speculative-simple"
        ) from error
    log = done.stdout + done.stderr
    if done.returncode:
        raise OptionError(
            f"{arguments[0]} ended with code {done.returncode}, it must be 0; its last words:\n"
            f"{log[-800:]}\nTry it by hand: {shlex.join(arguments)}"
        )
    return log


def command(
    rival: Rival, name: str, prompt: str, *, sampling: str, n_tokens: int, seed: int
) -> list[str]:
    """The command line of one text."""
    drafting = (
        [
            *("--spec-draft-n-max", str(combination.n_max)),
            *("--spec-draft-p-min", f"{combination.p_min:g}"),
        ]
        if (combination := _BY_NAME.get(name))
        else []
    )
    return [
        str(rival.binary),
        *("-m", str(rival.target), "-md", str(rival.draft), "--spec-type", "draft-simple"),
        *("-c", str(rival.n_ctx), "-t", str(rival.n_threads), "-td", str(rival.n_threads_draft)),
        *("-p", prompt, "--no-escape", "--ignore-eos", "--seed", str(seed)),
        *("-n", str(n_tokens - 1)),  # it stops behind the round that writes more than n
        *_sampling(sampling),
        *drafting,
        *("--log-colors", "off"),
    ]


def parse(log: str) -> Outcome:
    """What a log says. Raises OptionError for one that does not have the lines."""
    outcome = _outcome(log)
    if outcome is None:
        raise OptionError(
            "the log has no lines 'encoded ...', 'decoded ... speed ...', 'n_drafted', 'n_accept' "
            f"as those of llama-speculative-simple; it ends with:\n{log[-800:]}"
        )
    return outcome


def _outcome(log: str) -> Outcome | None:
    found = [line.search(log) for line in (_READ, _WRITTEN, _DRAFTED, _ACCEPTED)]
    read, written, drafted, accepted = found
    if not (read and written and drafted and accepted):
        return None
    return Outcome(
        n_prompt=int(read[1]),
        n_generated=int(written[1]),
        n_drafted=int(drafted[1]),
        n_accepted=int(accepted[1]),
        tokens_per_second=float(written[3]),
    )


def _sampling(sampling: str) -> Sequence[str]:
    """Samplers that truncate are off at a temperature; at 0 its own chain gives the same, faster.

    Penalties, DRY, typical, top-n-sigma and XTC stay in the chain and are off by default.
    """
    if sampling == "default":
        return ()
    if float(sampling) == 0:
        return ("--temp", "0")
    return ("--temp", sampling, "--top-k", "0", "--top-p", "1", "--min-p", "0")
