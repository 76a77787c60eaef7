"""Does the server keep working? Clients that ask, stream, go away and send rubbish, for a while.

    python -m tests.benchmarks.soak --clients 32 --seconds 600
    python -m tests.benchmarks.soak --target large.gguf --rival

Each greedy answer is held against what one client alone was told before: it must be the same, or
part from it where two tokens are nearly as likely (passes that texts share round differently). The
server's memory is read before and after. `--rival` asks llama-cpp-python's own server (its extra
`server`) the same, on the same file. Knows HTTP as a client does, and nothing of how the server is
made.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ggufspec.common import defaults
from ggufspec.llama.devices import n_threads_default

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
RUBBISH = (b"{", b"[" * 5000, b'{"prompt": 5}', b'{"prompt": "x", "temperature": NaN}', b"\xff\x00")
_SECONDS_OF_ONE = 300.0
_LOAD_SECONDS = 120.0
_WAIT_SECONDS = 0.2  # after a refusal
_SETTLE_SECONDS = 2.0
_NEAR_TIE = 0.3  # in log-probability, at most, where rounding may decide


@dataclass
class Tally:
    """What the clients have met; they add to it in turns."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    counts: Counter[str] = field(default_factory=Counter)
    n_tokens: int = 0
    first_seconds: list[float] = field(default_factory=list)
    parted: Counter[tuple[str, str]] = field(default_factory=Counter)  # prompt, and what was told

    def count(self, what: str) -> None:
        """One more of these."""
        with self.lock:
            self.counts[what] += 1


@dataclass(frozen=True)
class Asking:
    """What every client asks of whom."""

    port: int
    n_tokens: int

    def body(self, prompt: str, *, stream: bool) -> bytes:
        """A greedy text."""
        asked = {"prompt": prompt, "max_tokens": self.n_tokens, "temperature": 0, "stream": stream}
        return json.dumps(asked).encode()

    def sent(self, body: bytes) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """A connection, and the answer's head."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_SECONDS_OF_ONE)
        head = {"Content-Type": "application/json"}
        try:
            connection.request("POST", "/v1/completions", body, head)
            return connection, connection.getresponse()
        except OSError:
            connection.close()
            raise

    def whole(self, prompt: str) -> str:
        """The text that is told at once."""
        connection, response = self.sent(self.body(prompt, stream=False))
        with closing(connection):
            document = json.loads(response.read())
        text: str = document["choices"][0]["text"]
        return text

    def likely(self, prompt: str) -> list[dict[str, float]]:
        """For each token of the text, the likeliest ones with their log-probabilities, itself
        first. None where the server does not tell.
        """
        asked = {"prompt": prompt, "max_tokens": self.n_tokens, "temperature": 0, "logprobs": 5}
        connection, response = self.sent(json.dumps(asked).encode())
        with closing(connection):
            document = json.loads(response.read())
        told = document["choices"][0].get("logprobs")
        if not told:
            return []
        return [
            {token: likely[token], **likely}
            for token, likely in zip(told["tokens"], told["top_logprobs"], strict=True)
        ]


def is_likeliest(text: str, likely: Sequence[dict[str, float]]) -> bool:
    """Whether a text is the likeliest one, or leaves it for a token that is nearly as likely."""
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


def client(asking: Asking, wanted: dict[str, str], until: float, tally: Tally, seed: int) -> None:
    """One client, up to the end."""
    chance = random.Random(seed)
    while time.monotonic() < until:
        what = chance.choices(["whole", "stream", "leave", "rubbish"], [3, 4, 2, 1])[0]
        prompt = chance.choice(PROMPTS)
        try:
            if what == "rubbish":
                _send_rubbish(asking, chance.choice(RUBBISH), tally)
            else:
                _ask(asking, prompt, what, wanted, tally, chance)
        except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
            tally.count(f"lost: {type(error).__name__}")


def _send_rubbish(asking: Asking, body: bytes, tally: Tally) -> None:
    connection, response = asking.sent(body)
    with closing(connection):
        response.read()
        is_right = 400 <= response.status < 500
        tally.count("rubbish refused" if is_right else f"rubbish answered with {response.status}")


def _ask(
    asking: Asking,
    prompt: str,
    what: str,
    wanted: dict[str, str],
    tally: Tally,
    chance: random.Random,
) -> None:
    began = time.monotonic()
    connection, response = asking.sent(asking.body(prompt, stream=what != "whole"))
    with closing(connection):
        if response.status != 200:
            response.read()
            tally.count(f"told {response.status}")
            time.sleep(_WAIT_SECONDS)
            return
        if what == "whole":
            text = json.loads(response.read())["choices"][0]["text"]
        else:
            text = ""
            n_left = chance.randrange(asking.n_tokens) if what == "leave" else None
            for piece in _pieces(response):
                if piece and not text:
                    with tally.lock:
                        tally.first_seconds.append(time.monotonic() - began)
                text += piece
                if n_left is not None:
                    n_left -= 1
                    if n_left < 0:
                        tally.count("left")
                        return
    with tally.lock:
        tally.n_tokens += asking.n_tokens
        tally.counts["answered"] += 1
        if text != wanted[prompt]:
            tally.parted[prompt, text] += 1


def _pieces(response: http.client.HTTPResponse) -> Iterator[str]:
    """The texts of a stream. Raises ValueError where it ends before its end."""
    for line in response:
        if line.startswith(b"data: [DONE]"):
            return
        if line.startswith(b"data: "):
            yield json.loads(line[6:])["choices"][0]["text"]
    raise ValueError("the stream broke off")


def memory_of(process: int) -> int:
    """Resident bytes of a process; 0 where the system does not tell."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS")), 0)


@contextmanager
def running(command: Sequence[str], port: int) -> Iterator[int]:
    """A server as a process: its id, once it answers."""
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
        yield process.pid
    finally:
        process.terminate()
        process.wait(60)


def soak(command: Sequence[str], port: int, options: argparse.Namespace) -> dict[str, Any]:
    """Start a server, soak it, and tell what became of it."""
    asking, tally = Asking(port, options.tokens), Tally()
    with running(command, port) as process:
        wanted = {prompt: asking.whole(prompt) for _ in range(2) for prompt in PROMPTS}
        began = time.monotonic()
        warm = began + min(options.warm_up, options.seconds / 4)
        until = began + options.seconds
        threads = [
            threading.Thread(target=client, args=(asking, wanted, until, tally, seed))
            for seed in range(options.clients)
        ]
        for thread in threads:
            thread.start()
        time.sleep(max(warm - time.monotonic(), 0))
        first = memory_of(process)
        for thread in threads:
            thread.join()
        seconds = time.monotonic() - began
        time.sleep(_SETTLE_SECONDS)
        last = memory_of(process)
        again = sum(asking.whole(prompt) == wanted[prompt] for prompt in PROMPTS)
        likely = {prompt: asking.likely(prompt) for prompt, _ in tally.parted}
        at_ties = {
            (prompt, text)
            for prompt, text in tally.parted
            if all(is_likeliest(each, likely[prompt]) for each in (text, wanted[prompt]))
        }
    waits = sorted(tally.first_seconds)
    return {
        "clients": options.clients,
        "seconds": round(seconds, 1),
        "counts": dict(sorted(tally.counts.items())),
        "tokens_per_second": round(tally.n_tokens / seconds, 1),
        "first_token_seconds": {
            "p50": _quantile(waits, 0.5),
            "p99": _quantile(waits, 0.99),
        },
        "rss_mib": {"warm": first // 2**20, "end": last // 2**20},
        "same_afterwards": f"{again} of {len(PROMPTS)}",
        "parted_at_near_ties": sum(tally.parted[each] for each in at_ties),
        "answered_otherwise": [
            {"prompt": prompt, "told": text, "times": times, "wanted": wanted[prompt]}
            for (prompt, text), times in tally.parted.items()
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
    """Soak our server, and then the rival; print one JSON document each."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m tests.benchmarks.soak")
    parser.add_argument("--target", help="[default: the embedded stand-in]")
    parser.add_argument("--draft")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--warm-up", type=float, default=20, help="seconds, before memory is read")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--ctx-size", type=int, default=1024)
    parser.add_argument("--slots", type=int, default=defaults.SERVE_SLOTS)
    parser.add_argument("--rival", action="store_true", help="llama-cpp-python's server too")
    parser.add_argument("--only-rival", action="store_true")
    options = parser.parse_args(arguments)
    if (options.rival or options.only_rival) and not options.target:
        parser.error("--rival needs --target: both serve the same file")

    if not options.only_rival:
        port = _free_port()
        ours = [sys.executable, "-m", "ggufspec", "serve", "--port", str(port)]
        ours += ["-c", str(options.ctx_size), "--slots", str(options.slots)]
        ours += ["--max-queue", str(options.clients)]
        ours += ["--target", options.target] if options.target else []
        ours += ["--draft", options.draft] if options.draft else []
        _tell("ggufspec serve", soak(ours, port, options))
    if options.rival or options.only_rival:
        port = _free_port()
        theirs = [sys.executable, "-m", "llama_cpp.server", "--model", options.target]
        theirs += ["--port", str(port), "--n_ctx", str(options.ctx_size)]
        theirs += ["--n_threads", str(n_threads_default()), "--flash_attn", "true"]
        # By default it breaks off what it writes when another request comes.
        theirs += ["--interrupt_requests", "false"]
        _tell("llama_cpp.server", soak(theirs, port, options))


def _tell(name: str, found: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps({"server": name, **found}, indent=1, ensure_ascii=False) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
