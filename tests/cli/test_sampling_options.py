"""The options that shape a distribution arrive where they belong, or are refused with a reason."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from cli.conftest import Command

from ggufspec.standin.embedded import embedded_target

TARGET = ("-m", str(embedded_target()), "-p", "The prince", "-n", "8", "--seed", "1")


def test_all_of_them_arrive(run: Command) -> None:
    result = run(
        *TARGET,
        *("--temp", "0.7", "--top-k", "20", "--top-p", "0.9", "--min-p", "0.01"),
        *("--typical", "0.95", "--top-nsigma", "3", "--repeat-last-n", "32"),
        *("--repeat-penalty", "1.1", "--presence-penalty", "0.2", "--frequency-penalty", "0.1"),
        *("--dry-multiplier", "0.8", "--dry-base", "2", "--dry-allowed-length", "3"),
        *("--dry-penalty-last-n", "-1", "--dry-sequence-breaker", ";", "-l", "5+1.5"),
        *("-l", "7-inf"),
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


def test_a_schema_from_a_file_holds_the_text(run: Command, tmp_path: Path) -> None:
    path = tmp_path / "schema.json"
    path.write_text('{"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 4}')
    result = run(*TARGET, "-n", "60", "-jf", path)
    assert result.code == 0
    assert set(json.loads(result.out)) <= {1, 2}


@pytest.mark.parametrize(
    ("option", "value", "wanted"),
    [
        ("--grammar", 'root ::= "yes" | "no"', "yes|no"),
        ("--regex", "[0-9]{3}-[a-z]{2}", "[0-9]{3}-[a-z]{2}"),  # a file ends with a line break
    ],
)
def test_a_constraint_from_a_file_is_the_same_as_one_on_the_line(
    option: str, value: str, wanted: str, run: Command, tmp_path: Path
) -> None:
    path = tmp_path / "constraint"
    path.write_text(f"{value}\n")
    by_file, by_line = (
        run(*TARGET, *given) for given in ((f"{option}-file", path), (option, value))
    )
    assert by_file.out == by_line.out
    assert re.fullmatch(wanted, by_line.out.removesuffix("\n"))


def test_the_text_is_one_of_the_choices(run: Command) -> None:
    result = run(*TARGET, "--choice", "a b", "--choice", "c/d", "--json")
    assert result.document["text"] in ("a b", "c/d")
    assert result.document["settings"]["choices"] == ["a b", "c/d"]


def test_forced_tokens_are_reported(run: Command) -> None:
    schema = '{"type": "object", "properties": {"name": {"const": "a"}}, "required": ["name"]}'
    args = (*TARGET, "--drafter", "forced", "--draft-n", "4", "-j", schema)
    notes = run(*args, "--json").document["notes"]
    assert notes["n_forced"] > 0
    assert 0 <= notes["forced_acceptance"] <= 1
    assert "n_forced" not in run(*TARGET, "--json").document["notes"]


def test_all_samplers_of_llama_cpp_are_options(run: Command) -> None:
    given = ("--xtc-probability", "0.5", "--dynatemp-range", "0.3", "--dynatemp-exp", "1.5")
    given += ("--adaptive-target", "0.4", "--mirostat", "2", "--mirostat-ent", "4")
    settings = run(*TARGET, *given, "--mirostat-lr", "0.2", "--json").document["settings"]
    assert (settings["xtc_probability"], settings["dynatemp_range"]) == (0.5, 0.3)
    assert (settings["dynatemp_exponent"], settings["adaptive_target"]) == (1.5, 0.4)
    assert [settings[f"mirostat{end}"] for end in ("", "_tau", "_eta")] == [2, 4.0, 0.2]


def test_a_banned_string_is_never_written(run: Command) -> None:
    plain = run(*TARGET, "--temp", "0", "--json").document["text"]
    banned = plain.strip()[:2]
    found = run(*TARGET, "--temp", "0", "--banned-string", banned, "--json").document["text"]
    assert banned in plain
    assert banned.lower() not in found.lower()
