"""The registry: ours is sound, a user's goes on top, and what is wrong in it is told."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from ggufspec.errors import ModelError, OptionError
from ggufspec.models import registry
from ggufspec.models.registry import Dimensions, load_registry, parse_registry

NOTEBOOK = ("70B-Q3_K_S", "8B-Q3_K_L")


@pytest.fixture(autouse=True)
def _no_registry_of_a_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GGUFSPEC_MODELS", raising=False)
    monkeypatch.setattr(registry, "user_registry_path", lambda: tmp_path / "own.toml")


def test_the_notebooks_pair_comes_first() -> None:
    found = load_registry()
    pair = next(iter(found.pairs.values()))
    assert (pair.target, pair.draft) == NOTEBOOK
    target, draft = (found.find(alias) for alias in NOTEBOOK)
    assert target.shape is not None
    assert draft.shape is not None
    assert (target.shape.n_layers, draft.shape.n_layers) == (80, 32)
    assert target.shape.n_vocab == draft.shape.n_vocab == 128_256
    assert target.sha256[0].startswith("8e622456")
    assert draft.sha256[0].startswith("1411591a")
    assert found.draft_for("70b-q3_k_s") == draft


def test_the_models_of_a_pair_can_draft_for_each_other() -> None:
    found = load_registry()
    for pair in found.pairs.values():
        target, draft = found.models[pair.target].shape, found.models[pair.draft].shape
        assert target is not None
        if "EAGLE3" in pair.draft:  # a head has no dimensions of its own here
            assert found.models[pair.draft].repo == found.models[pair.target].repo
            continue
        assert draft is not None
        assert abs(target.n_vocab - draft.n_vocab) <= 128
        assert target.n_layers * target.n_embd**2 > draft.n_layers * draft.n_embd**2
    digests = [digest for entry in found.models.values() for digest in entry.sha256]
    assert len(set(digests)) == len(digests)


def test_a_draft_is_known_for_other_quantizations_too() -> None:
    shape = '[shapes.s]\narchitecture = "llama"\n' + "".join(
        f"{each.name} = 1\n" for each in fields(Dimensions) if each.type == "int"
    )
    models = "".join(
        f'[models.{name}]\nrepo = "u/{name}"\nfiles = ["x.gguf"]\n{more}\n'
        for name, more in {**dict.fromkeys("ABE", 'shape = "s"'), "C": "", "D": ""}.items()
    )
    pairs = [
        f'[pairs.{name}]\ntarget = "{name[0]}"\ndraft = "{name[1]}"\n' for name in ("AC", "BD")
    ]
    found = parse_registry([("mine", shape + models + "".join(pairs))])
    assert found.draft_for("A") == found.draft_for("E") == found.find("C")
    assert found.draft_for("B") == found.find("D"), "its own pair goes first"
    assert found.draft_for("C") is None
    assert [pair.name for pair in found.pairs_of("C")] == ["AC"]


def test_a_wrong_alias_gets_suggestions() -> None:
    with pytest.raises(ModelError, match=r"did you mean 70B-Q3_K_S.*ggufspec models list"):
        load_registry().find("70B-Q3_KS")


def test_a_users_files_go_on_top(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = '[models."{}"]\nrepo = "{}"\nfiles = ["x.gguf"]\n'
    (tmp_path / "own.toml").write_text(
        entry.format("mine", "i/one") + entry.format("70b-q3_k_s", "i/two")
    )
    other = tmp_path / "other.toml"
    other.write_text(entry.format("mine", "i/three"))
    monkeypatch.setenv("GGUFSPEC_MODELS", str(other))
    found = load_registry()
    assert found.find("mine").repo == "i/three"
    assert found.find(NOTEBOOK[0]).repo == "i/two"
    assert found.find(NOTEBOOK[1]).repo.startswith("QuantFactory/")


def test_a_pair_of_registered_and_own_models() -> None:
    models = [f'[models."{name}"]\nrepo = "u/r"\nfiles = ["{name}.gguf"]\n' for name in "AB"]
    pair = '[pairs."p"]\ntarget = "b"\ndraft = "A"\nsettings = { draft_n = 4 }'
    found = parse_registry([("ours", models[0]), ("mine", models[1] + pair)])
    assert found.pairs["p"].target == "B"
    assert found.pairs["p"].settings == {"draft_n": 4}
    assert found.draft_for("B") == found.find("a")


def test_a_named_file_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GGUFSPEC_MODELS", "no-such.toml")
    with pytest.raises(OptionError, match=r"no-such.toml cannot be read.*GGUFSPEC_MODELS"):
        load_registry()


MODEL = '[models."m"]\nrepo = "u/r"\nfiles = ["x.gguf"]\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonsense", "mine.toml is not TOML"),
        ("[model]", "mine.toml: has an unknown key 'model'.*did you mean models"),
        ("models = 3", r"\[models\] must be a table"),
        ("models = { m = 3 }", r'\[models."m"\] must be a table'),
        ('[models."m"]\nfiles = ["x.gguf"]', r'\[models."m"\] has no repo'),
        (MODEL + "sha265 = []", "has an unknown key 'sha265'.*did you mean sha256"),
        (MODEL + "size = '3'", "size is '3'; it must be a whole number"),
        (MODEL + "size = -1", "size is -1; it must be at least 1"),
        (MODEL + "sha256 = ['ab']", "'ab'; it must be 64"),
        (MODEL + "sha256 = [3]", "sha256 is .3.; it must be a list of strings"),
        (MODEL + f"sha256 = ['{'0' * 64}', '{'0' * 64}']", "2 values for 1 files"),
        (MODEL + "shape = 'llama'", r"shape is 'llama'; there is no \[shapes\] entry"),
        (MODEL.replace("u/r", "r"), "repo is 'r'; it must be user/repo"),
        (MODEL.replace("x.gguf", "x.bin"), "GGUF files only"),
        (MODEL.replace('"m"', '"a/b"'), "not a valid name"),
        (MODEL.replace('"m"', '"m.gguf"'), "not a valid name"),
        ('[pairs."p"]\ntarget = "x"\ndraft = "y"', "'x' is not the name of a model"),
        (MODEL + '[pairs."p"]\ntarget="m"\ndraft="m"\nsettings={draftn=3}', "did you mean draft_n"),
        (MODEL + '[pairs."p"]\ntarget="m"\ndraft="m"\nsettings={temp="x"}', "temp is 'x'"),
        ('[shapes."s"]\narchitecture = "llama"', r'\[shapes."s"\] has no n_layers'),
        ("[shapes.s]\narchitecture = 'x'\ntied = 1", "has no n_layers"),
        ("a=" + "[" * 100_000, "not TOML"),
    ],
)
def test_what_is_wrong_is_told(text: str, message: str) -> None:
    with pytest.raises(OptionError, match=message) as caught:
        parse_registry([("mine.toml", text)])
    assert "mine.toml" in str(caught.value)
