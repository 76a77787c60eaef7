"""Types three functions of a file, and asks `/infill` of llama-server and of `ggufspec serve`.

    python -m tests.benchmarks.editing_session coder.gguf --draft small-coder.gguf \\
        --llama-server llama.cpp/build/bin/llama-server

Each of the 40 requests has the file before the cursor, what follows the function that is being
typed, and three other files, as an editor's plugin sends them. Servers are started anew in each
run, and take turns. Prints Markdown: seconds to the first text and to the end, medians and the 90th
percentile, and both over the best of llama-server in the same run. The files are those of the
invented project of `agent_session`.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from statistics import median, quantiles
from typing import Any, NamedTuple

from ggufspec.bench.experiment import rotated
from tests.benchmarks.agent_session import RECORDED, load
from tests.benchmarks.servers import OURS, data_lines, free_port, running

EDITED = "sitelog/outages.py"
FUNCTIONS = ("read_messages", "outages", "report")
_BASE, _PLAIN = "llama-server", "ggufspec --drafter none"


class Request(NamedTuple):
    """What an editor sends: the file around the gap."""

    prefix: str
    suffix: str


class Answer(NamedTuple):
    """What a client saw. Seconds are from when the request is sent."""

    first_seconds: float
    seconds: float
    n_tokens: int


def files() -> dict[str, str]:
    """The files of the project that the recorded agent reads, by name."""
    session, found = load(RECORDED), {}
    for message, answer in zip(session.messages, session.messages[1:], strict=False):
        for call in message.get("tool_calls", ()):
            if call["function"]["name"] == "read_file":
                found[json.loads(call["function"]["arguments"])["path"]] = answer["content"]
    return found


def typed(text: str, names: Sequence[str], n: int) -> list[Request]:
    """`n` moments while the bodies of functions are typed, each before or inside a line."""
    lines, places = text.splitlines(keepends=True), list[Request]()
    ends = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
    for name in names:
        node = ends[name]
        after = "".join(lines[node.end_lineno :])
        for i in range(node.body[0].lineno - 1, node.end_lineno or 0):
            before, line = "".join(lines[:i]), lines[i].rstrip("\n")
            indent = len(line) - len(line.lstrip())
            for n_typed in {indent, (indent + len(line)) // 2}:
                places.append(Request(before + line[:n_typed], "\n" + after))
    places.sort(key=lambda each: len(each.prefix))
    return [places[i * len(places) // n] for i in range(min(n, len(places)))]


def asked(port: int, requests: Sequence[Request], body: Mapping[str, Any]) -> Iterator[Answer]:
    """Send the requests one after the other. Raises ValueError for an error of the server."""
    others = [{"filename": name, "text": text} for name, text in files().items() if name != EDITED]
    for each in requests:
        sent = {"input_prefix": each.prefix, "input_suffix": each.suffix, "input_extra": others}
        start, first, lines = time.perf_counter(), 0.0, list[bytes]()
        for line in data_lines(port, "/infill", {**sent, **body, "stream": True}):
            lines.append(line)
            first = first or time.perf_counter() - start
        seconds = time.perf_counter() - start
        yield Answer(first or seconds, seconds, json.loads(lines[-1])["tokens_predicted"])


def commands(options: argparse.Namespace, port: int) -> dict[str, list[str]]:
    """The command line of each contender."""
    shared = ["-m", options.target, "-c", str(options.ctx_size), "--port", str(port)]
    shared += ["-t", str(options.threads)]
    ours, theirs = [*OURS, *shared, "--slots", "1"], [options.llama_server, *shared, "-np", "1"]
    made = {_BASE: theirs, f"{_BASE} ngram-mod": [*theirs, "--spec-type", "ngram-mod"]}
    made |= {_PLAIN: [*ours, "--drafter", "none"], "ggufspec": ours}
    if options.draft:
        draft = ["-md", options.draft, "-td", str(options.threads)]
        made[f"{_BASE} with draft"] = [*theirs, *draft, "--spec-type", "draft-simple"]
        made["ggufspec with draft"] = [*ours, *draft]
    wanted = options.contenders.split(",") if options.contenders else made
    return {name: made[name] for name in made if name in wanted}


def report(found: Mapping[str, Sequence[Sequence[Answer]]]) -> str:
    """A line for each contender: medians over all its requests."""
    lines = [
        "| server | first text, s: median, 90 % | end, s: median, 90 % | whole session, s "
        "| over the best of llama-server | tokens |",
        "|---|---|---|---|---|---|",
    ]
    totals = {
        name: [sum(each.seconds for each in run) for run in runs] for name, runs in found.items()
    }
    theirs = [runs for name, runs in totals.items() if name.startswith(_BASE)]
    best = [min(of_run) for of_run in zip(*theirs, strict=False)]
    for name, runs in found.items():
        answers = [each for run in runs for each in run]
        firsts, ends = ([each[i] for each in answers] for i in (0, 1))
        ratios = [own / of_best for own, of_best in zip(totals[name], best, strict=False)]
        cells = [
            name,
            *(f"{median(each):.2f}, {quantiles(each, n=10)[-1]:.2f}" for each in (firsts, ends)),
        ]
        cells += [f"{median(totals[name]):.1f}", f"{median(ratios):.2f}" if ratios else ""]
        lines.append(f"| {' | '.join([*cells, str(sum(each.n_tokens for each in runs[0]))])} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all contenders in turns, and print the report after each run."""
    name = "python -m tests.benchmarks.editing_session"
    made = argparse.ArgumentParser(description=__doc__, prog=name)
    made.add_argument("target")
    made.add_argument("--draft")
    made.add_argument("--llama-server", default=_BASE)
    made.add_argument("--requests", type=int, default=40)
    made.add_argument("--tokens", type=int, default=64, help="of an answer, at most")
    made.add_argument("--t-max-predict-ms", type=int, default=0, help="0: no limit")
    made.add_argument("--contenders", help="some of those that the report names")
    made.add_argument("--ctx-size", type=int, default=8192)
    made.add_argument("--threads", type=int, default=2)
    made.add_argument("--runs", type=int, default=3)
    options = made.parse_args(arguments)
    body = {"n_predict": options.tokens, "temperature": 0, "cache_prompt": True}
    body |= {"t_max_predict_ms": options.t_max_predict_ms} if options.t_max_predict_ms else {}
    requests = typed(files()[EDITED], FUNCTIONS, options.requests)
    found: dict[str, list[list[Answer]]] = {}
    for run in range(options.runs):
        port = free_port()
        contenders = commands(options, port)
        found = found or {each: [] for each in contenders}
        for each in rotated(list(contenders), run):
            with running(contenders[each], port):
                list(asked(port, [Request("def f(x):\n    ", "\n")], body))  # warm-up
                found[each].append(list(asked(port, requests, body)))
        sys.stdout.write(f"Run {run + 1} of {options.runs}:\n\n{report(found)}\n\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
