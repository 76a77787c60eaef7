"""Starts llama.cpp's server, requests texts with the server's timings, and stops it."""

from __future__ import annotations

import json
import math
import os
import shlex
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, fields
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from ggufspec.common.files import temporary_folder
from ggufspec.decoding.sampling import Sampling
from ggufspec.errors import OptionError
from ggufspec.llama.python_llama import BaselineRequest, BaselineText
from ggufspec.models.adapters import Adapters
from ggufspec.models.head_facts import MTP
from ggufspec.models.heads import DraftFile
from ggufspec.placement.overrides import Overrides

_HOST = "127.0.0.1"
_START_SECONDS = 600.0  # large models load slowly
_STOP_SECONDS = 5.0  # between SIGTERM and SIGKILL
_HEALTH_SECONDS = 5.0
_WRITE_SECONDS = 3600.0
_POLL_SECONDS = 0.05
_READY = 200
_WINDOWS = ("repeat_last_n", "dry_penalty_last_n")
_N_TAIL = 800  # characters of a log in an error message
_SAMPLER_NAMES = {"typical_p": "typ_p"}  # our name: llama.cpp's name, if different


@dataclass(frozen=True)
class LlamaCppProgram:
    """A program of llama.cpp and the models it loads. Layers None: llama.cpp's default."""

    binary: Path
    target: Path
    draft: DraftFile | None
    n_ctx: int
    n_threads: int
    n_threads_draft: int
    n_gpu_layers: int | None = None
    n_gpu_layers_draft: int | None = None
    overrides: Overrides = ()
    overrides_draft: Overrides = ()
    adapters: Adapters = ()  # of the target; llama.cpp's programs have no adapters for drafts
    spec_type: str = "draft-simple"


@dataclass(frozen=True)
class LlamaServer:
    """A server that is ready. Valid until its `running` block ends."""

    program: LlamaCppProgram
    port: int
    process: subprocess.Popen[bytes]
    log: Path
    sampling_options: Sequence[str] | None = None  # that it supports; None: all

    def wait_until_ready(self, seconds: float) -> None:
        """Raise OptionError, with the end of the log, if the server ends or is not ready."""
        until, what = monotonic() + seconds, f"was not ready within {seconds:g} s"
        while monotonic() < until:
            if (code := self.process.poll()) is not None:
                what = f"ended with exit code {code} before it was ready"
                break
            with suppress(OSError, HTTPException):  # not listening yet
                if _request(self.port, "GET", "/health", None, _HEALTH_SECONDS)[0] == _READY:
                    return
            sleep(_POLL_SECONDS)
        by_hand = shlex.join(command(self.program, self.port))
        raise OptionError(
            f"{self.program.binary} {what}; its log ends with:\n{self._log_tail()}\n"
            f"Run it by hand: {by_hand}"
        )

    def write(self, request: BaselineRequest) -> BaselineText:
        """The result of one request to /completion. Raises OptionError."""
        body, name = request_body(request, self.program.n_ctx), self.program.binary.name
        try:
            status, answer = _request(self.port, "POST", "/completion", body, _WRITE_SECONDS)
        except (OSError, HTTPException) as error:
            code = self.process.poll()
            ended = "does not respond" if code is None else f"ended with exit code {code}"
            raise OptionError(
                f"{name} {ended} ({error}); its log ends with:\n{self._log_tail()}"
            ) from error
        if status != _READY:
            raise OptionError(
                f"{name} refused a request with status {status}: "
                f"{answer.decode('utf-8', 'replace')[:800]}"
            )
        return parse(answer)

    def _log_tail(self) -> str:
        return log_tail(self.log.read_text(errors="replace"))


def command(program: LlamaCppProgram, port: int) -> list[str]:
    """The command line of a server with one slot that keeps no earlier prompts."""
    return [
        str(program.binary),
        *loading_options(program),
        *("-np", "1", "--cache-ram", "0"),
        *("--host", _HOST, "--port", str(port)),
        *("--log-colors", "off"),
    ]


def loading_options(program: LlamaCppProgram) -> list[str]:
    made = ["-m", str(program.target), "-c", str(program.n_ctx), "-t", str(program.n_threads)]
    placed = [("", program.n_gpu_layers, program.overrides)]
    for adapter in program.adapters:
        made += ["--lora-scaled", f"{adapter.path}:{adapter.scale}"]
    if program.draft is not None:
        made += [] if program.draft == MTP else ["-md", str(program.draft)]
        made += ["--spec-type", program.spec_type, "-td", str(program.n_threads_draft)]
        placed.append(("d", program.n_gpu_layers_draft, program.overrides_draft))
    for end, n_layers, overrides in placed:
        if n_layers is not None:
            made += [f"-ngl{end}", "all" if n_layers < 0 else str(n_layers)]
        if overrides:
            made += [f"-ot{end}", ",".join(map(str, overrides))]
    return made


def request_body(request: BaselineRequest, n_ctx: int) -> dict[str, Any]:
    """The JSON for /completion, with all options, since a model file may have other defaults."""
    sampling = request.sampling
    # The server has the same names of sampling options.
    made: dict[str, Any] = {each.name: getattr(sampling, each.name) for each in fields(Sampling)}
    if request.dry_sequence_breakers:
        made["dry_sequence_breakers"] = list(request.dry_sequence_breakers)
    return {
        **made,
        # llama.cpp's programs do not accept -1 (all).
        **{name: n_ctx if made[name] < 0 else made[name] for name in _WINDOWS},
        "prompt": list(request.tokens),
        "n_predict": request.n_tokens + 1,  # the first token's time counts as the prompt's
        "seed": request.seed,
        "ignore_eos": request.ignore_eos,
        "cache_prompt": False,
        "return_tokens": True,
        "samplers": sampler_names(sampling),
        "logit_bias": [
            [token, False if bias == -math.inf else bias]
            for token, bias in sampling.logit_bias.items()
        ],
    }


def parse(body: bytes) -> BaselineText:
    """The result in a response of /completion. Raises OptionError for an invalid response."""
    try:
        document = json.loads(body)
        timings = document["timings"]
        return BaselineText(
            n_prompt=int(document["tokens_evaluated"]),
            n_generated=max(int(timings["predicted_n"]) - 1, 0),
            n_drafted=int(timings.get("draft_n", 0)),
            n_accepted=int(timings.get("draft_n_accepted", 0)),
            prompt_seconds=timings["prompt_ms"] / 1e3,
            first_token_seconds=timings["prompt_ms"] / 1e3,
            generation_seconds=timings["predicted_ms"] / 1e3,
            tokens=tuple(map(int, document["tokens"])),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise OptionError(
            f"the response is not as llama-server writes it ({type(error).__name__}: {error}); use "
            "the llama.cpp version that llama-cpp-python has. The response begins: "
            f"{body[:400].decode('utf-8', 'replace')}"
        ) from error


def environment() -> dict[str, str]:
    """The environment without LLAMA_ARG_ variables, which would change the server's options."""
    return {name: value for name, value in os.environ.items() if not name.startswith("LLAMA_ARG_")}


def log_tail(log: str) -> str:
    return log[-_N_TAIL:].strip()


def sampler_names(sampling: Sampling) -> list[str]:
    return [_SAMPLER_NAMES.get(name, name) for name in sampling.samplers]


@contextmanager
def running(
    program: LlamaCppProgram,
    *,
    start_seconds: float = _START_SECONDS,
    stop_seconds: float = _STOP_SECONDS,
) -> Iterator[LlamaServer]:
    """A running server; it is always stopped at the end of the block.

    It has a separate session, so Ctrl-C at the terminal does not reach it.
    Raises OptionError, with the end of the server's log, if it does not start.
    """
    with socket.socket() as tried:
        tried.bind((_HOST, 0))
        port: int = tried.getsockname()[1]
    with temporary_folder("ggufspec-server-") as folder:
        log = folder / "log"
        try:
            with log.open("wb") as file:
                process = subprocess.Popen(
                    command(program, port),
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    env=environment(),
                    start_new_session=True,
                )
        except OSError as error:
            raise OptionError(
                f"{program.binary} cannot be run: {error.strerror}; give the folder of a "
                "llama-server"
            ) from error
        try:
            server = LlamaServer(program, port, process, log)
            server.wait_until_ready(start_seconds)
            yield server
        finally:
            process.terminate()
            try:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(stop_seconds)
            finally:  # also on another Ctrl-C
                process.kill()
                process.wait()


def _request(
    port: int, method: str, path: str, document: object, seconds: float
) -> tuple[int, bytes]:
    """(status, body) of a response. Proxies set in the environment are ignored."""
    with closing(HTTPConnection(_HOST, port, timeout=seconds)) as connection:
        body = None if document is None else json.dumps(document)
        connection.request(method, path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read()
