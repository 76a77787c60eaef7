"""Starts real servers on free ports of loopback, and asks them as a client would."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from patience import PATIENCE, comes_true

from ggufspec.engine.engine import Engine
from ggufspec.server.app import make_app
from ggufspec.server.errors import ApiError
from ggufspec.server.events import ChoiceEvent, ParsedRequest
from ggufspec.server.service import ServerOptions, Service, make_service
from ggufspec.server.texts import Texts
from ggufspec.server.uvicorn_server import GracefulServer, bind, url_of


@dataclass(frozen=True)
class Live:
    """A server that runs, and a client for it."""

    url: str
    service: Service
    server: GracefulServer
    client: httpx.Client

    @property
    def engine(self) -> Engine:
        return self.service.engine

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.url.removeprefix("http://").partition(":")
        return host, int(port)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.client.post(path, json=body)

    def ok(self, path: str, **body: Any) -> Any:
        response = self.post(path, **body)
        assert response.status_code == 200, response.text
        return response.json()

    def metric(self, name: str) -> float:
        """The value of a metric, by its name with labels and without `ggufspec_`."""
        lines = self.client.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"ggufspec_{name}"))

    def is_free(self, *, within: float = PATIENCE) -> bool:
        """Whether all requests and texts end."""
        slots = self.engine.pair.slots

        def is_idle() -> bool:
            return not (self.service.texts.n_running or [each for each in slots if each.is_used])

        return comes_true(is_idle, within)


@contextmanager
def serving(
    engine: Engine, *, grace: float = 0.2, n_unsent: int | None = None, **settings: Any
) -> Iterator[Live]:
    """A server in a thread of this process; at the end it must stop."""
    service = make_service(engine, ServerOptions(**{"alias": "tiny", **settings}))
    server = GracefulServer(make_app(service), service.texts, grace=grace)
    listening = bind("127.0.0.1", 0)
    if n_unsent is not None:  # bytes that the system keeps for a client that does not read
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, n_unsent)
    url = url_of(listening)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    headers = {}
    if settings.get("api_keys"):
        headers["Authorization"] = f"Bearer {settings['api_keys'][0]}".encode()
    try:
        assert comes_true(lambda: server.started)
        with httpx.Client(
            base_url=url, headers=headers, timeout=PATIENCE, trust_env=False
        ) as client:
            yield Live(url, service, server, client)
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
        assert not thread.is_alive()
        assert not service.texts.n_running + service.texts.n_waiting


async def written(
    texts: Texts, parsed: ParsedRequest, found: list[ChoiceEvent], *, timeout: float = PATIENCE
) -> ApiError | None:
    """Append the events of a request to `found` as they come; returns the error that ends it."""

    async def receive() -> Any:
        await asyncio.sleep(PATIENCE)

    events = texts.events(parsed, receive, timeout=timeout, keep_alive=PATIENCE)
    try:
        async with aclosing(events):
            async for together in events:
                found += together
    except ApiError as error:
        return error
    return None


def events_of(response: httpx.Response) -> list[Any]:
    """The documents of a stream; its signs of life are left out, and its end is checked."""
    frames = [part for part in response.text.split("\n\n") if part and not part.startswith(":")]
    assert all(part.startswith("data: ") for part in frames)
    assert frames[-1] == "data: [DONE]"
    return [json.loads(part.removeprefix("data: ")) for part in frames[:-1]]


def said(events: list[Any], which: int = 0) -> str:
    """The text of one choice in a stream, of either form."""
    choices = [choice for event in events for choice in event["choices"]]
    mine = [choice for choice in choices if choice["index"] == which]
    return "".join(c["text"] if "text" in c else c["delta"].get("content") or "" for c in mine)
