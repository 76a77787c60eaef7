"""`ggufspec standin`: writes a file with the size and speed of any model."""

from __future__ import annotations

from pathlib import Path
from time import monotonic

import click

from ggufspec.cli import render, shared
from ggufspec.cli.loading import late_bars
from ggufspec.cli.option_values import PATH
from ggufspec.cli.options import added, options
from ggufspec.common.files import format_bytes


@click.command(name="standin", cls=shared.SectionedCommand)
@added(*options("standin"))
@click.argument("path", metavar="OUT", type=PATH)
def command(like: str, agreement: float, force: bool, path: Path) -> None:
    """Write a file with the size and speed of a model, to measure before a download.

    OUT has the tensors, the quantization and the vocabulary size of that model, so it takes the
    same memory and time. Its text is a fixed sequence of made-up words. All stand-ins of one
    vocabulary size share that sequence; a draft with --agreement 0.7 is right for 70 % of tokens,
    at temperatures up to 1.5. Write a target without --agreement.

    \b
      ggufspec standin --like 70B-Q3_K_S target.gguf
      ggufspec standin --like 8B-Q3_K_L --agreement 0.7 draft.gguf
      ggufspec run --target target.gguf --draft draft.gguf --compare -p "Once"
    """
    from ggufspec import standin
    from ggufspec.models.local import local_file

    source = local_file(like)
    standin.check_path(path, force=force, sources=[source] if source else [])
    made = standin.plan(like, agreement)
    started = monotonic()
    with late_bars() as bars:
        standin.write(
            made,
            path,
            force=force,
            progress=lambda done, of: bars.update(f"Writing {path.name}", done, of, unit="bytes"),
        )
    seconds = max(monotonic() - started, 1e-3)
    role = "--target" if agreement == 1 else "--target TARGET --draft"
    render.note(
        f"wrote {format_bytes(made.n_bytes)} in {seconds:.1f} s "
        f"({made.n_bytes / seconds / 1e6:.0f} MB/s); try it with "
        f'`ggufspec run {role} {path} -p "Once"`'
    )
