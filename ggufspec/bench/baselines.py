"""Others who speculate, on the same files and prompts: llama.cpp's programs, llama-cpp-python.

Knows which of them can run here, and makes their numbers alike; it has no clock, prints nothing,
and leaves what they are compared with to others.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Protocol

from ggufspec.bench import llama_cpp_runner, llama_server
from ggufspec.bench.llama_cpp_runner import Rival
from ggufspec.bench.llama_server import Server
from ggufspec.decoding.sampling import Sampling
from ggufspec.engine.options import CheckedOptions
from ggufspec.errors import ModelError, OptionError, OutOfMemoryError, PromptError
from ggufspec.llama import lookup
from ggufspec.llama.devices import free_memory
from ggufspec.llama.lookup import PythonLlama
from ggufspec.models.header import Header, read_header

LLAMA_SIMPLE = "llama.cpp speculative-simple"
LLAMA_SERVER = "llama.cpp server"
LLAMA_SERVER_PLAIN = "llama.cpp server, plain"
PYTHON_LOOKUP = "llama-cpp-python lookup"
PYTHON_PLAIN = "llama-cpp-python, plain"

PEERS: Mapping[str, str] = {
    LLAMA_SIMPLE: "llama-speculative-simple with the pair, at its defaults; loads at each text",
    LLAMA_SERVER: "llama-server with the pair, at its defaults",
    LLAMA_SERVER_PLAIN: "llama-server without a draft",
    PYTHON_LOOKUP: "llama_cpp.Llama with LlamaPromptLookupDecoding(num_pred_tokens=10)",
    PYTHON_PLAIN: "llama_cpp.Llama without a draft",
}
_BINARIES = {
    LLAMA_SIMPLE: "llama-speculative-simple",
    LLAMA_SERVER: "llama-server",
    LLAMA_SERVER_PLAIN: "llama-server",
}
_WITH_DRAFT = (LLAMA_SIMPLE, LLAMA_SERVER)
_FOLDERS = (".", "bin", "build/bin")  # of a build of llama.cpp
_N_LOOKUP = 10  # tokens, as its README has it
_GB = 1e9
_SAMPLING = tuple(field.name for field in fields(Sampling))
_BREAKERS = "dry_sequence_breakers"
_OF_TEXT = ("grammar", "json_schema", "stop")  # options of a request that no peer is given


@dataclass(frozen=True)
class PeerText:
    """One text of a peer, in numbers that mean what ours do.

    `n_generated` tokens took `generation_seconds`, each of them a step of the loop or drafted in
    one; `tokens` are the text's first ones, as many as were asked for: empty, with the text in
    `text`, of a peer that tells none.
    """

    n_prompt: int
    n_generated: int
    n_drafted: int
    n_accepted: int
    prompt_seconds: float
    first_token_seconds: float
    generation_seconds: float
    tokens: Sequence[int] = ()
    text: str = ""

    @property
    def n_rounds(self) -> int:
        """Each round adds a token of the target's own to those accepted."""
        return self.n_generated - self.n_accepted


class Peer(Protocol):
    """Somebody else who writes."""

    @property
    def name(self) -> str:
        """One of PEERS."""

    @property
    def speculative(self) -> bool:
        """Whether it drafts."""

    @property
    def is_resident(self) -> bool:
        """Whether its models stay loaded between texts; else its energy is not that of a text."""

    def write(
        self,
        tokens: Sequence[int],
        text: str | None,
        *,
        options: Mapping[str, Any],
        n_tokens: int,
        seed: int,
    ) -> PeerText:
        """Continue a prompt by n_tokens, more or less: see n_generated of what comes back.

        `text`: what tokenizes to `tokens`, special tokens by their names; None: there is no such.
        `options`: those of GenerateOptions that say how to sample, and `ignore_eos`.
        Raises PromptError for a prompt that it cannot read as we do, OptionError for an option
        that it does not have, and GgufspecError where it fails.
        """


@contextmanager
def peers(
    folder: Path | None,
    target: Path,
    draft: Path | None,
    *,
    n_ctx: int,
    n_threads: int,
    n_threads_draft: int,
    n_gpu_layers: int,
    n_gpu_layers_draft: int,
    heard: Callable[[str], None],
    wanted: Collection[str] = tuple(PEERS),
) -> Iterator[list[Peer]]:
    """Those of `wanted` that can run here with this pair, ready to write within the block.

    `folder`: a build of llama.cpp, or where its programs are; None: without these. `heard` is told
    why one cannot run. Servers are stopped at the end, also by an error, Ctrl-C or SIGTERM.
    Raises OptionError where a folder is given and none of its programs can run, or nobody can.
    """
    rival = Rival(
        *(Path(), target, draft, n_ctx, n_threads, n_threads_draft),
        n_gpu_layers=n_gpu_layers,
        n_gpu_layers_draft=n_gpu_layers_draft,
    )
    names = [name for name in PEERS if name in wanted]
    if folder is None:
        names = [name for name in names if name not in _BINARIES]
    with _terminated_in_order(), ExitStack() as stack:
        found: list[Peer] = []
        told: list[str] = []
        for name in names:
            try:
                found.append(stack.enter_context(_opened(name, rival, folder)))
            except (OptionError, OutOfMemoryError, ModelError) as error:
                told.append(f"{name} is left out: {error}")
                heard(told[-1])
        needs_program = folder is not None and any(name in _BINARIES for name in names)
        if not found or (needs_program and not any(peer.name in _BINARIES for peer in found)):
            of = "" if folder is None else f" of {folder}"
            raise OptionError(f"none{of} can be compared with:\n" + "\n".join(told))
        yield found


def taken(
    who: str, options: Mapping[str, Any], takes: Collection[str] = (*_SAMPLING, _BREAKERS)
) -> tuple[Sampling, Sequence[str]]:
    """Sampling and DRY's sequence breakers, if a peer takes all of them that are asked for.

    Raises OptionError, which names the others.
    """
    asked: dict[str, Any] = dict(options)
    request = CheckedOptions.of(asked)  # type: ignore[arg-type]
    sampling, usual, usually = request.sampling, Sampling(), CheckedOptions()
    refused = [name for name in _OF_TEXT if getattr(request, name) != getattr(usually, name)]
    refused += [
        name
        for name in _SAMPLING
        if name not in takes and getattr(sampling, name) != getattr(usual, name)
    ]
    breakers = tuple(request.dry_sequence_breakers)
    if _BREAKERS not in takes and breakers != tuple(usually.dry_sequence_breakers):
        refused.append(_BREAKERS)
    if refused:
        raise OptionError(f"{who} cannot be given {', '.join(refused)}; leave that out, or {who}")
    return sampling, breakers


# Each of them ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Simple:
    rival: Rival
    name: str = LLAMA_SIMPLE
    speculative: bool = True
    is_resident: bool = False

    def write(
        self,
        tokens: Sequence[int],
        text: str | None,
        *,
        options: Mapping[str, Any],
        n_tokens: int,
        seed: int,
    ) -> PeerText:
        sampling, breakers = taken(self.name, options)
        if text is None or "\0" in text:
            raise PromptError(
                f"{self.name} takes a text, and these {len(tokens):,} tokens are those of none"
            )
        arguments = llama_cpp_runner.text_command(
            self.rival,
            text,
            llama_cpp_runner.sampling_flags(sampling, breakers, self.rival.n_ctx),
            n_tokens=n_tokens,
            seed=seed,
            ignore_eos=bool(options.get("ignore_eos", False)),
            n_prompt=len(tokens),
        )
        said = llama_cpp_runner.write(arguments)
        _check_same_prompt(self.name, said.n_prompt, len(tokens))
        n_rounds = max(said.n_generated - said.n_accepted, 1)
        return PeerText(
            n_prompt=said.n_prompt,
            n_generated=said.n_generated,
            n_drafted=said.n_drafted,
            n_accepted=said.n_accepted,
            prompt_seconds=said.prompt_seconds,
            # It does not tell when the first came: a round behind the prompt, of middle length.
            first_token_seconds=said.prompt_seconds + said.generation_seconds / n_rounds,
            generation_seconds=said.generation_seconds,
            text=said.printed.partition(text)[2],
        )


@dataclass(frozen=True)
class _Server:
    name: str
    server: Server
    n_ctx: int
    speculative: bool
    is_resident: bool = True

    def write(
        self,
        tokens: Sequence[int],
        text: str | None,
        *,
        options: Mapping[str, Any],
        n_tokens: int,
        seed: int,
    ) -> PeerText:
        sampling, breakers = taken(self.name, options)
        asked = llama_server.request(
            *(tokens, sampling, breakers),
            n_tokens=n_tokens,
            n_ctx=self.n_ctx,
            seed=seed,
            ignore_eos=bool(options.get("ignore_eos", False)),
        )
        said = self.server.complete(asked)
        _check_same_prompt(self.name, said.n_prompt, len(tokens))
        return PeerText(
            n_prompt=said.n_prompt,
            n_generated=said.n_generated,
            n_drafted=said.n_drafted,
            n_accepted=said.n_accepted,
            prompt_seconds=said.prompt_seconds,
            first_token_seconds=said.prompt_seconds,
            generation_seconds=said.generation_seconds,
            tokens=said.tokens[:n_tokens],
        )


@dataclass(frozen=True)
class _Python:
    name: str
    llama: PythonLlama
    speculative: bool
    is_resident: bool = True

    def write(
        self,
        tokens: Sequence[int],
        text: str | None,
        *,
        options: Mapping[str, Any],
        n_tokens: int,
        seed: int,
    ) -> PeerText:
        sampling, _ = taken(self.name, options, lookup.TAKEN)
        said = self.llama.write(
            *(tokens, sampling),
            n_tokens=n_tokens,
            seed=seed,
            ignore_eos=bool(options.get("ignore_eos", False)),
        )
        return PeerText(
            n_prompt=len(tokens),
            n_generated=said.n_generated,
            n_drafted=said.n_drafted,
            n_accepted=said.n_accepted,
            prompt_seconds=said.prompt_seconds,
            first_token_seconds=said.prompt_seconds,
            generation_seconds=said.generation_seconds,
            tokens=said.tokens[:n_tokens],
        )


def _check_same_prompt(who: str, n_theirs: int, n_ours: int) -> None:
    if n_theirs != n_ours:
        raise PromptError(f"{who} read {n_theirs:,} tokens where we read {n_ours:,}")


# Opening them ------------------------------------------------------------------------------------


def _opened(name: str, rival: Rival, folder: Path | None) -> AbstractContextManager[Peer]:
    """One of them, for a block. Raises OptionError, OutOfMemoryError, ModelError."""
    if name in _WITH_DRAFT and rival.draft is None:
        raise OptionError("it needs a draft model, and there is none")
    if name not in _WITH_DRAFT:
        rival = replace(rival, draft=None)
    if folder is not None and name in _BINARIES:
        rival = replace(rival, binary=_binary(folder, _BINARIES[name]))
    header = read_header(rival.target)
    n_bytes = n_logits = 0
    if not rival.n_gpu_layers:
        n_bytes = header.n_bytes + (read_header(rival.draft).n_bytes if rival.draft else 0)
    if name == PYTHON_LOOKUP:
        n_logits = lookup.n_logits_bytes(rival.n_ctx, header.n_vocab)
    _check_room(header, n_bytes, n_logits, rival.n_ctx)
    if name == LLAMA_SIMPLE:
        return nullcontext(_Simple(rival))
    return _loaded(name, rival)


@contextmanager
def _loaded(name: str, rival: Rival) -> Iterator[Peer]:
    if name in _BINARIES:
        with llama_server.running(rival) as server:
            yield _Server(name, server, rival.n_ctx, speculative=rival.draft is not None)
        return
    speculative = name == PYTHON_LOOKUP
    llama = PythonLlama(
        rival.target,
        n_ctx=rival.n_ctx,
        n_threads=rival.n_threads,
        n_gpu_layers=rival.n_gpu_layers or 0,
        n_drafted=_N_LOOKUP if speculative else 0,
    )
    with closing(llama):
        yield _Python(name, llama, speculative)


def _binary(folder: Path, name: str) -> Path:
    places = os.pathsep.join(str(folder / place) for place in _FOLDERS)
    found = shutil.which(name, path=places)
    if found is None:
        raise OptionError(
            f"there is no program {name} in {folder}; build it "
            f"(cmake --build build --target {name}), or give the folder where it is"
        )
    return Path(found).resolve()


def _check_room(header: Header, n_bytes: int, n_logits: int, n_ctx: int) -> None:
    """Raise OutOfMemoryError where another copy of the weights would push others out.

    Weights that stay as they are in the file are shared, and count as free; llama.cpp lays many of
    them out anew for the processor.
    """
    free = free_memory()
    if free is None or n_bytes + n_logits <= free:
        return
    if n_logits > free:
        raise OutOfMemoryError(
            f"it keeps the logits of every position: {header.n_vocab:,} tokens x {n_ctx:,} cells "
            f"x 4 bytes are {n_logits / _GB:.1f} GB, and {free / _GB:.1f} GB are free; take a "
            "smaller context (-c)"
        )
    raise OutOfMemoryError(
        f"it may need {(n_bytes + n_logits) / _GB:.1f} GB more, and {free / _GB:.1f} GB are free; "
        "close what else runs, or compare with fewer"
    )


@contextmanager
def _terminated_in_order() -> Iterator[None]:
    """Within the block, SIGTERM ends this process by an exception: servers are stopped."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
