"""The options of a server, as the operator sets them, and the state that its routes share."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from starlette.types import Receive

from ggufspec.common import defaults
from ggufspec.engine.engine import Engine
from ggufspec.engine.options import GenerateOptions
from ggufspec.server.events import ParsedRequest
from ggufspec.server.metrics import Metrics
from ggufspec.server.texts import Events, Texts


@dataclass(frozen=True)
class ServerOptions:
    """`alias`: the model's name in responses. `hosts`: allowed Host headers; None: any.
    `api_keys`: one of them is required; empty: none.

    `timeout` and `body_seconds` limit a whole request and the upload of its body; `keep_alive` is
    the pause after which a waiting stream gets a keep-alive. `max_tokens` limits the tokens of a
    request; `defaults` are the options that a request does not set. `slot_folder`: folder in which
    clients save slots; None: saving is off.
    """

    alias: str
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    hosts: tuple[str, ...] | None = None
    n_waiting_max: int = defaults.SERVE_QUEUE
    max_tokens: int | None = None
    n_body_bytes: int = defaults.SERVE_BODY
    timeout: float = defaults.SERVE_TIMEOUT
    body_seconds: float = 30.0
    keep_alive: float = 5.0
    slot_folder: Path | None = None
    allow_remote_images: bool = False  # requests may name images by address
    suffix_first: bool = False  # in prompts for the text between two others
    defaults: GenerateOptions = field(default_factory=lambda: GenerateOptions())

    def limit(self, asked: int | None) -> int | None:
        """The maximum tokens of a text whose request gives this number, negative: none, or None."""
        wanted = self.defaults.get("max_tokens") if asked is None else asked
        return min((n for n in (wanted, self.max_tokens) if n is not None and n >= 0), default=None)


@dataclass(frozen=True)
class Service:
    """A model that is served. Several services may exist in one process."""

    engine: Engine
    texts: Texts
    metrics: Metrics
    options: ServerOptions
    started_at: int

    def events(self, parsed: ParsedRequest, receive: Receive) -> Events:
        """The events of a request: see Texts.events."""
        options = self.options
        return self.texts.events(
            parsed, receive, timeout=options.timeout, keep_alive=options.keep_alive
        )


def default_options(engine: Engine, server: ServerOptions) -> GenerateOptions:
    return {**engine.file_sampling.options, **server.defaults}


def make_service(engine: Engine, options: ServerOptions) -> Service:
    metrics = Metrics()
    texts = Texts(engine, n_waiting_max=options.n_waiting_max, metrics=metrics)
    return Service(engine, texts, metrics, options, int(time.time()))
