"""Runs other programs on the same files, to compare with: llama-server and llama-cpp-python."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from ggufspec.bench import llama_server
from ggufspec.bench.llama_server import LlamaCppProgram, LlamaServer
from ggufspec.common.child import exit_on_sigterm
from ggufspec.decoding.sampling import Sampling
from ggufspec.engine.options import CONSTRAINTS, CheckedOptions
from ggufspec.errors import ModelError, OptionError, OutOfMemoryError, PromptError
from ggufspec.llama.devices import free_memory
from ggufspec.llama.python_llama import BaselineRequest, BaselineText, PythonLlama
from ggufspec.models.head_facts import is_dspark
from ggufspec.models.header import read_header
from ggufspec.models.heads import read_draft

LLAMA_SERVER = "llama.cpp server"  # with the draft, at the server's defaults
LLAMA_SERVER_PLAIN = "llama.cpp server, plain"
PYTHON_PLAIN = "llama-cpp-python, plain"
BASELINES = (LLAMA_SERVER, LLAMA_SERVER_PLAIN, PYTHON_PLAIN)
_BINARY = "llama-server"
_SERVERS = (LLAMA_SERVER, LLAMA_SERVER_PLAIN)
_FOLDERS = (".", "bin", "build/bin")  # of a llama.cpp build
_SAMPLING = tuple(field.name for field in fields(Sampling))
_BREAKERS = "dry_sequence_breakers"
_UNSUPPORTED = (*CONSTRAINTS, "stop", "banned_strings")  # options that no baseline supports


@dataclass(frozen=True)
class Baseline:
    name: str
    runner: LlamaServer | PythonLlama

    def write(
        self, tokens: Sequence[int], *, options: Mapping[str, Any], n_tokens: int, seed: int
    ) -> BaselineText:
        """Continue a prompt by about `n_tokens`; the result's `n_generated` is the exact number.

        `options`: the sampling options of GenerateOptions, and `ignore_eos`. Raises PromptError if
        the program tokenizes the prompt differently, OptionError for an option that it does not
        support, and GgufspecError if it fails.
        """
        sampling, breakers = supported(self.name, options, self.runner.sampling_options)
        ignore_eos = bool(options.get("ignore_eos", False))
        request = BaselineRequest(tokens, sampling, n_tokens, seed, ignore_eos, breakers)
        found = self.runner.write(request)
        if found.n_prompt != len(tokens):
            raise PromptError(
                f"it is {found.n_prompt:,} tokens for {self.name}, {len(tokens):,} for ggufspec"
            )
        return replace(found, tokens=found.tokens[:n_tokens])


@contextmanager
def open_baselines(
    folder: Path | None,
    program: LlamaCppProgram,
    warn: Callable[[str], None],
    wanted: Collection[str] = BASELINES,
) -> Iterator[list[Baseline]]:
    """The baselines in `wanted` that can run with this pair, ready to use within the block.

    `folder`: a build of llama.cpp, or the folder of its programs; None: no llama.cpp programs.
    `warn` gets a reason for each baseline that cannot run. Servers are always stopped at the end,
    also by SIGTERM. Raises OptionError if no baseline can run, or none of a given folder.
    """
    possible = BASELINES if folder is not None else (PYTHON_PLAIN,)
    names = [name for name in possible if name in wanted]
    with exit_on_sigterm(), ExitStack() as stack:
        found: list[Baseline] = []
        reasons: list[str] = []
        for name in names:
            try:
                found.append(Baseline(name, stack.enter_context(_runner(name, program, folder))))
            except (OptionError, OutOfMemoryError, ModelError) as error:
                reasons.append(f"{name} is left out: {error}")
                warn(reasons[-1])
        wanted_servers = {*names} & {*_SERVERS}
        if not found or (wanted_servers and not wanted_servers & {each.name for each in found}):
            where = "" if folder is None else f" in {folder}"
            raise OptionError(f"no program to compare with{where}:\n" + "\n".join(reasons))
        yield found


def supported(
    name: str, options: Mapping[str, Any], available: Collection[str] | None = None
) -> tuple[Sampling, Sequence[str]]:
    """(sampling, DRY's breakers). Raises OptionError for options not `available` (None: all)."""
    request, usual = CheckedOptions.of({**options}), CheckedOptions()  # type: ignore[typeddict-item]
    breakers = tuple(request.dry_sequence_breakers)
    used = _changed(request.sampling, Sampling(), _SAMPLING)
    used += [_BREAKERS] if breakers != tuple(usual.dry_sequence_breakers) else []
    missing = _changed(request, usual, _UNSUPPORTED)
    missing += [each for each in used if available is not None and each not in available]
    if missing:
        raise OptionError(
            f"{name} does not support {', '.join(missing)}; leave that out, or {name}"
        )
    return request.sampling, breakers


def _changed(given: object, usual: object, names: Sequence[str]) -> list[str]:
    return [name for name in names if getattr(given, name) != getattr(usual, name)]


def _runner(
    name: str, program: LlamaCppProgram, folder: Path | None
) -> AbstractContextManager[LlamaServer | PythonLlama]:
    """The runner of a baseline, for a block. Raises OptionError, OutOfMemoryError, ModelError."""
    header, of_draft = read_header(program.target), None
    if name != LLAMA_SERVER:
        program = replace(program, draft=None)
    elif program.draft is None:
        raise OptionError("it needs a draft model, and none is given")
    else:
        of_draft, head = read_draft(header, program.draft)
        if head is not None:
            kind = "dspark" if of_draft is not None and is_dspark(of_draft) else head.kind
            program = replace(program, spec_type=f"draft-{kind}")
        elif of_draft and of_draft.vocabulary != header.vocabulary:
            raise OptionError("llama.cpp refuses a draft of another vocabulary")
    if folder is not None and name in _SERVERS:
        program = replace(program, binary=_binary(folder))
    n_bytes = 0 if program.n_gpu_layers else header.n_bytes + (of_draft.n_bytes if of_draft else 0)
    _check_room(n_bytes)
    if name in _SERVERS:
        return llama_server.running(program)
    if len(program.adapters) > 1:
        raise OptionError("it applies one LoRA adapter (--lora), and several are given")
    return closing(
        PythonLlama(
            program.target,
            adapter=next(iter(program.adapters), None),
            n_ctx=program.n_ctx,
            n_threads=program.n_threads,
            n_gpu_layers=program.n_gpu_layers or 0,
        )
    )


def _binary(folder: Path) -> Path:
    places = os.pathsep.join(str(folder / place) for place in _FOLDERS)
    if (found := shutil.which(_BINARY, path=places)) is None:
        raise OptionError(
            f"there is no program {_BINARY} in {folder}; build it "
            f"(cmake --build build --target {_BINARY}), or give the folder where it is"
        )
    return Path(found).resolve()


def _check_room(n_bytes: int) -> None:
    """Raise OutOfMemoryError if another copy of the weights may not fit into free memory."""
    # Weights mapped from the file are shared and count as free, but llama.cpp repacks many.
    free = free_memory()
    if free is not None and n_bytes > free:
        raise OutOfMemoryError(
            f"it may need {n_bytes / 1e9:.1f} GB more, and {free / 1e9:.1f} GB are free; close "
            "other programs, or use smaller models"
        )
