"""`ggufspec trim`: writes a cheaper draft, with fewer tokens, fewer layers or smaller types."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import click

from ggufspec.cli import render, shared
from ggufspec.cli.loading import find_model, late_bars
from ggufspec.cli.options import added, options
from ggufspec.common.child import exit_on_sigterm
from ggufspec.common.files import format_bytes, temporary_folder
from ggufspec.common.reading import read_text


@click.command(name="trim", cls=shared.SectionedCommand)
@click.argument("model")
@added(*options("trim"), *options("pair", "offline"))
def command(
    model: str,
    output: Path,
    offline: bool,
    force: bool,
    vocab: int | None,
    layers: tuple[int, ...] | None,
    type_: str | None,
    texts: Sequence[Path],
) -> None:
    """Make a cheaper draft out of a model: fewer tokens, fewer layers, smaller types.

    Needs no training: weights are left out. The draft proposes only tokens that it has kept; the
    text keeps the target's distribution. A model can also become a draft for itself, with a part
    of its layers. Measure the result with `ggufspec bench`, which ranks several drafts.

    \b
      ggufspec trim small.gguf --vocab 32768 -o a.gguf
      ggufspec trim small.gguf --vocab 32768 --layers 0-10,14-23 -o b.gguf
      ggufspec bench --target large.gguf --draft small.gguf,a.gguf,b.gguf
    """
    from ggufspec.llama.quantize import quantization_number, requantize
    from ggufspec.models.gguf_file import TYPES, check_path, write
    from ggufspec.models.header import read_header
    from ggufspec.models.heads import check_model
    from ggufspec.models.trim import most_frequent, trimmed

    if vocab is None and layers is None and type_ is None:
        raise click.UsageError("nothing would be cut; choose with --vocab, --layers or --type")
    if texts and vocab is None:
        raise click.UsageError("--text chooses the tokens to keep: give their number with --vocab")
    path = find_model(model, offline=offline)
    source = read_header(path)
    check_model(source)
    check_path(output, force=force, sources=source.paths)
    if type_ is not None:
        quantization_number(type_)
    counts = _counts(path, [read_text(each, "the text file") for each in texts])
    tokens = None if vocab is None else most_frequent(source, vocab, counts)
    with exit_on_sigterm(), ExitStack() as stack:
        plain = source.paths[0]
        if tokens is not None or layers is not None:
            made = trimmed(source, tokens=tokens, layers=layers)
            plain = output
            if type_ is not None:
                plain = stack.enter_context(temporary_folder("ggufspec-trim-")) / "plain.gguf"
            bars = stack.enter_context(late_bars())
            write(
                made,
                plain,
                force=force,
                progress=lambda done, of: bars.update("Writing", done, of, unit="bytes"),
            )
        if type_ is not None:
            output_type = type_ if type_.upper() in TYPES else None
            requantize(plain, output, type_, output_type=output_type, force=force)
    render.note(
        f"wrote {format_bytes(output.stat().st_size)}; use it with "
        f"`ggufspec run --target MODEL --draft {output}`"
    )


def _counts(path: Path, texts: Sequence[str]) -> Counter[int]:
    counts = Counter[int]()
    if texts:
        from ggufspec.llama.model import Model

        with closing(Model(path, n_gpu_layers=0)) as model:
            for text in texts:
                counts.update(model.vocab.tokenize(text, add_special=False, parse_special=False))
    return counts
