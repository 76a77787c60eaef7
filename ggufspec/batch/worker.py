"""The worker process: loads a pair, then generates text for one prompt after another."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from io import FileIO
from queue import SimpleQueue
from time import perf_counter
from typing import Any

from ggufspec.batch.run import prompt_seed, timeout_error
from ggufspec.common.files import write_all
from ggufspec.common.progress import LoadProgress, NamedProgress
from ggufspec.common.prompts import Prompt
from ggufspec.decoding.stats import COUNTS, Stats
from ggufspec.drafting import profile_store
from ggufspec.engine.calibration import settle
from ggufspec.engine.chat_template import conversation
from ggufspec.engine.engine import Engine
from ggufspec.engine.load import load
from ggufspec.engine.options import CheckedOptions
from ggufspec.engine.template_probe import Message
from ggufspec.engine.text import Completion
from ggufspec.errors import GgufspecError, PromptError
from ggufspec.llama.devices import n_threads_default
from ggufspec.llama.log import show_log
from ggufspec.measure.pairs import profile_key

_THREADS = ("n_threads", "n_threads_draft")


def main() -> None:
    incoming, outgoing = _take_pipes()
    messages: SimpleQueue[dict[str, Any]] = SimpleQueue()
    threading.Thread(target=_read, args=(incoming, messages), daemon=True).start()

    def send(**message: Any) -> None:
        write_all(outgoing, json.dumps(message).encode() + b"\n")

    def tell(what: str, done: float, total: float = 1.0) -> None:
        send(loading=what, share=done / total)

    task = messages.get()
    if task["verbose"]:
        show_log()
    try:
        options = _options(task)
        engine = _load(task, options, tell)
        profile = known_profile(engine, task, tell)
    except (GgufspecError, OSError, MemoryError) as error:
        send(refused=str(error) or type(error).__name__, kind=type(error).__name__)
        sys.exit(1)
    send(ready=True, profile=profile, note="; ".join(engine.notes))
    while True:
        prompt = Prompt.of_document(messages.get()["prompt"])
        send(record=answer(engine, prompt, task, options))


def answer(
    engine: Engine, prompt: Prompt, task: Mapping[str, Any], options: CheckedOptions
) -> dict[str, Any]:
    started = perf_counter()
    completions: list[Completion] = []
    record: dict[str, Any] = dict(prompt.label)
    error = None
    try:
        completions.extend(_generate(engine, prompt, task, options))
        if prompt.kind == "turns":
            record["choices"] = [_as_choice(completions)]
        else:
            record["text"] = completions[0].text
        record["finish_reason"] = completions[-1].finish_reason
    except GgufspecError as failure:
        error = str(failure)
    return {
        **record,
        **_counts([completion.stats for completion in completions]),
        "seed": prompt_seed(task["seed"], prompt.index),
        "seconds": perf_counter() - started,
        "error": error,
    }


def _generate(
    engine: Engine, prompt: Prompt, task: Mapping[str, Any], options: CheckedOptions
) -> Iterator[Completion]:
    deadline = perf_counter() + task["timeout"] if task["timeout"] else None

    def check_time(*_: object) -> None:
        if deadline is not None and perf_counter() > deadline:
            raise GgufspecError(timeout_error(task["timeout"]))

    engine.forget()
    turns: list[str] = []  # user's and target's turns, alternating
    for turn, text in enumerate(prompt.turns or [""]):
        turns.append(text)
        tokens = _to_tokens(engine, prompt, turns, task)
        seed = prompt_seed(task["seed"], prompt.index, turn)
        settings = replace(options, seed=seed, progress=check_time)
        with engine.begin(tokens, settings) as stream:
            for _ in stream:
                check_time()
        turns.append(stream.completion.text)
        yield stream.completion


def _to_tokens(
    engine: Engine, prompt: Prompt, turns: Sequence[str], task: Mapping[str, Any]
) -> str | list[int]:
    chat, system = task["chat"], task["system"]
    if prompt.kind == "messages":
        if chat is False:
            raise PromptError(
                "messages are a conversation and need the chat template; leave --no-chat out"
            )
        messages: list[Message] = [dict(message) for message in prompt.messages]
    else:
        if chat is None:
            has_template = engine.chat_template is not None
            chat = system is not None or (prompt.kind == "turns" and has_template)
        if not chat:
            return "\n".join(turns)
        messages = conversation(turns)
    if system is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return engine.render(messages)


def _load(task: Mapping[str, Any], options: CheckedOptions, progress: LoadProgress) -> Engine:
    """Load the pair; if no number of threads is given, with this worker's share of the cores."""
    settings = dict(task["load"])
    if settings.get("n_threads") is None and task["n_workers"] > 1:
        settings["n_threads"] = max(n_threads_default() // task["n_workers"], 1)
    settings = {"cache_ram": 0, "mmproj_auto": False, **settings, "progress": progress}
    engine = load(task["target"], task["draft"], **settings)
    engine.check(options)  # errors before any prompt
    return engine


def known_profile(
    engine: Engine, task: Mapping[str, Any], progress: NamedProgress
) -> dict[str, object] | None:
    """The pair profile that all texts start from; None if the draft length does not depend on it.

    It is the same in every worker. It is stored without the number of threads, so later batches of
    this pair on this machine use it too, with any number of workers; not if other programs
    disturbed its measurement.
    """
    if task["settings"]["n_draft"] != "auto" or task["settings"]["drafter"] == "none":
        return None
    about = profile_key(engine.pair.target, engine.pair.draft)
    key = {name: each for name, each in about.items() if name not in _THREADS}
    key |= {"about": "batch", "n_draft_max": engine.n_draft_max}
    for profile in (task["profile"], profile_store.recall(key)):
        if profile is not None:
            with contextlib.suppress(ValueError):
                return engine.run(partial(settle, engine.pair, profile))
    profile = engine.run(partial(settle, engine.pair, progress=progress))
    if not engine.pair.profile.is_settled_disturbed:
        profile_store.remember(key, profile)
    return profile


def _options(task: Mapping[str, Any]) -> CheckedOptions:
    """The options of all texts; JSON has made strings of the tokens in logit_bias."""
    settings = dict(task["settings"])
    biases = settings.get("logit_bias") or {}
    settings["logit_bias"] = {int(token): float(bias) for token, bias in biases.items()}
    return CheckedOptions.of(settings)  # type: ignore[arg-type]


def _as_choice(completions: Sequence[Completion]) -> dict[str, Any]:
    stats = [completion.stats for completion in completions]
    return {
        "index": 0,
        "turns": [completion.text for completion in completions],
        "decoding_steps": [each.n_rounds for each in stats],
        "new_tokens": [each.n_generated for each in stats],
        "wall_time": [each.seconds.prompt + each.seconds.generation for each in stats],
    }


def _counts(stats: Sequence[Stats]) -> dict[str, Any]:
    found = {name: sum(getattr(each, name) for each in stats) for name in COUNTS}
    seconds = sum(each.seconds.generation for each in stats)
    return {
        **found,
        "acceptance": found["n_accepted"] / max(found["n_drafted"], 1),
        "mean_length": found["n_generated"] / max(found["n_rounds"], 1),
        "tokens_per_second": found["n_generated"] / seconds if seconds > 0 else 0.0,
    }


def _take_pipes() -> tuple[int, FileIO]:
    """Descriptor and file (in, out) for messages; other output to stdout is sent to stderr."""
    incoming, outgoing = os.dup(0), FileIO(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    return incoming, outgoing


def _read(incoming: int, messages: SimpleQueue[dict[str, Any]]) -> None:
    """Queue the parent's messages; end this process when the parent has ended."""
    with os.fdopen(incoming, "rb") as lines:
        for line in lines:
            messages.put(json.loads(line))
    os._exit(0)
