"""Load test of the server: texts, schemas, tools, disconnects and hostile input at the same time.

    python -m tests.benchmarks.soak --clients 32 --seconds 600
    python -m tests.benchmarks.soak --target large.gguf --baseline

Each greedy response is compared with the one that a single client got before: it must be the same,
or differ first where two tokens are nearly equally likely (shared passes round differently). The
server's memory is read after a warm-up, in the middle and at the end. `--baseline` tests
llama-cpp-python's own server (its extra `server`) on the same file, with texts and invalid
requests only.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ggufspec.common import defaults
from ggufspec.llama.devices import n_threads_default
from tests.benchmarks import soak_mix

PROMPTS = (
    "The prince looked at her and",
    "It was a cold evening in November, and the old house",
    '"My dear Watson," said Holmes,',
    "In the morning they went down to the harbour, where",
    "Napoleon rode along the line, and",
    "She had never seen the sea, but",
    "The old man sat down by the fire and",
    "Up, and to the office, where",
)
_SECONDS_OF_ONE = 300.0
_LOAD_SECONDS = 120.0
_WAIT_SECONDS = 0.2  # after a refusal
_IDLE_CONNECTIONS = 5  # of each client, at most
_LARGE = 1_000_000  # bytes: a server may refuse such a body before it has read all
_SETTLE_SECONDS = 2.0
_NEAR_TIE = 0.3  # in log-probability, at most, where rounding may decide


@dataclass
class Tally:
    """Counts of what the clients saw, under a lock."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    counts: Counter[str] = field(default_factory=Counter)
    n_tokens: int = 0
    first_seconds: list[float] = field(default_factory=list)
    different: Counter[tuple[str, str]] = field(default_factory=Counter)  # by prompt and text
    wrong: dict[str, str] = field(default_factory=dict)  # one response for each kind of request

    def count(self, what: str) -> None:
        """One more of these."""
        with self.lock:
            self.counts[what] += 1


@dataclass(frozen=True)
class Target:
    """The server to test, the length of its texts, and whether it is ours."""

    port: int
    n_tokens: int
    is_ours: bool

    def body(self, prompt: str, *, stream: bool) -> bytes:
        """A greedy text."""
        request = {
            "prompt": prompt,
            "max_tokens": self.n_tokens,
            "temperature": 0,
            "stream": stream,
        }
        return json.dumps(request).encode()

    def sent(
        self, body: bytes, path: str = "/v1/completions"
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """A connection, and its response."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_SECONDS_OF_ONE)
        head = {"Content-Type": "application/json"}
        try:
            connection.request("POST", path, body, head)
            return connection, connection.getresponse()
        except OSError:
            connection.close()
            raise

    def hostile(self, rng: random.Random) -> soak_mix.Job:
        """A hostile request; for the other server one that is no more than invalid."""
        return soak_mix.hostile(rng, is_only_invalid=not self.is_ours)

    def whole(self, prompt: str) -> str:
        """The text of a request without streaming."""
        connection, response = self.sent(self.body(prompt, stream=False))
        with closing(connection):
            document = json.loads(response.read())
        text: str = document["choices"][0]["text"]
        return text

    def likely(self, prompt: str) -> list[dict[str, float]]:
        """For each token of the text, the likeliest ones with their log-probabilities, itself
        first. Empty if the server does not report them.
        """
        request = {"prompt": prompt, "max_tokens": self.n_tokens, "temperature": 0, "logprobs": 5}
        connection, response = self.sent(json.dumps(request).encode())
        with closing(connection):
            document = json.loads(response.read())
        reported = document["choices"][0].get("logprobs")
        if not reported:
            return []
        return [
            {token: likely[token], **likely}
            for token, likely in zip(reported["tokens"], reported["top_logprobs"], strict=True)
        ]


def is_likeliest(text: str, likely: Sequence[dict[str, float]]) -> bool:
    """Whether a text is the likeliest one, or differs first at a near-tie."""
    before = ""
    for of_token in likely:
        token, logprob = next(iter(of_token.items()))
        if text.startswith(before + token):
            before += token
            continue
        return any(
            text.startswith(before + other) and logprob - of_other < _NEAR_TIE
            for other, of_other in of_token.items()
        )
    return bool(likely)


def client(server: Target, wanted: dict[str, str], until: float, tally: Tally, seed: int) -> None:
    """Run one client until the end."""
    rng, idle = random.Random(seed), ExitStack()
    kinds = {"whole": 3, "stream": 4, "disconnect": 2, "hostile": 2}
    kinds |= {"useful": 4, "idle": 1} if server.is_ours else {}
    n_idle = 0
    while time.monotonic() < until:
        what = rng.choices([*kinds], [*kinds.values()])[0]
        try:
            if what == "idle":
                if n_idle == _IDLE_CONNECTIONS:
                    idle.close()
                    n_idle = 0
                idle.enter_context(_half_a_request(server, rng))
                n_idle += 1
                tally.count("idle connections")
            elif what in ("useful", "hostile"):
                made = soak_mix.useful(rng) if what == "useful" else server.hostile(rng)
                _do(server, made, tally)
            else:
                _ask(server, rng.choice(PROMPTS), what, wanted, tally, rng)
        except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
            tally.count(f"lost: {what}: {type(error).__name__}")
    idle.close()


def _half_a_request(server: Target, rng: random.Random) -> socket.socket:
    """A connection whose request never ends."""
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=_SECONDS_OF_ONE)
    whole = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n{"
    connection.sendall(whole[: rng.randrange(len(whole))])
    return connection


def _do(server: Target, job: soak_mix.Job, tally: Tally) -> None:
    """Send one request of the mix."""
    try:
        connection, response = server.sent(job.body, job.path)
    except ConnectionError:
        if len(job.body) < _LARGE:
            raise
        tally.count(f"{job.name}: closed while it was sent")
        return
    with closing(connection):
        status, text = response.status, response.read()
    if status in (429, 503):
        tally.count(f"status {status}")
        time.sleep(_WAIT_SECONDS)
    elif job.answers(status, text):
        tally.count(job.name)
    else:
        tally.count(f"wrong: {job.name}: status {status}")
        tally.wrong.setdefault(job.name, text.decode(errors="replace"))


def _ask(
    server: Target,
    prompt: str,
    what: str,
    wanted: dict[str, str],
    tally: Tally,
    rng: random.Random,
) -> None:
    began = time.monotonic()
    connection, response = server.sent(server.body(prompt, stream=what != "whole"))
    with closing(connection):
        if response.status != 200:
            response.read()
            tally.count(f"status {response.status}")
            time.sleep(_WAIT_SECONDS)
            return
        if what == "whole":
            text = json.loads(response.read())["choices"][0]["text"]
        else:
            text = ""
            n_left = rng.randrange(server.n_tokens) if what == "disconnect" else None
            for piece in _pieces(response):
                if piece and not text:
                    with tally.lock:
                        tally.first_seconds.append(time.monotonic() - began)
                text += piece
                if n_left is not None:
                    n_left -= 1
                    if n_left < 0:
                        tally.count("disconnected")
                        return
    with tally.lock:
        tally.n_tokens += server.n_tokens
        tally.counts["answered"] += 1
        if text != wanted[prompt]:
            tally.different[prompt, text] += 1


def _pieces(response: http.client.HTTPResponse) -> Iterator[str]:
    """The texts of a stream. Raises ValueError if it ends early."""
    for line in response:
        if line.startswith(b"data: [DONE]"):
            return
        if line.startswith(b"data: "):
            yield json.loads(line[6:])["choices"][0]["text"]
    raise ValueError("the stream broke off")


def memory_of(process: int) -> int:
    """Resident bytes of a process and its children; 0 if unknown."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
        tasks = [*Path(f"/proc/{process}/task").iterdir()]
        children = {child for task in tasks for child in (task / "children").read_text().split()}
    except OSError:
        return 0
    own = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS")), 0)
    return own + sum(memory_of(int(child)) for child in children)


@contextmanager
def running(command: Sequence[str], port: int) -> Iterator[subprocess.Popen[bytes]]:
    """A server process, when it accepts connections."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + _LOAD_SECONDS
        while True:
            if process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"the server did not start: {' '.join(command)}")
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                time.sleep(0.1)
        yield process
    finally:
        process.terminate()
        process.wait(60)


def soak(
    command: Sequence[str], port: int, options: argparse.Namespace, *, is_ours: bool
) -> dict[str, Any]:
    """Start a server, run the clients, and return the counts."""
    server, tally = Target(port, options.tokens, is_ours), Tally()
    with running(command, port) as process:
        wanted = {prompt: server.whole(prompt) for _ in range(2) for prompt in PROMPTS}
        began = time.monotonic()
        warm = began + min(options.warm_up, options.seconds / 4)
        until = began + options.seconds
        threads = [
            threading.Thread(target=client, args=(server, wanted, until, tally, seed))
            for seed in range(options.clients)
        ]
        for thread in threads:
            thread.start()
        memory = {}
        for name, moment in (("warm", warm), ("middle", (warm + until) / 2)):
            time.sleep(max(moment - time.monotonic(), 0))
            memory[name] = memory_of(process.pid)
        for thread in threads:
            thread.join()
        seconds = time.monotonic() - began
        time.sleep(_SETTLE_SECONDS)
        memory["end"] = memory_of(process.pid)
        again = sum(server.whole(prompt) == wanted[prompt] for prompt in PROMPTS)
        likely = {prompt: server.likely(prompt) for prompt, _ in tally.different}
        is_alive = process.poll() is None
        at_ties = {
            (prompt, text)
            for prompt, text in tally.different
            if all(is_likeliest(each, likely[prompt]) for each in (text, wanted[prompt]))
        }
    waits = sorted(tally.first_seconds)
    return {
        "clients": options.clients,
        "seconds": round(seconds, 1),
        "counts": dict(sorted(tally.counts.items())),
        "wrong": tally.wrong,
        "tokens_per_second": round(tally.n_tokens / seconds, 1),
        "first_token_seconds": {
            "p50": _quantile(waits, 0.5),
            "p99": _quantile(waits, 0.99),
        },
        "rss_mib": {name: n_bytes // 2**20 for name, n_bytes in memory.items()},
        "alive": is_alive,
        "same_afterwards": f"{again} of {len(PROMPTS)}",
        "differs_at_near_ties": sum(tally.different[each] for each in at_ties),
        "differs_otherwise": [
            {"prompt": prompt, "got": text, "times": times, "wanted": wanted[prompt]}
            for (prompt, text), times in tally.different.items()
            if (prompt, text) not in at_ties
        ],
    }


def _quantile(ordered: Sequence[float], share: float) -> float | None:
    if not ordered:
        return None
    return round(ordered[min(int(share * len(ordered)), len(ordered) - 1)], 3)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
        return port


def main(arguments: Sequence[str] | None = None) -> None:
    """Soak our server, and then llama-cpp-python's; print one JSON document each."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m tests.benchmarks.soak")
    parser.add_argument("--target", help="[default: the embedded stand-in]")
    parser.add_argument("--draft")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--warm-up", type=float, default=20, help="seconds, before memory is read")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--ctx-size", type=int, default=1024)
    parser.add_argument("--slots", type=int, default=defaults.SERVE_SLOTS)
    parser.add_argument("--baseline", action="store_true", help="llama-cpp-python's server too")
    parser.add_argument("--only-baseline", action="store_true")
    options = parser.parse_args(arguments)
    if (options.baseline or options.only_baseline) and not options.target:
        parser.error("--baseline needs --target: both serve the same file")

    if not options.only_baseline:
        port = _free_port()
        ours = [sys.executable, "-m", "ggufspec", "serve", "--port", str(port)]
        ours += ["-c", str(options.ctx_size), "--slots", str(options.slots)]
        ours += ["--max-queue", str(options.clients)]
        ours += ["--target", options.target] if options.target else []
        ours += ["--draft", options.draft] if options.draft else []
        with tempfile.TemporaryDirectory() as folder:
            template = Path(folder, "template.jinja")
            template.write_text(soak_mix.TEMPLATE)
            ours += ["--chat-template-file", str(template)]
            _print("ggufspec serve", soak(ours, port, options, is_ours=True))
    if options.baseline or options.only_baseline:
        port = _free_port()
        theirs = [sys.executable, "-m", "llama_cpp.server", "--model", options.target]
        theirs += ["--port", str(port), "--n_ctx", str(options.ctx_size)]
        theirs += ["--n_threads", str(n_threads_default()), "--flash_attn", "true"]
        # By default it breaks off what it writes when another request comes.
        theirs += ["--interrupt_requests", "false"]
        _print("llama_cpp.server", soak(theirs, port, options, is_ours=False))


def _print(name: str, found: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps({"server": name, **found}, indent=1, ensure_ascii=False) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
