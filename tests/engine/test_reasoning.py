"""The reasoning of an answer ends where its budget does, with every drafter; the rest is free."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
import tiny
from server.dialects import HELLO, OPENED, TEMPLATE

import ggufspec
from ggufspec.drafting import strategies as drafters
from ggufspec.engine.engine import Engine

END = "</think>"
NAMED = tiny.BPE.with_token("<think>", gguf.TokenType.USER_DEFINED)
VOCABS = {
    "letters": tiny.BPE,  # the marks are many tokens
    "names": NAMED.with_token(END, gguf.TokenType.USER_DEFINED),
    "control": NAMED.with_token(END, gguf.TokenType.CONTROL),
}


@pytest.fixture(scope="module", params=VOCABS)
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    """Random weights, which write any bytes; the draft agrees now and then."""
    folder, how = tmp_path_factory.mktemp("models"), {"vocab": VOCABS[request.param]}
    target = tiny.write_llama(folder / "target.gguf", chat_template=OPENED, **how)
    draft = tiny.write_llama(folder / "draft.gguf", n_layer=1, **how)
    with ggufspec.load(target, draft, n_ctx=256, n_threads=1, tuned=False, n_slots=2) as made:
        yield made


def end_of(engine: Engine) -> list[int]:
    return engine.vocab.tokenize(END, add_special=False, parse_special=True)


def n_before(engine: Engine, tokens: tuple[int, ...]) -> int:
    """The number of tokens before the first end mark."""
    end = end_of(engine)
    return next(i for i in range(len(tokens)) if [*tokens[i : i + len(end)]] == end)


def check(engine: Engine, tokens: tuple[int, ...], n_most: int) -> None:
    """The end mark stands behind `n_most` tokens, or behind the character that they begin."""
    n = n_before(engine, tokens)
    assert n_most <= n <= n_most + 3
    for i in range(n_most, n):
        with pytest.raises(UnicodeDecodeError):
            b"".join(map(engine.vocab.piece, tokens[:i])).decode()


@pytest.mark.parametrize("drafter", drafters.names())
def test_the_end_is_forced_with_every_drafter(engine: Engine, drafter: str) -> None:
    n_end = len(end_of(engine))
    for n_most in (0, 1, 9):
        how: Any = {"drafter": drafter, "temperature": 1.0, "max_tokens": 40, "n_draft": 4}
        texts = [engine.chat(HELLO, seed=i, reasoning_budget=n_most, **how) for i in range(3)]
        for done in texts:
            check(engine, done.tokens, n_most)
            if drafter not in ("none", "auto"):
                assert done.stats.notes["n_forced"] >= n_end - 1
                assert done.stats.notes["forced_acceptance"] == 1
        assert len({done.tokens for done in texts}) == 3


@pytest.mark.parametrize("options", [{"drafter": "ngram"}, {"tree": "on"}, {"tree": "off"}])
def test_greedy_text_is_that_of_the_target_alone(engine: Engine, options: Any) -> None:
    how: Any = {"temperature": 0, "max_tokens": 60, "reasoning_budget": 20, "seed": 1}
    alone = engine.chat(HELLO, drafter="none", **how)
    done = engine.chat(HELLO, n_draft=4, **how, **options)
    assert done.tokens == alone.tokens
    check(engine, done.tokens, 20)
    stats = done.stats
    assert (stats.n_drafted > sum(stats.drafted_by_position)) == (options == {"tree": "on"})
    assert engine.chat(HELLO, **{**how, "reasoning_budget": -1}).tokens[:20] == done.tokens[:20]


def test_texts_in_a_batch_have_budgets_of_their_own_and_so_do_plain_prompts(
    engine: Engine,
) -> None:
    opened = engine.render(HELLO)
    ended = [*opened, *end_of(engine)]
    how: Any = {"temperature": 1.0, "max_tokens": 30, "seed": 3, "reasoning_budget": 5}
    texts = engine.generate_batch([opened, ended, opened], **how)
    check(engine, texts[0].tokens, 5)
    check(engine, texts[2].tokens, 5)
    with pytest.raises(StopIteration):
        n_before(engine, texts[1].tokens)


def test_a_constraint_may_follow_the_reasoning(engine: Engine) -> None:
    form: Any = {"regex": r"[^<]*</think>(yes|no)"}
    if len(end := end_of(engine)) == 1:  # a grammar has to name such a token
        text = f'start: TEXT? <[{end[0]}]> ("yes" | "no")\nTEXT: /(?s:.+)/'
        form = {"grammar": text}
    how: Any = {"temperature": 1.0, "max_tokens": 60, "n_draft": 4, "reasoning_budget": 3}
    for seed in range(3):
        done = engine.chat(HELLO, seed=seed, **form, **how)
        assert done.text.endswith(("yes", "no"))
        assert done.finish_reason == "stop"
        check(engine, done.tokens, 3)


def test_reasoning_that_the_model_begins_or_ends_itself(tmp_path: Path) -> None:
    text = "<think>So it is</think>I say"
    script = [*tiny.BPE.spell(text), tiny.BPE.id_of("<|im_end|>")]
    with ggufspec.load(
        tiny.write_scripted(tmp_path / "m.gguf", [5], vocab=tiny.BPE, chat_template=TEMPLATE)
    ) as first:
        n_prompt = len(first.render(HELLO))
    path = tmp_path / "timed.gguf"
    tiny.write_timed(path, script, n_prompt=n_prompt, vocab=tiny.BPE, chat_template=TEMPLATE)
    n_thought = len(tiny.BPE.spell("So it is"))
    n_end = len(tiny.BPE.spell(END))
    with ggufspec.load(path, path, n_threads=1, tuned=False) as engine:
        for drafter in drafters.names():
            how: Any = {"drafter": drafter, "temperature": 0, "n_draft": 4}
            for n_most in (-1, n_thought, n_thought + 1, n_thought + n_end, 200):
                assert engine.chat(HELLO, reasoning_budget=n_most, **how).text == text
            assert engine.chat(HELLO, reasoning_budget=2, **how).text.startswith(
                "<think>So</think>"
            )
        assert engine.generate("hello", reasoning_budget=0, **how).text  # no header: no reasoning


def test_a_template_without_reasoning_has_no_budget(tmp_path: Path) -> None:
    path = tiny.write_llama(tmp_path / "m.gguf", vocab=tiny.BPE, chat_template=tiny.CHATML)
    with ggufspec.load(path, n_threads=1, tuned=False) as engine:
        how: Any = {"max_tokens": 20, "seed": 1}
        free = engine.chat(HELLO, **how)
        assert engine.chat(HELLO, reasoning_budget=0, **how).tokens == free.tokens
        for wrong in (-2, 1.5, "3"):
            with pytest.raises(ggufspec.OptionError, match="reasoning_budget"):
                engine.chat(HELLO, reasoning_budget=wrong)  # type: ignore[arg-type]
