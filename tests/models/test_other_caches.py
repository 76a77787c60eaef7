"""Models that llama.cpp, LM Studio and Ollama have downloaded are found by their names."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import tiny
from hub import Hub

from ggufspec.errors import ModelError
from ggufspec.models import local
from ggufspec.models.pull import locate, resolve
from ggufspec.models.registry import Registry

NONE = Registry({}, {})
REPO = "lab/m-GGUF"
TAG = "registry.ollama.ai/library/llama3.2/1b"


@pytest.fixture
def home(hub: Hub) -> Path:
    """The user's folder; the hub has nothing, so that what is found is on this machine."""
    folder = Path.home()
    folder.mkdir(exist_ok=True)
    return folder


def copied(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return tiny.write_llama(path)


def in_ollama(models: Path, name: str, *, kind: str = "model") -> Path:
    """Write a model as Ollama keeps it: a blob by its hash, which a manifest names."""
    made = copied(models / "blobs" / "new")
    digest = hashlib.sha256(made.read_bytes()).hexdigest()
    blob = made.rename(models / "blobs" / f"sha256-{digest}")
    manifest = models / "manifests" / name
    manifest.parent.mkdir(parents=True, exist_ok=True)
    media = f"application/vnd.ollama.image.{kind}"
    layers = [{"mediaType": media, "digest": f"sha256:{digest}", "size": blob.stat().st_size}]
    others = [{"mediaType": "application/vnd.ollama.image.template", "digest": "sha256:00"}]
    manifest.write_text(json.dumps({"schemaVersion": 2, "layers": [*others, *layers]}))
    return blob


def found(name: str) -> Path | None:
    return next(iter(locate(name, NONE) or ()), None)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (".lmstudio/models/lab/m-GGUF/m-Q4_K_M.gguf", f"{REPO}:q4_k_m"),
        (".cache/lm-studio/models/lab/m-GGUF/m-Q8_0.gguf", f"{REPO}:Q8_0"),
        (".lmstudio/models/lab/m-GGUF/sub/m-Q8_0.gguf", f"{REPO}/sub/m-Q8_0.gguf"),
        (".cache/llama.cpp/lab_m-GGUF_m-Q4_K_M.gguf", f"{REPO}:Q4_K_M"),
        (".cache/llama.cpp/lab_m-GGUF_m-Q4_K_M.gguf", f"{REPO}/m-Q4_K_M.gguf"),
        (".cache/llama.cpp/lab_m-GGUF_sub_m-Q4_K_M.gguf", f"{REPO}/sub/m-Q4_K_M.gguf"),
        (".lmstudio/models/lab/m-GGUF/m-Q2_K.gguf", REPO),
    ],
)
def test_files_that_other_programs_keep_are_found_by_name(home: Path, path: str, name: str) -> None:
    if "llama.cpp" in path and local.other_caches.sys.platform != "linux":
        pytest.skip("the folder has another name")
    assert found(name) is None
    made = copied(home / path)
    assert found(name) == made
    assert resolve(name, registry=NONE, offline=True) == made
    assert found("lab/other:Q4_K_M") is None


def test_what_the_hub_has_under_a_name_is_read_where_it_lies(hub: Hub, home: Path) -> None:
    made = copied(home / ".lmstudio/models/lab/m-GGUF/m-Q4_K_M.gguf")
    hub.add(REPO, {"m-Q4_K_M.gguf": made.read_bytes()})
    before = sorted(home.rglob("*"))
    assert resolve(REPO, registry=NONE) == made
    assert not hub.downloads()
    assert sorted(home.rglob("*")) == before


def test_folders_may_be_chosen(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_CACHE", str(tmp_path / "llama"))
    flat = copied(tmp_path / "llama" / "lab_m-GGUF_m-Q4_K_M.gguf")
    assert found(f"{REPO}:Q4_K_M") == flat
    commit = "1" * 40
    newer = copied(tmp_path / f"llama/models--lab--m-GGUF/snapshots/{commit}/m-Q8_0.gguf")
    (newer.parents[2] / "refs").mkdir()
    (newer.parents[2] / "refs" / "main").write_text(commit)
    assert found(f"{REPO}:Q8_0") == newer
    (home / ".lmstudio-home-pointer").write_text(str(tmp_path / "studio"))
    moved = copied(tmp_path / "studio/models/lab/m-GGUF/m-F16.gguf")
    assert found(f"{REPO}:F16") == moved
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "ollama"))
    assert in_ollama(tmp_path / "ollama", TAG) == found("llama3.2:1b")


def test_ollamas_models_are_found_by_manifest(home: Path) -> None:
    models = home / ".ollama" / "models"
    with pytest.raises(ModelError, match=r"there is no file llama3.2:1b"):
        found("llama3.2:1b")
    assert in_ollama(models, TAG) == found("llama3.2:1b")
    latest = in_ollama(models, "registry.ollama.ai/library/qwen3/latest")
    assert found("qwen3") == latest
    of_hub = in_ollama(models, f"hf.co/{REPO}/Q4_K_M")
    assert found(f"{REPO}:Q4_K_M") == found(f"hf.co/{REPO}:Q4_K_M") == of_hub


@pytest.mark.parametrize("damage", ["kind", "digest", "blob", "json", "huge", "folder"])
def test_damaged_manifests_are_no_models(home: Path, damage: str) -> None:
    models = home / ".ollama" / "models"
    blob = in_ollama(models, TAG, kind="adapter" if damage == "kind" else "model")
    manifest = models / "manifests" / TAG
    if damage == "digest":
        copied(models / "outside.gguf")
        (models / "blobs" / "sha256-x").mkdir()
        digest = blob.name.replace("-", ":")
        manifest.write_text(manifest.read_text().replace(digest, "sha256:x/../../outside.gguf"))
    elif damage == "blob":
        blob.unlink()
    elif damage == "json":
        manifest.write_text('{"layers": [1, {}]}')
    elif damage == "huge":
        manifest.write_text(manifest.read_text() + " " * 2**21)
    elif damage == "folder":
        manifest.unlink()
        manifest.mkdir()
    with pytest.raises(ModelError, match=r"there is no file llama3.2:1b"):
        found("llama3.2:1b")


@pytest.mark.parametrize("name", ["a:..", "a\0b", "a:\0", ".a:b", "../a:b", "a:b/c"])
def test_names_do_not_lead_out_of_the_folder(home: Path, name: str) -> None:
    in_ollama(home / ".ollama" / "models", TAG)
    with pytest.raises(ModelError):
        found(name)
