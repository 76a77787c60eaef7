"""Passes that are timed are the passes that were asked for, from the same cells each time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import llama_cpp
import pytest
import tiny

from ggufspec.errors import OptionError
from ggufspec.llama.context import Context
from ggufspec.llama.context_options import ContextOptions
from ggufspec.llama.model import Model
from ggufspec.measure import passes as timing
from ggufspec.measure.passes import (
    FilledContext,
    filler_tokens,
    measure,
    time_interleaved,
    time_target,
)

Decoded = list[tuple[int, int, int]]  # cells before, tokens, rows
KINDS = [tiny.write_llama, tiny.write_mamba]


@contextmanager
def context_of(path: Path, **options: Any) -> Iterator[Context]:
    options = {"n_ctx": 128, "n_rows": 8, "n_threads": 1, **options}
    with closing(Model(path)) as model, closing(Context(model, ContextOptions(**options))) as made:
        yield made


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> Decoded:
    """Every batch that is decoded from now on."""
    seen: Decoded = []
    real = Context.decode

    def decode(
        self: Context,
        tokens: Sequence[int],
        n_rows: int,
        sequence: int,
        parents: Sequence[int] = (),
    ) -> None:
        seen.append((self.n_cells(sequence), len(tokens), n_rows))
        real(self, tokens, n_rows, sequence, parents)

    monkeypatch.setattr(Context, "decode", decode)
    return seen


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return tiny.write_llama(tmp_path / "llama.gguf")


@pytest.mark.parametrize("write", KINDS)
def test_a_target_is_timed_behind_the_same_cells(
    write: Callable[[Path], Path], tmp_path: Path, decoded: Decoded
) -> None:
    with context_of(write(tmp_path / "model.gguf")) as context:
        found = time_target(context, [1, 2, 5], depth=40, n_repeats=3)
    assert {size: len(seconds) for size, seconds in found.items()} == {1: 3, 2: 3, 5: 3}
    assert all(0 < each < 10 for seconds in found.values() for each in seconds)
    filling, *passes = decoded
    assert filling == (0, 40, 0)
    first, *passes = passes
    assert first == (40, 1, 1)
    to, fro = [1, 1, 2, 2, 5, 5], [5, 5, 2, 2, 1, 1]
    assert passes == [(40, size, size) for size in [*to, *fro, *to]]


def test_a_small_context_holds_fewer_tokens(llama: Path, decoded: Decoded) -> None:
    with context_of(llama, n_ctx=16) as context:
        assert FilledContext(context, depth=300, n_most=8).depth == 8
        time_target(context, [8], depth=300, n_repeats=1)
        assert context.n_cells() == 16


def test_the_smallest_context_of_all(llama: Path) -> None:
    with context_of(llama, n_ctx=1, n_rows=1) as context:
        assert len(time_target(context, [1], depth=300, n_repeats=1)[1]) == 1


def test_batches_that_no_context_holds_are_refused(llama: Path) -> None:
    with context_of(llama, n_ctx=4) as context, pytest.raises(OptionError, match="no room for"):
        time_target(context, [1, 5], depth=0, n_repeats=1)


# Passes that decide


class Passes:
    """A context whose passes take given seconds, one after the other."""

    def __init__(self, *seconds: float) -> None:
        self.seconds_left = [*seconds]

    def fill(self, n_tokens: int) -> bool:
        return True

    def seconds(self, n_tokens: int, n_rows: int) -> float | None:
        return self.seconds_left.pop(0)


def measured(*seconds: float, most: float) -> dict[tuple[int, int], float]:
    contexts: Any = {"only": Passes(*seconds)}
    sizes = [(1, 0), (2, 0)]
    found = measure(contexts, sizes, at_least=0.0, most=dict.fromkeys(sizes, most))
    assert found is not None
    return found["only"]


def test_the_least_of_three_rounds_counts() -> None:
    assert measured(1, 2, 3, 1.5, 0.5, 9, most=10) == {(1, 0): 0.5, (2, 0): 1.5}


def test_a_pass_that_is_slow_twice_ends_it_and_one_that_is_slow_once_does_not() -> None:
    assert measured(5, 6, most=4) == {(1, 0): 5}
    assert measured(5, 3, 3, 5, 3, 3, 3, most=4) == {(1, 0): 3, (2, 0): 3}


# Threads


def test_a_context_changes_its_threads_in_silence(
    llama: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with context_of(llama, n_threads=2) as context:
        assert llama_cpp.llama_n_threads(context.pointer) == 2
        context.use_threads(3)
        assert context.n_threads == 3
        assert llama_cpp.llama_n_threads(context.pointer) == 3
        assert llama_cpp.llama_n_threads_batch(context.pointer) == 3
        context.keeps_threads = True  # as for texts with a seed
        context.decode([5], 1)
        assert context.n_threads_now == 3
    assert "n_threads" not in "".join(capfd.readouterr())


def test_a_hopeless_row_is_left(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with context_of(llama, n_threads=4) as context:
        now = 0.0

        def clock() -> float:
            nonlocal now
            now += 8.0 / context.n_threads
            return now

        monkeypatch.setattr(timing, "perf_counter", clock)
        found = timing.time_threads(context, [[4, 2, 1], [4, 8]], [1], depth=8, n_repeats=2)
        monkeypatch.setattr(timing, "HOPELESS", 1.5)
        fewer = timing.time_threads(context, [[4, 2, 1], [4, 8]], [1], depth=8, n_repeats=2)
        assert context.n_threads == 4, "they are put back"
    assert found == {4: {1: [2.0] * 2}, 2: {1: [4.0]}, 1: {1: [8.0]}, 8: {1: [1.0] * 2}}
    assert fewer == {4: {1: [2.0]}, 2: {1: [4.0]}, 8: {1: [1.0] * 2}}


# Turns


def test_kinds_of_passes_take_turns_and_the_first_of_two_is_not_timed() -> None:
    calls: list[str] = []
    heard: list[tuple[int, int]] = []
    passes = {name: lambda name=name: calls.append(name) for name in "ab"}
    found = time_interleaved(passes, 2, progress=lambda done, of: heard.append((done, of)))
    assert "".join(calls) == "aabb" + "bbaa"
    assert {name: len(seconds) for name, seconds in found.items()} == {"a": 2, "b": 2}
    assert heard == [(0, 4), (1, 4), (2, 4), (3, 4), (4, 4)]


def test_short_passes_are_repeated_more_often() -> None:
    assert len(time_interleaved({"a": lambda: None}, 3, at_least=60.0)["a"]) == 30


# The text


def test_the_text_is_of_valid_tokens(tmp_path: Path) -> None:
    vocab = tiny.SPM.with_size(1000)
    with closing(Model(tiny.write_llama(tmp_path / "model.gguf", vocab=vocab))) as model:
        tokens = filler_tokens(model.vocab, 700)
        assert len(tokens) == 700
        assert len(set(tokens)) > 10
        assert all(0 <= token < len(vocab) for token in tokens)
        assert not {*tokens} & {*model.vocab.stop_tokens, model.vocab.bos}


class Poor:
    """A vocabulary that can write nothing."""

    def __init__(self, n_tokens: int, stop_tokens: set[int], words: list[int]) -> None:
        self.n_tokens, self.stop_tokens, self._words = n_tokens, stop_tokens, words

    def plain_tokens(self, text: str) -> list[int]:
        return self._words


@pytest.mark.parametrize(
    ("vocab", "tokens"),
    [
        (Poor(5, {0, 1}, [3, 3, 3]), [2, 3, 4, 2]),
        (Poor(4, {0}, [0, 1, 2, 9]), [1, 2, 1, 2]),
        (Poor(2, {0, 1}, []), [0, 1, 0, 1]),
    ],
)
def test_a_vocabulary_that_cannot_write(vocab: Any, tokens: list[int]) -> None:
    assert filler_tokens(vocab, 4) == tokens
