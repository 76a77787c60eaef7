"""The number of threads while other programs use processors, with a simulated clock."""

import subprocess
import sys
from collections.abc import Callable
from random import Random
from time import perf_counter

import pytest

from ggufspec.llama.cpu_use import CpuUse, cpu_use
from ggufspec.llama.thread_count import ThreadCount


class Machine:
    """Runs passes of 10 ms with all threads; `n_busy` processors are in use by other programs.

    A thread without a processor of its own makes the pass wait: two to twenty times as long.
    """

    def __init__(self, n_usable: int = 2, shows_idle: bool = True) -> None:
        self.n_usable, self.n_busy, self.shows_idle = n_usable, 0.0, shows_idle
        self.now = self.own = self.idle = 0.0
        self.random = Random(1)
        self.count = ThreadCount(n_usable, self.use, lambda: self.now)

    def use(self) -> CpuUse:
        n_running = round(self.n_busy)
        if not self.shows_idle:
            return CpuUse(self.now, self.own, None, None, self.n_usable)
        return CpuUse(self.now, self.own, self.idle, n_running, self.n_usable)

    def seconds(self, n_threads: int, n_tokens: int = 1) -> float:
        """Of a pass with this many threads. The first has 0.7 of its work, whatever `n_threads`."""
        quiet = 0.01 * (0.7 + 0.3 * self.n_usable / n_threads) * (0.5 + 0.5 * n_tokens)
        quiet *= self.random.uniform(1, 1.1)
        is_short = self.random.random() < n_threads + self.n_busy - self.n_usable
        return quiet * (self.random.choice((2, 2, 2, 20)) if is_short else 1)

    def wait(self, seconds: float, n_threads: int = 0) -> None:
        self.now += seconds
        n_computing = n_threads + self.n_busy
        share = min(self.n_usable / n_computing, 1.0) if n_computing else 0.0
        self.own += n_threads * share * seconds
        self.idle += (self.n_usable - n_computing * share) * seconds

    def run(self, n_passes: int, n_tokens: Callable[[], int] = lambda: 1) -> list[int]:
        """Runs passes; returns the threads of each."""
        used = []
        for _ in range(n_passes):
            size = n_tokens()
            used.append(self.count.n_for(size))
            seconds = self.seconds(used[-1], size)
            self.wait(seconds, used[-1])
            self.count.observe(size, seconds)
        return used


@pytest.mark.parametrize("shows_idle", [True, False])
def test_a_busy_processor_is_left_to_its_program(shows_idle: bool) -> None:
    machine = Machine(shows_idle=shows_idle)
    assert machine.run(1000) == [2] * 1000, "a quiet machine"
    machine.n_busy, began = 1, machine.now
    machine.run(10)
    assert machine.now - began < 1.0
    began, n_passes = machine.now, 1000
    used = machine.run(n_passes)
    machine.wait(0.2)
    assert machine.count.n_for(512) == machine.count.n_for(1) == 1, "prompts, too"
    fewest = sum(machine.seconds(1) for _ in range(n_passes))
    assert used.count(1) > 0.95 * n_passes
    assert machine.now - began - 0.2 < fewest / (0.97 if shows_idle else 0.9)


@pytest.mark.parametrize("shows_idle", [True, False])
def test_all_threads_are_used_again_within_two_seconds(shows_idle: bool) -> None:
    machine = Machine(shows_idle=shows_idle)
    machine.run(100)
    machine.n_busy = 1
    machine.run(1000)
    machine.n_busy, until = 0, machine.now + (0.3 if shows_idle else 2.2)
    while machine.now < until:
        machine.run(1)
    assert machine.run(200) == [2] * 200


def test_a_program_that_is_busy_half_of_the_time_costs_at_most_a_tenth() -> None:
    def tokens_per_second(n_threads: int | None = None) -> float:
        machine = Machine()
        n, began = 0, machine.now
        while machine.now < 20.0:
            machine.n_busy = int(2 * machine.now) % 2
            if n_threads is None:
                machine.run(1)
            else:
                machine.wait(machine.seconds(n_threads), n_threads)
            n += 1
        return n / (machine.now - began)

    fixed = [tokens_per_second(n_threads) for n_threads in (1, 2)]
    assert tokens_per_second() > 0.9 * max(fixed)


def test_passes_of_several_sizes_are_compared_with_their_own() -> None:
    machine = Machine()
    sizes = Random(2)
    for n_busy, wanted in ((0, 2), (1, 1), (0, 2)):
        machine.n_busy = n_busy
        machine.run(60, lambda: sizes.choice((1, 2, 5, 9)))
        used = machine.run(300, lambda: sizes.choice((1, 2, 5, 9)))
        assert used.count(wanted) > 0.95 * len(used)


@pytest.mark.parametrize(("n_busy", "wanted"), [(3, 5), (8, 1)])
def test_a_wide_machine_leaves_as_many_processors_as_are_busy(n_busy: int, wanted: int) -> None:
    machine = Machine(8)
    machine.run(100)
    machine.n_busy = n_busy
    machine.run(100)
    used = machine.run(1000)
    assert used.count(wanted) > 0.8 * len(used), {n: used.count(n) for n in set(used)}


def test_slower_passes_of_a_longer_text_cost_few_trials() -> None:
    machine = Machine()
    machine.run(100)
    used = []
    for _ in range(2000):  # each pass is 0.1 % slower than the one before, up to three times
        used.append(machine.count.n_for(1))
        seconds = machine.seconds(used[-1]) * (1 + len(used) / 1000)
        machine.wait(seconds, used[-1])
        machine.count.observe(1, seconds)
    assert used.count(1) < 20


def test_disturbed_passes_and_trials_are_told() -> None:
    machine = Machine()
    machine.run(20)
    assert machine.count.is_usual
    machine.count.observe(1, 0.03)
    assert not machine.count.is_usual
    machine.count.observe(1, 0.03)  # this starts a trial of fewer threads
    machine.count.observe(1, 0.01)
    assert machine.count.n_for(1) == 1
    assert not machine.count.is_usual


def test_pieces_of_a_prompt_use_the_processors_that_other_programs_leave() -> None:
    machine = Machine(8)
    machine.wait(0.5)
    assert machine.count.n_for(512) == 8
    for n_busy, wanted in ((3, 5), (0, 8)):
        machine.n_busy = n_busy
        for _ in range(4):  # two programs on one processor count half each
            machine.wait(0.5, machine.count.n_for(512))
        assert machine.count.n_for(512) == wanted


def test_after_a_pause_the_programs_that_run_now_are_counted() -> None:
    machine = Machine()
    machine.wait(60.0)  # nothing was busy then
    machine.n_busy = 1
    assert machine.count.n_for(512) == machine.count.n_for(1) == 1


def test_the_processors_that_a_busy_program_uses_are_counted() -> None:
    """A real program, on this machine, which may be busy otherwise: at least one processor."""
    if cpu_use().idle is None:
        pytest.skip("this system does not tell the idle time of its processors")
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        try:
            before, until = cpu_use(), perf_counter() + 0.5
            while perf_counter() < until:
                pass
            now = cpu_use()
        finally:
            busy.kill()
    n_others = now.n_others(before)
    assert n_others is not None
    assert n_others > 0.4
    assert now.is_disturbed(before, now.n_usable)


def test_passes_are_disturbed_if_threads_lack_a_third_of_a_processor() -> None:
    before = CpuUse(0.0, 0.0, 0.0, 0, 4)
    now = CpuUse(2.0, 4.0, 2.0, 0, 4)  # two processors of its own, one idle, one of others
    assert now.n_others(before) == pytest.approx(1.0)
    assert [now.is_disturbed(before, n) for n in (2, 3, 4)] == [False, False, True]
    unknown = now._replace(idle=None)
    assert unknown.n_others(before) is None
    assert not unknown.is_disturbed(before, 4)
