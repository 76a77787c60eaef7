"""The process of a worker: loads a pair, then answers one prompt after the other.

Lines of JSON in on stdin, out on stdout; when stdin ends, so does the process, whatever it is at.
Knows no journal, no order, no other worker.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from time import perf_counter
from typing import Any

from ggufspec.batch.prompts import Prompt
from ggufspec.batch.settings import prompt_seed
from ggufspec.decoding.stats import Stats
from ggufspec.drafting import profile_store
from ggufspec.engine import scoring
from ggufspec.engine.calibration import settle
from ggufspec.engine.engine import Engine
from ggufspec.engine.generation import Completion
from ggufspec.engine.load import load
from ggufspec.engine.text import Message
from ggufspec.errors import GgufspecError, PromptError
from ggufspec.llama.devices import n_threads_default
from ggufspec.llama.profile_key import facts

_THREADS = ("n_threads", "n_threads_draft")
_ROLES = ("user", "assistant")


def main() -> None:
    """Work until stdin ends."""
    incoming, outgoing = _own_pipes()
    told: SimpleQueue[dict[str, Any]] = SimpleQueue()
    threading.Thread(target=_listen, args=(incoming, told), daemon=True).start()

    def tell(**message: Any) -> None:
        data = memoryview(json.dumps(message).encode() + b"\n")
        while data:
            data = data[os.write(outgoing, data) :]

    task = told.get()
    if task["verbose"]:
        _show_log()
    try:
        engine = _loaded(task)
        known = _known(engine, task)
    except (GgufspecError, OSError, MemoryError) as error:
        tell(refused=str(error) or type(error).__name__, kind=type(error).__name__)
        sys.exit(1)
    tell(ready=True, known=known, placement=engine.placement)
    while True:
        job = told.get()
        prompt = Prompt.of_document(job["prompt"])
        tell(done=prompt.index, record=answer(engine, prompt, task))


def answer(engine: Engine, prompt: Prompt, task: Mapping[str, Any]) -> dict[str, Any]:
    """The record of a prompt, or of why it has none."""
    started = perf_counter()
    written: list[Completion] = []
    error = None
    try:
        for completion in _texts(engine, prompt, task):
            written.append(completion)
    except GgufspecError as failure:
        error = str(failure)
    except _TooSlow:
        error = too_slow(task["timeout"])
    record: dict[str, Any] = {prompt.id_name: prompt.id} if prompt.id is not None else {}
    if error is None and prompt.kind == "turns":
        record["choices"] = [_as_choice(written)]
    elif error is None:
        record["text"] = written[0].text
    if written and error is None:
        record["finish_reason"] = written[-1].finish_reason
    return {
        **record,
        **_counts([completion.stats for completion in written]),
        "seed": prompt_seed(task["seed"], prompt.index),
        "seconds": perf_counter() - started,
        "error": error,
    }


def too_slow(timeout: float) -> str:
    """What is said of a prompt that took longer than it may."""
    return f"it took longer than {timeout:g} seconds (--timeout)"


class _TooSlow(Exception):
    """The prompt's time is over."""


def _texts(engine: Engine, prompt: Prompt, task: Mapping[str, Any]) -> Iterator[Completion]:
    """A text, or one for each turn. Each prompt begins with nothing remembered of others."""
    deadline = perf_counter() + task["timeout"] if task["timeout"] else None

    def check_time(*_: object) -> None:
        if deadline is not None and perf_counter() > deadline:
            raise _TooSlow

    engine.forget()
    said: list[str] = []
    for turn, text in enumerate(prompt.texts or [""]):
        said.append(text)
        tokens = _read(engine, prompt, said, task)
        seed = prompt_seed(task["seed"], prompt.index, turn)
        stream = engine.stream(tokens, seed=seed, progress=check_time, **_settings(task))
        for _ in stream:
            check_time()
        said.append(stream.completion.text)
        yield stream.completion


def _read(
    engine: Engine, prompt: Prompt, said: Sequence[str], task: Mapping[str, Any]
) -> str | list[int]:
    """What is continued: a text, or a conversation by the target's own template."""
    chat, system = task["chat"], task["system"]
    messages: list[Message] = [dict(message) for message in prompt.messages]
    if prompt.kind == "messages":
        if chat is False:
            raise PromptError("messages are a conversation; they cannot be asked with --no-chat")
    elif chat is None:
        has_template = engine.target.model.chat_template is not None
        chat = system is not None or (prompt.kind == "turns" and has_template)
    if prompt.kind != "messages":
        if not chat:
            return "\n".join(said)
        messages = [{"role": _ROLES[i % 2], "content": text} for i, text in enumerate(said)]
    if system is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return engine.render(messages)


def _loaded(task: Mapping[str, Any]) -> Engine:
    """The pair, with this worker's share of the machine's threads where nobody said how many."""
    settings = dict(task["load"])
    if settings.get("n_threads") is None and task["n_workers"] > 1:
        settings["n_threads"] = max(n_threads_default() // task["n_workers"], 1)
    draft = task["draft"] and Path(task["draft"])
    engine = load(Path(task["target"]), draft, **settings)
    scoring.sampling(engine, [], **_settings(task))  # an error is one for every prompt
    return engine


def _known(engine: Engine, task: Mapping[str, Any]) -> dict[str, object] | None:
    """What texts begin from where costs say how far to draft: the same in every worker.

    And in every batch of this pair on this machine, however many workers it has: it is remembered
    without their threads.
    """
    if task["settings"]["n_draft"] != "auto" or task["settings"]["drafter"] == "none":
        return None
    about = facts(engine.target, engine.draft)
    shared = {name: each for name, each in about.items() if name not in _THREADS}
    shared |= {"about": "batch", "n_draft_max": engine.n_draft_max}
    for known in (task["known"], profile_store.recall(shared)):
        if known is not None:
            try:
                return settle(engine, known)
            except ValueError:
                continue
    known = settle(engine)
    profile_store.remember(shared, known)
    return known


def _settings(task: Mapping[str, Any]) -> dict[str, Any]:
    """What `stream` takes: JSON has no numbers for names."""
    settings = dict(task["settings"])
    biases = settings.get("logit_bias") or {}
    settings["logit_bias"] = {int(token): float(bias) for token, bias in biases.items()}
    return settings


def _as_choice(written: Sequence[Completion]) -> dict[str, Any]:
    """As Spec-Bench keeps answers."""
    return {
        "index": 0,
        "turns": [completion.text for completion in written],
        "decoding_steps": [completion.stats.n_rounds for completion in written],
        "new_tokens": [completion.stats.n_generated for completion in written],
        "wall_time": [
            completion.stats.seconds.prompt + completion.stats.seconds.generation
            for completion in written
        ],
    }


def _counts(stats: Sequence[Stats]) -> dict[str, Any]:
    """Sums over the texts of a prompt, and what follows from them."""
    n_generated, n_rounds, n_drafted, n_accepted = (
        sum(getattr(each, name) for each in stats)
        for name in ("n_generated", "n_rounds", "n_drafted", "n_accepted")
    )
    seconds = sum(each.seconds.generation for each in stats)
    return {
        "n_prompt": sum(each.n_prompt for each in stats),
        "n_generated": n_generated,
        "n_rounds": n_rounds,
        "n_drafted": n_drafted,
        "n_accepted": n_accepted,
        "acceptance": n_accepted / n_drafted if n_drafted else 0.0,
        "mean_length": n_generated / n_rounds if n_rounds else 0.0,
        "tokens_per_second": n_generated / seconds if seconds > 0 else 0.0,
    }


def _own_pipes() -> tuple[int, int]:
    """Where messages come from and go to; what anybody else prints goes to stderr."""
    incoming, outgoing = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    return incoming, outgoing


def _listen(incoming: int, told: SimpleQueue[dict[str, Any]]) -> None:
    """Hand on what the parent says. When it is gone, nobody needs us any more."""
    with os.fdopen(incoming, "rb") as lines:
        for line in lines:
            told.put(json.loads(line))
    os._exit(0)


def _show_log() -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger = logging.getLogger("ggufspec")
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
