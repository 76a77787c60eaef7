"""`ggufspec serve`: OpenAI's API over a pair. The address goes to stdout, the talk to stderr."""

from __future__ import annotations

import logging
import signal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from ggufspec.cli.demo import cache_dir_option, size_option, stand_in
from ggufspec.cli.exits import INTERRUPTED
from ggufspec.cli.names import find_models, offline_option
from ggufspec.cli.options import (
    draft_n_option,
    draft_option,
    draft_temperature_option,
    drafter_option,
    load_options,
    room_for,
    show_log,
    target_option,
    verify_option,
)
from ggufspec.cli.progress import load_with_bars
from ggufspec.cli.run import check_needs_no_draft, check_rule
from ggufspec.cli.sections import SectionedCommand
from ggufspec.common import defaults
from ggufspec.errors import OptionError

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_HOSTS = ("127.0.0.1", "localhost", "[::1]")


@click.command(name="serve", cls=SectionedCommand)
@target_option(required=False)
@draft_option("without one, only the text so far drafts")
@offline_option
@size_option
@cache_dir_option
@draft_n_option
@drafter_option
@verify_option
@draft_temperature_option
@load_options
@click.option(
    "--host",
    default=defaults.SERVE_HOST,
    show_default=True,
    help="Address to listen at; any but loopback is open to others.",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=defaults.SERVE_PORT,
    show_default=True,
    help="Port to listen at; 0: any that is free.",
)
@click.option(
    "--api-key",
    envvar="GGUFSPEC_API_KEY",
    help="Ask clients for this key. Others of this machine can read options: better set "
    "GGUFSPEC_API_KEY.",
)
@click.option(
    "--cors-origin",
    "cors_origins",
    multiple=True,
    help="Let pages of this origin ask, such as http://localhost:3000; may be given several times.",
)
@click.option("--alias", help="Name of the model in answers. [default: that of its file]")
@click.option(
    "--slots",
    "n_slots",
    type=click.IntRange(1, defaults.N_SLOTS_LIMIT),
    default=defaults.SERVE_SLOTS,
    show_default=True,
    help="Texts at the same time, in passes that they share, and conversations that stay warm; "
    "each takes the memory of a context (-c).",
)
@click.option(
    "--max-queue",
    type=click.IntRange(min=0),
    default=defaults.SERVE_QUEUE,
    show_default=True,
    help="Requests that may wait for their turn; those beyond are told to come back (429).",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=defaults.SERVE_TIMEOUT,
    show_default=True,
    help="Seconds that a request may take, waiting included.",
)
@click.option(
    "--max-tokens",
    "n_tokens_max",
    type=click.IntRange(min=1),
    help="Tokens of a text at most, whatever is asked for. [default: what the context takes]",
)
@click.option(
    "--max-body",
    type=click.IntRange(min=1),
    default=defaults.SERVE_BODY,
    show_default=True,
    help="Bytes of a request at most.",
)
@click.option(
    "--grace",
    type=click.FloatRange(min=0),
    default=defaults.SERVE_GRACE,
    show_default=True,
    help="Seconds that what runs has to finish after SIGTERM or Ctrl-C.",
)
@click.option(
    "-v",
    "--verbose",
    is_flag=True,
    help="Show on stderr each request, where errors of the server's own come from, and "
    "llama.cpp's log.",
)
def command(
    target: str | None,
    draft: str | None,
    offline: bool,
    size: str,
    cache_dir: Path | None,
    n_draft: int | str,
    drafter: str | None,
    verify: str,
    draft_temperature: float | str,
    load_settings: dict[str, Any],
    host: str,
    port: int,
    api_key: str | None,
    cors_origins: tuple[str, ...],
    alias: str | None,
    n_slots: int,
    max_queue: int,
    timeout: float,
    n_tokens_max: int | None,
    max_body: int,
    grace: float,
    verbose: bool,
) -> int:
    """Serve a target model, helped by a draft model, by OpenAI's API; with a page to try it.

    Without --target, it is the embedded pair of `ggufspec demo`, the large one padded to --size.

    \b
      ggufspec serve --target large.gguf --draft small.gguf
      curl http://127.0.0.1:8080/v1/completions -H 'Content-Type: application/json' \\
           -d '{"prompt": "Once upon a time", "max_tokens": 50}'
    """
    if any(find_spec(name) is None for name in ("fastapi", "prometheus_client", "uvicorn")):
        raise OptionError("to serve, more has to be installed: pip install 'ggufspec[server]'")
    if api_key == "":
        raise click.BadParameter("is empty; leave it out to ask for none", param_hint="--api-key")
    check_rule(verify)
    if draft is not None and target is None:
        raise click.UsageError("--draft needs --target: the embedded pair has its own")
    show_log(verbose)
    _show_own_log(verbose)
    settings: dict[str, Any] = {
        "n_draft": n_draft,
        "drafter": drafter,
        "verify": verify,
        "draft_temperature": draft_temperature,
    }
    from ggufspec.engine.options import CheckedOptions
    from ggufspec.server.app import make_app, make_service
    from ggufspec.server.options import ServerOptions
    from ggufspec.server.uvicorn_server import GracefulServer, bind

    CheckedOptions.of(settings)  # type: ignore[arg-type]
    load_settings.update(room_for(n_draft))
    if target is not None and draft is None:
        check_needs_no_draft(drafter or ("auto" if n_draft == "auto" else "none"), compare=False)
    with bind(host, port) as listening:
        target_path, draft_path = _files(target, draft, size, cache_dir, offline=offline)
        load_settings["n_slots"] = n_slots
        with load_with_bars(target_path, draft_path, load_settings) as engine:
            service = make_service(
                engine,
                ServerOptions(
                    alias=alias or (target_path.stem if target else f"stand-in-{size}"),
                    api_key=api_key,
                    cors_origins=cors_origins,
                    hosts=_HOSTS if host in _LOOPBACK and api_key is None else None,
                    n_waiting_max=max_queue,
                    max_tokens=n_tokens_max,
                    n_body_bytes=max_body,
                    timeout=timeout,
                    defaults=settings,  # type: ignore[arg-type]
                ),
            )
            server = GracefulServer(
                make_app(service),
                service.worker,
                grace=grace,
                on_listening=click.echo,
                log_requests=verbose,
            )
            if host not in _LOOPBACK and api_key is None:
                _talk(f"anybody who reaches {host} may use this model: set GGUFSPEC_API_KEY")
            _talk(f"serving {service.options.alias}; Ctrl-C ends it")
            server.run(sockets=[listening])
            service.worker.join()
    return INTERRUPTED if server.stopped_by == signal.SIGINT else 0


def _files(
    target: str | None, draft: str | None, size: str, cache_dir: Path | None, *, offline: bool
) -> tuple[Path, Path | None]:
    if target is not None:
        return find_models(target, draft, offline=offline)
    from ggufspec.standin.embedded import embedded_draft

    return stand_in(size, cache_dir), embedded_draft()


def _show_own_log(verbose: bool) -> None:
    """Errors of the server on stderr, a line each; with -v, requests too."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("ggufspec: %(message)s"))
    for name in ("uvicorn.error", "uvicorn.access") if verbose else ("ggufspec.server",):
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        logger.propagate = False


def _talk(message: str) -> None:
    click.echo(f"ggufspec: {message}", err=True)
