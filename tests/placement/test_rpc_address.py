"""Addresses of RPC servers, and what may listen there; real sockets on loopback."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from time import monotonic, sleep

import pytest

from ggufspec.errors import OptionError, RpcError
from ggufspec.placement.rpc_address import Address, addresses, greet, resolved

Answer = Callable[[socket.socket], None]


@pytest.fixture
def listens() -> Iterator[Callable[[Answer], Address]]:
    """A server that answers each connection so."""
    opened: list[socket.socket] = []

    def start(answer: Answer) -> Address:
        server = socket.create_server(("127.0.0.1", 0))
        opened.append(server)

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    answer(connection)

        threading.Thread(target=serve, daemon=True).start()
        return Address("127.0.0.1", server.getsockname()[1])

    yield start
    for server in opened:
        server.shutdown(socket.SHUT_RDWR)
        server.close()


def hello(*version: int, n_bytes: int = 28) -> bytes:
    return struct.pack("<Q", n_bytes) + bytes(version).ljust(n_bytes, b"\0")


def test_addresses_are_hosts_with_ports() -> None:
    found = addresses("rpc", ["192.168.1.20:50052", " gpu-box.lan:1 ", "bücher:65535"])
    assert found == (
        Address("192.168.1.20", 50052),
        Address("gpu-box.lan", 1),
        Address("bücher", 65535),
    )
    assert str(found[0]) == "192.168.1.20:50052"
    assert addresses("rpc", []) == ()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "an entry is empty"),
        ("host", "'host' has no port (the default of servers is 50052"),
        ("host:", "'' is not a port"),
        (":50052", "has no host"),
        ("host:65536", "'65536' is not a port"),
        ("host:" + "9" * 5000, "is not a port"),
        ("host:٣", "is not a port"),
        ("ho st:1", "'ho st' is not a host name"),
        ("http://host:50052", "is a URL"),
        ("[::1]:50052", "is an IPv6 address; llama.cpp's RPC supports IPv4 only"),
        ("/run/rpc.sock", "is the path of a socket"),
    ],
)
def test_what_is_no_address_is_refused_with_a_right_one(text: str, said: str) -> None:
    with pytest.raises(OptionError) as raised:
        addresses("--rpc", ["127.0.0.1:1", text])
    assert said in str(raised.value)
    assert str(raised.value).startswith("--rpc: ")
    assert "Write host:port, such as 192.168.1.20:50052" in str(raised.value)


def test_a_server_is_named_once_and_they_are_not_too_many() -> None:
    with pytest.raises(OptionError, match="names a:1 twice"):
        addresses("rpc", ["a:1", "b:1", "a:01"])
    with pytest.raises(OptionError, match=r"names 17 servers; llama\.cpp takes at most 16"):
        addresses("rpc", [f"a:{port}" for port in range(1, 18)])


@pytest.mark.parametrize("host", ["nobody.invalid", "x" * 300])
def test_an_unknown_host_name(host: str) -> None:
    with pytest.raises(RpcError, match="has no IPv4 address"):
        resolved(Address(host, 50052))


def test_a_name_becomes_a_number() -> None:
    assert resolved(Address("localhost", 7)) == Address("127.0.0.1", 7)


def test_a_server_tells_its_version(listens: Callable[[Answer], Address]) -> None:
    asked: list[bytes] = []

    def answer(connection: socket.socket) -> None:
        asked.append(connection.recv(100))
        for byte in hello(7, 0, 1):
            connection.sendall(bytes([byte]))  # as slowly as a network may

    assert greet(listens(answer)) == "7.0.1"
    assert asked == [b"\x0e" + struct.pack("<Q", 24) + bytes(24)]


def test_no_server_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(RpcError, match=rf"no RPC server answers at 127.0.0.1:{port}.*ggml-rpc-ser"):
        greet(Address("127.0.0.1", port))


@pytest.mark.parametrize(
    "rubbish",
    [b"HTTP/1.1 400 Bad Request\r\n\r\n", hello(7, n_bytes=2)],
    ids=["http", "short"],
)
def test_another_thing_listens(rubbish: bytes, listens: Callable[[Answer], Address]) -> None:
    def answer(connection: socket.socket) -> None:
        connection.recv(100)
        connection.sendall(rubbish)

    with pytest.raises(RpcError, match=r"is not an RPC server of llama\.cpp"):
        greet(listens(answer))


@pytest.mark.parametrize("before", [b"", hello(7, 0, 0)[:20]])
def test_the_server_closes_the_connection(
    before: bytes, listens: Callable[[Answer], Address]
) -> None:
    def answer(connection: socket.socket) -> None:
        connection.recv(100)
        connection.sendall(before)

    with pytest.raises(RpcError, match="closed the connection at the handshake"):
        greet(listens(answer))


@pytest.mark.parametrize("byte", [b"", b"\x1c"], ids=["silent", "dribbling"])
def test_a_busy_server_times_out(byte: bytes, listens: Callable[[Answer], Address]) -> None:
    over = threading.Event()

    def answer(connection: socket.socket) -> None:
        while not over.wait(0.05):
            connection.sendall(byte)

    started = monotonic()
    with pytest.raises(RpcError, match=r"did not answer within 0.2 s.*one process at a time"):
        greet(listens(answer), seconds=0.2)
    assert monotonic() - started < 4, "less than without `seconds`"
    over.set()
    sleep(0.06)
