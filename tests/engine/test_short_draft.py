"""A draft whose context is smaller than the target's changes nothing of what the target writes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import head_pairs
import pytest
import tiny
from greedy import assert_same

import ggufspec
from ggufspec.engine.engine import Engine
from ggufspec.errors import OptionError

# Of llama.cpp's 256 cells each slot has no more than it may use.
N_CTX_DRAFT, N_SLOTS = 64, 4
GREEDY: dict[str, Any] = {"max_tokens": 90, "temperature": 0.0, "ignore_eos": True}
LONG = " hello world, a model" * 40  # more than three draft contexts
PROMPTS = (" hello world, a model", LONG, "say hello", LONG + " and say hello")
WAYS: list[dict[str, Any]] = [
    {"drafter": "model", "n_draft": 6, "tree": "on"},
    {"drafter": "staged", "n_draft": 6},
]
# Rounding is as small as in test_session.
PLAIN: dict[str, Any] = {"flash_attention": "off", "type_k": "f32", "type_v": "f32"}
HOW: dict[str, Any] = {"n_threads": 1, "n_ctx": 1024, "tuned": False, **PLAIN}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A target; drafts that agree now and then."""
    folder = tmp_path_factory.mktemp("short")
    foreign = tiny.bpe_vocab(words=(*tiny.WORDS, " zebra", "tion"))
    return {
        "target": tiny.write_llama(folder / "target.gguf"),
        "draft": tiny.write_llama(folder / "draft.gguf", n_layer=1),
        "windows": tiny.write_swa(folder / "windows.gguf"),
        "foreign": tiny.write_llama(folder / "foreign.gguf", n_layer=1, vocab=foreign),
        "recurrent": tiny.write_mamba(folder / "recurrent.gguf"),
    }


@pytest.fixture(params=["draft", "windows", "foreign"])
def engine(request: pytest.FixtureRequest, models: dict[str, Path]) -> Iterator[Engine]:
    with ggufspec.load(
        models["target"],
        models[request.param],
        n_ctx_draft=N_CTX_DRAFT,
        n_slots=N_SLOTS,
        **HOW,
    ) as made:
        yield made


def n_cells(engine: Engine) -> int:
    """The most cells that a draft uses for a slot."""
    _, *drafts = engine.pair.contexts
    return max(draft.n_cells(i) for draft in drafts for i in range(engine.n_slots))


@pytest.mark.parametrize("options", WAYS)
def test_the_greedy_text_is_the_targets(engine: Engine, options: dict[str, Any]) -> None:
    for prompt in PROMPTS:
        plain = engine.generate(prompt, **GREEDY, drafter="none")
        found = engine.generate(prompt, **GREEDY, **options)
        assert_same(engine, prompt, found.tokens, plain.tokens, **GREEDY)
        assert n_cells(engine) <= N_CTX_DRAFT
        assert found.stats.n_drafted > 60


def test_so_it_is_in_slots_and_conversations(engine: Engine) -> None:
    plain = [engine.generate(prompt, **GREEDY, drafter="none").tokens for prompt in PROMPTS]
    for _ in range(2):
        found = engine.generate_batch(PROMPTS, **GREEDY, **WAYS[0])
        for prompt, text, wanted in zip(PROMPTS, found, plain, strict=True):
            assert_same(engine, prompt, text.tokens, wanted, **GREEDY)
        assert n_cells(engine) <= N_CTX_DRAFT
    first, asked = engine.tokenize(PROMPTS[0]), engine.tokenize(PROMPTS[2])[1:]
    longer = [*first, *plain[0], *asked]
    for text in (longer, [*first, *plain[0][:-30], *asked], [*first, *plain[0][:9]], longer):
        after = engine.generate(text, **GREEDY, drafter="none").tokens
        assert_same(
            engine, text, engine.generate(text, **GREEDY, **WAYS[0]).tokens, after, **GREEDY
        )


def test_a_draft_that_needs_the_last_token_is_accepted_as_before(tmp_path: Path) -> None:
    script = tiny.SPM.spell("abcdefghijklmnopq")
    target = tiny.write_scripted(tmp_path / "target.gguf", script)
    wrong = [*script[:-1], script[-1] + 3]
    draft = tiny.write_scripted(tmp_path / "draft.gguf", wrong, then=script[0])
    found = []
    for n_ctx_draft in (None, N_CTX_DRAFT):
        with ggufspec.load(target, draft, n_ctx_draft=n_ctx_draft, **HOW) as engine:
            stats = engine.generate(" hello", **{**GREEDY, "max_tokens": 900}, n_draft=6).stats
            found.append((stats.n_drafted, stats.n_accepted))
    assert found[0] == found[1]
    assert 500 < found[0][1] < found[0][0]


@pytest.mark.parametrize("n_ctx_draft", [1024, 4096])
def test_as_many_tokens_as_the_target_has_change_nothing(
    models: dict[str, Path], n_ctx_draft: int
) -> None:
    names = models["target"], models["draft"]
    with ggufspec.load(*names, n_ctx_draft=n_ctx_draft, **HOW) as engine:
        engine.generate(LONG, **GREEDY, **WAYS[0])
        assert n_cells(engine) > len(engine.tokenize(LONG))


def test_what_reads_all_tokens_is_refused(models: dict[str, Path], tmp_path: Path) -> None:
    head = head_pairs.glm4moe(tmp_path)
    for target, draft, why in (
        (models["target"], models["recurrent"], "recurrent layers"),
        (head.target, head.draft, "a draft head"),
    ):
        with pytest.raises(OptionError, match=rf"{why}.*\(n_ctx_draft, -cd\)"):
            ggufspec.load(target, draft, n_ctx_draft=N_CTX_DRAFT, **HOW)


def test_numbers_that_leave_no_room_are_refused(models: dict[str, Path]) -> None:
    names = models["target"], models["draft"]
    for wrong in (0, -5, 2.5, "many"):
        with pytest.raises(OptionError, match="n_ctx_draft"):
            ggufspec.load(*names, n_ctx_draft=wrong, **HOW)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="too small for drafts of 16: use at least 40"):
        ggufspec.load(*names, n_ctx_draft=39, **HOW)


def test_learned_positions_still_limit_the_context(tmp_path: Path) -> None:
    script = tiny.SPM.spell("abc")
    target = tiny.write_scripted(tmp_path / "target.gguf", script)
    draft = tiny.write_timed(tmp_path / "draft.gguf", script)
    with pytest.raises(OptionError, match="256 positions"):
        ggufspec.load(target, draft, n_ctx_draft=N_CTX_DRAFT, **HOW)
