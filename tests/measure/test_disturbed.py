"""What disturbs a measurement: another program that uses processors, or a pass out of order."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ggufspec.llama import cpu_use
from ggufspec.llama.cpu_use import CpuUse
from ggufspec.measure import disturbed
from ggufspec.measure.disturbed import Disturbed, Watch, undisturbed


@pytest.fixture
def uses(monkeypatch: pytest.MonkeyPatch) -> list[CpuUse]:
    """The readings that follow, of a machine of two processors; the last one stays."""
    monkeypatch.delenv(cpu_use.VARIABLE)
    monkeypatch.setattr(disturbed, "sleep", lambda seconds: None)
    found: list[CpuUse] = []

    def read() -> CpuUse:
        return found.pop(0) if found[1:] else found[0]

    monkeypatch.setattr(disturbed, "cpu_use", read)
    return found


def reading(at: float, idle: float, *, own: float = 0.0, n_running: int = 0) -> CpuUse:
    return CpuUse(at, own, idle, n_running, 2)


def test_programs_that_run_before_disturb_it(uses: list[CpuUse]) -> None:
    uses += [reading(0, 0, n_running=1), reading(0.1, 0.1)]
    with pytest.raises(Disturbed):
        Watch(2)
    uses[:] = [reading(0, 0, n_running=1), reading(0.1, 0.1)]
    Watch(1)
    uses[:] = [reading(0, 0, n_running=1), reading(0.1, 0.2)]
    Watch(2)


def test_programs_that_run_beside_disturb_it(uses: list[CpuUse]) -> None:
    uses += [reading(0, 0), reading(1, 0, own=2.0)]
    Watch(2).end()
    uses[:] = [reading(0, 0), reading(1, 0, own=1.5)]
    with pytest.raises(Disturbed):
        Watch(2).end()


def test_a_long_measurement_ends_early(uses: list[CpuUse]) -> None:
    uses += [reading(-100, 0), reading(1, 0, own=1.0)]  # of the clock that check reads
    with pytest.raises(Disturbed):
        Watch(2).check()


def test_a_pass_that_took_longer_than_one_over_more_tokens_was_disturbed() -> None:
    watch = Watch(1)
    watch.end({(1, 32): 1.0, (2, 32): 0.7, (1, 512): 9.0, (2, 512): 9.0})
    with pytest.raises(Disturbed):
        watch.end({(2, 32): 0.6, (1, 32): 1.0})


def test_a_disturbed_measurement_is_repeated_once() -> None:
    answers: Iterator[bool] = iter([True, False, True, True, False])

    def measure(watch: Watch) -> str:
        if next(answers):
            raise Disturbed
        return "undisturbed"

    assert undisturbed(measure, 1) == "undisturbed"
    assert undisturbed(measure, 1) is None
    assert undisturbed(measure, 1) == "undisturbed"
