"""Records texts of a real pair for `tests.benchmarks.replay`: the draft reads along.

    python -m tests.benchmarks.record large.gguf small.gguf --prompts prompts.jsonl -o texts.npz

Of each text it stores the tokens, numbered anew in order of appearance, and for each position both
models' logit gaps and the probability that a token of the draft is accepted there.
"""

from __future__ import annotations

import argparse
import json
import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from ggufspec.decoding.rng import uniform_streams
from ggufspec.decoding.sampling import Sampling, to_probs
from ggufspec.decoding.types import Logits
from ggufspec.engine.load import load
from ggufspec.llama.context import Context
from ggufspec.llama.context_options import ContextOptions
from ggufspec.llama.session import LlamaSession

GAP_STEPS = 31  # of a logit: a byte goes up to 8.2, beyond what is distinguished
ACCEPTANCE_STEPS = 255  # from 0 to 1
_N_AT_ONCE = 8  # texts that share a pass
_N_OF_PROMPT = 32  # last tokens of a prompt that are recorded too
_N_CTX = 1024


@dataclass
class _Recorded:
    """One text under way. The lists hold one value for each position, first of the prompt."""

    kind: str
    temperature: float
    tokens: array[int]
    n_prompt: int
    seed: int
    target_gaps: list[float] = field(default_factory=list)
    draft_gaps: list[float] = field(default_factory=list)
    acceptances: list[float] = field(default_factory=list)
    is_over: bool = False

    def __post_init__(self) -> None:
        self.sampling = Sampling(temperature=self.temperature, top_k=20, top_p=0.8, min_p=0.0)
        self.uniforms = uniform_streams(self.seed)[0]

    def observe(self, target: Logits, draft: Logits, tail: Sequence[int] = ()) -> int:
        """Record each row of both models, before and after each of `tail`; draws a token."""
        ours, theirs = (to_probs(rows, self.sampling, (), tail) for rows in (target, draft))
        for i in range(len(target)):
            self.target_gaps.append(ours.gap(i))
            self.draft_gaps.append(theirs.gap(i))
            self.acceptances.append(ours.overlap(i, theirs, i))
        return ours.pick(len(target) - 1, self.uniforms(1)[0])

    def document(self) -> dict[str, np.ndarray]:
        """Arrays; token ids are numbered anew, so that no text can be read from them."""
        ids: dict[int, int] = {}
        return {
            "kind": np.array(self.kind),
            "temperature": np.array(self.temperature, np.float32),
            "tokens": np.array([ids.setdefault(t, len(ids)) for t in self.tokens], np.uint16),
            "n_prompt": np.array(self.n_prompt, np.uint16),
            "target_gaps": _bytes(self.target_gaps, GAP_STEPS),
            "draft_gaps": _bytes(self.draft_gaps, GAP_STEPS),
            "acceptances": _bytes(self.acceptances, ACCEPTANCE_STEPS),
        }


def main(arguments: Sequence[str] | None = None) -> None:
    """Record and store after each text that is complete."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.record")
    parser.add_argument("target", type=Path)
    parser.add_argument("draft", type=Path)
    parser.add_argument(
        "--prompts", type=Path, required=True, help='lines of {"kind": ..., "prompt": ...}'
    )
    parser.add_argument("--tokens", type=int, default=128, help="of a text, at most")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--temperature", type=float, default=0.0, help="0.7: top-k 20, top-p 0.8")
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args(arguments)
    prompts = [json.loads(line) for line in options.prompts.read_text().splitlines()]
    with load(options.target, options.draft, n_ctx=_N_CTX, tuned=False) as engine:
        waiting = iter(
            [
                _Recorded(each["kind"], options.temperature, array("i", tokens), len(tokens), seed)
                for seed, each in enumerate(prompts)
                if len(tokens := engine.render([{"role": "user", "content": each["prompt"]}]))
                < _N_CTX - options.tokens
            ]
        )
        stop_tokens = engine.vocab.stop_tokens
        contexts = [
            Context(
                context.model,
                ContextOptions(
                    n_ctx=_N_CTX,
                    n_rows=_N_OF_PROMPT,
                    n_sequences=_N_AT_ONCE,
                    n_threads=options.threads,
                ),
            )
            for context in (engine.pair.target, engine.pair.draft)
            if context
        ]
        done: list[_Recorded] = []
        started = perf_counter()
        for text in _written(waiting, contexts, stop_tokens, options.tokens):
            done.append(text)
            seconds = perf_counter() - started
            sys.stderr.write(f"[{seconds / 60:5.1f} min] {len(done)} of {len(prompts)} texts\n")
            arrays: dict[str, Any] = {
                f"{i}/{name}": values
                for i, each in enumerate(done)
                for name, values in each.document().items()
            }
            np.savez_compressed(options.output, **arrays)


def _written(
    waiting: Iterator[_Recorded],
    contexts: Sequence[Context],
    stop_tokens: frozenset[int],
    n_tokens: int,
) -> Iterator[_Recorded]:
    """The texts as they are completed; both models read the same tokens in each pass."""
    sessions = [[LlamaSession(context, i) for context in contexts] for i in range(_N_AT_ONCE)]
    writing: dict[int, _Recorded] = {}
    while True:
        for i in set(range(_N_AT_ONCE)) - set(writing):
            if (text := next(waiting, None)) is not None:
                writing[i] = text
                head = text.tokens[: -_N_OF_PROMPT + 1] or text.tokens[:1]
                tail = text.tokens[len(head) :]
                target, draft = (session.score(head, tail) for session in sessions[i])
                text.tokens.append(text.observe(target, draft, tail))
        if not writing:
            return
        order = list(writing)
        for m, context in enumerate(contexts):
            context.decode_together([sessions[i][m].prepare(writing[i].tokens) for i in order])
        for row, i in enumerate(order):
            text = writing[i]
            target, draft = (context.rows(row, 1) for context in contexts)
            text.tokens.append(text.observe(target, draft))
            if text.tokens[-1] in stop_tokens or len(text.tokens) - text.n_prompt >= n_tokens:
                del writing[i]
                yield text


def _bytes(values: Sequence[float], steps: int) -> np.ndarray:
    return np.array([round(min(value * steps, 255)) for value in values], np.uint8)


if __name__ == "__main__":
    main()
