"""Benchmark results without measuring: a recorded one, and others made from given rates."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ggufspec.bench.experiment import contenders
from ggufspec.bench.records import BenchResults, Contender, Measurement, RoundTiming

RECORDED = Path(__file__).parent / "bench" / "data" / "recorded.json"
_STAIRS = (27, 38, 44, 36, 55, 58, 60, 52, 75, 78)  # ms of a pass over 1, 2 ... tokens
_N_TOKENS = 48


def document() -> dict[str, Any]:
    """The recorded benchmark: the embedded pair, two prompts, two runs; most rounds left out."""
    found: dict[str, Any] = json.loads(RECORDED.read_text())
    return found


def text(
    contender: str, prompt: str = "a", run: int = 0, rate: float = 10.0, **changes: Any
) -> Measurement:
    """A text of 40 tokens at this rate."""
    made = Measurement(
        contender=contender,
        prompt=prompt,
        run=run,
        n_prompt=5,
        n_generated=40,
        n_rounds=40,
        n_drafted=0,
        n_accepted=0,
        prompt_seconds=0.5,
        first_token_seconds=0.6,
        generation_seconds=40 / rate,
    )
    return replace(made, **changes)


def two(
    plain: Mapping[tuple[str, int], float],
    other: Mapping[tuple[str, int], float],
    name: str = "draft 3",
    **of_other: Any,
) -> BenchResults:
    """Plain and another, at rates by prompt and run."""
    pair = [
        Contender("plain", {"drafter": "none", "temperature": 0.0}),
        Contender(name, {"n_draft": 3, "temperature": 0.0}, baseline="plain"),
    ]
    texts = [text("plain", *key, rate) for key, rate in plain.items()]
    texts += [text(name, *key, rate, **of_other) for key, rate in other.items()]
    return BenchResults({}, pair, measurements=texts)


def lively(
    lengths: Sequence[int | str] = (1, 3, 8, "auto"),
    *,
    n_prompts: int = 3,
    n_runs: int = 2,
    chance: float = 0.8,
    noise: float = 0.02,
    slower: float = 1.0,
    seed: int = 0,
    models: Mapping[str, Any] | None = None,
    **ways: Any,
) -> BenchResults:
    """A whole benchmark with its rounds, on a made machine."""
    rng = np.random.default_rng(seed)
    known = {"temperatures": (0.0,), "has_draft": True, **ways}
    made = BenchResults(
        {"n_tokens": _N_TOKENS},
        contenders(lengths=lengths, **known),
        {"cpu": "a made one"},
        {"ggufspec": "0.1.0"},
        dict(models or {"": {"target": "large.gguf", "draft": "small.gguf", "target_threads": 4}}),
    )
    for run in range(n_runs):
        for prompt in range(n_prompts):
            for contender in made.contenders:
                n_draft = contender.options.get("n_draft", 0)
                rounds: list[RoundTiming] = []
                n_done = 0
                while n_done < _N_TOKENS:
                    wanted = int(rng.integers(2, 6)) if n_draft == "auto" else n_draft
                    wanted = min(wanted, _N_TOKENS - n_done - 1)
                    n_kept = int(np.argmin([*(rng.random(wanted) < chance), False]))
                    pace = slower * np.exp(rng.normal(0, noise)) * 1e-3
                    seconds = round(float(_STAIRS[wanted] * pace), 6)
                    drafting = round(float(3 * wanted * pace), 6)
                    rounds.append(RoundTiming(n_kept + 1, wanted, n_kept, drafting, seconds))
                    n_done += n_kept + 1
                reach = range(max(each.n_drafted for each in rounds))
                made.measurements.append(
                    text(
                        *(contender.name, f"prompt {prompt}", run),
                        category=("writing", "coding")[prompt % 2],
                        n_generated=n_done,
                        n_rounds=len(rounds),
                        n_drafted=sum(each.n_drafted for each in rounds),
                        n_accepted=sum(each.n_accepted for each in rounds),
                        drafted_by_position=[sum(t.n_drafted > i for t in rounds) for i in reach],
                        accepted_by_position=[sum(t.n_accepted > i for t in rounds) for i in reach],
                        generation_seconds=sum(t.draft_seconds + t.target_seconds for t in rounds),
                        tokens=list(range(n_done)),
                        rounds=rounds,
                    )
                )
    return made
