"""The command line of tests.benchmarks.auto."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path

from ggufspec.bench.prompts import KINDS
from ggufspec.standin.embedded import embedded_draft, embedded_target
from tests.benchmarks.ab_report import AUTO, PLAIN


def parser() -> argparse.ArgumentParser:
    """The parser; lists are parsed, temperatures remain texts."""
    whole = argparse.ArgumentParser(prog="python -m tests.benchmarks.auto")
    add = whole.add_argument
    add("--target", type=Path, action="append", default=[], help="may be given several times")
    add("--draft", type=Path, default=embedded_draft(), help="default: the embedded one")
    add("--adversarial", action="store_true", help="also measure a draft of random weights")
    add("--temps", type=_samplings, default="0,0.7,1.0,default", help="default: llama.cpp's own")
    add("--prompts", type=_one_of(*KINDS), default="open,repetitive")
    add("--n-prompts", type=_count, default=3, help="of each kind, at most")
    add("--lengths", type=_lengths, default="1-16", help="fixed ones: 1-16, or 2,4,8")
    add("--contenders", type=_one_of(PLAIN, "fixed", AUTO), default="plain,fixed,auto")
    add("--tokens", type=_count, default=96, help="of a text")
    add("--warm-up", type=_count, default=32, help="tokens of each contender in each condition")
    add("--survey-runs", type=_count, default=1, help="of every length")
    add(
        "--runs",
        type=_whole,
        default=3,
        help="finals: of the best three lengths and grid points again",
    )
    add("--threads", type=_count, help="of the target, ours and llama.cpp's")
    add("--llama", type=Path, help="path of llama-speculative-simple")
    add("--grid", action="store_true", help="measure a grid of its draft lengths and p-mins too")
    add(
        "--replay",
        type=Path,
        nargs="?",
        const=embedded_target(),
        metavar="MODEL",
        help="write with MODEL (default: the embedded target), and count each pass with a measured "
        "time of the target: many more texts in the same time",
    )
    add(
        "--cold-start",
        action="store_true",
        help="instead: new processes with an empty cache folder",
    )
    add("--cold-start-tokens", type=_count, default=64)
    add("--json", type=Path, help="write all raw data here, after each condition")
    add("--report", type=Path, nargs="+", help="measure nothing; print the report of such files")
    return whole


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def _count(text: str) -> int:
    if _whole(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be at least 1")
    return int(text)


def _lengths(text: str) -> list[int]:
    found: list[int] = []
    for part in text.split(","):
        low, _, high = part.partition("-")
        found += range(_count(low), _count(high or low) + 1)
    return sorted(set(found))


def _samplings(text: str) -> list[str]:
    found = text.split(",")
    for each in found:
        if each != "default":
            _check_temperature(each)
    return found


def _check_temperature(text: str) -> None:
    try:
        good = 0 <= float(text) < math.inf
    except ValueError:
        good = False
    if not good:
        raise argparse.ArgumentTypeError(f"{text!r} is not a temperature, nor 'default'")


def _one_of(*names: str) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        found = text.split(",")
        for each in found:
            if each not in names:
                raise argparse.ArgumentTypeError(f"{each!r} is not one of {', '.join(names)}")
        return found

    return parse
