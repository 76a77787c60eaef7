"""Batches over real processes: who dies is replaced, and no text depends on who wrote it."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from batch.conftest import Setting, killing, texts, together

from ggufspec.batch import run as run_module
from ggufspec.batch.run import News
from ggufspec.batch.settings import prompt_seed
from ggufspec.common.prompts import Prompt
from ggufspec.engine.load import load
from ggufspec.errors import ModelError, OptionError

LONG = {"max_tokens": 4000}  # seconds of work


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def of_text(record: dict[str, Any]) -> list[Any]:
    """What no number of workers may change."""
    names = ("index", "text", "seed", "n_rounds", "n_drafted", "n_accepted", "finish_reason")
    return [record[name] for name in names]


@pytest.mark.parametrize(
    "settings",
    [
        {"n_draft": 3},
        {"n_draft": "auto", "max_tokens": 60},
        {"n_draft": "auto", "max_tokens": 60, "temperature": 0.0},
    ],
    ids=["fixed", "auto", "auto greedy"],
)
def test_the_number_of_workers_changes_no_text(settings: dict[str, Any], batch: Setting) -> None:
    load = {"n_threads": None}  # so that each has its share, as people run it
    one = batch.run(texts(8), "one", settings=settings, load=load)
    three = batch.run(
        texts(8), "three", settings=settings, load=load, n_workers=3, heard=together(3)
    )
    assert list(map(of_text, three)) == list(map(of_text, one))
    assert [record["index"] for record in three] == list(range(8))
    assert {record["worker"] for record in one} == {1}
    assert {record["worker"] for record in three} == {1, 2, 3}
    assert all(is_gone(news.pid) for news in batch.told("ready"))
    assert len({record["text"] for record in one}) == (3 if "temperature" in settings else 8), (
        "seeds"
    )


def test_a_text_is_what_an_engine_of_its_own_writes_by_the_recorded_seed(batch: Setting) -> None:
    records = batch.run(texts(3), settings={"verify": "rejection"}, seed=7)
    for prompt, record in zip(texts(3), records, strict=True):
        with load(batch.target, batch.draft, n_threads=1, tuned=False) as engine:
            done = engine.generate(
                prompt.turns[0], seed=record["seed"], max_tokens=24, n_draft=2, verify="rejection"
            )
        assert record["text"] == done.text
        assert record["seed"] == prompt_seed(7, prompt.index)
        assert (record["n_prompt"], record["n_generated"]) == (done.stats.n_prompt, 24)
        assert record["acceptance"] == done.stats.acceptance
        assert (record["finish_reason"], record["error"]) == ("length", None)
        assert record["seconds"] > 0
        assert record["tokens_per_second"] > 0


def test_a_worker_that_is_killed_is_replaced_and_its_prompt_tried_again(batch: Setting) -> None:
    calm = batch.run(texts(6), "calm")
    records = batch.run(texts(6), "killed", n_workers=2, heard=killing(2, n_times=1))
    assert list(map(of_text, records)) == list(map(of_text, calm))
    assert [record["attempts"] for record in records] == [1, 1, 2, 1, 1, 1]
    (death,) = batch.told("died")
    assert (death.index, death.again) == (2, True)
    assert "killed by SIGKILL" in death.why


def test_a_prompt_that_keeps_killing_is_recorded_and_the_others_are_not_harmed(
    batch: Setting,
) -> None:
    records = batch.run(texts(4), heard=killing(1), n_retries=1)
    assert records[1]["error"].startswith("its worker was killed by SIGKILL")
    assert records[1]["attempts"] == 2
    assert [record["error"] for record in records].count(None) == 3
    assert [news.again for news in batch.told("died")] == [True, False]
    assert [news.index for news in batch.told("begun")] == [0, 1, 1, 2, 3]


def test_errors_of_a_prompt_are_its_own(batch: Setting) -> None:
    prompts = [
        Prompt(0, "prompt", turns=("hello " * 90,), id="long"),
        Prompt(1, "prompt", turns=("\ud800",), id="broken"),
        Prompt(2, "messages", messages=({"role": "user", "content": "hi"},), id="messages"),
        Prompt(3, "prompt", turns=("hello",), id="good"),
    ]
    records = batch.run(prompts, load={"n_ctx": 64}, chat=False, n_workers=2)
    errors = [record["error"] for record in records]
    assert "the context 64" in errors[0]
    assert "not valid Unicode" in errors[1]
    assert "--no-chat" in errors[2]
    assert errors[3] is None
    assert [record["id"] for record in records] == ["long", "broken", "messages", "good"]
    assert "text" not in records[0]
    assert batch.told("died") == [], "nobody died of it"


def test_turns_are_answered_one_after_the_other(batch: Setting) -> None:
    prompts = [
        Prompt(0, "turns", turns=("hello", "and then?"), id=81, id_name="question_id"),
        Prompt(1, "messages", messages=({"role": "user", "content": "hello"},)),
        Prompt(2, "turns", turns=("hello",)),
    ]
    records = batch.run(prompts, settings={"temperature": 0.0}, system="Be brief.")
    (choice,) = records[0]["choices"]
    assert (records[0]["question_id"], len(choice["turns"])) == (81, 2)
    assert choice["new_tokens"] == [24, 24]
    assert records[0]["n_generated"] == 48
    with load(batch.target, n_threads=1, tuned=False) as engine:
        said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
        options: Any = {"max_tokens": 24, "temperature": 0, "drafter": "none"}
        first = engine.chat(said, **options).text
        said += [
            {"role": "assistant", "content": first},
            {"role": "user", "content": "and then?"},
        ]
        assert choice["turns"] == [first, engine.chat(said, **options).text]
    assert records[1]["text"] == first == records[2]["choices"][0]["turns"][0]


def test_a_prompt_that_takes_too_long_has_failed(batch: Setting) -> None:
    prompts = [texts(1)[0], Prompt(1, "prompt", turns=("hello " * 600,))]
    records = batch.run(prompts, settings=LONG, timeout=0.2, load={"n_ctx": 4096})
    assert [record["error"] for record in records] == [
        "it took longer than 0.2 seconds (--timeout)"
    ] * 2
    assert batch.told("died") == [], "it ended by itself"


def test_a_worker_that_hangs_is_killed(batch: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "_GRACE", 0.3)

    def freeze(news: News) -> None:
        if news.what == "begun" and news.index == 0:
            os.kill(news.pid, signal.SIGSTOP)

    records = batch.run(texts(2), heard=freeze, timeout=1.0)
    assert "took longer than" in records[0]["error"]
    assert records[0]["attempts"] == 1, "it would hang again"
    assert records[1]["error"] is None


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"target": "/nowhere.gguf"}, ModelError, "nowhere.gguf"),
        ({"settings": {"grammar": "nonsense"}}, OptionError, "grammar"),
        ({"settings": {"logit_bias": {"99999": 1.0}}}, OptionError, "logit_bias names token 99999"),
    ],
    ids=["model", "grammar", "bias"],
)
def test_what_no_worker_can_do_is_told_at_once(
    change: dict[str, Any], error: type[Exception], said: str, batch: Setting
) -> None:
    with pytest.raises(error, match=said):
        batch.run(texts(3), n_workers=2, **change)
    assert batch.news == []


def test_a_worker_that_dies_before_it_is_ready_ends_it(
    batch: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    (tmp_path / "python").write_text("#!/bin/sh\necho 'no memory at all' >&2; exit 3\n")
    (tmp_path / "python").chmod(0o755)
    with pytest.raises(ModelError, match="exited with code 3: no memory at all"):
        batch.run(texts(2))


def test_a_worker_that_cannot_be_started_again_is_done_without(
    batch: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its model is gone when it is to be loaded again; another has it loaded still."""
    model = batch.target
    moved = batch.folder / "target.gguf"
    moved.symlink_to(model)
    batch.target = moved
    held: list[int] = []
    killed: list[int] = []

    def hear(news: News) -> None:
        if len(batch.told("ready")) < 2:
            if news.what == "begun":  # the other one shall not come too late
                os.kill(news.pid, signal.SIGSTOP)
                held.append(news.pid)
            return
        while held:
            os.kill(held.pop(), signal.SIGCONT)
        if not killed and news.what == "begun":
            moved.unlink()
            killed.append(news.worker)
            os.kill(news.pid, signal.SIGKILL)

    records = batch.run(texts(12), settings={"max_tokens": 400}, n_workers=2, heard=hear)
    assert [record["error"] for record in records] == [None] * 12
    (lost,) = batch.told("lost")
    assert [lost.worker] == killed
    assert "target.gguf" in lost.why


def test_it_ends_when_there_is_nobody_left(batch: Setting) -> None:
    model = batch.target
    moved = batch.folder / "target.gguf"
    moved.symlink_to(model)
    batch.target = moved

    def hear(news: News) -> None:
        if news.what == "begun" and news.index == 1:
            moved.unlink()
            os.kill(news.pid, signal.SIGKILL)

    with pytest.raises(ModelError, match=r"target\.gguf"):
        batch.run(texts(4), heard=hear)
    assert (batch.folder / "r.jsonl").read_bytes().count(b"\n") == 1, "what was finished is kept"
    assert (batch.folder / "r.jsonl.part").exists()
