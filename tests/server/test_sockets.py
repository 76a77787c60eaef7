"""What arrives on sockets: no HTTP, slow, cut off, half-closed; and connections in between."""

from __future__ import annotations

import json
import socket
import threading
import time

import httpx
import pytest
from patience import PATIENCE
from serving import Live, comes_true, serving

from ggufspec.engine.engine import Engine
from ggufspec.server import uvicorn_server


def spoken(live: Live, *parts: bytes, shut: bool = False, pause: float = 0.0) -> bytes:
    """What a server answers to raw bytes, until it closes."""
    with socket.create_connection(live.address, timeout=PATIENCE) as connection:
        try:
            for part in parts:
                connection.sendall(part)
                time.sleep(pause)
            if shut:
                connection.shutdown(socket.SHUT_WR)
            heard = b""
            while more := connection.recv(65536):
                heard += more
        except OSError:
            return b"gone"
        return heard


def test_small_parts_of_an_answer_are_sent_at_once() -> None:
    """asyncio sets TCP_NODELAY where the protocol is TCP: without it, each answer takes 40 ms."""
    with uvicorn_server.bind("127.0.0.1", 0) as bound:
        assert bound.proto == socket.IPPROTO_TCP


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
KEY = b"Authorization: Bearer s3cret\r\n"


def works(live: Live) -> bool:
    return live.post("/v1/completions", prompt="hi", max_tokens=1).status_code == 200


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n" + b"X: y\r\n" * 50_000,
        HEAD + b"Content-Length: -5\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
    ids=["TLS", "no Host", "many heads", "negative", "chunk"],
)
def test_what_is_no_request_is_refused(live: Live, data: bytes) -> None:
    heard = spoken(live, data, shut=True)
    assert heard[:12] in (b"HTTP/1.1 400", b"gone", b"")
    if heard.startswith(b"HTTP"):
        error = json.loads(heard.partition(b"\r\n\r\n")[2])["error"]
        assert error["type"] == "invalid_request_error"
        assert b"application/json" in heard
    assert works(live)


def test_a_slow_body_is_cut_off(strict: Live) -> None:
    began = time.monotonic()
    heard = spoken(strict, HEAD + KEY + b"Content-Length: 500\r\n\r\n", *[b"{"] * 2, pause=0.15)
    assert heard.startswith(b"HTTP/1.1 408 ")
    assert time.monotonic() - began < 20
    assert works(strict)


def test_a_body_that_never_ends_is_cut_off(strict: Live) -> None:
    head = HEAD + KEY + b"Transfer-Encoding: chunked\r\n\r\n"
    heard = spoken(strict, head, *[b"64\r\n" + b"x" * 100 + b"\r\n"] * 100)
    assert heard.startswith(b"HTTP/1.1 413 ") or heard == b"gone"
    assert works(strict)


@pytest.mark.parametrize(
    "first", [b"", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"], ids=["at first", "later"]
)
def test_a_slow_head_is_cut_off(
    chat_pair: Engine, monkeypatch: pytest.MonkeyPatch, first: bytes
) -> None:
    monkeypatch.setattr(uvicorn_server, "HEAD_SECONDS", 0.3)
    with serving(chat_pair) as live:
        began = time.monotonic()
        dribble = [bytes([byte]) for byte in b"GET /heal"]
        heard = spoken(live, first, *dribble, pause=0.1)
        assert b"HTTP/1.1 408 " in heard or heard == b"gone"
        assert time.monotonic() - began < 20
        assert works(live)


def test_a_disconnect_within_a_request_is_handled(live: Live) -> None:
    assert spoken(live, HEAD + b"Content-Length: 500\r\n\r\n{", shut=True) in (b"", b"gone")
    assert works(live)


@pytest.mark.parametrize(("version", "stream"), [("1.0", False), ("1.1", True)])
def test_a_client_that_half_closes_its_socket_gets_its_answer(
    endless: Engine, version: str, stream: bool
) -> None:
    """After a text that is long enough for the first bytes to be sent before the others."""
    body = json.dumps({"prompt": "hi", "temperature": 0, "max_tokens": 390, "stream": stream})
    head = HEAD.replace(b"1.1", version.encode()) + b"Content-Length: %d\r\n\r\n" % len(body)
    with serving(endless) as live:
        heard = spoken(live, head + body.encode(), shut=True)
        assert heard.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b"abcdefgh" in heard or heard.count(b"data: ") > 26
        assert live.metric("generated_tokens_total") == 390


def test_requests_in_a_row_are_answered_after_the_client_half_closed(live: Live) -> None:
    body = b'{"prompt": "hi", "max_tokens": 3}'
    one = HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
    heard = spoken(live, one * 3 + b"GET / HT", shut=True)
    assert heard.count(b"HTTP/1.1 200 OK\r\n") == 3


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_a_client_that_closes_its_socket_frees_the_engine(endless: Engine, version: bytes) -> None:
    """Although it looks half-closed until something is sent to it."""
    body = b'{"prompt": "hi"}'
    head = HEAD.replace(b"1.1", version) + b"Content-Length: %d\r\n\r\n" % len(body)
    with serving(endless) as live:
        with socket.create_connection(live.address, timeout=PATIENCE) as connection:
            connection.sendall(head + body)
            assert comes_true(lambda: live.service.texts.n_running == 1)
        assert live.is_free()
        assert live.metric('generations_total{outcome="cancelled"}') == 1
        assert works(live)


def test_a_client_that_does_not_read_is_cut_off(
    endless: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uvicorn_server, "STALLED_SECONDS", 0.2)
    body = json.dumps({"prompt": "hi", "stream": True, "logprobs": 20}).encode()
    with serving(endless, n_unsent=4096) as live, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(live.address)
        connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        assert comes_true(lambda: live.service.texts.n_running == 1)
        assert live.is_free()
        assert works(live)


def test_connections_are_kept_until_clients_have_closed_them(live: Live) -> None:
    """Else a request could be sent on a connection that the server closes in this moment."""
    kept = httpx.Limits().keepalive_expiry
    assert kept is not None
    assert live.server.config.timeout_keep_alive >= 2 * kept


def test_many_silent_connections_do_not_block_others(live: Live) -> None:
    silent = [socket.create_connection(live.address, timeout=PATIENCE) for _ in range(100)]
    try:
        threads = [threading.Thread(target=works, args=(live,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        assert works(live)
    finally:
        for connection in silent:
            connection.close()
