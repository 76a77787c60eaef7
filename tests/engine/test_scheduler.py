"""Texts that are written at the same time become what each would have become alone."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count, pairwise
from pathlib import Path
from time import perf_counter, sleep
from typing import Any, Literal

import pytest
import tiny

import ggufspec
from ggufspec.drafting.acceptance import Acceptance
from ggufspec.drafting.cost_model import CostModel
from ggufspec.engine import scoring
from ggufspec.engine.engine import Engine
from ggufspec.engine.generation import Generation
from ggufspec.engine.logprobs import TokenLogprobs, entry_of
from ggufspec.engine.options import CheckedOptions
from ggufspec.engine.scheduler import Scheduler
from ggufspec.engine.slots import SlotLease
from ggufspec.engine.stream import Stream
from ggufspec.errors import ClosedError, DecodeError, OptionError
from ggufspec.llama.context import Context

# As they share no letter, a text that got another's rows would show it.
N_SLOTS = 3
PROMPTS = [[5 + i, 60 + i, 100 + i, 30 + i][: 2 + i % 3] for i in range(7)]
LENGTHS = {"temperature": 0.9, "seed": 9, "max_tokens": 20, "n_draft": 3, "ignore_eos": True}


@pytest.fixture(scope="module")
def engine(files: tuple[Path, Path]) -> Iterator[Engine]:
    with ggufspec.load(
        *files,
        n_ctx=128,
        n_slots=N_SLOTS,
        n_threads=1,
        tuned=False,
        flash_attention="off",
        type_k="f32",
        type_v="f32",
    ) as loaded:
        yield loaded


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many sequences each shared pass has."""
    found: list[int] = []
    real = Context.decode_together

    def counted(self: Context, parts: list[object]) -> None:
        found.append(len(parts))
        real(self, parts)

    monkeypatch.setattr(Context, "decode_together", counted)
    return found


def begin(engine: Engine, prompt: Sequence[int], **options: Any) -> Generation:
    return Generation(engine.pair, engine.tokenize(prompt), CheckedOptions.of(options))


def cheap_together(engine: Engine) -> None:
    """As if a pass over many tokens had been measured to take no longer than over one."""
    engine.pair.profile.costs = measured({1: 0.01, 12: 0.01})


def dear_together(engine: Engine) -> None:
    engine.pair.profile.costs = measured({1: 0.001, 2: 0.01, 12: 0.5})


def measured(seconds: dict[int, float]) -> CostModel:
    costs = CostModel(17, N_SLOTS)
    for n, each in seconds.items():
        costs.observe_target(n, each)
    return costs


@pytest.mark.parametrize(
    "drafting",
    [{"drafter": "model"}, {"drafter": "ngram"}, {"drafter": "model", "tree": "on", "n_draft": 5}],
    ids=lambda drafting: "-".join(map(str, drafting.values())),
)
def test_texts_together_are_those_of_the_same_seeds_alone(
    engine: Engine, passes: list[int], drafting: dict[str, Any]
) -> None:
    options = {**LENGTHS, **drafting}
    alone = [
        engine.generate(prompt, **{**options, "seed": 11 + i}) for i, prompt in enumerate(PROMPTS)
    ]
    has_branches = any(text.stats.n_drafted > sum(text.stats.drafted_by_position) for text in alone)
    assert has_branches == ("tree" in drafting)
    engine.pair.profile.costs = measured({1: 0.01, 6 * N_SLOTS: 0.01})
    together = engine.generate_batch(PROMPTS, **{**options, "seed": 11})
    assert [text.tokens for text in together] == [text.tokens for text in alone]
    assert [text.stats.n_drafted for text in together] == [text.stats.n_drafted for text in alone]
    assert passes.count(N_SLOTS) > 10, "most of it was written by three at a time"


def test_where_one_pass_is_dearer_than_two_each_has_its_own(
    engine: Engine, passes: list[int]
) -> None:
    dear_together(engine)
    engine.generate_batch(PROMPTS[:3], **{**LENGTHS, "drafter": "none"})
    assert not passes
    cheap_together(engine)
    engine.generate_batch(PROMPTS[:3], **{**LENGTHS, "drafter": "none"})
    assert passes


def test_a_text_counts_its_share_of_a_shared_pass_whose_cost_is_learned(engine: Engine) -> None:
    cheap_together(engine)
    before = engine.pair.profile.costs.n_measured(3)
    texts = engine.generate_batch(PROMPTS[:3], **{**LENGTHS, "drafter": "none"})
    assert engine.pair.profile.costs.n_measured(3) > before
    for text in texts:
        seconds = text.stats.seconds
        assert 0 < seconds.own < seconds.generation
    assert sum(text.stats.seconds.target for text in texts) <= max(
        text.stats.seconds.prompt + text.stats.seconds.generation for text in texts
    )


def test_a_text_that_fails_does_not_touch_the_others(engine: Engine) -> None:
    def fails(whose: str, done: int, total: int) -> None:
        raise OSError("no more")

    alone = [engine.generate(prompt, **{**LENGTHS, "seed": 3}).tokens for prompt in PROMPTS[:2]]
    engine.forget()
    good = [begin(engine, prompt, **{**LENGTHS, "seed": 3}) for prompt in PROMPTS[:2]]
    bad = begin(engine, [9, 8, 7, 6], progress=fails, **LENGTHS)
    scheduler, failed = Scheduler(engine.pair), []
    while any(not stream.is_over for stream in good):
        failed += scheduler.step([bad, *good] if not failed else good)
    assert [(stream, type(error)) for stream, error in failed] == [(bad, OSError)]
    assert [stream.completion.tokens for stream in good] == alone
    assert bad.is_over


def test_a_pass_that_fails_is_made_again_one_by_one(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = [
        engine.generate(p, **{**LENGTHS, "seed": 4 + i}).tokens for i, p in enumerate(PROMPTS[:3])
    ]
    cheap_together(engine)

    def fails(self: Context, parts: object) -> None:
        raise DecodeError("no room")

    monkeypatch.setattr(Context, "decode_together", fails)
    together = engine.generate_batch(PROMPTS[:3], **{**LENGTHS, "seed": 4})
    assert [text.tokens for text in together] == alone


def test_prompts_that_slots_hold_begin_at_once_beside_a_text(engine: Engine) -> None:
    engine.forget()
    options = {**LENGTHS, "drafter": "none", "max_tokens": 60}
    prompts = [[*range(first, first + 50)] for first in (5, 60)]
    for prompt in prompts:
        engine.generate(prompt, **options)
    writer = begin(engine, PROMPTS[0], **options)
    scheduler = Scheduler(engine.pair)
    while not writer.rounds:
        scheduler.step([writer])
    held = [begin(engine, prompt, progress=lambda *_: None, **options) for prompt in prompts]
    assert not scheduler.step([writer, *held])
    assert not any(each.is_reading for each in held)
    for each in (writer, *held):
        each.close()


def test_prompts_that_begin_together_are_read_in_one_pass(
    engine: Engine, passes: list[int]
) -> None:
    cheap_together(engine)
    engine.forget()
    texts = [begin(engine, prompt, **{**LENGTHS, "drafter": "none"}) for prompt in PROMPTS[:3]]
    assert not Scheduler(engine.pair).step(texts)
    assert passes == [3]
    assert [len(text.rounds) for text in texts] == [1, 1, 1]
    for text in texts:
        stats = text.completion.stats
        assert stats.n_prompt_reused == 0
        assert stats.seconds.prompt > 0
        assert stats.seconds.target < stats.seconds.prompt, "the prompt took most of the pass"
        text.close()


def test_scores_of_a_prompt_share_the_passes_of_the_texts(
    engine: Engine, passes: list[int]
) -> None:
    """And they are those that the prompt has alone."""
    long = [*range(5, 105)]
    first = TokenLogprobs(entry_of(long[0], None, engine.vocab), ())
    options = CheckedOptions.of({**LENGTHS, "drafter": "none", "max_tokens": 60})
    scheduler = Scheduler(engine.pair)
    found: list[list[float]] = []
    for is_alone in (True, False):
        engine.forget()
        cheap_together(engine)
        writer = begin(engine, PROMPTS[0], **{**LENGTHS, "max_tokens": 60, "drafter": "none"})
        scheduler.step([writer])
        scored = Generation(engine.pair, long, options, n_top=2, prompt_logprobs=[first])
        passes.clear()
        n_before, n_steps = len(writer.rounds), 0
        while scored.is_scoring:
            assert not scheduler.step([scored] if is_alone else [writer, scored])
            n_steps += 1
        if not is_alone:
            assert passes == [2] * n_steps
            assert len(writer.rounds) == n_before + n_steps, "the writer wrote all the while"
        assert scored.prompt_logprobs is not None
        found.append([each.chosen.logprob or 0.0 for each in scored.prompt_logprobs])
        for each in (writer, scored):
            each.close()
    assert len(found[0]) == len(long)
    assert found[1] == pytest.approx(found[0], abs=0.05)


@pytest.mark.parametrize(
    ("attention", "expected"), [("off", [49, 32, 18]), ("on", [64, 35])], ids=["off", "on"]
)
def test_a_lone_prompt_gets_smaller_pieces_on_a_slow_machine(
    files: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    attention: Literal["off", "on"],
    expected: list[int],
) -> None:
    """With flash attention on CPUs, fewer than 64 tokens together take longer than 64."""
    how = {"n_ctx": 128, "n_threads": 1, "tuned": False, "flash_attention": attention}
    with ggufspec.load(*files, **how) as engine:
        scheduler = Scheduler(engine.pair)
        ticks = count(0, 2)  # seconds
        monkeypatch.setattr("ggufspec.engine.scheduler.perf_counter", lambda: float(next(ticks)))
        sizes: list[list[int]] = []
        for _ in range(2):
            engine.forget()
            heard: list[int] = [0]
            long = begin(
                engine,
                [*range(5, 105)],
                **LENGTHS,
                drafter="model",
                progress=lambda whose, done, total, heard=heard: (
                    heard.append(done) if whose == "target" else None
                ),
            )
            while long.is_reading:
                scheduler.step([long])
            long.close()
            sizes.append([b - a for a, b in pairwise(heard)])
    assert sizes == [[99], expected], "each holds up Ctrl-C, and a text that comes"


@pytest.mark.parametrize("drafter", ["model", "none"])
def test_a_piece_of_a_prompt_shares_the_pass_of_the_texts(
    engine: Engine, passes: list[int], drafter: str
) -> None:
    long = [*range(5, 105)]
    alone = engine.generate(long, **{**LENGTHS, "drafter": drafter})
    cheap_together(engine)
    engine.forget()
    writer = begin(engine, PROMPTS[0], **{**LENGTHS, "max_tokens": 60, "drafter": "none"})
    scheduler = Scheduler(engine.pair)
    while not writer.rounds:
        scheduler.step([writer])
    late = begin(engine, long, **{**LENGTHS, "drafter": drafter})
    passes.clear()
    n_before, n_steps = len(writer.rounds), 0
    while late.is_reading:
        assert not scheduler.step([writer, late])
        n_steps += 1
    assert passes.count(2) >= 2, "of 100 tokens, no piece has more than half"
    assert len(writer.rounds) == n_before + n_steps, "the writer wrote all the while"
    while not late.is_over:
        assert not scheduler.step([writer, late])
    assert late.completion.tokens == alone.tokens
    writer.close()


def test_a_stream_that_is_closed_or_dropped_gives_its_slot_back(engine: Engine) -> None:
    next(engine.stream(PROMPTS[0], **LENGTHS))
    assert {slot.n_users for slot in engine.pair.slots} == {0}
    with engine.stream(PROMPTS[0], **LENGTHS) as stream:
        next(stream)
        assert sum(slot.n_users for slot in engine.pair.slots) == 1
    assert {slot.n_users for slot in engine.pair.slots} == {0}
    streams = [engine.stream(prompt, **{**LENGTHS, "drafter": "none"}) for prompt in PROMPTS[:3]]
    for stream in streams:
        next(stream)
    assert {slot.n_users for slot in engine.pair.slots} == {1}
    for stream in streams:
        stream.close()
        n_rounds = len(stream.rounds)
        list(stream)
        assert len(stream.rounds) == n_rounds, "it writes no more"
    assert {slot.n_users for slot in engine.pair.slots} == {0}


def test_a_slot_is_given_back_under_the_lock(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[bool] = []
    leave = SlotLease.leave

    def watched(self: SlotLease, *text: Any) -> None:
        found.append(engine.pair.lock.held().locked())
        leave(self, *text)

    monkeypatch.setattr(SlotLease, "leave", watched)
    engine.generate(PROMPTS[0], **LENGTHS)
    closed = engine.stream(PROMPTS[0], **LENGTHS)
    next(closed)
    closed.close()
    assert len(found) >= 2
    assert all(found)


def test_more_streams_than_slots_take_turns(engine: Engine) -> None:
    alone = [engine.generate(p, **{**LENGTHS, "seed": 2}).tokens for p in PROMPTS[:5]]
    streams = [begin(engine, prompt, **{**LENGTHS, "seed": 2}) for prompt in PROMPTS[:5]]
    cheap_together(engine)
    for stream in streams:
        next(Stream(engine.scheduler, stream))  # all have begun
    assert sum(slot.n_users for slot in engine.pair.slots) == 5
    scheduler = Scheduler(engine.pair)
    while left := [stream for stream in streams if not stream.is_over]:
        assert not scheduler.step(left)
    assert [stream.completion.tokens for stream in streams] == alone


def test_a_text_without_a_slot_waits_for_one(engine: Engine) -> None:
    """Two in one slot would read all that they have at each round."""
    first = [begin(engine, [*range(5, 45)], **{**LENGTHS, "seed": i}) for i in range(N_SLOTS)]
    late = begin(engine, [*range(50, 110)], **LENGTHS)
    scheduler = Scheduler(engine.pair)
    while not any(stream.is_over for stream in first):
        assert max(slot.n_users for slot in engine.pair.slots) <= 1
        assert not scheduler.step([*first, late])
    assert not late.has_begun
    while late.is_reading:
        assert not scheduler.step([*first, late])
    for stream in (*first, late):
        stream.close()


def test_after_ctrl_c_in_a_pass_streams_go_on(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {**LENGTHS, "drafter": "none"}
    alone = [engine.generate(prompt, **options).tokens for prompt in PROMPTS[:2]]
    cheap_together(engine)
    streams = [begin(engine, prompt, **options) for prompt in PROMPTS[:2]]
    scheduler = Scheduler(engine.pair)
    while not all(stream.rounds for stream in streams):
        scheduler.step(streams)

    def interrupted(self: Context, parts: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Context, "decode_together", interrupted)
        with pytest.raises(KeyboardInterrupt):
            scheduler.step(streams)
    while left := [stream for stream in streams if not stream.is_over]:
        assert not scheduler.step(left)
    assert [stream.completion.tokens for stream in streams] == alone


@pytest.mark.parametrize("error", [DecodeError("no room"), KeyboardInterrupt()])
def test_a_stream_alone_that_fails_is_over_and_gives_its_slot_back(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    stream = engine.stream(PROMPTS[0], **{**LENGTHS, "drafter": "none"})
    next(stream)

    def fails(*asked: object) -> None:
        raise error

    monkeypatch.setattr(Context, "decode", fails)
    with pytest.raises(type(error)):
        next(stream)
    assert list(stream) == []
    assert {slot.n_users for slot in engine.pair.slots} == {0}


def test_when_the_engine_closes_each_text_fails(files: tuple[Path, Path]) -> None:
    with ggufspec.load(files[0], n_ctx=64, n_slots=2, n_threads=1, tuned=False) as engine:
        cheap_together(engine)
        streams = [begin(engine, prompt, **LENGTHS) for prompt in PROMPTS[:2]]
        scheduler = Scheduler(engine.pair)
        while not all(stream.rounds for stream in streams):
            scheduler.step(streams)
    failed = scheduler.step(streams)
    assert [type(error) for _, error in failed] == [ClosedError, ClosedError]
    assert {slot.n_users for slot in engine.pair.slots} == {0}


def test_a_stream_can_be_closed_while_another_thread_takes_it_further(engine: Engine) -> None:
    for _ in range(2):
        streams = [begin(engine, prompt, **LENGTHS) for prompt in PROMPTS[:3]]
        scheduler, failed = Scheduler(engine.pair), []
        begun = threading.Event()

        def write(streams=streams, scheduler=scheduler, failed=failed, begun=begun) -> None:  # type: ignore[no-untyped-def]
            while left := [stream for stream in streams if not stream.is_over]:
                failed += scheduler.step(left)
                begun.set()

        thread = threading.Thread(target=write)
        thread.start()
        begun.wait()
        streams[1].close()
        thread.join()
        assert not failed
        assert {slot.n_users for slot in engine.pair.slots} == {0}


@pytest.mark.parametrize(
    "asks",
    [
        lambda engine, other: next(other),
        lambda engine, other: Scheduler(engine.pair).step([]),
        lambda engine, other: other.close(),
        lambda engine, other: list(scoring.logits(engine.pair, [5], [6], whose="target")),
        lambda engine, other: engine.generate_batch([[5]]),
    ],
)
def test_a_callback_that_would_wait_for_itself_is_refused(
    engine: Engine, asks: Callable[[Engine, Stream], object]
) -> None:
    engine.forget()
    other = engine.stream(PROMPTS[0], **LENGTHS)

    def heard(whose: str, done: int, total: int) -> None:
        asks(engine, other)

    with pytest.raises(OptionError, match="callback"):
        engine.generate(PROMPTS[1], progress=heard, **LENGTHS)
    other.close()


def test_a_finished_text_is_freed(engine: Engine) -> None:
    """Its uniforms and its grammar take memory: a batch may have thousands of prompts."""
    made: list[weakref.ref[Generation]] = []
    alive: list[int] = []

    def heard(*_: object) -> None:
        alive.append(sum(ref() is not None for ref in made))

    def generations() -> Iterator[Generation]:
        for prompt in PROMPTS:
            made_now = begin(engine, prompt, progress=heard, **LENGTHS)
            made.append(weakref.ref(made_now))
            yield made_now

    engine.forget()
    texts = Scheduler(engine.pair).write_all(generations())
    assert len(texts) == len(made) == len(PROMPTS)
    assert min(alive) <= N_SLOTS


def test_what_one_text_learns_is_used_by_the_next(files: tuple[Path, Path]) -> None:
    options = {**LENGTHS, "n_draft": "auto", "drafter": "model", "seed": None}
    known: list[Acceptance] = []  # at the beginning of each text

    def generations(engine: Engine) -> Iterator[Generation]:
        for prompt in PROMPTS:
            policy = engine.pair.profile.policy(
                LENGTHS["temperature"], repeats=False, in_blocks=True
            )
            known.append(policy.acceptance)
            yield begin(engine, prompt, **options)

    with ggufspec.load(*files, n_ctx=128, n_slots=2, n_threads=1, tuned=False) as fresh:
        Scheduler(fresh.pair).write_all(generations(fresh))
    assert known[0] == known[1]
    assert known[-1] != known[0]


# Slots


def written(engine: Engine, prompt: list[int], **options: object) -> list[int]:
    """A text with its prompt."""
    text = engine.generate(prompt, **{**LENGTHS, "max_tokens": 4, "seed": 1, **options})
    return [*prompt, *text.tokens]


def test_the_slot_used_longest_ago_makes_room(engine: Engine) -> None:
    engine.forget()
    talks = [written(engine, [7, 20 + i, 30 + i]) for i in range(N_SLOTS)]
    written(engine, talks[0])
    written(engine, [90, 91])  # a stranger: the second talk has to go
    reused = [engine.pair.slots.nearest(talk).target.n_common(talk) for talk in talks]
    assert [n >= 5 for n in reused] == [True, False, True]


def test_a_common_beginning_is_read_once(engine: Engine) -> None:
    engine.forget()
    system = [*range(10, 60)]
    questions = [[7, 8, 9, 10, 11], [90, 91, 92, 93, 94, 95]]
    first, second = (engine.generate([*system, *each], **LENGTHS) for each in questions)
    assert (first.stats.n_prompt_reused, second.stats.n_prompt_reused) == (0, 50)
    third = engine.generate([*system, *questions[0]], **LENGTHS)
    assert third.stats.n_prompt_reused == 54
    held = sorted(slot.target.n_held for slot in engine.pair.slots)
    assert held[-2] > 60, "each has a slot of its own"


@pytest.mark.parametrize("writer", [tiny.write_swa, tiny.write_mamba])
def test_models_that_share_no_passes_still_write_together(tmp_path: Path, writer: object) -> None:
    path = writer(tmp_path / "model.gguf")  # type: ignore[operator]
    options = {**LENGTHS, "drafter": "ngram"}
    with ggufspec.load(
        path,
        n_ctx=64,
        n_slots=2,
        n_threads=1,
        tuned=False,
        flash_attention="off",
        type_k="f32",
        type_v="f32",
    ) as engine:
        cheap_together(engine)
        alone = [
            engine.generate(p, **{**options, "seed": 6 + i}) for i, p in enumerate(PROMPTS[:4])
        ]
        together = engine.generate_batch(PROMPTS[:4], **{**options, "seed": 6})
    assert [text.tokens for text in together] == [text.tokens for text in alone]


# Threads


def in_threads(engine: Engine, prompts: Sequence[Any], **options: Any) -> list[tuple[int, ...]]:
    with ThreadPoolExecutor(len(prompts)) as threads:
        texts = threads.map(lambda prompt: engine.generate(prompt, **options), prompts)
        return [text.tokens for text in texts]


def test_texts_of_several_threads_share_passes(engine: Engine, passes: list[int]) -> None:
    options = {**LENGTHS, "max_tokens": 40, "drafter": "none"}
    prompts = [[n, *range(20, 30)] for n in range(5, 5 + 2 * N_SLOTS)]
    alone = [engine.generate(prompt, **options).tokens for prompt in prompts]
    cheap_together(engine)
    passes.clear()
    assert in_threads(engine, prompts, **options) == alone
    assert sum(passes) / len(passes) > N_SLOTS / 2
    assert not sum(slot.n_users for slot in engine.pair.slots)


def test_a_text_shares_a_slot_only_once_the_texts_in_slots_have_stopped(engine: Engine) -> None:
    """Texts that share a slot read each other's cells anew in each round."""
    options = {**LENGTHS, "drafter": "none"}
    held = [begin(engine, prompt, **options) for prompt in PROMPTS[:N_SLOTS]]
    while not all(each.rounds for each in held):
        assert not engine.scheduler.step(held)
    stopped = perf_counter()
    with engine.stream(PROMPTS[3], **options) as late:
        next(late)
        assert perf_counter() - stopped > 0.05
    for each in held:
        each.close()


def test_a_short_text_of_another_thread_does_not_wait_for_a_long_prompt(
    files: tuple[Path, Path],
) -> None:
    begun, ended = threading.Event(), list[str | int]()

    def slow(whose: str, done: int, total: int) -> None:
        ended.append(done)
        begun.set()
        sleep(0.05)  # by then the other thread waits

    def write(engine: Engine, name: str, n_prompt: int, **options: Any) -> None:
        engine.generate([5] * n_prompt, max_tokens=1, drafter="none", **options)
        ended.append(name)

    with (
        ggufspec.load(files[0], n_ctx=512, n_slots=2, n_threads=1, tuned=False) as engine,
        ThreadPoolExecutor(2) as threads,
    ):
        long = threads.submit(write, engine, "long", 500, progress=slow)
        assert begun.wait(10)
        threads.submit(write, engine, "short", 2).result(60)
        long.result(60)
    assert ended.index("short") < ended.index(499), "the long prompt was not read before"


def test_a_stream_that_is_not_read_gets_few_passes_more(engine: Engine) -> None:
    idle = engine.stream(PROMPTS[0], **{**LENGTHS, "max_tokens": 60, "drafter": "none"})
    next(idle)
    busy = engine.stream(PROMPTS[1], **{**LENGTHS, "max_tokens": 60, "drafter": "none"})
    for _ in busy:
        pass
    assert len(idle.rounds) <= 3
    idle.close()


def test_an_error_reaches_the_thread_whose_text_it_is(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = [9, 8, 7, 6]
    real = Generation.answer

    def answer(self: Generation, scored: Any) -> None:
        if self.n_prompt == len(bad):
            self.end()
            raise ValueError("this one")
        real(self, scored)

    monkeypatch.setattr(Generation, "answer", answer)
    options = {**LENGTHS, "max_tokens": 30}
    with ThreadPoolExecutor(4) as threads:
        good = [threads.submit(engine.generate, PROMPTS[0], **options) for _ in range(2)]
        failing = [threads.submit(engine.generate, bad, **options) for _ in range(2)]
        assert all(len(each.result(60).tokens) == 30 for each in good)
        for each in failing:
            with pytest.raises(ValueError, match="this one"):
                each.result(60)
