"""tests.benchmarks.auto: the order of texts, the report, and what is resumed."""

from __future__ import annotations

import gzip
import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from benchmarks.test_speculative_simple import LOG

from ggufspec.errors import OptionError
from ggufspec.standin.embedded import embedded_target
from tests.benchmarks import auto, auto_options, loaded_pair, prompt_sets
from tests.benchmarks.ab_report import CellReport, render, reports
from tests.benchmarks.prompt_sets import KindPrompt
from tests.benchmarks.text_file import Text, TextFile, read_texts

N_FIRST_OPEN = 21  # tokens of the first open prompt


def _texts(
    rates: dict[str, list[float]],
    *,
    target: str = "Q4_0",
    sampling: str = "0",
    kind: str = "code",
    n_generated: int = 96,
) -> list[Text]:
    """Tokens per second of each contender after prompt 0, 1 ..."""
    return [
        Text(target, sampling, kind, f"{kind}{i}", 0, name, rate, n_generated, 0, 0, 1.0, float(i))
        for name, speeds in rates.items()
        for i, rate in enumerate(speeds)
        if rate
    ]


def _only(texts: list[Text], **how: Any) -> CellReport:
    (found,) = reports(texts, **how)
    return found


# The report --------------------------------------------------------------------------------------


def test_ratios_are_of_the_same_turn() -> None:
    found = _only(_texts({"plain": [10.0, 5.0], "auto": [15.0, 10.0, 99.0]}))
    assert found.against["plain"] == [1.5, 2.0]
    assert len(found.turns) == 3


def test_the_best_fixed_setting_is_chosen_where_all_were_measured() -> None:
    texts = _texts(
        {
            "plain": [10.0, 10.0, 10.0],
            "ngram 3": [12.0, 30.0, 30.0],
            "fixed 1": [14.0, 0.0, 0.0],
            "auto": [14.0, 21.0, 28.0],
        }
    )
    found = _only(texts)
    assert found.best_fixed == "fixed 1"
    assert found.against["fixed"] == [1.0]
    found = _only([text for text in texts if text.contender != "fixed 1"])
    assert found.best_fixed == "ngram 3"
    assert found.against["fixed"] == pytest.approx([14 / 12, 0.7, 28 / 30])


def test_a_turn_with_a_short_text_does_not_count() -> None:
    texts = _texts({"plain": [10.0, 10.0], "auto": [12.0, 30.0]})
    texts[1] = Text(**{**vars(texts[1]), "n_generated": 9})
    assert _only(texts, least=10).against["plain"] == [1.2]
    assert "turns left out, with a text of fewer than 10 tokens: 1" in render(texts, least=10)
    assert "turns at temperature 0 where our texts have different lengths: 1" in render(texts)


def test_kinds_are_merged() -> None:
    texts = _texts({"plain": [10.0], "auto": [11.0]}, kind="qa")
    texts += _texts({"plain": [10.0], "auto": [12.0]}, kind="math")
    merged = auto_options.parser().parse_args(["--merge", "prose=qa,math"]).merge
    found = _only(texts, merged=merged)
    assert (found.cell.kind, found.against["plain"]) == ("prose", [1.1, 1.2])
    assert len(reports(texts)) == 2


def test_the_table_has_medians_and_geometric_means() -> None:
    texts = _texts({"plain": [10.0, 10.0], "auto": [10.0, 40.0], "llama": [10.0, 10.0]})
    texts += _texts({"plain": [10.0], "auto": [10.0], "llama": [10.0]}, kind="edit")
    lines = render(texts).splitlines()
    assert "| Q4_0 | 0 | code | 2 | 10.0 | 25.0 | 2.50 | 2.50 (plain) | 2.00 |  |" in lines
    assert "| Q4_0 | 0 | all, geometric mean | 3 | 10.0 | 10.0 | 1.59 | 1.59 | 1.59 |  |" in lines
    assert "| Q4_0 | 0 | code | 2.50 | 1.00 |" in lines
    assert "- first text of Q4_0 (Q4_0, 0, code): 1.000 of plain" in lines


def test_an_unfinished_cell_is_reported_as_far_as_it_goes() -> None:
    assert render([]) == "No texts to report.\n"
    assert "| Q4_0 | 0 | code | 1 | 10.0 |  |  |  |  |  |" in render(_texts({"plain": [10.0]}))
    assert render(_texts({"auto": [10.0]}))


# The order ---------------------------------------------------------------------------------------


def test_any_beginning_of_a_run_is_balanced() -> None:
    prompts = [KindPrompt(kind, f"{kind} {i}") for kind in "abc" for i in range(4)]
    turns = list(auto.schedule(prompts, 2, ["0", "0.7"], 2))
    assert len(turns) == 12 * 4 * 2 == len(set(turns))
    for n_rounds in (1, 2, 5):
        beginning = turns[: n_rounds * 3 * 4]
        counted = Counter((turn.target, turn.sampling, turn.prompt.kind) for turn in beginning)
        assert set(counted.values()) == {n_rounds}
    kinds = [turn.prompt.kind for turn in turns if (turn.target, turn.sampling) == (0, "0")]
    assert len({tuple(kinds[i : i + 3]) for i in range(0, 24, 3)}) > 2
    for target in (0, 1):
        own = [turn.prompt for turn in turns if turn.target == target]
        assert all(one != next_ for one, next_ in itertools.pairwise(own))
    assert turns == list(auto.schedule(prompts, 2, ["0", "0.7"], 2))


# Contenders --------------------------------------------------------------------------------------


def test_contenders_by_name() -> None:
    assert loaded_pair.options_of("fixed 12") == {"drafter": "model", "n_draft": 12}
    assert loaded_pair.options_of("ngram 3") == {"drafter": "ngram", "n_draft": 3}
    assert loaded_pair.options_of("auto")["seed"] is None
    assert loaded_pair.sampling_options("1/0/1") == {
        **{"temperature": 1.0, "top_k": 0},
        **{"top_p": 1.0, "min_p": 0.0},
    }


@pytest.mark.parametrize(
    "wrong",
    [("--temps", "0,warm"), ("--temps", "-1"), ("--contenders", "plain,fixed"), ("--runs", "0")],
)
def test_wrong_options_are_refused(wrong: tuple[str, str]) -> None:
    with pytest.raises(SystemExit):
        auto_options.parser().parse_args(wrong)


# Prompt sets -------------------------------------------------------------------------------------


def test_both_prompt_sets_have_all_kinds_and_share_nothing(tmp_path: Path) -> None:
    categories = ("writing", "qa", "math", "summarization", "coding")
    questions = [
        {"category": category, "turns": [f"{category} {i}", "later"]}
        for category in categories
        for i in range(48)
    ]
    problems = [
        {"prompt": f"def f{i}():\n" + "    # comment\n" * 25, "canonical_solution": "    pass\n"}
        for i in range(100)
    ]
    spec_bench, humaneval = tmp_path / "spec_bench.jsonl", tmp_path / "humaneval.jsonl.gz"
    spec_bench.write_text("".join(json.dumps(each) + "\n" for each in questions))
    with gzip.open(humaneval, "wt") as file:
        file.writelines(json.dumps(each) + "\n" for each in problems)
    found = {}
    for name in ("record", "show"):
        path = tmp_path / f"{name}.jsonl"
        prompt_sets.main(
            [name, "--spec-bench", str(spec_bench), "--humaneval", str(humaneval), "-o", str(path)]
        )
        found[name] = prompt_sets.read(path)
    assert [len(found[name]) for name in ("record", "show")] == [34 * 6, 12 * 6]
    for prompts in found.values():
        assert [prompt.kind for prompt in prompts[:7]] == [
            *("writing", "qa", "math", "summary", "code", "edit", "writing")
        ]
    assert not {each.text for each in found["record"]} & {each.text for each in found["show"]}
    assert len({prompt.name for prompt in found["show"]}) == 72


# The whole benchmark -----------------------------------------------------------------------------


def _arguments(path: Path, *more: str) -> list[str]:
    return [
        *("--target", str(embedded_target()), "--temps", "0", "--tokens", "8", "--least", "4"),
        *("--per-kind", "1", "--threads", "1", "--ctx", "512", "-o", str(path), *more),
    ]


def test_the_whole_benchmark_and_its_continuation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "texts.jsonl"
    short = ["--contenders", "plain,auto,auto chains,auto new,fixed 2"]
    auto.main(_arguments(path, *short, "--kinds", "open"))
    shown = capsys.readouterr()
    assert "min left] " in shown.err
    assert "first text of Q8_0" in shown.out
    about, texts = read_texts(path)
    assert about["settings"]["tokens"] == 8
    assert [text.contender for text in texts] == [
        "plain",
        "auto",
        "auto chains",
        "auto new",
        "fixed 2",
    ]
    assert all(text.n_generated == 8 for text in texts)
    assert texts[4].n_drafted > 0
    auto.main(["--report", str(path), "--least", "4"])
    assert capsys.readouterr().out == shown.out
    with pytest.raises(OptionError, match="exists; continue it with --resume"):
        auto.main(_arguments(path, *short))
    with pytest.raises(OptionError, match="with other models or settings"):
        auto.main(_arguments(path, *short, "--resume", "--runs", "2", "--tokens", "9"))
    with path.open("a") as file:
        file.write('{"target": "Q4')  # killed while it wrote
    auto.main(_arguments(path, *short, "--resume"))
    assert read_texts(path)[1][:5] == texts
    assert len({text.at for text in read_texts(path)[1]}) == 5 + 5


def test_the_budget_ends_a_run_and_short_texts_a_turn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "texts.jsonl"
    short = ["--contenders", "plain,fixed 1", "--least", "9"]
    auto.main(_arguments(path, *short, "--budget", "1"))
    assert "the budget ends here" in capsys.readouterr().err
    assert not read_texts(path)[1]
    auto.main(_arguments(path, *short, "--resume"))
    assert [text.contender for text in read_texts(path)[1]] == ["plain", "fixed 1"]
    stored = [
        json.loads(found.read_text()) for found in tmp_path.glob("texts.jsonl.cache/**/*.json")
    ]
    assert not [each for each in stored if "costs" in each["document"]], "only auto learns"


def test_llama_cpp_reads_the_same_prompt_or_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, path = tmp_path / "llama-speculative-simple", tmp_path / "texts.jsonl"
    log = LOG.replace("encoded    6", f"encoded {N_FIRST_OPEN}")
    script.write_text(f"#!/bin/sh\ncat <<'END'\n{log}END\n")
    script.chmod(0o755)
    more = ["--llama", str(tmp_path), "--contenders", "plain,auto,llama", "--kinds", "open"]
    auto.main(_arguments(path, *more, "--per-kind", "2"))
    counted = Counter(text.contender for text in read_texts(path)[1])
    assert counted == {"plain": 2, "auto": 2, "llama": 1}
    shown = capsys.readouterr()
    assert f"it is {N_FIRST_OPEN} tokens for llama" in shown.err
    assert "| llama |" in shown.out


def test_an_interrupted_benchmark_reports_what_is_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    add = TextFile.add

    def add_one(file: TextFile, text: Text) -> None:
        add(file, text)
        raise KeyboardInterrupt

    monkeypatch.setattr(TextFile, "add", add_one)
    with pytest.raises(SystemExit) as ended:
        auto.main(_arguments(tmp_path / "texts.jsonl", "--contenders", "plain,fixed 1"))
    assert ended.value.code == 130
    assert len(read_texts(tmp_path / "texts.jsonl")[1]) == 1
    assert "| 0 | " in capsys.readouterr().out


def test_unknown_kinds_and_missing_drafts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="there are open, repetitive"):
        auto.main(_arguments(tmp_path / "a", "--kinds", "code"))
    with pytest.raises(OptionError, match="no target to measure"):
        auto.main([])
    with pytest.raises(OptionError, match="1 targets have 2 drafts"):
        auto.main(_arguments(tmp_path / "a", "--draft", "a.gguf", "--draft", "b.gguf"))
    with pytest.raises(OptionError, match="--resume needs the file"):
        auto.main(["--target", str(embedded_target()), "--resume"])
