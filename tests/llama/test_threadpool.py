"""Contexts keep their threads between passes, also where llama.cpp has no OpenMP."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from itertools import permutations
from pathlib import Path

import pytest
import tiny
from patience import comes_true, in_child_of_a_fork

import ggufspec
from ggufspec.errors import DecodeError
from ggufspec.llama import threadpool
from ggufspec.llama.context import Context
from ggufspec.llama.context_options import ContextOptions
from ggufspec.llama.hidden_states import BatchPart
from ggufspec.llama.model import Model
from ggufspec.llama.threadpool import ThreadPools
from ggufspec.standin.embedded import embedded_draft, embedded_target

TOKENS = [5, 6, 7]
TASKS = Path("/proc/self/task")

own_threads = pytest.mark.skipif(
    not threadpool.are_needed(), reason="this build of llama.cpp has OpenMP: see tests/device"
)
linux = pytest.mark.skipif(not TASKS.exists(), reason="threads are counted by Linux's /proc")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    loaded = Model(tiny.write_llama(tmp_path_factory.mktemp("models") / "model.gguf"))
    yield loaded
    loaded.close()


def context_of(model: Model, n_threads: int = 2, pools: ThreadPools | None = None) -> Context:
    options = ContextOptions(n_ctx=64, n_rows=4, n_threads=n_threads, flash_attention="off")
    return Context(model, options, pools=pools)


def logits(context: Context) -> list[float]:
    context.truncate(0)
    context.decode(TOKENS, 1)
    return context.rows(len(TOKENS) - 1, 1)[0].tolist()  # type: ignore[no-any-return]


def threads() -> set[str]:
    return set(os.listdir(TASKS))


def seconds(thread: str) -> float:
    """Processor time of a thread."""
    return int((TASKS / thread / "schedstat").read_text().split()[0]) / 1e9


def state(thread: str) -> str:
    return (TASKS / thread / "stat").read_text().rpartition(")")[2].split()[0]


def test_openmp_keeps_threads_itself(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = []
    for needed in (threadpool.are_needed(), False):
        monkeypatch.setattr(threadpool, "are_needed", lambda needed=needed: needed)
        with closing(context_of(model)) as context:
            expected.append(logits(context))
    assert expected[0] == expected[1]


@linux
@own_threads
def test_threads_stay_and_compute(model: Model) -> None:
    before = threads()
    with closing(context_of(model)) as context:
        (kept,) = threads() - before  # the calling thread is the other one
        logits(context)
        assert comes_true(lambda: state(kept) == "S")  # it sleeps
        ran = seconds(kept)
        logits(context)
        assert threads() - before == {kept}
        assert seconds(kept) > ran
    assert threads() == before


@linux
@own_threads
@pytest.mark.parametrize("order", [*permutations(range(3))])
def test_shared_threads_end_with_the_last_context(model: Model, order: tuple[int, ...]) -> None:
    before, pools = threads(), ThreadPools()
    with ExitStack() as stack:
        made = [stack.enter_context(closing(context_of(model, 2, pools))) for _ in order]
        assert len(threads() - before) == 1
        expected = logits(made[0])
        for i, first in enumerate(order):
            made[first].close()
            made[first].close()
            assert len(threads() - before) == (i < 2)
            assert all(logits(made[left]) == expected for left in order[i + 1 :])
        with closing(context_of(model, 2, pools)) as another:
            assert logits(another) == expected


def test_another_number_of_threads(model: Model) -> None:
    pools = ThreadPools()
    with closing(context_of(model, 2, pools)) as a, closing(context_of(model, 2, pools)) as b:
        expected = logits(a)
        for n_threads in (3, 1, 2):
            a.use_threads(n_threads)
            assert logits(a) == logits(b) == expected


def test_contexts_with_the_same_threads_decode_one_after_the_other(model: Model) -> None:
    pools, part = ThreadPools(), BatchPart(0, TOKENS, 1)
    with closing(context_of(model, 2, pools)) as a, closing(context_of(model, 2, pools)) as b:
        for _ in range(50):
            a.truncate(0)
            b.truncate(0)
            a.decode_beside([part], b, [part])
            assert (a.rows(2, 1) == b.rows(2, 1)).all()
        with pytest.raises(DecodeError):
            a.decode_beside([part], b, [BatchPart(0, [10**6], 1)])
        assert (a.n_cells(), b.n_cells()) == (6, 3)


@linux
@own_threads
def test_target_and_draft_share_their_threads() -> None:
    before = threads()
    pair = embedded_target(), embedded_draft()
    with ggufspec.load(*pair, n_ctx=64, n_threads=2, n_threads_draft=2, tuned=False) as engine:
        engine.generate("Once upon a time", max_tokens=4)
        assert len(threads() - before) == 1
    assert threads() == before


@own_threads
def test_an_engine_that_waits_takes_no_processor_time() -> None:
    with ggufspec.load(embedded_target(), n_ctx=64, n_threads=2, tuned=False) as engine:
        engine.generate("Once upon a time", max_tokens=8, temperature=0)
        time.sleep(0.05)
        began = time.process_time()
        time.sleep(0.5)
        assert time.process_time() - began < 0.02


@own_threads
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_has_threads_of_its_own(model: Model) -> None:
    def fresh() -> list[float]:
        with closing(context_of(model)) as made:
            return logits(made)

    with closing(context_of(model)) as context:
        # Before its first pass: the threads exist already.
        assert "was forked" in in_child_of_a_fork(lambda: logits(context))
        expected = str(logits(context))
        assert "was forked" in in_child_of_a_fork(lambda: logits(context))
        assert in_child_of_a_fork(context.close) == "None"
        assert in_child_of_a_fork(fresh) == expected
        assert str(logits(context)) == expected


@linux
@pytest.mark.skipif(threadpool.are_needed(), reason="this build of llama.cpp has no OpenMP")
def test_an_engine_that_rests_keeps_no_threads_of_openmp(tmp_path: Path) -> None:
    path = tiny.write_llama(tmp_path / "model.gguf")
    with ThreadPoolExecutor(1) as other:
        other.submit(time.time).result()
        before = threads()
        with ggufspec.load(path, n_ctx=64, n_threads=3, tuned=False, n_slots=2) as engine:
            assert comes_true(lambda: threads() <= before), "loading has computed"
            with engine.stream(TOKENS, max_tokens=8) as stream:
                next(stream)
                assert len(threads() - before) == 3, "its own, and two for the next pass"
                other.submit(engine.generate, TOKENS, max_tokens=8).result()
                stream.finish()
            assert comes_true(lambda: len(threads() - before) == 1)
            engine.generate_batch([TOKENS, TOKENS], max_tokens=8)
            assert comes_true(lambda: len(threads() - before) == 1)
        assert comes_true(lambda: threads() <= before)
