"""The state that the routes share."""

from __future__ import annotations

from dataclasses import dataclass

from ggufspec.engine.engine import Engine
from ggufspec.server.metrics import Metrics
from ggufspec.server.options import ServerOptions
from ggufspec.server.worker import EngineWorker


@dataclass(frozen=True)
class Service:
    """A model that is served. Several services may exist in one process."""

    engine: Engine
    worker: EngineWorker
    metrics: Metrics
    options: ServerOptions
    started_at: int
