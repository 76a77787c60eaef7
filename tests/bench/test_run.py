"""Measuring in turns, with models of a few kilobytes; times are not checked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny

from ggufspec.bench import run
from ggufspec.bench.experiment import Experiment, contenders
from ggufspec.bench.records import BenchResults, Contender, Measurement, TextKey
from ggufspec.common.prompts import Prompt
from ggufspec.engine.engine import Engine
from ggufspec.engine.load import load
from ggufspec.engine.stream import Stream

OURS = contenders(lengths=[2, "auto"], temperatures=[0.0], has_draft=True)
HELLO, WORLD = Prompt(id="hello", turns=(" hello",)), Prompt(id="world", turns=(" world the",))
UNCHANGED: Any = {"repeat_penalty": 1.0, "top_k": 40}
WRITERS = [tiny.write_llama, tiny.write_mamba]


@pytest.fixture(scope="module", params=WRITERS, ids=lambda write: write.__name__[6:])
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A target and its draft, of models that can drop a tail and of others that cannot."""
    folder = tmp_path_factory.mktemp("pair")
    return [request.param(folder / f"{seed}.gguf", seed=seed) for seed in range(2)]


@pytest.fixture
def engine(files: list[Path]) -> Iterator[Engine]:
    with load(*files, n_threads=1, n_draft_max=4) as loaded:
        yield loaded


def experiment(
    prompts: list[Prompt], ours: list[Contender] = OURS, n_tokens: int = 6
) -> Experiment:
    return Experiment(ours, prompts, n_runs=2, n_tokens=n_tokens, n_warm_up=3)


def measured(engine: Engine, of: Experiment) -> dict[TextKey, Measurement]:
    return {found.key: found for found in run.measure(engine, of)}


# Turns


def test_a_contender_takes_nothing_from_the_file(tmp_path: Path) -> None:
    header = {"general.sampling.penalty_repeat": 3.0, "general.sampling.top_k": 3}
    path = tiny.write_llama(tmp_path / "model.gguf", header=header)
    options: Any = {"temperature": 0.0, "drafter": "none"}
    with load(path, n_threads=1) as engine:
        found = measured(engine, experiment([HELLO], [Contender("plain", options)], 24))
        wanted = engine.generate(" hello", max_tokens=24, ignore_eos=True, **options, **UNCHANGED)
        own = engine.generate(" hello", max_tokens=24, ignore_eos=True, **options)
    assert {tuple(each.tokens) for each in found.values()} == {wanted.tokens}
    assert own.tokens != wanted.tokens


def test_every_contender_has_every_place() -> None:
    for n in range(1, 32):
        ours = [Contender(str(i), {}) for i in range(n)]
        order = list(Experiment(ours, [HELLO], n_runs=n, n_tokens=1).order())
        assert len(set(order)) == len(order) == n * n
        for place in range(n):
            assert len({key.contender for key in order[place::n]}) == n


# Texts


def test_every_text_is_measured_and_reported(engine: Engine) -> None:
    whole = experiment([HELLO, WORLD])
    seen: list[tuple[int, int, str]] = []
    texts = list(run.measure(engine, whole, progress=lambda *made: seen.append(made)))
    assert [text.key for text in texts] == list(whole.order())
    assert [done for done, _, _ in seen] == sorted(done for done, _, _ in seen)
    assert seen[-1][:2] == (seen[-1][1], len(OURS) * 3 + len(texts) * 6)
    for text in texts:
        assert text.n_generated == len(text.tokens) == 6
        assert len(text.rounds) == text.n_rounds
        assert sum(round_.n_tokens for round_ in text.rounds) == 6
        assert sum(turn.n_drafted for turn in text.rounds) == text.n_drafted
        assert sum(text.drafted_by_position) <= text.n_drafted
        assert sum(text.accepted_by_position) == text.n_accepted
        assert text.first_token_seconds >= text.prompt_seconds > 0
        assert 0 < text.generation_seconds < 60
    assert any(text.n_drafted for text in texts)
    document = BenchResults({}, list(OURS), measurements=texts).to_document()
    assert len(BenchResults.of_document(document, "it").measurements) == len(texts)


def test_every_text_begins_with_an_empty_cache(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams: list[Stream] = []
    begin = Engine.begin

    def watched(*args: Any, **how: Any) -> Stream:
        streams.append(begin(*args, **how))
        return streams[-1]

    monkeypatch.setattr(Engine, "begin", watched)
    texts = measured(engine, experiment([WORLD]))
    reused = [stream.completion.stats.n_prompt_reused for stream in streams]
    assert reused == [0] * (len(OURS) + len(texts))


def test_what_is_done_is_not_done_again(engine: Engine) -> None:
    whole = experiment([HELLO])
    order = list(whole.order())
    left = [order[1], order[-1]]
    done = {key for key in order if key not in left}
    seen: list[str] = []
    found = list(run.measure(engine, whole, done=done, progress=lambda *made: seen.append(made[2])))
    assert [text.key for text in found] == left
    warmed = {label.removeprefix("warm-up: ") for label in seen if label.startswith("warm-up")}
    assert warmed == {key.contender for key in left}
    assert list(run.measure(engine, whole, done=order)) == []


def test_greedy_texts_are_the_same_by_every_contender_of_the_pair(engine: Engine) -> None:
    found = measured(engine, experiment([HELLO], n_tokens=12))
    texts = {tuple(text.tokens) for text in found.values() if text.contender != "draft alone"}
    assert len(texts) == 1


def test_the_draft_alone_writes_what_it_writes_as_a_target(
    engine: Engine, files: list[Path]
) -> None:
    found = measured(engine, experiment([HELLO, WORLD], n_tokens=12))
    with load(files[1], n_threads=1) as alone:
        for prompt in (HELLO, WORLD):
            expected = alone.generate(
                prompt.turns[0], temperature=0.0, max_tokens=12, ignore_eos=True
            ).tokens
            for i in range(2):
                assert tuple(found[TextKey("draft alone", prompt.name, i)].tokens) == expected
                plain = tuple(found[TextKey("plain", prompt.name, i)].tokens)
                assert plain != expected


def test_a_second_question_follows_the_models_own_answer(engine: Engine) -> None:
    twice = Prompt(id="twice", turns=(" hello", " say"))
    first = engine.generate(" hello", temperature=0.0, max_tokens=6, ignore_eos=True)
    second = engine.generate(
        f" hello\n{first.text}\n say", temperature=0.0, max_tokens=6, ignore_eos=True
    )
    (text, *_) = measured(engine, experiment([twice])).values()
    assert text.contender == "plain"
    assert tuple(text.tokens) == (*first.tokens, *second.tokens)
    assert text.n_generated == 12
    assert text.n_prompt == first.stats.n_prompt + second.stats.n_prompt


def test_divergences_are_found_where_the_texts_differ(engine: Engine) -> None:
    whole = experiment([HELLO], n_tokens=6)
    results = BenchResults({}, list(OURS), measurements=list(run.measure(engine, whole)))
    assert run.divergences(engine, whole, results) == []
    tokens = next(text.tokens for text in results.measurements if text.contender == "draft 2")
    other = (tokens[3] + 1) % 256 + 3
    tokens[3:] = [other] * 3  # type: ignore[index]
    (found,) = run.divergences(engine, whole, results)
    assert (found.contender, found.prompt, found.position) == ("draft 2", "hello", 3)
    assert found.margin > 0
    tokens.clear()  # type: ignore[attr-defined]
    assert run.divergences(engine, whole, results) == [], "its tokens are not known"
