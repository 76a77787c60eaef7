"""Texts that are written at the same time become what each would have become alone."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count, pairwise
from pathlib import Path
from time import sleep
from typing import Any, Literal

import pytest
import tiny
from patience import PATIENCE, comes_true, held

import ggufspec
from ggufspec.drafting.cost_model import CostModel
from ggufspec.drafting.draft_length import Coefficients
from ggufspec.engine import scoring
from ggufspec.engine.engine import Engine
from ggufspec.engine.generation import Generation
from ggufspec.engine.handle import Handle
from ggufspec.engine.logprobs import TokenLogprobs, entry_of
from ggufspec.engine.options import CheckedOptions
from ggufspec.engine.passes import Passes
from ggufspec.engine.stream import Stream
from ggufspec.errors import ClosedError, DecodeError, OptionError
from ggufspec.llama.context import Context
from ggufspec.llama.hidden_states import BatchPart
from ggufspec.llama.session import LlamaSession

# As they share no letter, a text that got another's rows would show it.
N_SLOTS = 3
PROMPTS = [[5 + i, 60 + i, 100 + i, 30 + i][: 2 + i % 3] for i in range(7)]
LENGTHS: dict[str, Any] = {
    "temperature": 0.9,
    "seed": 9,
    "max_tokens": 20,
    "n_draft": 3,
    "ignore_eos": True,
}
ENDLESS: dict[str, Any] = {**LENGTHS, "max_tokens": None, "context_shift": True}


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
        if len(parts) > 1:
            found.append(len(parts))
        real(self, parts)

    monkeypatch.setattr(Context, "decode_together", counted)
    return found


def begin(engine: Engine, prompt: Sequence[int], **options: Any) -> Generation:
    return Generation(engine.pair, engine.prepare(prompt, CheckedOptions.of(options)))


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
    passes_of, failed = Passes(engine.pair), []
    while any(not stream.is_over for stream in good):
        failed += passes_of.run([bad, *good] if not failed else good)
    assert [(stream, type(error)) for stream, error in failed] == [(bad, OSError)]
    assert [stream.completion.tokens for stream in good] == alone
    bad.end()


def test_a_text_whose_part_of_a_pass_fails_does_not_touch_the_others(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Panic(BaseException):
        """As of native code: no Exception."""

    alone = engine.generate(PROMPTS[0], **LENGTHS).tokens
    engine.forget()
    good, bad = (begin(engine, prompt, **LENGTHS) for prompt in PROMPTS[:2])
    prepare = LlamaSession.prepare

    def fails(session: LlamaSession, *asked: Any) -> BatchPart:
        if session is bad.session:
            raise Panic
        return prepare(session, *asked)

    monkeypatch.setattr(LlamaSession, "prepare", fails)
    passes_of, failed = Passes(engine.pair), []
    while not good.is_over:
        failed += passes_of.run([good] if failed else [good, bad])
    assert [(text, type(error)) for text, error in failed] == [(bad, Panic)]
    assert good.completion.tokens == alone
    bad.end()


def test_a_pass_that_fails_is_made_again_one_by_one(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = [
        engine.generate(p, **{**LENGTHS, "seed": 4 + i}).tokens for i, p in enumerate(PROMPTS[:3])
    ]
    cheap_together(engine)

    real = Context.decode_together

    def fails(self: Context, parts: Sequence[BatchPart]) -> None:
        if len(parts) > 1:
            raise DecodeError("no room")
        real(self, parts)

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
    passes_of = Passes(engine.pair)
    while not writer.rounds:
        passes_of.run([writer])
    held = [begin(engine, prompt, progress=lambda *_: None, **options) for prompt in prompts]
    assert not passes_of.run([writer, *held])
    assert not any(each.is_reading for each in held)
    for each in (writer, *held):
        each.end()


def test_prompts_that_begin_together_are_read_in_one_pass(
    engine: Engine, passes: list[int]
) -> None:
    cheap_together(engine)
    engine.forget()
    texts = [begin(engine, prompt, **{**LENGTHS, "drafter": "none"}) for prompt in PROMPTS[:3]]
    assert not Passes(engine.pair).run(texts)
    assert passes == [3]
    assert [len(text.rounds) for text in texts] == [1, 1, 1]
    for text in texts:
        stats = text.completion.stats
        assert stats.n_prompt_reused == 0
        assert stats.seconds.prompt > 0
        assert stats.seconds.target < stats.seconds.prompt, "the prompt took most of the pass"
        text.end()


def test_scores_of_a_prompt_share_the_passes_of_the_texts(
    engine: Engine, passes: list[int]
) -> None:
    """And they are those that the prompt has alone."""
    long = [*range(5, 105)]
    first = TokenLogprobs(entry_of(long[0], None, engine.vocab), ())
    options = CheckedOptions.of({**LENGTHS, "drafter": "none", "max_tokens": 60})
    passes_of = Passes(engine.pair)
    found: list[list[float]] = []
    for is_alone in (True, False):
        engine.forget()
        cheap_together(engine)
        writer = begin(engine, PROMPTS[0], **{**LENGTHS, "max_tokens": 60, "drafter": "none"})
        passes_of.run([writer])
        text = engine.prepare(long, options, n_top=2, prompt_logprobs=[first])
        scored = Generation(engine.pair, text)
        passes.clear()
        n_before, n_steps = len(writer.rounds), 0
        while scored.is_scoring:
            assert not passes_of.run([scored] if is_alone else [writer, scored])
            n_steps += 1
        if not is_alone:
            assert passes == [2] * n_steps
            assert len(writer.rounds) == n_before + n_steps, "the writer wrote all the while"
        assert scored.prompt_logprobs is not None
        found.append([each.chosen.logprob or 0.0 for each in scored.prompt_logprobs])
        for each in (writer, scored):
            each.end()
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
        passes_of = Passes(engine.pair)
        ticks = count(0, 2)  # seconds
        monkeypatch.setattr("ggufspec.engine.passes.perf_counter", lambda: float(next(ticks)))
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
                passes_of.run([long])
            long.end()
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
    passes_of = Passes(engine.pair)
    while not writer.rounds:
        passes_of.run([writer])
    late = begin(engine, long, **{**LENGTHS, "drafter": drafter})
    passes.clear()
    n_before, n_steps = len(writer.rounds), 0
    while late.is_reading:
        assert not passes_of.run([writer, late])
        n_steps += 1
    assert passes.count(2) >= 2, "of 100 tokens, no piece has more than half"
    assert len(writer.rounds) == n_before + n_steps, "the writer wrote all the while"
    while not late.is_over:
        assert not passes_of.run([writer, late])
    assert late.completion.tokens == alone.tokens
    writer.end()


def test_a_stream_that_is_closed_or_dropped_gives_its_slot_back(engine: Engine) -> None:
    next(engine.stream(PROMPTS[0], **ENDLESS))
    assert comes_true(lambda: is_free(engine))
    with engine.stream(PROMPTS[0], **ENDLESS) as stream:
        next(stream)
        assert not is_free(engine)
    assert is_free(engine)
    streams = [engine.stream(prompt, **{**ENDLESS, "drafter": "none"}) for prompt in PROMPTS[:3]]
    for stream in streams:
        next(stream)
    assert all(slot.is_used for slot in engine.pair.slots)
    for stream in streams:
        stream.close()
        n_rounds = len(stream.rounds)
        assert list(stream), "what it wrote before can be taken"
        assert len(stream.rounds) == n_rounds, "it writes no more"
    assert is_free(engine)


def test_a_text_waits_for_a_slot_and_may_be_given_up_before(engine: Engine) -> None:
    alone = engine.generate(PROMPTS[4], **LENGTHS).tokens
    writing = [engine.stream(prompt, **ENDLESS) for prompt in PROMPTS[:N_SLOTS]]
    for each in writing:
        next(each)
    given_up, waits = engine.stream(PROMPTS[3], **LENGTHS), engine.stream(PROMPTS[4], **LENGTHS)
    assert waits.poll() is None
    given_up.close()
    assert list(given_up) == []
    assert given_up.completion.tokens == ()
    writing[0].close()
    assert waits.finish().tokens == alone
    for each in writing:
        each.close()


def test_a_stream_can_be_closed_while_another_thread_takes_its_chunks(engine: Engine) -> None:
    with ThreadPoolExecutor(1) as threads, engine.stream(PROMPTS[0], **ENDLESS) as stream:
        reading = threads.submit(list, stream)
        assert comes_true(lambda: stream.rounds)
        stream.close()
        assert reading.result(PATIENCE)
    assert is_free(engine)


def test_the_texts_of_one_request_do_not_keep_others_waiting(engine: Engine) -> None:
    begun: list[int] = []
    handles: list[Handle] = []
    request = object()
    with held(engine):
        for i in range(2 * N_SLOTS + 1):
            options = {**LENGTHS, "progress": lambda *_, i=i: begun.append(i), "drafter": "none"}
            text = engine.prepare([5 + i, *range(20, 90)], CheckedOptions.of(options))
            handles.append(Handle(text, group=request if i < 2 * N_SLOTS else None))
            engine.scheduler.submit(handles[-1])
    for each in handles:
        assert comes_true(lambda each=each: each.has_ended)
    assert list(dict.fromkeys(begun)).index(2 * N_SLOTS) < N_SLOTS, "it was the last to come"


def is_free(engine: Engine) -> bool:
    return len(engine.pair.slots.free) == N_SLOTS


@pytest.mark.parametrize("error", [DecodeError("no room"), KeyboardInterrupt()])
def test_a_stream_alone_that_fails_is_over_and_gives_its_slot_back(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fails(*asked: object) -> None:
        raise error

    stream = engine.stream(PROMPTS[0], **{**ENDLESS, "drafter": "none"})
    next(stream)
    monkeypatch.setattr(Context, "decode", fails)
    with pytest.raises(type(error)):
        list(stream)
    assert list(stream) == []
    assert is_free(engine)


def test_when_the_engine_closes_each_text_fails(files: tuple[Path, Path]) -> None:
    with ggufspec.load(files[0], n_ctx=64, n_slots=2, n_threads=1, tuned=False) as engine:
        streams = [engine.stream(prompt, **ENDLESS) for prompt in PROMPTS[:3]]
        for stream in streams[:2]:
            next(stream)
    for stream in streams:
        with pytest.raises(ClosedError, match="closed"):
            stream.finish()
    with pytest.raises(ClosedError, match="closed"):
        engine.generate(PROMPTS[0], **LENGTHS)


def test_a_batch_prepares_a_text_when_its_turn_comes_and_keeps_none(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uniforms and grammars take memory: a batch may have thousands of prompts."""
    made: list[weakref.ref[Generation]] = []
    alive: list[int] = []
    real = Generation.__init__

    def begins(self: Generation, *arguments: Any) -> None:
        real(self, *arguments)
        made.append(weakref.ref(self))
        gc.collect()
        alive.append(sum(ref() is not None for ref in made))

    monkeypatch.setattr(Generation, "__init__", begins)
    gc.freeze()  # else each collection takes half a second, over the objects of all other tests
    try:
        assert len(engine.generate_batch(PROMPTS * 3, **LENGTHS)) == len(made)
    finally:
        gc.unfreeze()
    assert max(alive) <= 2 * N_SLOTS + 1
    assert is_free(engine)


def test_what_one_text_learns_is_used_by_the_next(files: tuple[Path, Path]) -> None:
    options = {**LENGTHS, "n_draft": "auto", "drafter": "model", "seed": None}
    with ggufspec.load(*files, n_ctx=128, n_slots=2, n_threads=1, tuned=False) as fresh:

        def known() -> Coefficients:
            how = {"repeats": False, "in_blocks": True}
            return fresh.pair.profile.policy(LENGTHS["temperature"], **how).acceptance.coefficients

        before = known()
        fresh.generate_batch(PROMPTS, **options)
        assert known() != before


def test_what_passes_cost_is_learned_for_each_depth(files: tuple[Path, Path]) -> None:
    options = {**LENGTHS, "n_draft": "auto", "seed": None}
    with ggufspec.load(*files, n_ctx=1200, n_threads=1, tuned=False) as fresh:
        costs = fresh.pair.profile.costs
        fresh.generate([5, 60], **options)
        shallow = costs.sizes
        fresh.generate([5, 60] * 550, **options)
        deep = costs.sizes
        fresh.pair.use_costs(0)
        assert deep != shallow
        assert costs.sizes == shallow


@pytest.mark.parametrize(
    "asks",
    [
        lambda engine, other: next(other),
        lambda engine, other: engine.run(lambda: 1),
        lambda engine, other: engine.close(),
        lambda engine, other: other.close(),
        lambda engine, other: list(scoring.logits(engine, [5], [6], whose="target")),
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
    assert not sum(slot.is_used for slot in engine.pair.slots)


def test_a_short_text_of_another_thread_does_not_wait_for_a_long_prompt(
    files: tuple[Path, Path],
) -> None:
    begun, ended = threading.Event(), list[str | int]()

    def slow(whose: str, done: int, total: int) -> None:
        ended.append(done)
        if not begun.is_set():
            begun.set()
            sleep(0.5)  # by then the other thread waits, also on a busy machine

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
