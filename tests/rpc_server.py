"""An RPC server out of llama-cpp-python's own build: `python rpc_server.py 127.0.0.1:PORT`."""

from __future__ import annotations

import ctypes
import sys

import llama_cpp

from ggufspec.llama import devices


def main(endpoint: str) -> None:
    """Serve the processor, with one thread, until killed."""
    llama_cpp.llama_backend_init()
    text, size, pointer = ctypes.c_char_p, ctypes.c_size_t, ctypes.c_void_p
    types = (None, text, text, size, size, pointer)
    start = devices.backend_function("RPC", "ggml_backend_rpc_start_server", *types)
    assert start is not None
    (processor,) = [device.pointer for device in devices.devices() if device.kind == 0]
    start(endpoint.encode(), None, 1, 1, (pointer * 1)(processor))


if __name__ == "__main__":
    main(sys.argv[1])
