"""`ggufspec serve`: HTTP APIs over a pair; the address on stdout, all else on stderr."""

from __future__ import annotations

import logging
import signal
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ggufspec.cli import INTERRUPTED, render, shared, text_settings
from ggufspec.cli.loading import (
    PairOptions,
    late_bars,
    load_with_bars,
    room_for_drafts,
    wants_projector,
)
from ggufspec.cli.options import added, gathered, groups, load_options, options
from ggufspec.cli.serve_pairs import named_pairs, opened_pairs
from ggufspec.common import child, defaults
from ggufspec.common.facts import LogFormatter, counted
from ggufspec.common.reading import read_file
from ggufspec.engine.load_options import FIT
from ggufspec.errors import OptionError

if TYPE_CHECKING:
    from ggufspec.engine.engine import Engine
    from ggufspec.server.embeddings import EmbeddingService

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_HOSTS = ("127.0.0.1", "localhost", "[::1]")
_N_CTX = (
    "Context size: tokens of prompt and text together; 0: what the target was trained for.  "
    "[default: that, or less if memory is short]"
)


@click.command(name="serve", cls=shared.SectionedCommand)
@shared.pair_options(target={"kind": "targets", "required": False}, draft={"more": shared.LOOKUP})
@gathered(
    "settings",
    *options("text", "temperature", "max_tokens", "seed"),
    *groups("drafting", "limits", "sampling"),
    make=text_settings.to_generate,
)
@load_options(
    *("texts", "chats", "images", "serve"),
    n_ctx={"help": _N_CTX},
    n_slots={"default": defaults.SERVE_SLOTS},
    n_remembered={"default": 0},
)
@gathered("several", *options("several"))
@gathered("served", *options("served"))
@added(*options("serve"))
def command(
    pair: PairOptions,
    settings: dict[str, Any],
    load_settings: dict[str, Any],
    served: dict[str, Any],
    several: dict[str, Any],
    of_router: bool,
    host: str,
    port: int,
    api_key: str | None,
    api_key_file: Path | None,
    alias: str | None,
    n_tokens_max: int | None,
    embeddings: bool,
    pooling: str | None,
    grace: float,
    verbose: bool,
) -> int:
    """Serve a target model, accelerated by a draft model, over HTTP; with a web page.

    Clients of OpenAI's (/v1/chat/completions, /v1/responses), Anthropic's (/v1/messages), Ollama's
    (/api/chat) and llama.cpp's API (/completion, /infill) can use it. Without --target, the
    embedded pair of `ggufspec demo` is served, its target padded to --size.

    \b
      ggufspec serve --target large.gguf --draft small.gguf
      curl http://127.0.0.1:8080/v1/completions -H 'Content-Type: application/json' \\
           -d '{"prompt": "Once upon a time", "max_tokens": 50}'
    """
    if any(find_spec(name) is None for name in ("fastapi", "prometheus_client", "uvicorn")):
        raise OptionError("the server's packages are missing: pip install 'ggufspec[server]'")
    api_keys = _api_keys(api_key, api_key_file)
    if (folder := served["slot_folder"]) is not None and not folder.is_dir():
        raise OptionError(f"--slot-save-path {folder} is no folder; make it first")
    if embeddings and (pair.target is None or pair.draft is not None):
        raise click.UsageError("--embeddings needs --target, and no --draft")
    if pooling is not None and not embeddings:
        raise click.UsageError("--pooling needs --embeddings")
    lines = named_pairs(click.get_current_context())
    if lines is None:
        text_settings.check(pair, settings)
    if of_router:
        child.end_with_stdin()
    _show_own_log(verbose)
    from ggufspec.engine.calibration import calibrate_all
    from ggufspec.server.app import make_app, make_embedding_app
    from ggufspec.server.router import make_router_app
    from ggufspec.server.service import ServerOptions, make_service
    from ggufspec.server.uvicorn_server import (
        AFTER_GRACE_SECONDS,
        GracefulServer,
        bind,
        is_path,
        watchdog,
    )

    last_resort = watchdog(grace + 2 * AFTER_GRACE_SECONDS)
    with bind(host, port) as listening, ExitStack() as opened:
        if is_path(host):
            opened.callback(partial(Path(host).unlink, missing_ok=True))
        if lines is None:
            may_have = wants_projector(load_settings) and not embeddings
            target, draft = pair.find(projector=may_have)
            alias = alias or (target.stem if pair.target else f"stand-in-{pair.size}")
        served |= {
            "alias": ", ".join(lines or [str(alias)]),
            "api_keys": api_keys,
            "hosts": _HOSTS if host in _LOOPBACK and not api_keys else None,
            "max_tokens": n_tokens_max,
        }
        serving = partial(
            GracefulServer,
            grace=grace,
            on_listening=click.echo,
            on_signal=last_resort.start,
            log_requests=verbose,
        )
        has_limit = served["n_body_bytes"] is not None
        # Of several models, one may read images.
        usual = defaults.SERVE_BODY if lines is None else defaults.SERVE_BODY_IMAGES
        served["n_body_bytes"] = served["n_body_bytes"] or usual
        if lines is not None:
            pairs = opened.enter_context(opened_pairs(lines, several, served["slot_folder"]))
            server = serving(make_router_app(pairs, ServerOptions(**served)), pairs)
            note = f"{counted(len(lines), 'model')}, loaded when a request names them"
        elif embeddings:
            embedding = _embedding_service(target, load_settings, pooling, served)
            opened.callback(embedding.close)
            server = serving(make_embedding_app(embedding), embedding)
            embedder = embedding.embedder
            note = f"context: {embedder.n_ctx:,} tokens; pooling: {embedder.pooling}"
        else:
            load_settings |= room_for_drafts(settings["n_draft"])
            is_fitted = load_settings["n_ctx"] is None
            if is_fitted:
                load_settings["n_ctx"] = FIT
            engine = opened.enter_context(load_with_bars(target, draft, load_settings))
            settings = text_settings.with_file_sampling(
                settings, engine.file_sampling, verbose=True
            )
            engine.check(text_settings.checked(settings))
            with late_bars() as bars:  # otherwise the first text with a seed would delay the others
                engine.run(partial(calibrate_all, engine.pair, bars.prompt))
            if not has_limit and engine.pair.target.projector is not None:
                served["n_body_bytes"] = defaults.SERVE_BODY_IMAGES
            options = ServerOptions(defaults=settings, **served)  # type: ignore[arg-type]
            service = make_service(engine, options)
            server = serving(make_app(service), service.texts)
            note = _context_note(engine, is_fitted)
        if not (host in _LOOPBACK or is_path(host) or api_keys):
            render.note(
                f"anyone who can connect to {host} can use this model: set GGUFSPEC_API_KEY"
            )
        render.note(note)
        end = "" if of_router else "; press Ctrl-C to stop"
        render.note(f"serving {served['alias']}{end}")
        server.run(sockets=[listening])
    last_resort.cancel()
    return INTERRUPTED if server.stopped_by == signal.SIGINT else 0


def _embedding_service(
    target: Path, load_settings: dict[str, Any], pooling: str | None, served: dict[str, Any]
) -> EmbeddingService:
    from ggufspec.llama.embedder import Embedder
    from ggufspec.server.embeddings import EmbeddingService
    from ggufspec.server.service import ServerOptions

    n_gpu_layers = load_settings["n_gpu_layers"]
    embedder = Embedder(
        target,
        n_ctx=load_settings["n_ctx"],
        n_gpu_layers=n_gpu_layers if isinstance(n_gpu_layers, int) else -1,
        n_threads=load_settings["n_threads"],
        pooling=pooling,
    )
    return EmbeddingService(embedder, ServerOptions(**served))


def _context_note(engine: Engine, is_fitted: bool) -> str:
    n_ctx, n_trained = engine.n_ctx, engine.pair.target.model.n_ctx_train
    why = ""
    if is_fitted:
        is_all = n_ctx >= n_trained
        why = ", all that the model was trained for" if is_all else ", as memory allows (see -c)"
    return f"context: {n_ctx:,} tokens for each of {counted(engine.n_slots, 'slot')}{why}"


def _api_keys(key: str | None, path: Path | None) -> tuple[str, ...]:
    """The keys of --api-key and --api-key-file. Raises BadParameter, OptionError."""
    if key == "":
        raise click.BadParameter(
            "the key is empty; leave the option out to require none", param_hint="--api-key"
        )
    keys: tuple[str, ...] = () if key is None else (key,)
    if path is not None:
        text = read_file(path, "the file of keys", OptionError).decode("utf-8", "surrogateescape")
        listed = tuple(filter(None, map(str.strip, text.splitlines())))
        if not listed:
            raise OptionError(f"the file of keys {path} is empty; write one key per line")
        keys += listed
    return keys


def _show_own_log(verbose: bool) -> None:
    """Show the server's errors on stderr, one line each; with -v, also requests and tracebacks."""
    handler = logging.StreamHandler()
    handler.setFormatter(LogFormatter("ggufspec: %(message)s"))
    own = ("ggufspec.server", "ggufspec.failures")
    for name in ("uvicorn.error", "uvicorn.access") if verbose else own:
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        logger.propagate = False
