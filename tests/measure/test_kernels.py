"""Passes of a model decide which kernels it uses, once, and without loading a large one twice."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from processes import python
from small import small

import ggufspec
from ggufspec import standin
from ggufspec.common.progress import Share
from ggufspec.drafting import profile_store
from ggufspec.llama import devices
from ggufspec.llama import kernels as own_kernels
from ggufspec.llama.kernel_offer import Placed
from ggufspec.llama.model import Model
from ggufspec.measure import kernels
from ggufspec.measure import passes as measured_passes
from ggufspec.models.quantization import header_of

pytestmark = pytest.mark.skipif(
    own_kernels.unusable() is not None, reason=f"no kernels here: {own_kernels.unusable()}"
)


def written(path: Path, type_: str = "Q4_K_M", **shape: int) -> Path:
    """A small model with random weights of such a type."""
    standin.write(standin.plan(header_of("small", small(**shape), type_), 1.0), path)
    return path


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("models") / "model.gguf")


class Clock:
    """What passes take: `speeds` are factors by types of weights that our kernels multiply."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.speeds: dict[str, float] = {}
        self.asked: list[list[str]] = []
        self.first = 1.0  # factor of a pass over one token
        monkeypatch.setattr(measured_passes, "measure", self)
        monkeypatch.delenv(own_kernels.VARIABLE)

    def __call__(
        self, contexts: Mapping[tuple[str, str], object], passes: list[tuple[int, int]], **how: Any
    ) -> dict[tuple[str, str], dict[tuple[int, int], float]]:
        self.asked.append([types for types, _ in contexts])
        return {
            kind: {
                (n, depth): self.speeds.get(kind[0], 1.0) * n * (self.first if n == 1 else 1.0)
                for n, depth in passes
            }
            for kind in contexts
        }

    @property
    def n_compared(self) -> int:
        return sum(len(contexts) > 1 for contexts in self.asked)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def loaded(path: Path) -> tuple[list[str], str]:
    """The types of weights that our kernels multiply, and the reason."""
    with ggufspec.load(path, n_ctx=64, flash_attention="off") as engine:
        (reason,) = engine.kernels
        return [*engine.pair.target.model.kernels.types], reason


@pytest.mark.parametrize(
    ("speeds", "chosen"),
    [
        ({"q4_K q6_K": 0.5}, ["q4_K", "q6_K"]),
        ({"q4_K q6_K": 2.0, "q4_K": 0.5, "q6_K": 2.0}, ["q4_K"]),
        ({"q4_K q6_K": 2.0, "q4_K": 2.0, "q6_K": 2.0}, []),
    ],
)
def test_types_whose_kernels_are_slower_are_left_to_llama_cpp(
    speeds: dict[str, float], chosen: list[str], quantized: Path, clock: Clock
) -> None:
    clock.speeds = speeds
    types, reason = loaded(quantized)
    assert types == chosen
    assert ("own kernels for" if chosen else "llama.cpp's kernels: ") in reason
    n_compared = clock.n_compared
    assert loaded(quantized) == (types, reason)
    assert clock.n_compared == n_compared, "it is remembered"


@pytest.mark.parametrize(("speed", "chosen"), [(0.5, ["q4_K", "q6_K"]), (2.0, [])])
def test_layers_that_devices_leave_to_the_processor_are_measured_with_a_prompt(
    speed: float, chosen: list[str], quantized: Path, clock: Clock
) -> None:
    clock.speeds = {"q4_K q6_K": speed}

    def make(types: Collection[str] | None, progress: Share) -> Model:
        return Model(quantized, own_kernels=types, progress=progress)

    model, reason = kernels.load(make, quantized, Placed(("GPU0",), 1), measures=True)
    with closing(model):
        assert [*model.kernels.types] == chosen
    assert "passes over 1/2/4/8/512 tokens take" in str(reason)
    model, reason = kernels.load(make, quantized, Placed(("GPU0",), -1), measures=True)
    with closing(model):
        assert reason is None, "no weights are on the processor"


# A second load


@pytest.mark.parametrize("is_slow", [True, False])
def test_a_model_that_loads_slowly_or_fits_once_is_not_loaded_twice(
    is_slow: bool, quantized: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_slow:
        monkeypatch.setattr(kernels, "MOST_LOAD_SECONDS", 0.0)
    else:
        n_bytes = quantized.stat().st_size
        frees = iter([n_bytes, n_bytes])  # before it is loaded
        monkeypatch.setattr(devices, "free_memory", lambda: next(frees, n_bytes // 2))
    types, reason = loaded(quantized)
    assert types == ["q4_K", "q6_K"]
    assert f"not compared, since {'it takes long to load' if is_slow else 'memory'}" in reason
    assert clock.n_compared == 0


def test_a_large_model_is_loaded_as_another_of_its_types_was_found_to_be_fastest(
    quantized: Path, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for speed, chosen in ((2.0, []), (0.5, ["q4_K", "q6_K"])):
        monkeypatch.setenv("GGUFSPEC_CACHE", str(tmp_path / str(speed)))
        monkeypatch.setattr(kernels, "MOST_LOAD_SECONDS", 5.0)
        clock.speeds = dict.fromkeys(("q4_K q6_K", "q4_K", "q6_K"), speed)
        loaded(quantized)
        monkeypatch.setattr(kernels, "MOST_LOAD_SECONDS", 0.0)
        n_compared = clock.n_compared
        large = written(tmp_path / f"large{speed}.gguf", n_layers=6)
        types, reason = loaded(large)
        assert (types, clock.n_compared) == (chosen, n_compared)
        assert "faster with another model of the same types" in reason
        other = written(tmp_path / f"other{speed}.gguf", "Q8_0")
        assert "not compared" in loaded(other)[1], "of other types"


def test_passes_that_are_slower_than_expected_refute_the_choice_of_another_model(
    quantized: Path, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock.speeds = {"q4_K q6_K": 0.5}
    loaded(quantized)
    monkeypatch.setattr(kernels, "MOST_LOAD_SECONDS", 0.0)
    large = written(tmp_path / "large.gguf", n_layers=6)
    clock.speeds = {"q4_K q6_K": 9.0}
    assert loaded(large)[0] == ["q4_K", "q6_K"], "its pass is timed"
    types, reason = loaded(large)
    assert types == []
    assert "slower than expected" in reason


# Measuring


def test_a_disturbed_comparison_is_repeated_and_not_stored(quantized: Path, clock: Clock) -> None:
    """As where one token takes longer than two."""
    clock.speeds, clock.first = {"q4_K q6_K": 0.5}, 9.0
    with ggufspec.load(quantized, n_ctx=64, flash_attention="off") as engine:
        assert (engine.kernels, clock.n_compared) == ([], 2)
        assert engine.pair.target.model.kernels.types
    assert not [each for each in profile_store.records() if "llama_cpp" in each.document]
    clock.first = 1.0
    assert "own kernels for" in loaded(quantized)[1]


def test_passes_of_the_model_decide_once(quantized: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was measured is stored, and used by the next process."""
    monkeypatch.delenv(own_kernels.VARIABLE)
    program = """
        import ggufspec, sys
        with ggufspec.load(sys.argv[1], n_ctx=64, flash_attention="off") as engine:
            print(*engine.kernels)
            print(*engine.pair.target.model.kernels.types)
    """
    first = [""]
    while "passes over 1/2/4/8 tokens take" not in first[0]:  # where something disturbs it
        first = python(program, args=(quantized,))
    assert python(program, args=(quantized,)) == first


def test_ctrl_c_ends_a_measurement(quantized: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(own_kernels.VARIABLE)
    program = """
        import ggufspec, signal, sys
        shares = []

        def press(what, share):  # after two of three phases it is loaded, in the third measured
            shares.append(share if what == "target" else 0.0)
            if shares[-1] > 0.7:
                signal.raise_signal(signal.SIGINT)

        try:
            ggufspec.load(sys.argv[1], n_ctx=64, progress=press)
        except KeyboardInterrupt:
            print(sum(share > 0.7 for share in shares), 0.7 < shares[-1] < 1)
    """
    assert python(program, args=(quantized,)) == ["1 True"]
