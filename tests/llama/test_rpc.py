"""Layers on RPC servers: in a build that has no such backend, and for real in one that has it."""

from __future__ import annotations

import logging
import signal
import socket
import struct
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import head_pairs
import llama_cpp
import pytest
from patience import PATIENCE
from rpc_server import RpcServer, rpc_server

import ggufspec
from ggufspec.engine import fit, load
from ggufspec.engine.fit import Fit
from ggufspec.engine.load_options import LoadOptions
from ggufspec.errors import OptionError, RpcError
from ggufspec.llama import devices
from ggufspec.llama.model import Model
from ggufspec.llama.rpc import RemoteDevice, RpcConnections
from ggufspec.measure.pairs import profile_key
from ggufspec.placement.rpc_address import Address, greet
from ggufspec.placement.speeds import Gpu

needs_rpc = pytest.mark.skipif(
    not llama_cpp.llama_supports_rpc(),
    reason="needs llama-cpp-python built with -DGGML_RPC=on",
)


# In every build


def test_a_build_without_the_backend_says_how_to_build_one(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if llama_cpp.llama_supports_rpc():
        monkeypatch.setattr(llama_cpp, "llama_supports_rpc", lambda: False)
    with pytest.raises(OptionError) as raised:
        ggufspec.load(target, rpc=["127.0.0.1:50052"])
    assert '-DGGML_RPC=on" ' in str(raised.value)
    assert " -m pip install --force-reinstall" in str(raised.value)
    assert f"llama-cpp-python=={llama_cpp.__version__}" in str(raised.value)


def test_a_server_that_is_not_there_is_an_error_and_no_abort(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama_cpp, "llama_supports_rpc", lambda: True)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(RpcError, match=f"no RPC server answers at 127.0.0.1:{port}"):
        ggufspec.load(target, rpc=[f"127.0.0.1:{port}"])
    with pytest.raises(RpcError, match=r"'nobody\.invalid' has no IPv4 address"):
        ggufspec.load(target, rpc=["nobody.invalid:50052"])


def the_processor() -> int:
    """A device that every llama.cpp has."""
    return next(at.pointer for at in devices.devices() if at.kind == 0)


def test_a_model_has_the_devices_that_it_was_given(
    target: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ggufspec.llama")
    plain = Model(target)
    assert "using device CPU" not in caplog.text
    lent = Model(target, rpc=[RemoteDevice(the_processor(), "far:1")])
    assert "using device CPU" in caplog.text
    assert (plain.rpc, lent.rpc) == ((), ("far:1",))
    assert lent.n_gpu_layers == 3
    plain.close()
    lent.close()


class Lent(RpcConnections):
    """A server of this very processor."""

    closed = 0

    def __init__(self, addresses: object) -> None:
        self.devices = (RemoteDevice(the_processor(), "far:1"),)

    def gpus(self) -> tuple[Gpu, ...]:
        return (Gpu("far:1", 4 * 2**30, is_remote=True),)

    def close(self) -> None:
        Lent.closed += 1


def test_a_draft_stays_here(
    target: Path, draft: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ggufspec.engine.fit.gpus", lambda: ())
    monkeypatch.setattr(load, "RpcConnections", Lent)
    monkeypatch.setattr(Lent, "closed", 0)
    caplog.set_level(logging.INFO, "ggufspec.llama")
    with ggufspec.load(target, draft, n_threads=1) as engine:
        assert caplog.text.count("using device CPU") == 1, "of the target"
        assert engine.pair.draft is not None
        assert (engine.pair.target.model.rpc, engine.pair.draft.model.rpc) == (("far:1",), ())
        assert engine.placement is not None
        assert engine.placement.startswith("3 of 3 layers of the target on 1 RPC device (")
        assert Lent.closed == 0
    assert Lent.closed == 1, "the servers are free for others"
    with pytest.raises(ggufspec.ModelError):
        ggufspec.load(target, target.with_name("none.gguf"))
    with pytest.raises(OptionError, match="no GPU 1"):
        ggufspec.load(target, main_gpu=1)


def test_a_head_with_the_targets_output_has_the_targets_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp ends the process for a matrix on a device that a context has not."""
    monkeypatch.setattr(load, "RpcConnections", Lent)
    for make, wanted in ((head_pairs.eagle3, ("far:1",)), (head_pairs.eagle3_own, ())):
        pair = make(tmp_path)
        with ggufspec.load(pair.target, pair.draft, n_ctx=64, n_threads=1) as engine:
            assert engine.pair.draft is not None
            assert engine.pair.draft.model.rpc == wanted


def test_the_gpu_of_a_draft_is_counted_among_those_here(
    target: Path, draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit, "gpus", lambda: (Gpu("here", 4 * 2**30),))
    places = Fit(LoadOptions(target, draft, n_batch=64, n_gpu_layers_draft=-1))
    places.add([Gpu("far:1", 4 * 2**30, is_remote=True)] * 2)
    place = places.first()
    assert place.main_gpu == 0
    assert tuple(place.tensor_split) == (0, 0, 3)


def test_more_devices_than_llama_cpp_knows(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "RpcConnections", Lent)
    monkeypatch.setattr(Lent, "closed", 0)
    monkeypatch.setattr(Lent, "gpus", lambda self: (Gpu("far", 2**30, is_remote=True),) * 17)
    with pytest.raises(OptionError, match="rpc adds 17 devices"):
        ggufspec.load(target)
    assert Lent.closed == 1


def test_costs_with_servers_are_not_those_without(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ggufspec.load(target, n_threads=1) as engine:
        alone = profile_key(engine.pair.target, None)
    monkeypatch.setattr(load, "RpcConnections", Lent)
    with ggufspec.load(target, n_threads=1, n_gpu_layers=0) as engine:
        assert profile_key(engine.pair.target, None) == alone, (
            "a server without layers costs nothing"
        )
    with ggufspec.load(target, n_threads=1, n_gpu_layers=1) as engine:
        assert "far:1" in str(profile_key(engine.pair.target, None))


# In a build with the backend


@pytest.fixture
def serve() -> Iterator[Callable[[], RpcServer]]:
    with ExitStack() as stack:
        yield lambda: stack.enter_context(rpc_server())


@needs_rpc
def test_the_text_is_the_same(target: Path, draft: Path, serve: Callable[[], RpcServer]) -> None:
    servers = [serve()[0] for _ in range(2)]

    def text(rpc: list[str], **more: int) -> tuple[str, str | None]:
        with ggufspec.load(target, draft, n_threads=1, rpc=rpc, **more) as engine:
            done = engine.generate("the", max_tokens=40, temperature=0, n_draft=3)
            return done.text, engine.placement

    alone, _ = text([])
    assert text(servers[:1])[0] == alone
    spread, placement = text(servers)
    assert spread == alone
    assert placement is not None
    assert "3 of 3 layers of the target on 2 RPC devices" in placement
    assert text(servers, n_gpu_layers=1)[0] == alone
    assert text([])[0] == alone
    assert not any("127.0.0.1" in str(device) for device in devices.devices())


@needs_rpc
def test_a_server_is_held_while_an_engine_is_open(
    target: Path, serve: Callable[[], RpcServer]
) -> None:
    server, _ = serve()
    host, _, port = server.partition(":")
    with ggufspec.load(target, n_threads=1, rpc=[server]) as first:
        with pytest.raises(RpcError, match="one process at a time"):
            greet(Address(host, int(port)), seconds=0.2)
        with pytest.raises(RpcError, match="another engine of this process"):
            ggufspec.load(target, n_threads=1, rpc=[f"localhost:{port}"])
        assert first.generate("a", max_tokens=4).text
    assert greet(Address(host, int(port))).count(".") == 2, "it is free again"


@needs_rpc
@pytest.mark.parametrize("version", [(6, 0, 0), (7, 0, 0)], ids=str)
def test_a_server_on_which_ggml_would_abort(version: tuple[int, ...], target: Path) -> None:
    """It greets well, and then hangs up: of another version, or dead."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            for _ in range(2):
                connection, _ = server.accept()
                with connection:
                    connection.recv(100)
                    connection.sendall(struct.pack("<Q", 28) + bytes(version).ljust(28, b"\0"))

        threading.Thread(target=answer, daemon=True).start()
        told = ".".join(map(str, version))
        with pytest.raises(RpcError, match=rf"version {told} .*does not support(?s:.*)llama"):
            ggufspec.load(target, rpc=[f"127.0.0.1:{server.getsockname()[1]}"])


@needs_rpc
def test_a_server_that_goes_away_ends_the_process(
    target: Path, serve: Callable[[], RpcServer]
) -> None:
    """llama.cpp aborts, and nothing here can catch it. One line gives the reason."""
    server, process = serve()
    script = """
        import sys
        import ggufspec
        with ggufspec.load(sys.argv[1], n_threads=1, rpc=[sys.argv[2]]) as engine:
            print("loaded", flush=True)
            while True:
                engine.generate("the", max_tokens=20)
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), str(target), server],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "loaded\n"
        process.kill()
        _, said = writer.communicate(timeout=PATIENCE)
    assert writer.returncode == -signal.SIGABRT
    assert "Remote RPC server crashed" in said
    assert len(said.splitlines()) == 1
