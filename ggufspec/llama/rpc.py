"""Devices of RPC servers, for layers of a target: llama.cpp's RPC backend, through ggml's registry.

They are never put into ggml's own list of devices, which every model of the process would take
from: a model has those that it was given, so drafts and other targets stay on this machine.

ggml ends the process (abort) where a server is not there, speaks another version, or goes away. So
a server is greeted first, then tried by a child process, and only then named to ggml here. Against
one that goes away later nothing helps: ggml's last line says so, and debuggers need not say more.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import llama_cpp

from ggufspec.errors import OptionError, RpcError
from ggufspec.llama import devices
from ggufspec.llama.log import listening
from ggufspec.placement.plan import Gpu
from ggufspec.placement.rpc_address import Address, greet, resolved

_QUIET = "GGML_NO_BACKTRACE"
_TRY_SECONDS = 60.0  # of the child; it starts an interpreter
_CODE = (
    "import sys; sys.path[:] = sys.argv[2:]; "
    "from ggufspec.llama import rpc; print(rpc.count(sys.argv[1]))"
)
_held: set[Address] = set()  # by engines of this process


class RemoteDevice(NamedTuple):
    """A device of a server. pointer: ggml's; name: the server's address, and a number if it has
    several."""

    pointer: int
    name: str


class Servers:
    """Connections to servers, kept until close: a server talks to one process at a time.

    Close it after the models that have its devices. With no addresses it needs no RPC backend.
    """

    def __init__(self, addresses: Sequence[Address]) -> None:
        """Raises OptionError without the backend, RpcError for a server that cannot be used."""
        self.devices: tuple[RemoteDevice, ...] = ()
        self._backends: list[int] = []
        self._addresses: list[Address] = []
        if addresses and not is_built():
            raise OptionError(
                "rpc needs llama.cpp's RPC backend, and this build of llama-cpp-python has none. "
                "Build it again, with what else it was built with:\n"
                '  CMAKE_ARGS="-DGGML_RPC=on" pip install --force-reinstall --no-deps '
                "--no-cache-dir --no-binary llama-cpp-python "
                f"llama-cpp-python=={llama_cpp.__version__}"
            )
        try:
            for address in addresses:
                self._connect(address)
        except BaseException:
            self.close()
            raise

    def gpus(self) -> tuple[Gpu, ...]:
        """The devices with the memory that they say is free."""
        return tuple(Gpu(at.name, _n_free(at.pointer), is_remote=True) for at in self.devices)

    def close(self) -> None:
        """Let go of the servers. Closing twice is fine."""
        while self._backends:
            _ggml().ggml_backend_free(self._backends.pop())
        while self._addresses:
            _held.discard(self._addresses.pop())

    def _connect(self, address: Address) -> None:
        os.environ.setdefault(_QUIET, "1")
        at = resolved(address)
        if at in _held:
            # When one model is freed, the server forgets the graphs of all, and ggml does not know.
            raise RpcError(
                f"the RPC server {address} is in use already, by another engine of this process or "
                "since it is named twice: llama.cpp would mix up the two; name each server once, "
                "and close the other engine first"
            )
        n_devices = _tried(address, at)
        with listening():
            pointers = _added(str(at))
            if n_devices != len(pointers):
                raise RpcError(
                    f"the RPC server {address} has {n_devices} devices now, and had "
                    f"{len(pointers)} when this process asked first; start this process again"
                )
            # A backend holds the connection, so that nobody else can get in before the model.
            self._backends.append(_ggml().ggml_backend_dev_init(pointers[0], None))
        _held.add(at)
        self._addresses.append(at)
        names = [str(address) if not i else f"{address}#{i}" for i in range(len(pointers))]
        self.devices += tuple(map(RemoteDevice, pointers, names))


def is_built() -> bool:
    """Whether this llama.cpp has the RPC backend."""
    with listening():
        llama_cpp.llama_backend_init()
    return bool(llama_cpp.llama_supports_rpc())


def count(endpoint: str) -> int:
    """How many devices a server has; ends the process where it is none. For a child."""
    pointers = _added(endpoint)
    for pointer in pointers:
        _n_free(pointer)
    return len(pointers)


def _tried(address: Address, at: Address) -> int:
    """The number of devices of a server that ggml gets on with, as a child has found."""
    version = greet(at)
    try:
        done = subprocess.run(
            [sys.executable, "-c", _CODE, str(at), *sys.path],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env={**os.environ, _QUIET: "1"},
            timeout=_TRY_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise RpcError(
            f"the RPC server {address} greets, and then says nothing for {_TRY_SECONDS:g} s; "
            "start it again"
        ) from error
    told = done.stdout.decode("utf-8", "replace").split()
    if done.returncode or not told or not told[-1].isdigit():
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines()[-3:]
        raise RpcError(
            f"the RPC server {address} speaks version {version} of the protocol, and the llama.cpp "
            f"in llama-cpp-python {llama_cpp.__version__} does not get on with it. Build it from "
            "the llama.cpp that is in llama-cpp-python's source.\n"
            + "\n".join(f"  llama.cpp: {line}" for line in lines)
        )
    if not (n_devices := int(told[-1])):
        raise RpcError(f"the RPC server {address} has no devices; start it with some (--device)")
    return n_devices


def _added(endpoint: str) -> list[int]:
    """ggml's devices of a server; the same ones each time."""
    ggml = _ggml()
    registry = ggml.ggml_backend_reg_by_name(b"RPC")
    address = registry and ggml.ggml_backend_reg_get_proc_address(
        registry, b"ggml_backend_rpc_add_server"
    )
    if not address:
        raise OptionError("this llama.cpp has no RPC backend that servers can be added to")
    add = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p)(address)
    server = add(endpoint.encode())
    if not server:
        return []
    return [
        ggml.ggml_backend_reg_dev_get(server, i)
        for i in range(ggml.ggml_backend_reg_dev_count(server))
    ]


def _n_free(pointer: int) -> int:
    """Bytes of a device, as its server tells."""
    n_free, n_all = ctypes.c_size_t(), ctypes.c_size_t()
    _ggml().ggml_backend_dev_memory(pointer, ctypes.byref(n_free), ctypes.byref(n_all))
    return n_free.value


@cache
def _ggml() -> ctypes.CDLL:
    """ggml's registry, with its types. Raises OptionError where the functions are not to be had."""
    pointer, text, size = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t
    sizes = ctypes.POINTER(size)
    functions: dict[str, devices.Signature] = {
        "ggml_backend_reg_by_name": (pointer, [text]),
        "ggml_backend_reg_get_proc_address": (pointer, [pointer, text]),
        "ggml_backend_reg_dev_count": (size, [pointer]),
        "ggml_backend_reg_dev_get": (pointer, [pointer, size]),
        "ggml_backend_dev_init": (pointer, [pointer, text]),
        "ggml_backend_dev_memory": (None, [pointer, sizes, sizes]),
        "ggml_backend_free": (None, [pointer]),
    }
    if library := devices.ggml(functions):
        return library
    raise OptionError("this llama-cpp-python does not let ggml's devices be reached, as rpc needs")
