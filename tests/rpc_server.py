"""An RPC server out of llama-cpp-python's own build: `rpc_server.py 127.0.0.1:PORT [DEVICE]`."""

from __future__ import annotations

import ctypes
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import llama_cpp
from patience import comes_true

from ggufspec.errors import RpcError
from ggufspec.llama import devices
from ggufspec.placement.rpc_address import Address, greet


class RpcServer(NamedTuple):
    address: str
    process: subprocess.Popen[bytes]


@contextmanager
def rpc_server(device: str = "CPU") -> Iterator[RpcServer]:
    """A process that serves a device of this machine, named as llama.cpp names it."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = Address("127.0.0.1", probe.getsockname()[1])
    command = [sys.executable, __file__, str(address), device]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            assert comes_true(lambda: answers(address))
            yield RpcServer(str(address), process)
        finally:
            process.kill()


def answers(address: Address) -> bool:
    try:
        return bool(greet(address))
    except RpcError:
        return False


def main(endpoint: str, device: str = "CPU") -> None:
    """Serve a device, with one thread, until killed."""
    llama_cpp.llama_backend_init()
    text, size, pointer = ctypes.c_char_p, ctypes.c_size_t, ctypes.c_void_p
    types = (None, text, text, size, size, pointer)
    start = devices.backend_function("RPC", "ggml_backend_rpc_start_server", *types)
    assert start is not None
    (served,) = [each.pointer for each in devices.devices() if each.name == device]
    start(endpoint.encode(), None, 1, 1, (pointer * 1)(served))


if __name__ == "__main__":
    main(*sys.argv[1:])
