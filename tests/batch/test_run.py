"""Batches in real processes: workers are replaced, and no text depends on its worker."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from batch.conftest import LOAD, BatchSetup, killing, texts, together

from ggufspec.batch.run import BatchEvent, WorkerEvent, prompt_seed
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
    """The fields that must not depend on the number of workers."""
    names = ("index", "text", "seed", "n_rounds", "n_drafted", "n_accepted", "finish_reason")
    return [record[name] for name in names]


def test_the_number_of_workers_changes_no_text(batch: BatchSetup) -> None:
    load = {"n_threads": None}  # so that each has its share, as people run it
    settings: dict[str, Any] = {"n_draft": "auto", "max_tokens": 60}
    one = batch.run(texts(8), "one", settings=settings, load=load)
    three = batch.run(
        texts(8), "three", settings=settings, load=load, n_workers=3, report=together(3)
    )
    assert list(map(of_text, three)) == list(map(of_text, one))
    assert [record["index"] for record in three] == list(range(8))
    assert {record["worker"] for record in one} == {1}
    assert {record["worker"] for record in three} == {1, 2, 3}
    assert all(is_gone(event.pid) for event in batch.events_of("ready"))
    assert len({record["text"] for record in one}) == 8, "each has a seed of its own"


def test_an_engine_of_its_own_writes_the_same_text_from_the_recorded_seed(
    batch: BatchSetup,
) -> None:
    records = batch.run(texts(3), settings={"verify": "rejection"}, seed=7)
    record = records[2]
    with load(batch.target, batch.draft, **LOAD, tuned=False) as engine:
        done = engine.generate(
            texts(3)[2].turns[0], seed=record["seed"], max_tokens=24, n_draft=2, verify="rejection"
        )
    assert record["text"] == done.text
    assert record["seed"] == prompt_seed(7, 2)
    assert (record["n_prompt"], record["n_generated"]) == (done.stats.n_prompt, 24)
    assert record["acceptance"] == done.stats.acceptance
    assert (record["finish_reason"], record["error"]) == ("length", None)
    assert record["seconds"] > 0
    assert record["tokens_per_second"] > 0
    assert prompt_seed(1, 2) == prompt_seed(1, 2, 0) == 1809754618 != prompt_seed(1, 2, 1)


def test_the_steps_of_loading_are_reported(batch: BatchSetup) -> None:
    batch.run(texts(1), settings={"n_draft": "auto"})
    shares = {event.reason: event.share for event in batch.events_of("loading")}
    steps = ["kernels", "target", "draft", "contexts", "costs", "draft costs"]
    assert shares == dict.fromkeys(steps, 1.0)


def test_a_killed_worker_is_replaced_and_its_prompt_tried_again(batch: BatchSetup) -> None:
    calm = batch.run(texts(6), "calm")
    records = batch.run(texts(6), "killed", n_workers=2, report=killing(2, n_times=1))
    assert list(map(of_text, records)) == list(map(of_text, calm))
    assert [record["attempts"] for record in records] == [1, 1, 2, 1, 1, 1]
    (death,) = batch.events_of("ended")
    assert (death.index, death.will_retry) == (2, True)
    assert "killed by SIGKILL" in death.reason


def test_a_prompt_fails_after_its_retries_and_the_others_do_not(
    batch: BatchSetup,
) -> None:
    records = batch.run(texts(4), report=killing(1), n_retries=1)
    assert records[1]["error"].startswith("its worker process was killed by SIGKILL")
    assert records[1]["attempts"] == 2
    assert [record["error"] for record in records].count(None) == 3
    assert [event.will_retry for event in batch.events_of("ended")] == [True, False]
    assert [event.index for event in batch.events_of("begun")] == [0, 1, 1, 2, 3]


def test_an_error_fails_its_prompt_only(batch: BatchSetup) -> None:
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
    assert batch.events_of("ended") == [], "no process ended"


def test_turns_are_answered_in_order(batch: BatchSetup) -> None:
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
    with load(batch.target, **LOAD, tuned=False) as engine:
        said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
        options: Any = {"max_tokens": 24, "temperature": 0, "drafter": "none"}
        first = engine.chat(said, **options).text
        said += [
            {"role": "assistant", "content": first},
            {"role": "user", "content": "and then?"},
        ]
        assert choice["turns"] == [first, engine.chat(said, **options).text]
    assert records[1]["text"] == first == records[2]["choices"][0]["turns"][0]


def test_a_prompt_fails_at_its_timeout(batch: BatchSetup) -> None:
    prompts = [texts(1)[0], Prompt(1, "prompt", turns=("hello " * 600,))]
    records = batch.run(prompts, settings=LONG, timeout=0.2, load={"n_ctx": 4096})
    assert [record["error"] for record in records] == [
        "it took longer than 0.2 seconds (--timeout)"
    ] * 2
    assert batch.events_of("ended") == [], "the worker stopped in time"


def test_a_worker_that_hangs_is_killed(batch: BatchSetup) -> None:
    def freeze(event: BatchEvent) -> None:
        if event.what == "begun" and event.index == 0:
            os.kill(event.pid, signal.SIGSTOP)

    records = batch.run(texts(2), report=freeze, timeout=2.0, grace=0.3)
    assert "took longer than" in records[0]["error"]
    assert records[0]["attempts"] == 1, "it would take too long again"
    assert records[1]["error"] is None


class LateProcess:
    """A worker that finishes its first prompt just when it is killed at the deadline."""

    pid, node = 1, ""

    def __init__(
        self, number: int, task: Mapping[str, Any], events: SimpleQueue[WorkerEvent]
    ) -> None:
        self.number, self.events = number, events
        self.index: int | None = None
        self.is_alive = True
        self.events.put(WorkerEvent(number, {"ready": True, "profile": None, "note": ""}))

    def send(self, message: Mapping[str, Any]) -> None:
        self.index = message["prompt"]["index"]
        if self.index != 0 and self.is_alive:
            self.finish()

    def finish(self) -> None:
        record = {"error": None, "text": str(self.index)}
        self.events.put(WorkerEvent(self.number, {"record": record}))

    def kill(self) -> None:
        if self.is_alive and self.index == 0:
            self.finish()
        if self.is_alive:
            self.events.put(WorkerEvent(self.number, None))
        self.is_alive = False

    def close(self) -> None:
        self.kill()

    def end_reason(self) -> str:
        return "its worker process was killed"


def test_a_record_that_arrives_at_the_deadline_counts_and_fails_no_other_prompt(
    batch: BatchSetup,
) -> None:
    records = batch.run(texts(3), start=LateProcess, timeout=0.1, grace=0.0, n_retries=0)
    assert [record["error"] for record in records] == [None] * 3
    assert [record["text"] for record in records] == ["0", "1", "2"]
    assert [record["attempts"] for record in records] == [1, 1, 1]


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"target": "/nowhere.gguf"}, ModelError, "nowhere.gguf"),
        ({"settings": {"grammar": "nonsense"}}, OptionError, "grammar"),
        ({"settings": {"logit_bias": {"99999": 1.0}}}, OptionError, "logit_bias names token 99999"),
    ],
    ids=["model", "grammar", "bias"],
)
def test_what_every_worker_would_refuse_is_raised_at_once(
    change: dict[str, Any], error: type[Exception], said: str, batch: BatchSetup
) -> None:
    with pytest.raises(error, match=said):
        batch.run(texts(3), n_workers=2, **change)
    assert {event.what for event in batch.events} <= {"loading"}


def test_a_worker_that_ends_before_it_is_ready_ends_the_batch(
    batch: BatchSetup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    (tmp_path / "python").write_text("#!/bin/sh\necho 'no memory at all' >&2; exit 3\n")
    (tmp_path / "python").chmod(0o755)
    with pytest.raises(ModelError, match="exited with code 3: no memory at all"):
        batch.run(texts(2))


def test_a_batch_goes_on_without_a_worker_that_cannot_be_started_again(
    batch: BatchSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file of its model is removed; another worker has it loaded.

    That one waits until the first is lost: else it may write all texts before two starts fail.
    """
    model = batch.target
    moved = batch.folder / "target.gguf"
    moved.symlink_to(model)
    batch.target = moved
    held: list[int] = []
    killed: list[int] = []

    def report(event: BatchEvent) -> None:
        if event.what == "lost":
            os.kill(held.pop(), signal.SIGCONT)
        elif event.what == "begun" and not batch.events_of("lost"):
            if not held:
                os.kill(event.pid, signal.SIGSTOP)
                held.append(event.pid)
            else:
                moved.unlink()
                killed.append(event.worker)
                os.kill(event.pid, signal.SIGKILL)

    records = batch.run(texts(12), n_workers=2, report=report)
    assert [record["error"] for record in records] == [None] * 12
    (lost,) = batch.events_of("lost")
    assert [lost.worker] == killed
    assert "target.gguf" in lost.reason


def test_a_batch_ends_when_no_worker_can_be_started(batch: BatchSetup) -> None:
    model = batch.target
    moved = batch.folder / "target.gguf"
    moved.symlink_to(model)
    batch.target = moved

    def report(event: BatchEvent) -> None:
        if event.what == "begun" and event.index == 1:
            moved.unlink()
            os.kill(event.pid, signal.SIGKILL)

    with pytest.raises(ModelError, match=r"target\.gguf"):
        batch.run(texts(4), report=report)
    assert (batch.folder / "r.jsonl").read_bytes().count(b"\n") == 1, "the finished record is kept"
    assert (batch.folder / "r.jsonl.part").exists()
