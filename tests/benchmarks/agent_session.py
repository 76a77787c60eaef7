"""Replays a recorded session of a coding agent against llama-server and `ggufspec serve`.

    python -m tests.benchmarks.agent_session large.gguf --draft small.gguf \\
        --llama-server llama.cpp/build/bin/llama-server

Each turn sends the whole conversation so far, with the recorded answers: all servers get the same
prompts. They generate answers of their own, greedily, of at most as many tokens as the recorded one
has (and `--tokens`). A server is started anew for each session, and sessions alternate. Prints
Markdown: seconds of a session, over those of llama-server with the same models in the same run.

`data/agent_session.json` was made by a script in place of a model: it edited a small project that
was invented for it, with tools that really ran.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from ggufspec.bench.experiment import rotated
from tests.benchmarks.servers import OURS, data_lines, free_port, running

RECORDED = Path(__file__).parent / "data" / "agent_session.json"
_BASE, _OURS, _WITH_DRAFT = "llama-server", "ggufspec", " with draft"
_CHARACTERS_PER_TOKEN = 4
_LEAST_TOKENS = 16


@dataclass(frozen=True)
class Session:
    """Tools and messages, as in OpenAI's chat completions."""

    tools: Sequence[Mapping[str, Any]]
    messages: Sequence[Mapping[str, Any]]

    @property
    def answers(self) -> list[int]:
        """Which messages are the assistant's."""
        return [i for i, message in enumerate(self.messages) if message["role"] == "assistant"]

    def before(self, index: int) -> Session:
        """The session up to a message."""
        return Session(self.tools, self.messages[:index])

    def length(self, index: int) -> int:
        """Characters of a message with its calls."""
        message = self.messages[index]
        calls = [call["function"] for call in message.get("tool_calls", ())]
        return len(message["content"]) + sum(map(len, map(json.dumps, calls)))

    def request(self, n_tokens: int) -> dict[str, Any]:
        """The body that asks for the next answer, of at most `n_tokens`."""
        return {
            "model": "any",
            "messages": self.messages,
            **({"tools": self.tools} if self.tools else {}),
            "max_tokens": n_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


class Turn(NamedTuple):
    """What a client saw of one answer. Seconds are from when the request is sent."""

    first_seconds: float  # to the first text, or call
    seconds: float
    n_tokens: int
    n_prompt: int
    n_cached: int


Replayed = Sequence[Turn]


def load(path: Path = RECORDED) -> Session:
    """The tools and messages of a session, as in OpenAI's chat completions."""
    return Session(**json.loads(path.read_text(encoding="utf-8")))


def replay(
    session: Session, port: int, *, n_turns: int, n_tokens: int, ignore_eos: bool
) -> list[Turn]:
    """Ask the server for the first answers of a session. Raises ValueError for an error of it."""
    made = []
    for at in session.answers[:n_turns]:
        most = min(max(session.length(at) // _CHARACTERS_PER_TOKEN, _LEAST_TOKENS), n_tokens)
        body = session.before(at).request(most)
        made.append(_ask(port, body | ({"ignore_eos": True} if ignore_eos else {})))
    return made


def _ask(port: int, body: Mapping[str, Any]) -> Turn:
    start, first = time.perf_counter(), 0.0
    lines = []
    for line in data_lines(port, "/v1/chat/completions", body):
        lines.append(line)
        if not first and has_text(json.loads(line)):
            first = time.perf_counter() - start
    seconds = time.perf_counter() - start
    # Parsed at the end only: the client shares the server's processors.
    usages = [usage for line in lines if (usage := json.loads(line).get("usage"))]
    if not usages:
        raise ValueError(f"the stream has no 'usage'; it ends with {lines[-1:]!r}")
    usage = usages[-1]
    n_cached = usage["prompt_tokens_details"]["cached_tokens"]
    n_tokens, n_prompt = usage["completion_tokens"], usage["prompt_tokens"]
    return Turn(first or seconds, seconds, n_tokens, n_prompt, n_cached)


def has_text(event: Mapping[str, Any]) -> bool:
    """Whether an event of a stream has a part of the answer."""
    deltas = [choice["delta"] for choice in event.get("choices", ())]
    names = ("content", "reasoning_content", "tool_calls")
    return any(delta.get(name) for delta in deltas for name in names)


def commands(options: argparse.Namespace, port: int) -> dict[str, list[str]]:
    """The command line of each contender: the same models, context, threads and attention."""
    shared = ["-m", options.target, "-c", str(options.ctx_size), "--port", str(port)]
    shared += ["-t", str(options.threads), "-fa", options.flash_attn]
    if options.chat_template_file:
        shared += ["--chat-template-file", options.chat_template_file]
    ours = [*OURS, *shared, "--slots", "1"]
    theirs = [options.llama_server, *shared, "-np", "1"]
    made = {_BASE: theirs, _OURS: ours}
    if options.draft:
        draft = ["-md", options.draft, "-td", str(options.threads)]
        made[_BASE + _WITH_DRAFT] = [*theirs, *draft, "--spec-type", "draft-simple"]
        made[_OURS + _WITH_DRAFT] = [*ours, *draft]
    wanted = options.contenders.split(",") if options.contenders else made
    return {name: made[name] for name in made if name in wanted}


def measured(command: Sequence[str], port: int, options: argparse.Namespace) -> Replayed:
    """A session with a server of its own."""
    with running(command, port):
        warm_up = Session([], [{"role": "user", "content": "Hello"}])
        _ask(port, warm_up.request(16))
        return replay(
            load(options.session),
            port,
            n_turns=options.turns,
            n_tokens=options.tokens,
            ignore_eos=options.ignore_eos,
        )


def report(found: Mapping[str, Sequence[Replayed]]) -> str:
    """Two tables: sessions, and the turns of all contenders. Medians over the runs."""
    lines = [
        "| server | session, s | over llama-server | first token, s | later turns, s "
        "| tokens | cached | tokens/s after the first |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, runs in found.items():
        base = found.get(name.replace(_OURS, _BASE), ())
        ratios = [_total(run) / _total(other) for run, other in zip(runs, base, strict=False)]
        turns = [turn for run in runs for turn in run]
        later = [turn.first_seconds for run in runs for turn in run[1:]] or [0.0]
        writing = sum(turn.seconds - turn.first_seconds for turn in turns)
        n_tokens = sum(turn.n_tokens for turn in turns)
        cells = [
            name,
            _range([_total(run) for run in runs], 1),
            _range(ratios, 2) if ratios else "",
            f"{median(run[0].first_seconds for run in runs):.2f}",
            _range(later, 2),
            _range([sum(turn.n_tokens for turn in run) for run in runs], 0),
            f"{sum(turn.n_cached for turn in turns) / sum(turn.n_prompt for turn in turns):.0%}",
            f"{(n_tokens - len(turns)) / max(writing, 1e-9):.1f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    best = {
        base: [min(_total(found[name][i]) for name in found if name.startswith(base)) for i in runs]
        for base, runs in ((each, _common(found, each)) for each in (_BASE, _OURS))
    }
    if ratios := [ours / theirs for ours, theirs in zip(best[_OURS], best[_BASE], strict=False)]:
        lines.append(f"\nBest of ours over the best of llama-server: {_range(ratios, 2)}")
    return "\n".join([*lines, "", *_turn_lines(found)]) + "\n"


def _common(found: Mapping[str, Sequence[Replayed]], base: str) -> range:
    """The runs that all contenders of a server have."""
    return range(min((len(found[name]) for name in found if name.startswith(base)), default=0))


def _turn_lines(found: Mapping[str, Sequence[Replayed]]) -> list[str]:
    """A line for each turn: what each server took to the first token, and to the last."""
    lines = ["| turn | prompt | " + " | ".join(found) + " |", "|---|---|" + "---|" * len(found)]
    by_name = [zip(*runs, strict=True) for runs in found.values()]
    for i, turns in enumerate(zip(*by_name, strict=True)):
        cells = [
            f"{median(turn.first_seconds for turn in of_name):.2f} / "
            f"{median(turn.seconds for turn in of_name):.2f} s, "
            f"{of_name[0].n_tokens} tokens, {of_name[0].n_cached} cached"
            for of_name in turns
        ]
        lines.append(f"| {i + 1} | {turns[0][0].n_prompt} | {' | '.join(cells)} |")
    return lines


def _total(run: Replayed) -> float:
    return sum(turn.seconds for turn in run)


def _range(values: Sequence[float], n_digits: int) -> str:
    middle, least, most = (f"{f(values):.{n_digits}f}" for f in (median, min, max))
    return middle if least == most else f"{middle} ({least}-{most})"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    name = "python -m tests.benchmarks.agent_session"
    made = argparse.ArgumentParser(description=__doc__, prog=name)
    made.add_argument("target")
    made.add_argument("--draft")
    made.add_argument("--llama-server", default=_BASE)
    made.add_argument("--session", type=Path, default=RECORDED)
    made.add_argument("--turns", type=int, default=20, help="the first ones only")
    made.add_argument("--tokens", type=int, default=96, help="of an answer, at most")
    made.add_argument("--ignore-eos", action="store_true", help="answers never end early")
    made.add_argument("--contenders", help="some of those that the report names")
    made.add_argument("--chat-template-file", help="for a model whose own has no tools")
    made.add_argument("--ctx-size", type=int, default=8192)
    made.add_argument("--threads", type=int, default=2)
    made.add_argument("--flash-attn", choices=("on", "off", "auto"), default="on")
    made.add_argument("--runs", type=int, default=3)
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all contenders in turns, and print the report after each turn."""
    options = parser().parse_args(arguments)
    found: dict[str, list[Replayed]] = {}
    for run in range(options.runs):
        port = free_port()
        made = commands(options, port)
        found = found or {name: [] for name in made}
        for name in rotated(list(made), run):
            found[name].append(measured(made[name], port, options))
        what = f"Run {run + 1} of {options.runs}:"
        sys.stdout.write(f"{what}\n\n{report(found)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
