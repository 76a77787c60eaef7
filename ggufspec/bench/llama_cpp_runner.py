"""llama.cpp's own speculative decoding, run as a command: its options in, its own numbers out.

Knows llama.cpp's options, and llama-speculative-simple's log; no statistics, none of our models.

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

from ggufspec.decoding.sampling import Sampling
from ggufspec.errors import OptionError

_N_MAX = (2, 3, 5, 7, 11, 15)
_P_MIN = (0.0, 0.3, 0.5, 0.75, 0.9)
_N_TRIES = 6  # now and then its last lines are lost: it does not flush its log as it ends
_N_LAST_WORDS = 800  # letters
_N_BATCH = 2048  # llama.cpp's own; its command reads a prompt in one batch
_SAMPLER_NAMES = {"typical_p": "typ_p"}  # where llama.cpp's are others than ours
_FIRST = "\n\n"  # what it prints before the prompt, and behind the text
_LAST = "\n\n\n\n"
_READ = re.compile(r"encoded\s+(\d+) tokens in\s+([\d.]+) seconds")
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
    """A program of llama.cpp with a pair of models. Layers: None leaves them to llama.cpp."""

    binary: Path
    target: Path
    draft: Path | None
    n_ctx: int
    n_threads: int
    n_threads_draft: int
    n_gpu_layers: int | None = None
    n_gpu_layers_draft: int | None = None


@dataclass(frozen=True)
class Outcome:
    """What it says of one text; `n_prompt` counts the beginning-of-text token, as ours.

    `printed`: the prompt and the text, special tokens by their names.
    """

    n_prompt: int
    n_generated: int
    n_drafted: int
    n_accepted: int
    tokens_per_second: float
    prompt_seconds: float = 0.0
    generation_seconds: float = 0.0
    printed: str = ""


def run(
    rival: Rival, name: str, prompt: str, *, sampling: str, n_tokens: int, seed: int
) -> Outcome:
    """One text, at its defaults or as a combination of the grid. Raises OptionError."""
    return write(command(rival, name, prompt, sampling=sampling, n_tokens=n_tokens, seed=seed))


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
    options = [*_sampling(sampling), *drafting]
    return text_command(rival, prompt, options, n_tokens=n_tokens, seed=seed, ignore_eos=True)


def write(arguments: Sequence[str]) -> Outcome:
    """What the command of one text says. Raises OptionError."""
    for _ in range(_N_TRIES - 1):
        log, printed = _log(arguments)
        if outcome := _outcome(log, printed):
            return outcome
    return parse(*_log(arguments))


def _log(arguments: Sequence[str]) -> tuple[str, str]:
    """All that a command says, and what it says of that on stdout."""
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
            f"{arguments[0]} ended with code {done.returncode}, it must be 0; its last words:\n"
            f"{last_words(log)}\nTry it by hand: {shlex.join(arguments)}"
        )
    return log, done.stdout


def environment() -> dict[str, str]:
    """Ours, without what the user's shell says of llama.cpp: it would change what is compared."""
    return {name: value for name, value in os.environ.items() if not name.startswith("LLAMA_ARG_")}


def last_words(log: str) -> str:
    """The end of a log, where it says what went wrong."""
    return log[-_N_LAST_WORDS:].strip()


def text_command(
    rival: Rival,
    prompt: str,
    options: Sequence[str],
    *,
    n_tokens: int,
    seed: int,
    ignore_eos: bool,
    n_prompt: int = 0,
) -> list[str]:
    """The command line of one text; `n_prompt`: its tokens, where they may be many."""
    return [
        str(rival.binary),
        *loading(rival),
        *("-p", prompt, "--no-escape", *(["--ignore-eos"] if ignore_eos else [])),
        *("--seed", str(seed)),
        *("-n", str(n_tokens - 1)),  # it stops behind the round that writes more than n
        *(["-b", str(n_prompt)] if n_prompt > _N_BATCH else []),
        *options,
        *("--log-colors", "off"),
    ]


def loading(rival: Rival) -> list[str]:
    """The options of loading that all of llama.cpp's programs have in common."""
    made = ["-m", str(rival.target)]
    if rival.draft is not None:
        made += ["-md", str(rival.draft), "--spec-type", "draft-simple"]
    made += ["-c", str(rival.n_ctx), "-t", str(rival.n_threads)]
    if rival.draft is not None:
        made += ["-td", str(rival.n_threads_draft)]
    if rival.n_gpu_layers is not None:
        made += ["-ngl", _layers(rival.n_gpu_layers)]
    if rival.draft is not None and rival.n_gpu_layers_draft is not None:
        made += ["-ngld", _layers(rival.n_gpu_layers_draft)]
    return made


def sampling_flags(sampling: Sampling, breakers: Sequence[str], n_ctx: int) -> list[str]:
    """Ours as options of its command line: every one, since a model file may have defaults too."""
    made = [
        *("--temp", str(sampling.temperature), "--top-k", str(sampling.top_k)),
        *("--top-p", str(sampling.top_p), "--min-p", str(sampling.min_p)),
        *("--typical", str(sampling.typical_p), "--top-nsigma", str(sampling.top_n_sigma)),
        *("--repeat-last-n", str(looked_back(sampling.repeat_last_n, n_ctx))),
        *("--repeat-penalty", str(sampling.repeat_penalty)),
        *("--frequency-penalty", str(sampling.frequency_penalty)),
        *("--presence-penalty", str(sampling.presence_penalty)),
        *("--samplers", ";".join(sampler_names(sampling))),
    ]
    if sampling.dry_multiplier > 0:
        made += [
            *("--dry-multiplier", str(sampling.dry_multiplier)),
            *("--dry-base", str(sampling.dry_base)),
            *("--dry-allowed-length", str(sampling.dry_allowed_length)),
            *("--dry-penalty-last-n", str(looked_back(sampling.dry_penalty_last_n, n_ctx))),
        ]
        for breaker in breakers or ["none"]:
            made += ["--dry-sequence-breaker", breaker]
    for token, bias in sampling.logit_bias.items():
        made += ["--logit-bias", f"{token}{bias:+}"]
    return made


def sampler_names(sampling: Sampling) -> list[str]:
    """The samplers in their order, by llama.cpp's names."""
    return [_SAMPLER_NAMES.get(name, name) for name in sampling.samplers]


def looked_back(n: int, n_ctx: int) -> int:
    """Tokens that a penalty looks back upon: llama.cpp's programs know no -1."""
    return n_ctx if n < 0 else n


def _layers(n: int) -> str:
    return "all" if n < 0 else str(n)


def parse(log: str, printed: str = "") -> Outcome:
    """What a log says. Raises OptionError for one that does not have the lines."""
    outcome = _outcome(log, printed)
    if outcome is None:
        raise OptionError(
            "the log has no lines 'encoded ...', 'decoded ... speed ...', 'n_drafted', 'n_accept' "
            f"as those of llama-speculative-simple; it ends with:\n{last_words(log)}"
        )
    return outcome


def _outcome(log: str, printed: str) -> Outcome | None:
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
        prompt_seconds=float(read[2]),
        generation_seconds=float(written[2]),
        printed=printed.removeprefix(_FIRST).removesuffix(_LAST),
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
