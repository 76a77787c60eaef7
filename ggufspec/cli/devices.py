"""`ggufspec devices`: llama.cpp's devices, how it was built, and which features it lacks."""

from __future__ import annotations

import importlib
import signal
import subprocess
from typing import Any

import click

from ggufspec.cli import render, shared
from ggufspec.cli.options import added, options
from ggufspec.common import child
from ggufspec.common.facts import json_object
from ggufspec.common.files import format_bytes
from ggufspec.errors import LibraryError

_N_SHOWN = 5  # lines to show of a driver's output


@click.command(name="devices", cls=shared.SectionedCommand)
@added(*options("output", "as_json"))
def command(as_json: bool) -> None:
    """Show what llama.cpp can run on, what it was built with, and what it lacks.

    It also lists the types of weights for which ggufspec's own kernels can be used on this CPU;
    the first call tests the kernels. For a GPU that this build of llama.cpp cannot use, it prints
    the command that builds one that can. `ggufspec plan` predicts how many layers of a pair fit on
    the GPUs, and its speed.
    """
    found, messages = _facts()
    document = {**found, "messages": messages, "versions": render.versions()}
    if as_json:
        render.echo_json(document)
    else:
        _print(document)


def _facts() -> tuple[dict[str, Any], list[str]]:
    try:
        done = child.call("ggufspec.llama.build", "print_facts")
    except subprocess.TimeoutExpired as error:
        raise LibraryError(
            f"llama.cpp did not find its devices within {child.SECONDS:g} s: a GPU or its driver "
            "hangs. Look for its messages (`dmesg`), then restart the machine"
        ) from error
    messages = done.stderr.decode("utf-8", "replace").strip().splitlines()
    printed = done.stdout.decode("utf-8", "replace").splitlines()[-1:]
    found = json_object(printed[0]) if printed else None
    if found is not None and not done.returncode:
        return found, messages
    if (code := done.returncode) == 1:  # Python's exit code after an exception
        # Raise errors that name a missing library, or a variable with an unknown value.
        importlib.import_module("ggufspec.llama")
        importlib.import_module("ggufspec.llama.kernels").check_variables()
    ended = f"by {signal.strsignal(-code) or -code}" if code < 0 else f"with code {code}"
    lines = "".join(f"\n  {line}" for line in messages[-_N_SHOWN:])
    raise LibraryError(
        f"llama.cpp ended {ended} while it looked for devices: a GPU's driver is damaged, or does "
        "not match this build. Update the driver; GGML_DISABLE_VULKAN=1 leaves out Vulkan, "
        f"CUDA_VISIBLE_DEVICES=-1 leaves out CUDA{lines}"
    )


def _print(document: dict[str, Any]) -> None:
    rows = [["device", "type", "free", "total", "nominal", "description"]]
    for device in document["devices"]:
        rate = f"{device['bandwidth'] / 1e9:.0f} GB/s" if device["bandwidth"] else ""
        free, total = format_bytes(device["n_free"]), format_bytes(device["n_total"])
        named = [device["name"], device["type"]]
        rows.append([*named, free, total, rate, device["description"]])
    has_bandwidth = any(row[4] for row in rows[1:])
    render.echo_rows([row if has_bandwidth else [*row[:4], row[5]] for row in rows])
    render.echo()
    version = document["versions"]["llama-cpp-python"]
    render.echo(f"llama-cpp-python {version}, built with {', '.join(document['backends'])}")
    for backend, features in document["features"].items():
        render.echo(f"{backend}: {features}")
    processor = document["processor"]
    if processor["missing"]:
        render.echo(f"missing, though this processor has it: {' '.join(processor['missing'])}")
    elif processor["has_variants"]:
        render.echo("CPU: the best of its libraries for this processor, chosen at run time")
    own = document["kernels"]
    used = f"{own['instructions']} for {', '.join(own['types'])}"
    render.echo(f"own kernels: {used if own['types'] else 'none, ' + own['reason']}")
    cores = f"{document['n_threads']} by default, {document['n_logical_cores']} logical cores"
    kept = ", kept by ggufspec: llama.cpp has no OpenMP" if document["thread_pools"] else ""
    render.echo(f"threads: {cores}{kept}")
    for line in document["messages"][-_N_SHOWN:]:
        render.echo(f"llama.cpp: {line}")
    for line in document["advice"]:
        render.echo(f"\n{line}")
