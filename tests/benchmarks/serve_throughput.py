"""Compares `ggufspec serve` with llama-server where several clients stream texts at the same time.

    python -m tests.benchmarks.serve_throughput large.gguf --draft small.gguf \\
        --llama-server llama.cpp/build/bin/llama-server --prompts question.jsonl

Each turn starts each server anew, one at a time, in rotated order. Clients take the prompts one
by one, each of which is used once per server. Reports tokens/s of wall time, prompts included, the
time to first token, and both over those of llama-server in the same turn.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from ggufspec.bench.experiment import rotated
from ggufspec.common import defaults
from ggufspec.common.prompts import TEXTS, parse_prompts
from tests.benchmarks.servers import OURS, data_lines, free_port, running

_BASE = "llama-server"


class Load(NamedTuple):
    """What the clients saw of one server."""

    tokens_per_second: float
    first_seconds: Sequence[float]
    cpu_seconds: float  # of the server, while the clients ran; 0 where /proc is missing


class Clients:
    """Threads that stream one text after the other, until no prompt is left."""

    def __init__(self, port: int, prompts: Sequence[str], settings: Mapping[str, Any]) -> None:
        self._port, self._settings = port, settings
        self._left = iter(prompts)
        self._lock = threading.Lock()
        self.first_seconds: list[float] = []
        self.n_tokens = 0
        self.errors: list[str] = []

    def run(self, n_clients: int) -> float:
        """Returns the seconds until the last text has ended. Raises SystemExit for any error."""
        threads = [threading.Thread(target=self._stream_all) for _ in range(n_clients)]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.errors:
            raise SystemExit(f"a request failed: {self.errors[0]}")
        return time.perf_counter() - start

    def _stream_all(self) -> None:
        while True:
            with self._lock:
                prompt = next(self._left, None)
            if prompt is None:
                return
            try:
                first, n_tokens = self._stream(prompt)
            except (OSError, HTTPException, ValueError) as error:
                self.errors.append(f"{type(error).__name__}: {error}")
                return
            with self._lock:
                self.first_seconds.append(first)
                self.n_tokens += n_tokens

    def _stream(self, prompt: str) -> tuple[float, int]:
        """Seconds to the first token, and the number of tokens that the server reports."""
        further = {"stream": True, "stream_options": {"include_usage": True}}
        body = {"prompt": prompt, **self._settings, **further}
        start = time.perf_counter()
        lines = data_lines(self._port, "/v1/completions", body)
        next(lines)
        first = time.perf_counter() - start
        *_, last = lines  # parsed at the end only: the clients share the server's processors
        return first, json.loads(last)["usage"]["completion_tokens"]


def measured(command: Sequence[str], port: int, options: argparse.Namespace) -> Load:
    """Start a server, let the clients stream all prompts, and stop it."""
    settings = {
        "max_tokens": options.tokens,
        "temperature": options.temp,
        "ignore_eos": True,
        "model": "any",
    }
    with running(command, port) as process:
        warm_up = Clients(port, ["One, two, three,"] * options.slots, settings)
        warm_up.run(options.slots)
        clients = Clients(port, options.texts, settings)
        before = _cpu_seconds(process.pid)
        seconds = clients.run(options.clients)
        cpu = _cpu_seconds(process.pid) - before
    n_expected = options.tokens * len(options.texts)
    if clients.n_tokens != n_expected:
        sys.stderr.write(f"{clients.n_tokens} tokens instead of {n_expected}: {command[0]}\n")
    return Load(clients.n_tokens / seconds, sorted(clients.first_seconds), cpu)


def _cpu_seconds(process: int) -> float:
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def commands(options: argparse.Namespace, port: int) -> dict[str, list[str]]:
    """The command line of each contender."""
    ours = [*OURS, "--target", options.target]
    ours += ["-c", str(options.ctx_size), "--slots", str(options.slots), "--port", str(port)]
    theirs = [options.llama_server, "-m", options.target, "--port", str(port)]
    # llama-server divides its context among the slots.
    theirs += ["-c", str(options.ctx_size * options.slots), "-np", str(options.slots)]
    if options.threads:
        ours += ["-t", str(options.threads)]
        theirs += ["-t", str(options.threads)]
    made = {
        _BASE: theirs,
        "no drafts": [*ours, "--drafter", "none"],
        "n-grams": ours,
    }
    if options.draft:
        made["draft"] = [*ours, "--draft", options.draft]
    return {name: made[name] for name in options.contenders.split(",") if name in made}


def report(found: Mapping[str, Sequence[Load]]) -> str:
    """A line for each contender: medians over the turns, ratios with their range."""
    lines = [
        "contender      tokens/s   over llama-server     TTFT median   over it            p90   CPU"
    ]
    for name, loads in found.items():
        speeds = [load.tokens_per_second for load in loads]
        firsts = [median(load.first_seconds) for load in loads]
        p90 = median(load.first_seconds[int(0.9 * len(load.first_seconds))] for load in loads)
        of_speed = of_first = ""
        if base := found.get(_BASE):
            of_speed = _range(
                [mine / other.tokens_per_second for mine, other in zip(speeds, base, strict=True)]
            )
            of_first = _range(
                [
                    mine / median(other.first_seconds)
                    for mine, other in zip(firsts, base, strict=True)
                ]
            )
        lines.append(
            f"{name:12} {median(speeds):10.1f}   {of_speed:19} {median(firsts):10.2f} s   "
            f"{of_first:19} {p90:5.2f} s {median(load.cpu_seconds for load in loads):5.1f} s"
        )
    return "\n".join(lines) + "\n"


def _range(ratios: Sequence[float]) -> str:
    return f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all contenders in turns, and print the report after each turn."""
    name = "python -m tests.benchmarks.serve_throughput"
    parser = argparse.ArgumentParser(description=__doc__, prog=name)
    parser.add_argument("target")
    parser.add_argument("--draft")
    parser.add_argument("--llama-server", default=_BASE)
    parser.add_argument("--prompts", type=Path, required=True, help="see `ggufspec bench`")
    parser.add_argument("--first", type=int, default=0, help="index of the first prompt to use")
    parser.add_argument("--step", type=int, default=1, help="use each prompt of so many")
    parser.add_argument("--n-prompts", type=int, default=24)
    parser.add_argument("--most-characters", type=int, default=600, help="longer ones are left out")
    parser.add_argument("--contenders", default=f"{_BASE},no drafts,n-grams,draft")
    parser.add_argument("--slots", type=int, default=defaults.SERVE_SLOTS)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--temp", type=float, default=0.0)
    parser.add_argument("--ctx-size", type=int, default=1024)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args(arguments)

    every = parse_prompts(options.prompts.read_bytes(), str(options.prompts), TEXTS)
    texts = [prompt.turns[0] for prompt in every[options.first :: options.step]]
    short = [text for text in texts if len(text) <= options.most_characters]
    options.texts = short[: options.n_prompts]
    found: dict[str, list[Load]] = {}
    for turn in range(options.runs):
        port = free_port()
        made = commands(options, port)
        found = found or {name: [] for name in made}
        for name in rotated(list(made), turn):
            found[name].append(measured(made[name], port, options))
        sys.stdout.write(f"turn {turn + 1} of {options.runs}\n{report(found)}")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
