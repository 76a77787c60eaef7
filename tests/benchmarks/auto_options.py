"""The command line of tests.benchmarks.auto, and the prompts and files that it names."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from ggufspec.bench.experiment import KINDS
from ggufspec.decoding.sampling import Sampling
from ggufspec.errors import OptionError
from ggufspec.models.header import read_header
from ggufspec.standin.embedded import embedded_draft
from tests.benchmarks import loaded_pair, prompt_sets
from tests.benchmarks.loaded_pair import LLAMA
from tests.benchmarks.prompt_sets import KindPrompt

_CONTENDERS = "plain,auto,ngram 3,fixed 1,fixed 3,fixed 7,llama"


def parser() -> argparse.ArgumentParser:
    """The command line; lists are parsed, samplings remain texts."""
    whole = argparse.ArgumentParser(prog="python -m tests.benchmarks.auto")
    add = whole.add_argument
    add("--target", type=Path, action="append", default=[], help="may be given several times")
    add("--draft", type=Path, action="append", help="one for all, or one for each target")
    add(
        "--temps",
        type=_parsed(_sampling),
        default="0,0.7",
        help="a temperature with top-k 20, top-p 0.8, min-p 0; others: 0.7/40/0.95/0.05",
    )
    add(
        "--prompts",
        type=Path,
        help='lines of {"kind": ..., "prompt": ...}, for the chat template; see prompt_sets. '
        "Default: a few texts to continue",
    )
    add("--kinds", type=_parsed(str), help="of the prompts; default: all")
    add("--per-kind", type=_count, help="prompts of each kind, at most")
    add("--contenders", type=_parsed(_contender), default=_CONTENDERS, help="default: %(default)s")
    add("--tokens", type=_count, default=128, help="of a text, at most")
    add("--least", type=_count, default=32, help="turns with a shorter text do not count")
    add("--runs", type=_count, default=1, help="of each prompt")
    add("--ctx", type=_count, default=2048, help="longer prompts are left out")
    add("--threads", type=_count, help="ours and llama.cpp's")
    add("--llama", type=Path, help="folder of llama-speculative-simple; default: without it")
    add("--llama-draft-threads", type=_count, help="of its draft; default: as --threads")
    add("-o", "--output", type=Path, help="append each text here; beside it is auto's cache folder")
    add("--resume", action="store_true", help="leave out the texts that the output has")
    add("--budget", type=_count, metavar="SECONDS", help="begin no turn that would end later")
    add("--report", type=Path, nargs="+", help="measure nothing; print the report of such outputs")
    add(
        "--merge",
        type=_merge,
        default={},
        metavar="NEW=KIND,KIND",
        help="report these kinds as one: prose=writing,qa,math,summary",
    )
    return whole


def pairs(options: argparse.Namespace) -> list[tuple[str, Path, Path]]:
    """Names, targets and drafts. The name is the quantization, with the files' if needed."""
    targets = options.target
    drafts = options.draft or [embedded_draft()]
    if not targets:
        raise OptionError("no target to measure; give --target large.gguf")
    if len(drafts) not in (1, len(targets)):
        raise OptionError(
            f"{len(targets)} targets have {len(drafts)} drafts; give one --draft for all, or one "
            "for each"
        )
    drafts = drafts * len(targets) if len(drafts) == 1 else drafts
    names = [read_header(target).quantization for target in targets]
    if len(set(names)) < len(names):
        names = [
            f"{target.stem} {name} ({draft.stem})"
            for name, target, draft in zip(names, targets, drafts, strict=True)
        ]
    return list(zip(names, targets, drafts, strict=True))


def prompts(options: argparse.Namespace) -> list[KindPrompt]:
    """At most --per-kind of each of --kinds."""
    if options.prompts:
        found = prompt_sets.read(options.prompts)
    else:
        found = [KindPrompt(kind, text) for kind, texts in KINDS.items() for text in texts]
    kinds = dict.fromkeys(prompt.kind for prompt in found)
    if missing := set(options.kinds or ()) - set(kinds):
        raise OptionError(
            f"no prompt is of kind {', '.join(sorted(missing))}; there are {', '.join(kinds)}"
        )
    return [
        prompt
        for kind in options.kinds or kinds
        for prompt in [each for each in found if each.kind == kind][: options.per_kind]
    ]


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _parsed(check: Callable[[str], str]) -> Callable[[str], list[str]]:
    """A list, each item checked; a repeated one counts once."""

    def parse(text: str) -> list[str]:
        return list(dict.fromkeys(check(each.strip()) for each in text.split(",") if each.strip()))

    return parse


def _sampling(text: str) -> str:
    try:
        Sampling(**loaded_pair.sampling_options(text))
    except (ValueError, OptionError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no sampling: {error}") from error
    return text


def _contender(text: str) -> str:
    try:
        if text != LLAMA:
            loaded_pair.options_of(text)
    except OptionError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def _merge(text: str) -> dict[str, str]:
    name, _, kinds = text.partition("=")
    return dict.fromkeys(kinds.split(","), name)
