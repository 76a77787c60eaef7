"""No test reads or writes the user's cache folder, or asks any hub but one of its own."""

from __future__ import annotations

import os
import signal
import ssl
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

# Here and in all children, one thread by default, and threads that wait for each other sleep: with
# more threads than cores, as xdist has them, a pass waits for a core at each of its operations, and
# spinning threads take 30 times as long. libgomp reads them once.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# A child that ends by an assertion of ggml would wait for gdb to show where, for seconds.
os.environ.setdefault("GGML_NO_BACKTRACE", "1")

import tiny
from hub import Hub

import ggufspec.llama  # noqa: F401  (before tests import llama_cpp where xdist has threads)

if TYPE_CHECKING:
    from ggufspec.llama.model import Model
    from ggufspec.measure.attention import UsualText
    from ggufspec.measure.disturbed import Watch
    from ggufspec.measure.table import Table

_numbers = count()

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts jobs in the background with Ctrl-C switched off, and our children inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_xdist_auto_num_workers() -> int:
    """`-n auto`: one more than processors, since tests also wait, for children and for time."""
    return (os.cpu_count() or 1) + 1


def pytest_configure(config: pytest.Config) -> None:
    """Keep bytecode with pytest's cache where Python may not write it beside the sources.

    Else each process compiles all modules and rewrites all assertions again: 12 seconds for the
    tests themselves, and a third of the time of a short command.
    """
    cache = getattr(config, "cache", None)  # none with -p no:cacheprovider
    if sys.dont_write_bytecode and cache is not None:
        sys.pycache_prefix = str(cache.mkdir("bytecode"))
        sys.dont_write_bytecode = False
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Each process of xdist compiles a share of the tests, not each of them all: 12 seconds.

    They are compiled, and their assertions rewritten, when they are imported for the first time.
    """
    worker = getattr(session.config, "workerinput", None)
    if worker is None:
        return
    folder = Path(__file__).parent
    given = [Path(each.partition("::")[0]).absolute() for each in session.config.args]
    files = [each for each in folder.rglob("test_*.py") if any(map(each.is_relative_to, given))]
    share = slice(int(worker["workerid"].removeprefix("gw")), None, worker["workercount"])
    for path in sorted(files)[share]:
        with suppress(Exception, pytest.skip.Exception):  # pytest imports it again, and tells
            import_module(".".join(path.relative_to(folder).with_suffix("").parts))


@pytest.fixture(scope="session", autouse=True)
def _caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of caches; fixtures that live longer than a test use one of it too."""
    folder = tmp_path_factory.mktemp("caches")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GGUFSPEC_CACHE", str(folder / "shared"))
        yield folder


@pytest.fixture(scope="session", autouse=True)
def _amx(_caches: Path) -> Iterator[None]:
    """Whether AMX works is tried once, not by each process; llama_cpp.Llama crashes if not, too.

    Our own kernels are used wherever there are some: nothing is tried or measured at each load.
    What is measured, is measured beside other tests.
    """
    from ggufspec.llama import cpu_use, kernels

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(cpu_use.VARIABLE, "always")
        patch.setenv(kernels.VARIABLE, os.environ.get(kernels.VARIABLE, "on"))
        patch.setenv(kernels.AMX_VARIABLE, "off" if kernels.leave_out_broken_amx() else "on")
        kernels.status()  # the process keeps it: not what a test finds that turns them off
        yield


@pytest.fixture(scope="session", autouse=True)
def _threads(_amx: None) -> Iterator[None]:
    """The number of threads does not vary.

    Tests that run beside each other would change the rounding of each other's texts.
    """
    from ggufspec.llama import context

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context, "ThreadCount", lambda n_most: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def _certificates() -> Iterator[None]:
    """The system's certificates are read once, not for each client: all ask by plain HTTP."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", cache(ssl.create_default_context))
        yield


@pytest.fixture(scope="session", autouse=True)
def _templates() -> Iterator[None]:
    """Engines share the process that renders chat templates, instead of starting one each."""
    from ggufspec.engine import chat_template, engine

    shared = chat_template.TemplateProcess()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared, "close", lambda: None)
        patch.setattr(engine, "TemplateProcess", lambda: shared)
        yield
    shared.close()


@pytest.fixture(scope="session", autouse=True)
def _attention(_amx: None) -> Iterator[None]:
    """Passes of models of one shape are timed once by each process, not at each load."""
    from ggufspec.measure import attention

    known: dict[tuple[object, ...], Table] = {}
    measure = attention.time_passes

    def time_once(model: Model, text: UsualText, watch: Watch) -> Table:
        facts = (model.attention_heads, model.n_layers, model.n_embd, text.deepest)
        shape = (*facts, *model.kernels.types)
        if shape not in known:
            known[shape] = measure(model, text, watch)
        return known[shape]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "time_passes", time_once)
        yield


@pytest.fixture(autouse=True)
def _own_cache(_caches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test starts with nothing remembered."""
    monkeypatch.setenv("GGUFSPEC_CACHE", str(_caches / str(next(_numbers))))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub on loopback, an empty cache for it, and no registry but the shipped one."""
    from huggingface_hub.utils import close_session  # type: ignore[attr-defined]

    from ggufspec.models import hub as client

    for name in (
        *("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"),
        *("GGUFSPEC_MODELS", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"),
        *("NO_PROXY", "no_proxy", "LLAMA_CACHE", "OLLAMA_MODELS", "XDG_CACHE_HOME"),
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_TOKEN", "hf_nobody")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))  # without other programs' caches
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(client, "WAITS", (0.01, 0.01, 0.01))
    made = Hub()
    server = made.start()
    close_session()  # one of before would keep the proxies of before
    monkeypatch.setenv("HF_ENDPOINT", made.url)
    yield made
    close_session()
    server.shutdown()
    server.server_close()


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tiny.write_llama(tmp_path / "target.gguf")


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    return tiny.write_llama(tmp_path / "draft.gguf", n_layer=1)
