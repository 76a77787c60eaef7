"""`ggufspec models`: lists, shows, downloads, verifies and removes models."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from ggufspec.cli import DIFFERENCE, render
from ggufspec.cli.loading import late_bars, room
from ggufspec.cli.options import added, options
from ggufspec.common.facts import counted
from ggufspec.common.files import format_bytes
from ggufspec.errors import DownloadError, ModelError
from ggufspec.models import local
from ggufspec.models.download import hashes_of
from ggufspec.models.header import Header, read_header
from ggufspec.models.heads import check_type, head_text, is_head
from ggufspec.models.hub import Transient, is_offline
from ggufspec.models.local import parse
from ggufspec.models.pull import Mismatch, locate
from ggufspec.models.pull import check as check_one
from ggufspec.models.pull import pull as pull_one
from ggufspec.models.registry import ModelEntry, ModelPair, load_registry
from ggufspec.models.shape import experts_of, shape_of
from ggufspec.models.trim_facts import trim_of, trim_text


@click.group(name="models")
def command() -> None:
    """List, show, download, verify and remove models.

    A NAME is a registered name (see list), user/repo (Q4_K_M, or the nearest), user/repo:QUANT,
    user/repo/file.gguf, the URL of a file on huggingface.co, a name of Ollama's, or the path of a
    file; an @revision may follow. Downloads go to the Hugging
    Face cache (HF_HUB_CACHE, HF_HOME). To register your own models, write a TOML file and set the
    environment variable GGUFSPEC_MODELS to its path.

    \b
      ggufspec models list
      ggufspec models pull 70B-Q3_K_S 8B-Q3_K_L
      ggufspec models show bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M
    """


@command.command(name="list")
@added(*options("output", "as_json"))
def list_models(as_json: bool) -> None:
    """List the registered models.

    "cached": the file is on this machine. "fits": it is not larger than the memory of this machine.
    """
    from ggufspec.llama.devices import gpus, physical_memory

    registry = load_registry()
    if (n_memory := physical_memory()) is not None:
        n_memory += sum(gpu.n_free for gpu in gpus())
    facts = [_entry_facts(entry, n_memory) for entry in registry.models.values()]
    if as_json:
        pairs = [_pair_facts(pair) for pair in registry.pairs.values()]
        render.echo_json({"models": facts, "pairs": pairs, "memory": n_memory})
        return
    rows = [["name", "size", "cached", "fits", "repository"]]
    yes_or_no = {True: "yes", False: "no", None: "?"}
    for row in facts:
        size = format_bytes(row["size"]) if row["size"] else "?"
        cached, fits = "yes" if row["cached"] else "", yes_or_no[row["fits_memory"]]
        rows.append([row["name"], size, cached, fits, row["repo"]])
    widths = render.column_widths(rows)
    if sys.stdout.isatty() and sum(widths) + 2 * len(widths) > shutil.get_terminal_size().columns:
        rows = [row[:-1] for row in rows]  # leave out the repository
    render.echo_rows(rows)


@command.command()
@click.argument("name")
@added(*options("output", "as_json"))
def show(name: str, as_json: bool) -> None:
    """Show registry entry, pairs and file header of a model."""
    registry = load_registry()
    named = parse(name, registry)
    known = named if isinstance(named, ModelEntry) else None
    paths = locate(name, registry)
    if known is None and paths is None:
        raise ModelError(
            f"{name} is neither on this machine nor registered: "
            f"`ggufspec models pull {name}` downloads it"
        )
    header = read_header(paths[0]) if paths else None
    if header is not None:
        check_type(header)
    pairs = registry.pairs_of(known.alias) if known else ()
    if as_json:
        document = {
            "entry": _entry_facts(known, None) if known else None,
            "pairs": [_pair_facts(pair) for pair in pairs],
            "header": header and _header_facts(header),
        }
        render.echo_json(document)
        return
    parts = [_known_text(known)] if known else []
    parts += map(_pair_text, pairs)
    parts += [_header_text(header)] if header else []
    render.echo("\n\n".join(parts))


@command.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
def pull(names: tuple[str, ...]) -> None:
    """Download or update models, and print their paths.

    An interrupted download continues where it stopped. A downloaded file is kept only if its sha256
    is the one in the registry and on the hub; to check older files, see verify.

    \b
      ggufspec models pull 8B-Q3_K_L
      ggufspec models pull bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M
      HF_TOKEN=hf_... ggufspec models pull google/gemma-2-2b-it-GGUF/2b_it_v2.gguf
    """
    for name in names:
        with late_bars() as bars:
            paths = pull_one(name, progress=bars.download, room=room)
        render.echo(str(paths[0]))


@command.command()
@click.argument("name")
def path(name: str) -> None:
    """Print the path of a model on this machine."""
    render.echo(str(_here(name)[0]))


@command.command()
@click.argument("names", nargs=-1, metavar="[NAME...]")
@added(*options("output", "as_json"))
def check(names: tuple[str, ...], as_json: bool) -> int:
    """Compare registry entries (default: all) with the hub. Downloads no model.

    Exit code 1 if a file, its size or its sha256 differs.
    """
    if is_offline():
        raise DownloadError("HF_HUB_OFFLINE is set, so the hub cannot be asked: unset it")
    registry = load_registry()
    entries = [registry.find(name) for name in names] or list(registry.models.values())
    found: list[Mismatch] = []
    for entry in entries:
        try:
            differences = list(check_one(entry))
        except Transient:
            raise
        except DownloadError as error:
            differences = [Mismatch(entry.alias, "repository", entry.repo, str(error))]
        found += differences
        if not as_json:
            for difference in differences:
                render.echo(
                    f"{entry.alias}: {difference.what}: registered {difference.registered}, "
                    f"found {difference.found}"
                )
            if not differences:
                render.echo(f"{entry.alias}: as registered")
    if as_json:
        render.echo_json({"n_checked": len(entries), "differences": [asdict(d) for d in found]})
    return DIFFERENCE if found else 0


@command.command()
@click.argument("name")
def verify(name: str) -> int:
    """Check the files of a model for damage.

    Their sha256 is computed again, and compared with the registry's or the hub's. Exit code 1 if a
    file is damaged.
    """
    entry = parse(name, load_registry())
    paths = _here(name)
    is_damaged = False
    with late_bars() as bars:
        for i, digest in enumerate(hashes_of(paths, bars.download)):
            path = paths[i]
            known = entry.sha256_of(entry.files[i]) if isinstance(entry, ModelEntry) else None
            wanted = known or _blob_sha256(path)
            verdict = {None: "not compared, no sha256 is known for it", digest: "correct"}.get(
                wanted, f"DAMAGED: the correct one is {wanted}"
            )
            is_damaged = is_damaged or wanted not in (None, digest)
            render.echo(f"{digest}  {path.name}: {verdict}")
    if is_damaged:
        render.note(
            f"to download it again: `ggufspec models rm {name}`, then `ggufspec models pull {name}`"
        )
    return DIFFERENCE if is_damaged else 0


@command.command()
@click.argument("name")
@added(*options("models"))
def rm(name: str, yes: bool) -> None:
    """Remove a model from the Hugging Face cache."""
    paths = [path.parent.resolve() / path.name for path in _here(name)]
    cache = local.hub_cache().resolve()
    if not all(cache in path.parents and "snapshots" in path.parts for path in paths):
        raise ModelError(f"{name} is not in the hub's cache {cache}; remove other files yourself")
    size = format_bytes(sum(path.stat().st_size for path in paths))
    files = counted(len(paths), "file")
    if not yes:
        click.confirm(f"Remove {files} of {name}, {size}?", abort=True, err=True)
    render.echo(f"Freed {format_bytes(local.remove(paths))}.")


def _header_text(header: Header) -> str:
    from ggufspec.engine.options import sampling_text
    from ggufspec.engine.speeds import weights_note
    from ggufspec.placement.speeds import experts_note

    facts = _header_facts(header)
    layers = list(filter(None, facts["layer_bytes"]))  # leave out the layers of a head
    low, high = format_bytes(min(layers)), format_bytes(max(layers))
    span = low if low == high else f"{low} to {high}"
    rows = {
        "file": ", ".join(facts["paths"]),
        "size": format_bytes(facts["n_bytes"]),
        "architecture": facts["architecture"],
        "parameters": f"{facts['n_params'] / 1e6:,.0f} M",
        "origin": facts["trim"] and trim_text(facts["trim"]),
        "quantization": facts["quantization"],
        # A head is a draft, so it has no such row.
        "weights": "" if is_head(header) else weights_note(facts["matrix_type"]),
        "experts": experts_note(*experts) if (experts := experts_of(header))[0] else "",
        "layers": f"{len(layers)}, {span} each",
        "head": facts["head"],
        "context": f"{facts['n_ctx']} tokens",
        "vocabulary": f"{facts['n_vocab']} tokens, fingerprint {facts['vocabulary']}",
        "chat template": "yes" if facts["chat_template"] else "no",
        "sampling": sampling_text(facts["sampling"]) or "not in the file: llama.cpp's defaults",
    }
    return "\n".join([_lines(rows), *facts["sampling_notes"]])


def _header_facts(header: Header) -> dict[str, Any]:
    names = (
        *("n_bytes", "architecture", "n_params", "quantization", "matrix_type", "n_layers"),
        *("n_ctx", "n_vocab", "vocabulary", "chat_template"),
    )
    from ggufspec.engine.options import file_sampling

    return {
        "paths": [str(path) for path in header.paths],
        **{name: getattr(header, name) for name in names},
        "layer_bytes": [layer.n_bytes for layer in shape_of(header).layers],
        "trim": trim_of(header),
        "head": head_text(header) or None,
        **dict(zip(("sampling", "sampling_notes"), file_sampling(header.values), strict=True)),
    }


def _entry_facts(entry: ModelEntry, n_memory: int | None) -> dict[str, Any]:
    paths = local.find(entry)
    fits = None if n_memory is None or entry.size is None else entry.size <= n_memory
    facts = asdict(entry)
    cached = str(paths[0]) if paths else None
    return {"name": facts.pop("alias"), **facts, "cached": cached, "fits_memory": fits}


def _pair_facts(pair: ModelPair) -> dict[str, Any]:
    return {**vars(pair), "settings": dict(pair.settings)}


def _known_text(entry: ModelEntry) -> str:
    facts = _entry_facts(entry, None)
    rows = {
        "name": entry.alias,
        "repository": f"https://huggingface.co/{entry.repo} at {entry.revision}",
        "files": ", ".join(entry.files),
        "size": format_bytes(entry.size) if entry.size else "unknown",
        "sha256": ", ".join(entry.sha256) or "unknown",
        "cached": facts["cached"] or f"no (`ggufspec models pull {entry.alias}`)",
    }
    if (shape := entry.shape) is not None:
        layers = f"{shape.n_layers} layers of width {shape.n_embd}"
        rows |= {
            "architecture": f"{shape.architecture}, {layers}",
            "vocabulary": f"{shape.n_vocab} tokens",
            "context": f"{shape.n_ctx} tokens",
            "licence": shape.license or "not known",
        }
    return _lines(rows)


def _pair_text(pair: ModelPair) -> str:
    options = "".join(
        f" --{name.replace('_', '-')} {value}" for name, value in pair.settings.items()
    )
    note = f"\n  {pair.note}" if pair.note else ""
    return f"ggufspec run --target {pair.target} --draft {pair.draft}{options}{note}"


def _here(name: str) -> Sequence[Path]:
    if (paths := locate(name)) is None:
        raise ModelError(f"{name} is not in the cache: `ggufspec models pull {name}` downloads it")
    return paths


def _blob_sha256(path: Path) -> str | None:
    content = path.resolve()
    is_blob = content.parent.name == "blobs" and len(content.name) == 64
    return content.name if is_blob else None


def _lines(rows: dict[str, str]) -> str:
    shown = {name: value for name, value in rows.items() if value}
    width = max(map(len, shown)) + 2
    return "\n".join(f"{name:<{width}}{value}" for name, value in shown.items())
