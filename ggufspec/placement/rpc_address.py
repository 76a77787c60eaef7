"""Parses addresses of llama.cpp's RPC servers, and checks that a server answers there."""

from __future__ import annotations

import re
import socket
import struct
from time import monotonic
from typing import NamedTuple

from ggufspec.common import validate
from ggufspec.errors import OptionError, RpcError

PORT = 50052  # llama.cpp's default
_MOST_SERVERS = 16  # GGML_RPC_MAX_SERVERS
_SECONDS = 5.0  # timeout to connect, and again to get an answer
_HOST = re.compile(r"[^\s/\\@\[\]:,;?#%]+")

# RPC_CMD_HELLO and rpc_msg_hello_rsp of ggml-rpc.cpp. Request: a command, the size of the rest,
# the client's network features (0: TCP only). Answer: its size, the version in three bytes, more.
_HELLO = struct.pack("<BQ24x", 14, 24)
_SIZE = struct.Struct("<Q")
_VERSION = struct.Struct("BBB")
_MOST_BYTES = 256


class Address(NamedTuple):
    """Where a server listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def addresses(name: str, value: object) -> tuple[Address, ...]:
    """Parse texts in llama.cpp's form "host:port". Raises OptionError."""
    found: list[Address] = []
    for text in validate.texts(name, value):
        address = _address(name, text.strip())
        if address in found:
            raise OptionError(f"{name} names {address} twice; name each server once")
        found.append(address)
    if len(found) > _MOST_SERVERS:
        raise OptionError(
            f"{name} names {len(found)} servers; llama.cpp takes at most {_MOST_SERVERS}"
        )
    return tuple(found)


def _address(name: str, text: str) -> Address:
    host, colon, port = text.rpartition(":")
    if not text:
        wrong = "an entry is empty"
    elif "://" in text:
        wrong = f"{text!r} is a URL"
    elif text.startswith(("/", "./", "~", "unix:")):
        wrong = f"{text!r} is the path of a socket; llama.cpp's RPC servers use TCP"
    elif "[" in text or ":" in host:
        wrong = f"{text!r} is an IPv6 address; llama.cpp's RPC supports IPv4 only"
    elif not colon:
        wrong = f"{text!r} has no port (the default of servers is {PORT})"
    elif not _HOST.fullmatch(host):
        wrong = f"{text!r} has no host" if not host else f"{host!r} is not a host name"
    elif not (port.isascii() and port.isdigit() and 1 <= int(port[:6]) <= 65535):
        wrong = f"{port!r} is not a port: use a number from 1 to 65535"
    else:
        return Address(host, int(port))
    raise OptionError(f"{name}: {wrong}. Write host:port, such as 192.168.1.20:{PORT}")


def resolved(address: Address) -> Address:
    """The address with the host's name replaced by its IP address. Raises RpcError."""
    try:
        return Address(socket.gethostbyname(address.host), address.port)
    except (OSError, UnicodeError) as error:
        raise RpcError(
            f"the RPC server {address} cannot be found: {address.host!r} has no IPv4 address "
            f"({error}). Check the name, or use the IP address"
        ) from error


def greet(address: Address, seconds: float = _SECONDS) -> str:
    """The server's version of the protocol, such as "7.0.0". Raises RpcError.

    `seconds`: timeout to connect, and again to get an answer. Without this check, ggml would wait
    forever for a silent server, and abort the process on a wrong answer.
    """
    try:
        connection = socket.create_connection(address, timeout=seconds)
    except OSError as error:
        raise RpcError(
            f"no RPC server answers at {address} ({error}). Start one there (ggml-rpc-server -H "
            f"ADDRESS -p {address.port}), or check address and firewall"
        ) from error
    with connection:
        try:
            connection.sendall(_HELLO)
            deadline = monotonic() + seconds
            (n_bytes,) = _SIZE.unpack(_receive(connection, _SIZE.size, deadline))
            if not _VERSION.size <= n_bytes <= _MOST_BYTES:
                raise RpcError(
                    f"the server at {address} is not an RPC server of llama.cpp: it does not "
                    "speak the protocol. Check host and port"
                )
            reply = _receive(connection, n_bytes, deadline)
        except TimeoutError as error:
            raise RpcError(
                f"the server at {address} accepted the connection but did not answer within "
                f"{seconds:g} s. An RPC server serves one process at a time: end the other one, or "
                "start another server. (Or it is not an RPC server: check host and port)"
            ) from error
        except OSError as error:
            raise RpcError(
                f"the server at {address} closed the connection at the handshake ({error}): it is "
                "not an RPC server of llama.cpp, or has another version. Check host and port, and "
                "build it from the llama.cpp in llama-cpp-python's source"
            ) from error
    return ".".join(map(str, _VERSION.unpack_from(reply)))


def _receive(connection: socket.socket, n_bytes: int, deadline: float) -> bytes:
    """Exactly `n_bytes` bytes. Raises OSError, also TimeoutError."""
    found = b""
    while len(found) < n_bytes:
        connection.settimeout(max(deadline - monotonic(), 1e-3))
        if not (more := connection.recv(n_bytes - len(found))):
            raise ConnectionError("the connection was closed")
        found += more
    return found
