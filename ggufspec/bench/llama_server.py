"""llama.cpp's server as a competitor: started, asked and stopped; its own timings out.

Knows llama-server's options, its /health and its /completion; neither contenders nor statistics.

It is asked for a token more than is wanted: the first one comes with the prompt, so that the
seconds of its generation are those of the others. That is how it counts its rate, too.
"""

from __future__ import annotations

import json
import math
import shlex
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from ggufspec.bench import llama_cpp_runner
from ggufspec.bench.llama_cpp_runner import Rival
from ggufspec.decoding.sampling import Sampling
from ggufspec.errors import OptionError

_HOST = "127.0.0.1"
_START_SECONDS = 600.0  # large models are read from slow disks
_STOP_SECONDS = 5.0
_HEALTH_SECONDS = 5.0
_WRITE_SECONDS = 3600.0
_POLL_SECONDS = 0.05
_READY = 200
# By their names here, which are the server's own.
_NUMBERS = (
    *("temperature", "top_k", "top_p", "min_p", "typical_p", "top_n_sigma"),
    *("repeat_penalty", "frequency_penalty", "presence_penalty"),
    *("dry_multiplier", "dry_base", "dry_allowed_length"),
)
_LOOKING_BACK = ("repeat_last_n", "dry_penalty_last_n")


@dataclass(frozen=True)
class Answer:
    """One text: `tokens` has the first one too, `n_generated` and the seconds have not."""

    n_prompt: int
    n_generated: int
    n_drafted: int
    n_accepted: int
    prompt_seconds: float  # to the first token
    generation_seconds: float
    tokens: tuple[int, ...]


class Server:
    """A server that is ready. Valid until its `running` ends."""

    def __init__(self, name: str, port: int, process: subprocess.Popen[bytes], log: Path) -> None:
        self._name = name
        self._port = port
        self._process = process
        self._log = log

    def complete(self, request: Mapping[str, Any]) -> Answer:
        """The answer to a request. Raises OptionError."""
        try:
            status, body = _ask(self._port, "POST", "/completion", request, _WRITE_SECONDS)
        except (OSError, HTTPException) as error:
            code = self._process.poll()
            ended = "does not answer" if code is None else f"ended with code {code}"
            raise OptionError(
                f"{self._name} {ended} ({error}); its last words:\n{_last_words(self._log)}"
            ) from error
        if status != _READY:
            raise OptionError(
                f"{self._name} refused a text with status {status}: "
                f"{body.decode('utf-8', 'replace')[:800]}"
            )
        return parse(body)


def command(rival: Rival, port: int) -> list[str]:
    """The command line of a server for one request at a time that keeps no former prompts."""
    return [
        str(rival.binary),
        *llama_cpp_runner.loading(rival),
        *("-np", "1", "--cache-ram", "0"),
        *("--host", _HOST, "--port", str(port)),
        *("--log-colors", "off"),
    ]


def request(
    tokens: Sequence[int],
    sampling: Sampling,
    breakers: Sequence[str],
    *,
    n_tokens: int,
    n_ctx: int,
    seed: int,
    ignore_eos: bool,
) -> dict[str, Any]:
    """What is posted to /completion: every option, since a model file may have defaults too."""
    made: dict[str, Any] = {name: getattr(sampling, name) for name in _NUMBERS}
    for name in _LOOKING_BACK:
        made[name] = llama_cpp_runner.looked_back(getattr(sampling, name), n_ctx)
    if breakers:
        made["dry_sequence_breakers"] = list(breakers)
    return {
        **made,
        "prompt": list(tokens),
        "n_predict": n_tokens + 1,
        "seed": seed,
        "ignore_eos": ignore_eos,
        "cache_prompt": False,
        "return_tokens": True,
        "samplers": llama_cpp_runner.sampler_names(sampling),
        "logit_bias": [
            [token, False if bias == -math.inf else bias]
            for token, bias in sampling.logit_bias.items()
        ],
    }


def parse(body: bytes) -> Answer:
    """What /completion says. Raises OptionError for what is no such answer."""
    try:
        document = json.loads(body)
        timings = document["timings"]
        return Answer(
            n_prompt=int(document["tokens_evaluated"]),
            n_generated=max(int(timings["predicted_n"]) - 1, 0),
            n_drafted=int(timings.get("draft_n", 0)),
            n_accepted=int(timings.get("draft_n_accepted", 0)),
            prompt_seconds=timings["prompt_ms"] / 1e3,
            generation_seconds=timings["predicted_ms"] / 1e3,
            tokens=tuple(map(int, document["tokens"])),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise OptionError(
            f"the answer is not as llama-server writes it ({type(error).__name__}: {error}); give "
            "a llama.cpp of the version that llama-cpp-python has. It begins: "
            f"{body[:400].decode('utf-8', 'replace')}"
        ) from error


@contextmanager
def running(rival: Rival, *, patience: float = _START_SECONDS) -> Iterator[Server]:
    """A server for the block, which waits without work between texts; stopped in any case.

    It is in a session of its own, so that a Ctrl-C at the terminal reaches us alone.
    Raises OptionError, with the last words of its log, where it does not start.
    """
    port = _free_port()
    arguments = command(rival, port)
    with tempfile.TemporaryDirectory(prefix="ggufspec-server-") as folder:
        log = Path(folder, "log")
        try:
            with log.open("wb") as file:
                process = subprocess.Popen(
                    arguments,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    env=llama_cpp_runner.environment(),
                    start_new_session=True,
                )
        except OSError as error:
            raise OptionError(
                f"{arguments[0]} cannot be run: {error.strerror}; give the folder of a llama-server"
            ) from error
        try:
            _wait_until_ready(process, port, patience, arguments, log)
            yield Server(rival.binary.name, port, process, log)
        finally:
            _stop(process)


def _wait_until_ready(
    process: subprocess.Popen[bytes],
    port: int,
    patience: float,
    arguments: Sequence[str],
    log: Path,
) -> None:
    until = monotonic() + patience
    while True:
        code = process.poll()
        if code is not None:
            what = f"ended with code {code} before it was ready"
            break
        try:
            if _ask(port, "GET", "/health", None, _HEALTH_SECONDS)[0] == _READY:
                return
        except (OSError, HTTPException):
            pass  # it does not listen yet
        if monotonic() > until:
            what = f"was not ready within {patience:g} s"
            break
        sleep(_POLL_SECONDS)
    raise OptionError(
        f"{arguments[0]} {what}; its last words:\n{_last_words(log)}\n"
        f"Try it by hand: {shlex.join(arguments)}"
    )


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ask it to end, then make it."""
    process.terminate()
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        pass
    finally:  # also if Ctrl-C comes once more
        if process.poll() is None:
            process.kill()
            process.wait()


def _ask(port: int, method: str, path: str, document: object, seconds: float) -> tuple[int, bytes]:
    """Status and body of an answer; the proxies of the user's shell are not asked."""
    connection = HTTPConnection(_HOST, port, timeout=seconds)
    try:
        body = None if document is None else json.dumps(document)
        connection.request(method, path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def _last_words(log: Path) -> str:
    return llama_cpp_runner.last_words(log.read_text(errors="replace"))


def _free_port() -> int:
    with socket.socket() as tried:
        tried.bind((_HOST, 0))
        port: int = tried.getsockname()[1]
        return port
