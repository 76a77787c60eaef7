"""What a user may type, and what is meant by it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lora
import pytest
import tiny
import tiny_heads

from ggufspec.errors import ModelError
from ggufspec.models import quants
from ggufspec.models.local import HubFiles, HubQuant, parse
from ggufspec.models.pull import locate
from ggufspec.models.registry import parse_registry


def choose(paths: Sequence[str], quant: str | None, where: str, **how: Any) -> quants.ModelFiles:
    return quants.choose(dict.fromkeys(paths, 100), quant, where, **how)


REGISTRY = parse_registry(
    [("models.toml", '[models."8B-Q3_K_L"]\nrepo = "some/body"\nfiles = ["x.gguf"]\nrevision="v1"')]
)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("user/repo:Q4_K_M", HubQuant("user/repo", "Q4_K_M")),
        ("hf://user/repo:UD-Q4_K_XL", HubQuant("user/repo", "UD-Q4_K_XL")),
        ("user/repo", HubQuant("user/repo", None, may_be_path=True)),
        ("user/repo:latest", HubQuant("user/repo", None, may_be_path=True)),
        ("hf.co/user/repo@v2", HubQuant("user/repo", None, "v2")),
        ("user/repo@v2:Q8_0", HubQuant("user/repo", "Q8_0", "v2")),
        ("user/repo:Q8_0@v2", HubQuant("user/repo", "Q8_0", "v2")),
        ("hf:user/repo@refs/pr/3:Q8_0", HubQuant("user/repo", "Q8_0", "refs/pr/3")),
        ("user/repo/sub/x.gguf", HubFiles("user/repo", ("sub/x.gguf",), may_be_path=True)),
        ("hf://user/repo@v2/sub/x.GGUF", HubFiles("user/repo", ("sub/x.GGUF",), "v2")),
        (
            "https://huggingface.co/user/repo/resolve/main/x.gguf?download=true",
            HubFiles("user/repo", ("x.gguf",)),
        ),
        (
            "https://huggingface.co/user/repo/blob/v2/sub/x%20y.gguf",
            HubFiles("user/repo", ("sub/x y.gguf",), "v2"),
        ),
        (
            "hf:user/repo/x-00002-of-00002.gguf",
            HubFiles("user/repo", ("x-00001-of-00002.gguf", "x-00002-of-00002.gguf")),
        ),
        ("8b-q3_k_l", REGISTRY.find("8B-Q3_K_L")),
    ],
)
def test_what_is_meant(name: str, meant: object) -> None:
    assert parse(name, REGISTRY) == meant


@pytest.mark.parametrize("name", ["8B-Q3_K_L", "user/repo/x.gguf"])
def test_a_file_that_is_there_goes_before_all(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).touch()
    assert parse(name, REGISTRY) == Path(name)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "x.gguf",
        "folder/x.gguf",
        "~/user/x.gguf",
        r"C:\models\x.gguf",
        "C:/models/more/x.gguf",
        r"models\user\x.gguf",
        "user/repo/../../x.gguf",
        "user/repo@a:Q8_0@b",
        "a\0b/c/x.gguf",
        "https://example.org/user/repo/resolve/main/x.gguf",
    ],
)
def test_a_path_without_a_file(name: str) -> None:
    with pytest.raises(ModelError, match="there is no file"):
        parse(name, REGISTRY)


def test_a_wrong_name_gets_suggestions() -> None:
    with pytest.raises(ModelError, match="not a GGUF file"):
        parse("hf:user/repo/model.safetensors", REGISTRY)
    with pytest.raises(ModelError, match=r"no file 8B-Q3KL, and .* did you mean 8B-Q3_K_L"):
        parse("8B-Q3KL", REGISTRY)


@pytest.mark.parametrize(
    ("path", "quant"),
    [
        ("qwen2.5-7b-instruct-q4_k_m-00001-of-00002.gguf", "Q4_K_M"),
        ("Qwen3-30B-A3B-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
        ("x-Q4_0_4_4.gguf", "Q4_0_4_4"),
        ("gpt-oss-20b-MXFP4.gguf", "MXFP4"),
        ("m-UD-MXFP4_MOE.gguf", "UD-MXFP4_MOE"),
        ("Qwen3.5-27B-NVFP4.gguf", "NVFP4"),
        ("m-FP8-Q4_K_M.gguf", "Q4_K_M"),
        ("m_fp8.gguf", "FP8"),
        ("UD-Q4_K_XL/m-00001-of-00002.gguf", "UD-Q4_K_XL"),
        ("BF16/model.gguf", "BF16"),
        ("Q4_0/model-Q8_0.gguf", "Q8_0"),
        ("model.gguf", None),
    ],
)
def test_the_quantization_in_a_name(path: str, quant: str | None) -> None:
    assert quants.quant_of(path) == quant


def test_choosing_a_quantization() -> None:
    paths = [
        "x-Q4_K_M.gguf",
        "x-UD-Q4_K_XL.gguf",
        "Q8_0/x-Q8_0-00001-of-00002.gguf",
        "Q8_0/x-Q8_0-00002-of-00002.gguf",
        "mmproj-x-Q4_K_M.gguf",
        "x.imatrix.gguf",
        "README.md",
        "x-UD-Q4_K_M.gguf",
    ]
    assert choose(paths, "q4_k_m", "x").files == ("x-Q4_K_M.gguf",)
    assert choose(paths, "Q4_K_XL", "x").files == ("x-UD-Q4_K_XL.gguf",)
    assert choose(paths, "Q8_0", "x").files == tuple(paths[2:4])
    assert choose(paths[:3], "Q8_0", "x").missing == (paths[3],)
    with pytest.raises(ModelError, match="no model of Q5_K_M; did you mean Q4_K_M"):
        choose(paths, "Q5_K_M", "x")
    with pytest.raises(ModelError, match=r"several .* x-Q4_K_M.gguf, y-Q4_K_M.gguf"):
        choose([*paths, "y-Q4_K_M.gguf"], "Q4_K_M", "x")
    with pytest.raises(ModelError, match="no GGUF models"):
        choose(["README.md"], "Q4_K_M", "x")


@pytest.mark.parametrize(
    ("there", "n_most", "chosen"),
    [
        ("Q2_K Q4_K_S Q4_K_M Q8_0", 1e9, "Q4_K_M"),
        ("Q8_0 UD-Q4_K_XL F16", 1e9, "UD-Q4_K_XL"),
        ("Q8_0 Q5_K_M BF16", 1e9, "Q5_K_M"),
        ("Q8_0 Q3_K_M IQ2_XXS", 1e9, "Q3_K_M"),
        ("Q3_K_M Q5_K_M", 1e9, "Q5_K_M"),
        ("NVFP4 Q8_0", 1e9, "NVFP4"),
        ("MXFP4_MOE BF16", 1e9, "MXFP4_MOE"),
        ("Q4_K_M Q4_K_S Q3_K_S Q2_K", 4700, "Q4_K_S"),
        ("Q4_K_M Q3_K_M IQ2_XXS", 3000, "IQ2_XXS"),
        ("Q4_K_M Q3_K_M IQ2_XXS", 10, "IQ2_XXS"),
        ("Q8_0", 1e9, "Q8_0"),
    ],
)
def test_a_repository_alone_is_its_usual_quantization_or_the_nearest_that_fits(
    there: str, n_most: float, chosen: str
) -> None:
    sizes = {f"m-{name}.gguf": int(quants.bits_of(name) * 1000) for name in there.split()}
    sizes |= {"mmproj-F16.gguf": 5, "MTP/mtp-m-Q4_K_M.gguf": 5, "m-eagle3-Q4_K_M.gguf": 5}
    found = quants.choose(sizes, None, "x", n_most=n_most)
    assert found.files == (f"m-{chosen}.gguf",)


def test_a_repository_alone_may_have_one_model_without_a_quantization_in_its_name() -> None:
    assert choose(["model.gguf", "mmproj.gguf"], None, "x").files == ("model.gguf",)
    assert choose(["MTP/mtp-m.gguf"], None, "x", heads=True).files == ("MTP/mtp-m.gguf",)
    with pytest.raises(ModelError, match=r"several models of Q4_K_M: name one of the files"):
        choose(["a-Q4_K_M.gguf", "b-Q4_K_M.gguf", "b-Q8_0.gguf"], None, "x")
    with pytest.raises(ModelError, match="no GGUF models, only draft heads"):
        choose(["MTP/mtp-m-Q8_0.gguf"], None, "x")


MODELS = ["m-UD-Q4_K_XL.gguf", "m-Q8_0.gguf"]


@pytest.mark.parametrize(
    "other",
    [
        "MTP/mtp-m-{}.gguf",
        "mtp-m-{}.gguf",
        "MTP/m-{}-MTP.gguf",
        "m-DFlash-{}.gguf",
        "m-eagle3-{}.gguf",
        "m_EAGLE-3.{}.gguf",
        "assistant/m-{}.gguf",
        "mmproj-{}.gguf",
        "m-{}.imatrix.gguf",
        "ggml-vocab-m-{}.gguf",
    ],
)
def test_heads_and_files_without_a_model_are_no_candidates(other: str) -> None:
    there = [*MODELS, *map(other.format, ("Q8_0", "BF16"))]
    assert choose(there, "Q8_0", "x").files == ("m-Q8_0.gguf",)
    assert choose(there, "Q4_K_XL", "x").files == ("m-UD-Q4_K_XL.gguf",)
    with pytest.raises(ModelError, match=r"no model of BF16.* it has Q8_0, UD-Q4_K_XL$"):
        choose(there, "BF16", "x")
    with pytest.raises(ModelError, match=r"x has no GGUF models.*: name another repository"):
        choose(there[2:], "BF16", "x")


@pytest.mark.parametrize("word", ["MTP", "lora"])
def test_a_name_that_leaves_doubt_is_a_candidate_where_no_other_is(word: str) -> None:
    doubtful = [f"m-{word}-{quant}.gguf" for quant in ("Q8_0", "BF16")]
    assert choose([*MODELS, *doubtful], "Q8_0", "x").files == ("m-Q8_0.gguf",)
    assert choose([*MODELS, *doubtful], "BF16", "x").files == (doubtful[1],)
    same = f"m-{word}-Q4_K_XL.gguf"
    assert choose([*MODELS, same], "Q4_K_XL", "x").files == (MODELS[0],)


@pytest.mark.parametrize("name", ["OpenAssistant-7b", "flashmtp"])
def test_words_within_words_leave_no_doubt(name: str) -> None:
    there = [f"{name}-Q8_0.gguf", "m-Q8_0.gguf"]
    with pytest.raises(ModelError, match="several models"):
        choose(there, "Q8_0", "x")


def test_a_draft_may_be_a_head_where_no_model_is() -> None:
    there = [*MODELS, "MTP/mtp-m-Q8_0.gguf", "MTP/mtp-m-BF16.gguf"]
    assert choose(there, "Q8_0", "x", heads=True).files == ("m-Q8_0.gguf",)
    assert choose(there, "BF16", "x", heads=True).files == ("MTP/mtp-m-BF16.gguf",)
    with pytest.raises(ModelError, match=r"only draft heads .*--draft: MTP/mtp-m-BF16.gguf\)"):
        choose(there, "BF16", "x")
    with pytest.raises(ModelError, match=r"no model or draft head of F32.* it has BF16, Q8_0"):
        choose(there, "F32", "x", heads=True)


def test_the_header_tells_what_a_doubtful_name_in_the_cache_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    commit = "0" * 40
    folder = tmp_path / "models--lab--m" / "snapshots" / commit
    folder.mkdir(parents=True)
    table = tiny_heads.Table()
    head = tiny_heads.Head(table=table)
    model = tiny_heads.write_glm4moe(folder / "m-MTP-Q4_0.gguf", table, head)
    alone = tiny_heads.write_eagle3(folder / "m-assistant-Q8_0.gguf", head)
    tiny.write_vocab_only(folder / "m-vocab-F32.gguf")
    lora.write_lora(folder / "m-lora-F16.gguf")
    (folder / "m-lora-BF16.gguf").write_bytes(b"GGUF")

    def found(quant: str, **how: bool) -> Path | None:
        return next(iter(locate(f"lab/m@{commit}:{quant}", REGISTRY, **how) or ()), None)

    assert found("Q4_0") == found("Q4_0", heads=True) == model
    assert (found("Q8_0"), found("Q8_0", heads=True)) == (None, alone)
    assert found("F16", heads=True) is found("F32", heads=True) is None
    assert found("BF16") is not None, "damaged: verify can name it"
