"""Who writes when: with models of a few kilobytes, whose clock nobody looks at."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny

from ggufspec.bench import run
from ggufspec.bench.contenders import contenders
from ggufspec.bench.prompts import Prompt
from ggufspec.bench.records import Contender, Key, Measurement, Results
from ggufspec.bench.run import Plan
from ggufspec.engine import scoring
from ggufspec.engine.engine import Engine
from ggufspec.engine.load import load
from ggufspec.errors import OptionError

OURS = contenders(lengths=[2, "auto"], temperatures=[0.0], has_draft=True)
HELLO, WORLD = Prompt("hello", "", (" hello",)), Prompt("world", "", (" world the",))
WRITERS = [tiny.write_llama, tiny.write_mamba, tiny.write_hybrid]


@pytest.fixture(scope="module", params=WRITERS, ids=lambda write: write.__name__[6:])
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A target and its draft, of models that can drop a tail and of others that cannot."""
    folder = tmp_path_factory.mktemp("pair")
    return [request.param(folder / f"{seed}.gguf", seed=seed) for seed in range(2)]


@pytest.fixture
def engine(files: list[Path]) -> Iterator[Engine]:
    with load(*files, n_threads=1, n_draft_max=4) as loaded:
        yield loaded


def plan(prompts: list[Prompt], ours: list[Contender] = OURS, n_tokens: int = 6) -> Plan:
    return Plan(ours, prompts, n_runs=2, n_tokens=n_tokens, n_warm_up=3)


def measured(engine: Engine, of: Plan) -> dict[Key, Measurement]:
    return {found.key: found for found in run.measure(engine, of)}


# Turns


@pytest.mark.parametrize("n", range(1, 32))
def test_every_contender_has_every_place(n: int) -> None:
    ours = [Contender(str(i), {}) for i in range(n)]
    whole = Plan(ours, [HELLO], n_runs=n, n_tokens=1)
    order = list(whole.order())
    assert len(set(order)) == len(order) == whole.n_texts == n * n
    for place in range(n):
        assert len({key.contender for key in order[place::n]}) == n


def test_the_contenders_take_turns_behind_each_prompt() -> None:
    order = list(plan([HELLO, WORLD]).order())
    n = len(OURS)
    for start in range(0, len(order), n):
        turn = order[start : start + n]
        assert {key.contender for key in turn} == {each.name for each in OURS}
        assert len({(key.prompt, key.run) for key in turn}) == 1
    assert order[0].contender != order[n].contender


# Texts


def test_every_text_is_measured_and_told_of(engine: Engine) -> None:
    whole = plan([HELLO, WORLD])
    heard: list[tuple[int, int, str]] = []
    texts = list(run.measure(engine, whole, heard=lambda *told: heard.append(told)))
    assert [text.key for text in texts] == list(whole.order())
    assert [done for done, _, _ in heard] == sorted(done for done, _, _ in heard)
    assert heard[-1][:2] == (heard[-1][1], len(OURS) * 3 + whole.n_texts * 6)
    for text in texts:
        assert text.n_generated == len(text.tokens) == 6
        assert len(text.rounds) == text.n_rounds
        assert sum(turn.n_tokens for turn in text.rounds) == 6
        assert sum(turn.n_drafted for turn in text.rounds) == text.n_drafted
        assert sum(text.drafted_by_position) == text.n_drafted
        assert sum(text.accepted_by_position) == text.n_accepted
        assert text.first_token_seconds >= text.prompt_seconds > 0
        assert 0 < text.generation_seconds < 60
    assert any(text.n_drafted for text in texts)
    document = Results({}, list(OURS), measurements=texts).to_document()
    assert len(Results.of_document(document, "it").measurements) == len(texts)


def test_every_text_begins_with_an_empty_cache(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    reused: list[int] = []
    stream = Engine.stream

    class Watched:
        def __init__(self, found: object) -> None:
            self._found = found

        def __iter__(self) -> Iterator[object]:
            yield from self._found  # type: ignore[misc]
            reused.append(self._found.completion.stats.n_prompt_reused)  # type: ignore[attr-defined]

        def __getattr__(self, name: str) -> object:
            return getattr(self._found, name)

    monkeypatch.setattr(Engine, "stream", lambda *args, **how: Watched(stream(*args, **how)))
    whole = plan([WORLD])
    assert len(measured(engine, whole)) == whole.n_texts
    assert reused == [0] * (len(OURS) + whole.n_texts)


def test_what_is_done_is_not_done_again(engine: Engine) -> None:
    whole = plan([HELLO])
    order = list(whole.order())
    left = [order[1], order[-1]]
    done = {key for key in order if key not in left}
    heard: list[str] = []
    found = list(run.measure(engine, whole, done=done, heard=lambda *told: heard.append(told[2])))
    assert [text.key for text in found] == left
    warmed = {told.removeprefix("warm-up: ") for told in heard if told.startswith("warm-up")}
    assert warmed == {key.contender for key in left}
    assert list(run.measure(engine, whole, done=order)) == []


def test_greedy_texts_are_the_same_by_every_contender_of_the_pair(engine: Engine) -> None:
    found = measured(engine, plan([HELLO], n_tokens=12))
    texts = {tuple(text.tokens) for text in found.values() if text.contender != "draft alone"}
    assert len(texts) == 1


def test_the_draft_alone_writes_what_it_writes_as_a_target(
    engine: Engine, files: list[Path]
) -> None:
    found = measured(engine, plan([HELLO, WORLD], n_tokens=12))
    with load(files[1], n_threads=1) as alone:
        for prompt in (HELLO, WORLD):
            expected = alone.generate(
                prompt.turns[0], temperature=0.0, max_tokens=12, ignore_eos=True
            ).tokens
            for i in range(2):
                assert tuple(found[Key("draft alone", prompt.name, i)].tokens) == expected
                plain = tuple(found[Key("plain", prompt.name, i)].tokens)
                assert plain != expected


def test_a_second_question_follows_the_models_own_answer(engine: Engine) -> None:
    twice = Prompt("twice", "", (" hello", " say"))
    first = engine.generate(" hello", temperature=0.0, max_tokens=6, ignore_eos=True)
    second = engine.generate(
        f" hello\n{first.text}\n say", temperature=0.0, max_tokens=6, ignore_eos=True
    )
    (text, *_) = measured(engine, plan([twice])).values()
    assert text.contender == "plain"
    assert tuple(text.tokens) == (*first.tokens, *second.tokens)
    assert text.n_generated == 12
    assert text.n_prompt == first.stats.n_prompt + second.stats.n_prompt


def test_partings_are_found_where_the_texts_part(engine: Engine) -> None:
    whole = plan([HELLO], n_tokens=6)
    results = Results({}, list(OURS), measurements=list(run.measure(engine, whole)))
    assert run.partings(engine, whole, results) == []
    tokens = next(text.tokens for text in results.measurements if text.contender == "draft 2")
    other = (tokens[3] + 1) % 256 + 3
    tokens[3:] = [other] * 3  # type: ignore[index]
    (found,) = run.partings(engine, whole, results)
    assert (found.contender, found.prompt, found.position) == ("draft 2", "hello", 3)
    assert found.margin > 0


# The engine


def test_an_engine_that_forgets_reads_anew(engine: Engine) -> None:
    def again() -> tuple[int, tuple[int, ...]]:
        found = engine.generate(" hello world the", temperature=0.0, max_tokens=8, n_draft=2)
        return found.stats.n_prompt_reused, found.tokens

    first = again()
    assert again()[0] > 0
    engine.forget()
    assert again() == first
    assert first[0] == 0


def test_texts_of_the_pair_and_of_the_draft_alone_may_alternate(engine: Engine) -> None:
    alone = scoring.draft_alone(engine)
    texts: dict[Engine, set[tuple[int, ...]]] = {engine: set(), alone: set()}
    for _ in range(3):
        for writer, found in texts.items():
            engine.forget()
            alone.forget()
            found.add(writer.generate(" hello", temperature=0.0, max_tokens=8).tokens)
    assert [len(found) for found in texts.values()] == [1, 1]


def test_without_a_draft_none_writes_alone(files: list[Path]) -> None:
    with load(files[0], n_threads=1) as engine, pytest.raises(OptionError, match="no draft"):
        scoring.draft_alone(engine)
