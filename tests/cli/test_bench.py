"""`ggufspec bench` measures in turns, keeps what it has, and prints its sources' tables."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest
from cli.conftest import Command

from ggufspec.bench import experiment, run
from ggufspec.cli import bench as cli_bench
from ggufspec.cli import loading
from ggufspec.cli.options import TABLE
from ggufspec.errors import GgufspecError
from ggufspec.models import local
from ggufspec.models.registry import load_registry

SHORT = ("-t", "1", "-n", "6", "--runs", "2", "--warm-up", "2")


@pytest.fixture
def bench(command: Command, target: Path, draft: Path) -> Command:
    """`ggufspec bench` of the smallest pair, with little to write."""
    pair = ("--target", target, "--draft", draft)
    return lambda *args, **how: command("bench", *pair, *SHORT, *args, **how)


def test_a_table_of_all_that_was_asked_for(bench: Command, target: Path, draft: Path) -> None:
    found = bench("--draft-n", "auto,2-3", "--temp", "0", "-p", "hi")
    assert found.code == 0
    names = [line.split("  ")[0] for line in found.out.splitlines()]
    for name in ("plain", "draft alone", "draft auto", "draft 2", "draft 3"):
        assert name in names
    assert found.out.startswith(f"{target} with {draft}."), "paths are printed as given"
    assert "speed-up" in found.out
    assert "accepted up to position" in found.out


def test_several_drafts_are_ranked(
    command: Command, target: Path, draft: Path, tmp_path: Path
) -> None:
    pair = ("--target", target, "--draft", f"{draft},{target}", "--draft-n", "1,2")
    path = tmp_path / "out.json"
    ask = ("bench", *pair, *SHORT, "--temp", "0", "-p", "hi", "--json", path)
    found = command(*ask)
    assert found.code == 0, found.err
    assert found.out.startswith(f"{target} with {draft},{target}.")
    assert "Drafts, the fastest first" in found.out
    document = json.loads(path.read_text())
    assert set(document["models"]) == {"draft", "target"}
    names = {each["name"]: each["baseline"] for each in document["contenders"]}
    assert names["draft: draft 2"] == "draft: plain"
    assert names["target: draft 2"] == "target: plain"
    first, second = document["ranking"]
    assert {first["draft"], second["draft"]} == {"draft", "target"}
    assert first["speedup"]["ratio"] >= second["speedup"]["ratio"]
    assert min(first["ms_per_step"], second["ms_per_step"]) > 0
    again = command(*ask, "--resume")
    assert again.code == 0
    assert json.loads(path.read_text())["ranking"] == document["ranking"], "nothing was left"
    found = command("bench", "--preset", "gpt2", *pair[:4], *SHORT)
    assert found.code == 0, found.err
    assert "on the given pairs" in found.out
    assert {"target.gguf / draft", "target.gguf / target"} <= set(found.out.splitlines())


def test_every_text_is_in_the_file(
    bench: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli_bench, "SAVE_SECONDS", 0.0)
    path = tmp_path / "out.json"
    assert bench("--draft-n", "2", "--temp", "0,1", "-p", "hi", "--json", path).code == 0
    document = json.loads(path.read_text())
    texts = document["measurements"]
    assert len(texts) == 2 * 3 * 2  # temperatures, contenders, runs
    assert {text["n_generated"] for text in texts} == {6}
    assert {text["contender"] for text in texts} >= {"plain, T 0", "draft 2, T 1"}
    assert document["models"][""]["target"] == "target.gguf"
    assert document["machine"]["cpu"]
    assert document["versions"]["llama-cpp-python"]
    assert document["memory"]["peak_rss_bytes"] > 1e6
    order = [text["contender"] for text in texts]
    assert order[:6] != order[6:], "another one begins in each turn"


def test_what_is_missing_is_measured_and_nothing_else(bench: Command, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    options = ("--draft-n", "2", "--temp", "0", "-p", "hi", "--json", path)
    assert bench(*options).code == 0
    whole = json.loads(path.read_text())
    kept = whole["measurements"][:-2]
    path.write_text(json.dumps({**whole, "measurements": kept, "interrupted": True}))
    found = bench(*options, "--resume")
    again = json.loads(path.read_text())
    assert found.code == 0
    assert again["measurements"][: len(kept)] == kept
    keys = [(text["contender"], text["prompt"], text["run"]) for text in again["measurements"]]
    assert len(set(keys)) == len(keys) == len(whole["measurements"])
    assert not again["interrupted"]


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (("-p", "ho"), "prompts was"),
        (("-p", "hi", "--draft-n", "3"), "contenders was"),
        (("-p", "hi", "--temp", "0.5"), "plain: temperature was 0.8, is 0.5"),
    ],
    ids=["prompt", "contenders", "options"],
)
def test_results_of_another_benchmark_are_not_resumed(
    bench: Command, tmp_path: Path, other: tuple[str, ...], told: str
) -> None:
    path = tmp_path / "out.json"
    assert bench("-p", "hi", "--draft-n", "2", "--json", path).code == 0
    before = path.read_text()
    found = bench("--draft-n", "2", *other, "--json", path, "--resume")
    assert (found.code, path.read_text()) == (2, before)
    assert told in found.err


def test_markdown(bench: Command) -> None:
    options = ("--draft-n", "2", "--temp", "0", "-p", "hi", "--format")
    lines = bench(*options, "markdown").out.splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert len({line.count("|") for line in table[:5]}) == 1
    assert table[1].startswith("| --- | ---: |")


def test_categories_and_their_geometric_mean(bench: Command, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    entries = [
        {"question_id": i, "category": name, "turns": ["hi", "and then?"][: 1 + i % 2]}
        for i, name in enumerate(["writing", "math", "writing", "math"])
    ]
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    found = bench("--prompts", path, "--draft-n", "2", "--temp", "0", "--json", tmp_path / "o.json")
    assert found.code == 0
    assert "Speed-up by category" in found.out
    assert "geometric mean" in found.out
    texts = json.loads((tmp_path / "o.json").read_text())["measurements"]
    lengths = {text["prompt"]: text["n_generated"] for text in texts}
    assert lengths == {"0": 6, "1": 12, "2": 6, "3": 12}, "both turns are asked"
    few = bench("--prompts", path, "--n-prompts", "2", "--draft-n", "2")
    assert "writing" in few.out
    assert "math" in few.out


def test_without_a_draft_there_are_ngrams(command: Command, target: Path) -> None:
    found = command("bench", "--target", target, *SHORT, "-p", "hi", "--drafter", "ngram")
    assert found.code == 0
    assert "draft alone" not in found.out
    assert "draft auto" in found.out
    found = command("bench", "--target", target, *SHORT, "-p", "hi", "--draft-n", "3")
    assert found.code == 2
    assert "Traceback" not in found.err


def test_a_picture_comes_with_it(bench: Command, tmp_path: Path) -> None:
    path = tmp_path / "out.svg"
    found = bench("--draft-n", "1-3,auto", "--temp", "0", "-p", "hi", "--plot", path)
    assert found.code == 0
    assert path.read_text().rstrip().endswith("</svg>")


def test_two_benchmarks_compared(bench: Command, command: Command, tmp_path: Path) -> None:
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path in paths:
        assert bench("--draft-n", "2", "--temp", "0", "-p", "hi", "--json", path).code == 0
    found = command("bench", "compare", *paths)
    assert found.code == 0
    assert "draft 2" in found.out
    assert "| draft 2 |" in command("bench", "compare", *paths, "--format", "markdown").out
    paths[1].write_text("{}")
    found = command("bench", "compare", *paths)
    assert found.code == 2
    assert str(paths[1]) in found.err


# Presets


def test_the_command_knows_every_preset() -> None:
    assert TABLE["bench"]["--preset"]["choices"] == list(experiment.PRESETS)


def test_presets_name_registered_models() -> None:
    registry = load_registry()
    for preset in experiment.PRESETS.values():
        assert all(registry.get(name) for pair in preset.pairs for name in pair[:2])


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (
            "notebook",
            ["Model", "GPU layers", "gain %", "Published", "87.02", "speculative, draft 3"],
        ),
        ("llama-ssp", ["Ms/token", "Target / draft", "regular", "530ms"]),
        ("llmss", ["speed(tokens/sec)", "Google's", "DeepMind's", "1084.86"]),
        ("gpt2", ["Autoregressive Sampling", "num_runs", "+/- std", "2.96"]),
    ],
)
def test_each_preset_prints_its_table(bench: Command, name: str, told: list[str]) -> None:
    found = bench("--preset", name, "--runs", "1", "-n", "4")
    assert found.code == 0, found.err
    assert "on the given pair" in found.out
    for part in told:
        assert part in found.out


def test_a_preset_without_its_models_says_so(
    command: Command, hub: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GGUFSPEC_CACHE", str(tmp_path))
    found = command(
        "bench", "--preset", "gpt2", "--size", "10M", "-t", "1", "-n", "3", "--runs", "1"
    )
    assert found.code == 0
    assert "uses GPT-2-XL-Q8_0 (1.7 GB), which is not on this machine" in found.err
    assert "`ggufspec models pull GPT-2-XL-Q8_0`" in found.err
    assert "NOT on the models that it names" in found.out
    assert "stand-in / itself" in found.out
    assert "100.0% of the drafted tokens were accepted" in found.out


def test_a_preset_takes_the_models_that_are_here(
    command: Command, hub: object, target: Path, draft: Path
) -> None:
    """Of the study's models, in the hub's cache; and then without the smaller one."""
    registry = load_registry()
    files = {}
    for name, path in (("GPT-2-XL-Q8_0", target), ("GPT-2-Q8_0", draft)):
        entry = registry.find(name)
        folder = local.repo_folder(entry.repo)
        (folder / "refs").mkdir(parents=True)
        (folder / "refs" / "main").write_text("0" * 40)
        (folder / "snapshots" / ("0" * 40)).mkdir(parents=True)
        files[name] = folder / "snapshots" / ("0" * 40) / entry.files[0]
        files[name].symlink_to(path)
    found = command("bench", "--preset", "gpt2", *SHORT)
    assert found.code == 0, found.err
    assert "A study of GPT-2 XL" in found.out
    assert "stand-in" not in found.out
    assert {"gpt2-xl / gpt2-xl", "gpt2-xl / gpt2"} <= set(found.out.splitlines())
    assert not found.err
    files["GPT-2-Q8_0"].unlink()
    found = command("bench", "--preset", "gpt2", *SHORT)
    assert found.code == 0
    assert "uses GPT-2-Q8_0" in found.err
    assert "gpt2-xl / gpt2-xl" in found.out
    assert "stand-in" not in found.out


# Ctrl-C, and errors


@pytest.mark.parametrize(
    ("raised", "n_done", "code", "told"),
    [
        (KeyboardInterrupt(), 0, 130, "ggufspec: interrupted"),
        (KeyboardInterrupt(), 3, 130, ""),
        (GgufspecError("out of order"), 3, 1, "out of order"),
    ],
    ids=["interrupt at first", "interrupt", "error"],
)
def test_what_was_measured_survives(
    bench: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    raised: BaseException,
    n_done: int,
    code: int,
    told: str,
) -> None:
    path, measure = tmp_path / "out.json", run.measure

    def failing(*args: Any, **how: Any) -> Any:
        yield from itertools.islice(measure(*args, **how), n_done)
        raise raised

    monkeypatch.setattr(run, "measure", failing)
    found = bench("-p", "hi", "--draft-n", "2", "--json", path)
    assert (found.code, told in found.err) == (code, True)
    if not n_done:
        assert found.out == ""
        return
    document = json.loads(path.read_text())
    assert (len(document["measurements"]), document["interrupted"]) == (3, True)
    assert "Warning: interrupted: 3 of 6 texts are missing" in found.out
    assert "draft 2" in found.out


def test_baselines_alternate_with_ours(
    bench: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of llama.cpp's programs none is here; llama-cpp-python is."""
    monkeypatch.setenv("PATH", str(tmp_path))
    path = tmp_path / "out.json"
    options = ("--draft-n", "2", "--temp", "0", "-p", "hi", "--against", "llama.cpp")
    found = bench(*options, "--json", path)
    assert found.code == 0
    assert "llama.cpp's programs are left out" in found.err
    texts = json.loads(path.read_text())["measurements"]
    written = {
        name: [text["tokens"] for text in texts if text["contender"] == name]
        for name in ("plain", "llama-cpp-python, plain")
    }
    assert written["plain"] == written["llama-cpp-python, plain"]


# What must not be lost, or mixed


def test_another_machine_is_another_benchmark(
    bench: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.json"
    options = ("-p", "hi", "--draft-n", "2", "--json", path)
    assert bench(*options).code == 0
    document = json.loads(path.read_text())
    document["machine"]["platform"] = "an older kernel"
    path.write_text(json.dumps(document))
    assert bench(*options, "--resume").code == 0
    document["machine"]["cpu"] = "Another"
    path.write_text(json.dumps(document))
    found = bench(*options, "--resume")
    assert found.code == 2
    assert 'cpu was "Another", is ' in found.err


@pytest.mark.parametrize(
    "options",
    [("--logit-bias", "5-inf"), ("--temp", "0.7,0.70000001")],
    ids=["infinite", "nearly the same"],
)
def test_what_was_written_can_be_read(
    bench: Command, tmp_path: Path, options: tuple[str, ...]
) -> None:
    path = tmp_path / "out.json"
    asked = ("-p", "hi", "--draft-n", "2", *options, "--json", path)
    assert bench(*asked).code == 0
    found = bench(*asked, "--resume")
    assert found.code == 0, found.err


def test_names_of_files_need_not_be_unicode(
    command: Command, target: Path, draft: Path, tmp_path: Path
) -> None:
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.gguf"))
    odd.symlink_to(target)
    path = tmp_path / "out.json"
    pair = ("--preset", "notebook", "--target", odd, "--draft", draft)
    asked = ("bench", *pair, *SHORT, "-p", "hi", "--json", path)
    found = command(*asked)
    assert found.code == 0, found.err
    assert "\\udcff.gguf" in found.out
    assert command(*asked, "--resume").code == 0


def test_a_prompt_that_is_too_long_is_left_out(bench: Command, tmp_path: Path) -> None:
    prompts, path = tmp_path / "prompts.jsonl", tmp_path / "out.json"
    entries = [{"prompt": "long " * 40}, {"prompt": "short"}]
    prompts.write_text("\n".join(map(json.dumps, entries)))
    asked = ("--prompts", prompts, "-c", "64", "--temp", "0", "--json", path)
    found = bench(*asked)
    assert found.code == 0
    assert "prompt 1 is left out: " in found.err
    assert {text["prompt"] for text in json.loads(path.read_text())["measurements"]} == {"2"}
    prompts.write_text(json.dumps(entries[0]))
    found = bench(*asked[:-2])
    assert (found.code, found.out) == (1, "")
    assert "larger context" in found.err


def test_a_preset_has_fewer_prompts_of_its_own(bench: Command, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    assert bench("--preset", "llama-ssp", "--n-prompts", "2", "--json", path).code == 0
    asked = json.loads(path.read_text())["settings"]["prompts"]
    assert asked == [
        [each.name, list(each.turns)]
        for each in experiment.PRESETS["llama-ssp"].experiment.prompts[:2]
    ]


def test_a_bar_shows_names_with_brackets() -> None:
    shown = loading.make_progress("count")
    shown.add_task("draft auto: [/1], run 1 of 3")
    (task,) = shown.tasks
    assert str(shown.columns[0].render(task)) == "draft auto: [/1], run 1 of 3"  # type: ignore[attr-defined]
