"""`serve`, `batch` and `run` with layers on a device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from device.conftest import ON_CPU, ON_DEVICE, PROMPTS, ROUNDING, LoadPair, logits
from serving import events_of, said, serving

import ggufspec
from ggufspec.engine.engine import Engine
from ggufspec.standin.embedded import embedded_draft, embedded_target

SPLIT = ["-ngl", "3", "-ngld", "-1", "-c", "256", "--temp", "0", "-n", "16", "--ignore-eos"]
PAIR = ["--target", embedded_target(), "--draft", embedded_draft()]
Program = Callable[..., str]


@pytest.fixture
def program(tmp_path: Path) -> Program:
    """`ggufspec ...` as a process, which has to succeed; returns its stdout."""

    def call(*args: object) -> str:
        paths = [str(Path(ggufspec.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        done = subprocess.run(
            [sys.executable, "-m", "ggufspec", *map(str, args)],
            capture_output=True,
            stdin=subprocess.DEVNULL,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            timeout=300,
        )
        assert done.returncode == 0, done.stderr.decode()[-2000:]
        return done.stdout.decode()

    return call


def assert_greedy_text(text: str, reference: Engine, prompt: str) -> None:
    """As assert_greedy, of a text whose tokens are not known."""
    tokens = reference.tokenize(prompt)
    both = reference.tokenize(prompt + text)
    assert both[: len(tokens)] == tokens
    rows = logits(reference, prompt, both[len(tokens) :])
    chosen = [row[token] for row, token in zip(rows, both[len(tokens) :], strict=True)]
    assert (rows.max(axis=1) - chosen).max() <= 2 * ROUNDING["f16"], text


def test_a_server_answers_requests_at_the_same_time(load: LoadPair) -> None:
    engine = load(**ON_DEVICE, n_slots=2)
    body: dict[str, Any] = {"temperature": 0, "max_tokens": 16, "n_draft": 3, "model": "any"}
    with serving(engine) as live, ThreadPoolExecutor() as pool:
        live.client.timeout = 300  # a driver may compile for minutes
        asked = [
            pool.submit(live.ok, "/v1/completions", prompt=prompt, **body) for prompt in PROMPTS
        ]
        answers = [each.result()["choices"][0]["text"] for each in asked]
        streamed = live.post("/v1/completions", prompt=PROMPTS[0], stream=True, **body)
        assert said(events_of(streamed)) == answers[0]
    for prompt, text in zip(PROMPTS, answers, strict=True):
        assert_greedy_text(text, load(**ON_CPU), prompt)


def test_a_batch_in_two_processes(load: LoadPair, program: Program, tmp_path: Path) -> None:
    prompts = [PROMPTS[i % 2] for i in range(6)]
    lines = [json.dumps({"id": i, "prompt": prompt}) for i, prompt in enumerate(prompts)]
    (tmp_path / "p.jsonl").write_text("\n".join(lines))
    program("batch", "p.jsonl", "-o", "r.jsonl", "--num-processes", 2, *PAIR, *SPLIT)
    records = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    assert [record["id"] for record in records] == list(range(6))
    for prompt, record in zip(prompts, records, strict=True):
        assert_greedy_text(record["text"], load(**ON_CPU), prompt)


@pytest.mark.parametrize("layers", [SPLIT[:4], ["-ngl", "auto"]], ids=["split", "auto"])
def test_run_prints_the_text(layers: list[str], load: LoadPair, program: Program) -> None:
    written = program("run", *PAIR, *SPLIT[4:], *layers, "-p", PROMPTS[0])
    assert_greedy_text(written.removesuffix("\n"), load(**ON_CPU), PROMPTS[0])
