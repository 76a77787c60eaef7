"""The commands with real models, as a user runs them; and `DraftModel` in `llama_cpp.Llama`."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

from greedy import assert_same
from real_models import Load, MakeLlama, PathOf, Program

import ggufspec
from ggufspec.engine.engine import Engine

PROMPT = "def fibonacci(n):\n    "
JSON = '{"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}'


def test_run_answers_as_the_chat_template_asks(program: Program, path_of: PathOf) -> None:
    smollm = path_of("smollm")
    question = ("--system", "You are a helpful assistant.", "-p", "Name the capital of France.")
    options = (*question, "-m", smollm, "--temp", 0, "-n", 32, "-v")
    assert "Paris" in program("run", *options)
    document = json.loads(program("run", *options, "--json"))
    assert "Paris" in document["text"]
    assert document["finish_reason"] in ("stop", "length")
    answer = program("run", *options[:6], "-n", 64, "--json-schema", JSON, "--seed", 1)
    assert isinstance(json.loads(answer)["n"], int)


def test_models_and_plans_are_shown(program: Program, path_of: PathOf) -> None:
    shown = json.loads(program("models", "show", path_of("gemma"), "--json"))["header"]
    assert (shown["architecture"], shown["n_vocab"]) == ("gemma3", 262144)
    pair = ("-m", path_of("qwen"), "-md", path_of("qwen-draft"))
    assert "Qwen2.5 Coder 0.5B" in program("plan", *pair)


def test_a_tuned_pair_runs(program: Program, path_of: PathOf) -> None:
    pair = ("-m", path_of("smollm"), "-md", path_of("smollm"), "-t", 1, "-td", 1, "-fa", "on")
    options = ("--runs", 1, "--max-n", 3, "--depth", 64, "-b", 128)
    tuned = json.loads(program("tune", *pair, *options, "--json"))
    assert [row["n_tokens"] for row in tuned["target"]] == [1, 2, 3, 4]
    assert tuned["remembered"]
    assert json.loads(program("run", *pair, "-p", PROMPT, "-n", 8, "--seed", 1, "--json"))["text"]


def test_compare_and_bench_measure(program: Program, path_of: PathOf) -> None:
    pair = ("-m", path_of("smollm"), "-md", path_of("smollm"), "--temp", 0)
    race = json.loads(program("compare", *pair, "-p", PROMPT, "-n", 16, "--draft-n", 2, "--json"))
    assert race["same_text"] or race["divergence"]["near_tie"]
    assert race["speculative"]["n_accepted"] > 0
    bench = ("bench", *pair, "-p", PROMPT, "-n", 8, "--draft-n", "2,auto", "--runs", 1)
    assert "plain" in program(*bench)


def test_a_batch_answers_all_forms_of_prompts(
    program: Program, path_of: PathOf, tmp_path: Path
) -> None:
    lines: list[dict[str, Any]] = [
        {"id": "text", "prompt": "The capital of France is"},
        {"id": "chat", "messages": [{"role": "user", "content": "Name the capital of France."}]},
        {"id": "turns", "turns": ["Name a city in Italy.", "And one in Spain?"]},
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    program("batch", "in.jsonl", "-o", "out.jsonl", "-m", path_of("smollm"), "--temp", 0, "-n", 24)
    records = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [record["id"] for record in records] == ["text", "chat", "turns"]
    assert all("Paris" in json.dumps(record) for record in records[:2])
    assert len(records[2]["choices"][0]["turns"]) == 2


def test_the_audit_of_the_pair_finds_nothing(
    program: Program, path_of: PathOf, tmp_path: Path
) -> None:
    (tmp_path / "prompts.txt").write_text("def fibonacci(n):\n\nThe old house had been\n")
    pair = ("-m", path_of("qwen"), "-md", path_of("qwen-draft"))
    options = ("--prompts", "prompts.txt", "--runs", 4, "-n", 12, "--seed", 1, "--json")
    report = json.loads(program("audit", *pair, *options))
    assert report["greedy"]["n_texts"] == 2
    assert report["sequences"]["n_drafted"] > 0


def test_a_draft_model_leaves_the_text_of_llama_alone(
    load: Load, path_of: PathOf, llama: MakeLlama
) -> None:
    engine: Engine = load("qwen")
    draft = ggufspec.DraftModel(path_of("qwen-draft"), n_ctx=engine.n_ctx)
    plain = llama(engine)
    drafted = llama(engine, draft_model=draft)
    prompt = engine.tokenize(PROMPT)
    wanted, found = (
        list(itertools.islice(each.generate(prompt, temp=0.0), 32)) for each in (plain, drafted)
    )
    assert_same(engine, prompt, found, wanted)
    draft.close()
