"""The options that shape a distribution arrive where they belong, or are refused with a reason."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ggufspec.standin.embedded import embedded_target

Command = Callable[..., Any]
TARGET = ("-m", str(embedded_target()), "-p", "The prince", "-n", "8", "--seed", "1")


def test_all_of_them_arrive(run: Command) -> None:
    result = run(
        *TARGET,
        *("--temp", "0.7", "--top-k", "20", "--top-p", "0.9", "--min-p", "0.01"),
        *("--typical", "0.95", "--top-nsigma", "3", "--repeat-last-n", "32"),
        *("--repeat-penalty", "1.1", "--presence-penalty", "0.2", "--frequency-penalty", "0.1"),
        *("--dry-multiplier", "0.8", "--dry-base", "2", "--dry-allowed-length", "3"),
        *(
            "--dry-penalty-last-n",
            "-1",
            "--dry-sequence-breaker",
            ";",
            "-l",
            "5+1.5",
            "-l",
            "7-inf",
        ),
        *("--samplers", "penalties;dry;top_k;typical_p;temperature", "--json"),
        *("-md", TARGET[1], "--draft-temp", "0.5"),
    )
    assert result.code == 0
    settings = result.document["settings"]
    expected = {
        **{"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.95},
        **{"top_n_sigma": 3.0, "repeat_last_n": 32, "repeat_penalty": 1.1},
        **{"presence_penalty": 0.2, "frequency_penalty": 0.1, "dry_multiplier": 0.8},
        **{"dry_base": 2.0, "dry_allowed_length": 3, "dry_penalty_last_n": -1},
        **{"dry_sequence_breakers": [";"], "logit_bias": {"5": 1.5, "7": "-inf"}},
        **{"samplers": ["penalties", "dry", "top_k", "typical_p", "temperature"]},
        **{"draft_temperature": 0.5, "grammar": None, "json_schema": None},
        **{"regex": None, "choices": None},
    }
    assert {name: settings[name] for name in expected} == expected


def test_a_bias_bans_a_token(run: Command) -> None:
    first = run(*TARGET, "--temp", "0", "--json").document["tokens"][0]
    other = run(*TARGET, "--temp", "0", "-l", f"{first}-inf", "--json").document["tokens"]
    assert first not in other


def test_a_schema_from_a_file_holds_the_text(run: Command, tmp_path: Path) -> None:
    path = tmp_path / "schema.json"
    path.write_text('{"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 4}')
    result = run(*TARGET, "-n", "60", "-jf", path)
    assert result.code == 0
    assert set(json.loads(result.out)) <= {1, 2}


def test_a_grammar_from_a_file_is_the_same_as_one_on_the_line(run: Command, tmp_path: Path) -> None:
    path = tmp_path / "yes.gbnf"
    path.write_text('root ::= "yes" | "no"')
    by_file, by_line = (
        run(*TARGET, *given)
        for given in (("--grammar-file", path), ("--grammar", path.read_text()))
    )
    assert by_file.out == by_line.out in ("yes\n", "no\n")


def test_a_grammar_may_be_lark(run: Command) -> None:
    assert run(*TARGET, "--grammar", 'start: "yes" | "no"').out in ("yes\n", "no\n")


def test_a_regular_expression_matches_the_whole_text(run: Command, tmp_path: Path) -> None:
    regex = "[0-9]{3}-[a-z]{2}"
    path = tmp_path / "regex.txt"
    path.write_text(f"{regex}\n")  # the line break is the editor's
    by_file, by_line = (
        run(*TARGET, *given) for given in (("--regex-file", path), ("--regex", regex))
    )
    assert by_file.out == by_line.out
    assert re.fullmatch(regex, by_line.out.removesuffix("\n"))


def test_the_text_is_one_of_the_choices(run: Command) -> None:
    result = run(*TARGET, "--choice", "a b", "--choice", "c/d", "--json")
    assert result.document["text"] in ("a b", "c/d")
    assert result.document["settings"]["choices"] == ["a b", "c/d"]


@pytest.mark.parametrize("drafter", ["auto", "forced"])
def test_forced_tokens_are_reported(drafter: str, run: Command) -> None:
    schema = '{"type": "object", "properties": {"name": {"const": "a"}}, "required": ["name"]}'
    args = (*TARGET, "--drafter", drafter, "--draft-n", "4", "-j", schema)
    notes = run(*args, "--json").document["notes"]
    assert notes["n_forced"] > 0
    assert 0 <= notes["forced_acceptance"] <= 1
    assert "n_forced" not in run(*TARGET, "--json").document["notes"]


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (("--regex", "("), "the regular expression cannot be used: unclosed group."),
        (("--regex", "(?=a)b"), "look-around"),
        (("--grammar", 'start: "yes" no'), 'unknown name: "no"'),
        (("--grammar", "yes or no"), "the grammar needs a rule start"),
        (
            ("--json-schema", '{"not": {"const": 1}}'),
            'at #: "not" cannot be guaranteed; leave it out',
        ),
    ],
    ids=str,
)
def test_an_invalid_constraint_is_refused_before_models_are_loaded(
    args: tuple[str, ...], complaint: str, run: Command
) -> None:
    result = run("-m", "nowhere.gguf", "-p", "The prince", *args)
    assert result.code == 2
    assert complaint in " ".join(result.err.split())
    assert "Traceback" not in result.err


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (("-l", "five+1"), "is not a token id with a bias"),
        (("-l", "5+inf"), "logit_bias of token 5"),
        (("-l", "99999+1"), "the vocabulary has 4,096"),
        (("--samplers", "top_k;xtc"), "no distribution"),
        (("--samplers", "top_z"), "choose from penalties"),
        (("--samplers", ""), "no sampler is named"),
        (("--draft-temp", "0.5"), "--draft-temp needs a draft model"),
        (("--draft-n", "3"), "--draft-n needs a draft model"),
        (("-td", "1"), "--threads-draft needs a draft model"),
        (("-cd", "512"), "--ctx-size-draft needs a draft model"),
        (("-cmoed",), "--cpu-moe-draft needs a draft model"),
        (("-ncffnd", "2"), "--n-cpu-ffn-draft needs a draft model"),
        (("-otd", "exps=CPU"), "--override-tensor-draft needs a draft model"),
        (("--mirostat", "2"), "--mirostat is not supported"),
        (("--xtc-probability", "0.5"), "--xtc-probability is not supported"),
        (("-md", TARGET[1], "--draft-temp", "auto"), "not a valid float"),
        (("-md", TARGET[1], "--draft-temp", "-1"), "draft_temperature is -1.0"),
        (("--grammar", 'root ::= "a'), "grammar"),
        (
            ("--grammar", 'root ::= "a"', "--json-schema", "{}"),
            "--json-schema and --grammar were given; give one of them",
        ),
        (("--regex", "a", "--choice", "b"), "--regex and --choice were given"),
        (("--grammar", "start: <think>"), "unknown special token"),
        (("--choice", "yes", "--ignore-eos"), "ignore_eos"),
        (("--regex-file", "."), "the file . is a folder"),
        (("--regex-file", "nowhere.txt"), "nowhere.txt cannot be read"),
        (("--json-schema", "{"), "JSON"),
        (("--json-schema", '{"type": "array", "uniqueItems": true}'), "uniqueItems"),
        (("--json-schema", "{}", "--ignore-eos"), "ignore_eos"),
        (("--json-schema-file", "nowhere.json"), "nowhere.json cannot be read"),
        (("--grammar-file", "nowhere.gbnf", "--grammar", "root ::= [a]"), "nowhere.gbnf"),
    ],
    ids=str,
)
def test_what_cannot_be_used_is_wrong_usage(
    args: tuple[str, ...], complaint: str, run: Command
) -> None:
    result = run(*TARGET, *args)
    assert result.code == 2
    assert complaint in " ".join(result.err.split())
    assert result.out == ""


def test_switching_off_what_is_refused_is_fine(run: Command) -> None:
    assert run(*TARGET, "--mirostat", "0", "--xtc-probability", "0.0").code == 0
