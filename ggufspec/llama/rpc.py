"""Connects to llama.cpp's RPC servers, after a handshake and a trial in a child process."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import llama_cpp

from ggufspec.common import child
from ggufspec.common.failures import closed_on_error
from ggufspec.errors import OptionError, RpcError
from ggufspec.llama import devices
from ggufspec.llama.build import backends
from ggufspec.llama.devices import POINTER, SIZE, TEXT
from ggufspec.llama.install import build_command
from ggufspec.llama.log import listening
from ggufspec.placement.rpc_address import Address, greet, resolved
from ggufspec.placement.speeds import Gpu

_in_use: set[Address] = set()  # by engines of this process


class RemoteDevice(NamedTuple):
    """A device of a server. pointer: of ggml; name: the server's address, numbered from the second
    device on."""

    pointer: int
    name: str


class RpcConnections:
    """Connections to servers, held until close: a server serves one process at a time.

    Close it after the models that use its devices. Without addresses it needs no RPC backend.
    """

    def __init__(self, addresses: Sequence[Address]) -> None:
        """Raises OptionError without the backend, RpcError for a server that cannot be used."""
        self.devices: tuple[RemoteDevice, ...] = ()
        self._connected: list[tuple[int, Address]] = []  # each with a backend of ggml
        devices.look_for_devices()
        if addresses and not llama_cpp.llama_supports_rpc():
            raise OptionError(
                "rpc needs llama.cpp's RPC backend, and this build of llama-cpp-python has none. "
                f"Build it again, with what it has:\n  {build_command([*backends(), 'RPC'])}"
            )
        with closed_on_error(self.close):
            for address in addresses:
                self._connect(address)

    def gpus(self) -> tuple[Gpu, ...]:
        """The devices, with the free memory that their servers report."""
        return tuple(
            Gpu(at.name, devices.device_memory(at.pointer)[0], is_remote=True)
            for at in self.devices
        )

    def close(self) -> None:
        """Release the servers. Closing twice is fine."""
        while self._connected:
            backend, address = self._connected.pop()
            ggml().ggml_backend_free(backend)
            _in_use.discard(address)

    def _connect(self, address: Address) -> None:
        os.environ.setdefault("GGML_NO_BACKTRACE", "1")
        at = resolved(address)
        if at in _in_use:
            # Freeing one model drops the graphs of all models on the server, unnoticed by ggml.
            raise RpcError(
                f"the RPC server {address} is already in use, by another engine of this process or "
                "because it is named twice; name each server once, and close the other engine first"
            )
        n_devices = _try(address, at)
        with listening():
            pointers = _add(str(at))
            if n_devices != len(pointers):
                raise RpcError(
                    f"the RPC server {address} has {n_devices} devices now, but had "
                    f"{len(pointers)} when this process first connected; restart this process"
                )
            # A backend keeps the connection, so that no other process takes the server meanwhile.
            self._connected.append((ggml().ggml_backend_dev_init(pointers[0], None), at))
        _in_use.add(at)
        names = [str(address) if not i else f"{address}#{i}" for i in range(len(pointers))]
        self.devices += tuple(map(RemoteDevice, pointers, names))


def print_device_count(endpoint: str) -> None:
    """Print a server's number of devices, in a child process: ggml may abort."""
    pointers = _add(endpoint)
    for pointer in pointers:
        devices.device_memory(pointer)
    sys.stdout.write(f"{len(pointers)}\n")


def _try(address: Address, at: Address) -> int:
    version = greet(at)
    try:
        done = child.call("ggufspec.llama.rpc", "print_device_count", str(at))
    except subprocess.TimeoutExpired as error:
        raise RpcError(
            f"the RPC server {address} answers the handshake, then nothing for "
            f"{child.SECONDS:g} s; restart it"
        ) from error
    except OSError as error:
        raise RpcError(
            f"the RPC server {address} cannot be tried: no child process can be started ({error})"
        ) from error
    printed = done.stdout.decode("utf-8", "replace").split()
    if done.returncode or not printed or not printed[-1].isdigit():
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines()[-3:]
        raise RpcError(
            f"the RPC server {address} speaks version {version} of the protocol, which the "
            f"llama.cpp in llama-cpp-python {llama_cpp.__version__} does not support. Build the "
            "server from the llama.cpp in llama-cpp-python's source.\n"
            + "\n".join(f"  llama.cpp: {line}" for line in lines)
        )
    if not (n_devices := int(printed[-1])):
        raise RpcError(f"the RPC server {address} has no devices; start it with --device")
    return n_devices


def _add(endpoint: str) -> list[int]:
    """The ggml devices of a server; the same pointers each time."""
    add = devices.backend_function("RPC", "ggml_backend_rpc_add_server", POINTER, TEXT)
    if add is None:
        raise OptionError("the RPC backend of this llama.cpp cannot add servers; update it")
    server = add(endpoint.encode())
    n_devices = ggml().ggml_backend_reg_dev_count(server) if server else 0
    return [ggml().ggml_backend_reg_dev_get(server, i) for i in range(n_devices)]


@cache
def ggml() -> ctypes.CDLL:
    """ggml, with the types of the functions used here. Raises OptionError if one is missing."""
    library = devices.ggml(
        {
            "ggml_backend_reg_dev_count": (SIZE, [POINTER]),
            "ggml_backend_reg_dev_get": (POINTER, [POINTER, SIZE]),
            "ggml_backend_dev_init": (POINTER, [POINTER, TEXT]),
            "ggml_backend_free": (None, [POINTER]),
        }
    )
    if library is None:
        raise OptionError("this llama-cpp-python does not export the functions that rpc needs")
    return library
