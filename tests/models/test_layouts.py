"""The layouts in which publishers keep heads, projectors and drafts, on the hub and in folders."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import tiny
from head_pairs import Pair, dflash, eagle3, gemma4, sidecar
from hub import Hub

from ggufspec.errors import DownloadError, ModelError
from ggufspec.models import hub as client
from ggufspec.models.draft_proposal import DraftProposal, proposals, propose_draft
from ggufspec.models.header import read_header
from ggufspec.models.heads import head_of
from ggufspec.models.pull import locate, resolve
from ggufspec.models.registry import Registry

NONE = Registry({}, {})
REPO = "lab/m-GGUF"
TARGET = "m-Q4_K_M.gguf"
LAYOUTS: list[tuple[str, Callable[[Path], Pair], str]] = [
    ("MTP/mtp-m-Q8_0.gguf", sidecar, "an MTP head"),
    ("MTP/m-Q8_0-MTP.gguf", sidecar, "an MTP head"),
    ("mtp-m-Q8_0.gguf", sidecar, "an MTP head"),
    ("assistant/m-Q8_0.gguf", gemma4, "an MTP head"),
    ("mtp-m.gguf", gemma4, "an MTP head"),
    ("m-DFlash-Q8_0.gguf", dflash, "a DFlash head"),
    ("dflash-m-Q8_0.gguf", dflash, "a DFlash head"),
    ("dflash-draft-q8_0.gguf", dflash, "a DFlash head"),
    ("m-eagle3-Q8_0.gguf", eagle3, "an EAGLE-3 head"),
    ("eagle3-m-Q8_0.gguf", eagle3, "an EAGLE-3 head"),
    ("m-speculator.eagle3-F16.gguf", eagle3, "an EAGLE-3 head"),
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Callable[[Path], Pair]], Pair]:
    """Makes each kind of pair once."""
    return cache(lambda make: make(tmp_path_factory.mktemp("made")))


@pytest.fixture
def published(
    hub: Hub, tmp_path: Path, made: Callable[[Callable[[Path], Pair]], Pair]
) -> Callable[..., dict[str, Path]]:
    """Puts a pair into a repository, with a projector; returns its files by their paths there."""

    def publish(make: Callable[[Path], Pair], head: str, target: str = TARGET) -> dict[str, Path]:
        pair = made(make)
        assert isinstance(pair.draft, Path)
        projector = tmp_path / "projector.gguf"
        tiny.write_llama(projector, header={"general.type": "mmproj"})
        files = {target: pair.target, head: pair.draft, "mmproj-F16.gguf": projector}
        files["mmproj-m-Q4_K_M.gguf"] = projector
        hub.add(REPO, {name: path.read_bytes() for name, path in files.items()})
        return files

    return publish


def all_of(target: str) -> list[DraftProposal]:
    return list(proposals(target, NONE))


@pytest.mark.parametrize(("head", "make", "what"), LAYOUTS)
def test_a_head_in_the_targets_repository_is_proposed(
    published: Callable[..., dict[str, Path]],
    hub: Hub,
    head: str,
    make: Callable[[Path], Pair],
    what: str,
) -> None:
    files = published(make, head)
    target = resolve(REPO, registry=NONE)
    assert target.name == TARGET, "no projector, and no head"
    first = all_of(REPO)[0]
    n_bytes = files[head].stat().st_size
    assert first == DraftProposal(f"{REPO}/{head}", f"{what} in {REPO}", n_bytes)
    assert all_of(str(target))[0] == first, "by its file in the cache, too"
    assert not hub.downloads(head)
    draft = resolve(first.name, registry=NONE, heads=True)
    assert head_of(read_header(target), read_header(draft)) is not None
    again = propose_draft(REPO, NONE)
    assert (again.name, again.why, again.n_bytes) == (str(draft), f"{what} beside the target", 0)


@pytest.mark.parametrize(("head", "make", "what"), LAYOUTS)
def test_a_head_in_the_targets_folder_is_proposed(
    published: Callable[..., dict[str, Path]],
    tmp_path: Path,
    head: str,
    make: Callable[[Path], Pair],
    what: str,
) -> None:
    for name, path in published(make, head).items():
        (tmp_path / "own" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "own" / name).write_bytes(path.read_bytes())
    found = propose_draft(str(tmp_path / "own" / TARGET), NONE)
    assert found == DraftProposal(str(tmp_path / "own" / head), f"{what} beside the target")


def test_a_head_is_found_above_the_folder_of_a_quantization(
    published: Callable[..., dict[str, Path]], tmp_path: Path
) -> None:
    target, head = "UD-Q4_K_XL/m-UD-Q4_K_XL.gguf", "MTP/mtp-m-Q8_0.gguf"
    for name, path in published(sidecar, head, target).items():
        (tmp_path / "own" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "own" / name).write_bytes(path.read_bytes())
    found = propose_draft(str(tmp_path / "own" / target), NONE)
    assert found == DraftProposal(str(tmp_path / "own" / head), "an MTP head beside the target")


def test_a_head_is_found_anywhere_in_the_targets_snapshot(
    published: Callable[..., dict[str, Path]],
) -> None:
    published(sidecar, "MTP/mtp-m-Q8_0.gguf", "weights/m-Q4_K_M.gguf")
    head = resolve(f"{REPO}/MTP/mtp-m-Q8_0.gguf", registry=NONE)
    found = propose_draft(str(resolve(REPO, registry=NONE)), NONE)
    assert (found.name, found.why) == (str(head), "an MTP head beside the target")


def test_a_projector_is_no_model(published: Callable[..., dict[str, Path]]) -> None:
    published(sidecar, "MTP/mtp-m-Q8_0.gguf")
    for name in (f"{REPO}:F16", f"{REPO}:Q8_0"):
        with pytest.raises(ModelError, match="has no model of"):
            resolve(name, registry=NONE)
    path = resolve(f"{REPO}/mmproj-F16.gguf", registry=NONE)
    with pytest.raises(ModelError, match="a projector for images or sound, not a model"):
        propose_draft(str(path), NONE)


def test_a_draft_in_the_models_repository_is_proposed(hub: Hub, tmp_path: Path) -> None:
    target = tiny.write_llama(tmp_path / "t.gguf", n_layer=24).read_bytes()
    draft = tiny.write_llama(tmp_path / "d.gguf", n_layer=1).read_bytes()
    hub.add(REPO, {TARGET: target, "draft/m-0.5B-draft-Q4_K_M.gguf": draft})
    assert resolve(REPO, registry=NONE).name == TARGET, "and no two models of Q4_K_M"
    (found,) = all_of(REPO)
    assert found.name == f"{REPO}/draft/m-0.5B-draft-Q4_K_M.gguf"
    assert (found.why, found.n_bytes) == (f"a draft in {REPO}", len(draft))


def test_of_several_heads_the_fastest_kind_and_a_fine_quantization_come_first(hub: Hub) -> None:
    names = ["m-eagle3-Q8_0", "m-DFlash-BF16", "m-DFlash-Q4_0", "m-DFlash-Q8_0", "mtp-m-BF16"]
    hub.add(REPO, {f"{name}.gguf": b"GGUF" for name in (*names, "m-Q4_K_M")})
    found = [each.name for each in proposals(f"{REPO}:Q4_K_M", NONE)]
    wanted = ["mtp-m-BF16", "m-DFlash-Q8_0", "m-eagle3-Q8_0"]
    assert found == [f"{REPO}/{name}.gguf" for name in wanted]


def test_without_an_answer_of_the_hub_what_is_here_is_proposed(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny.write_llama(tmp_path / "t.gguf", n_layer=24).read_bytes()
    hub.add(REPO, {TARGET: target})
    path = resolve(REPO, registry=NONE)
    small = tiny.write_llama(path.with_name("small-Q8_0.gguf"), n_layer=1)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    assert [each.name for each in all_of(REPO)] == [str(small)]
    hub.requests.clear()
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert [each.name for each in all_of(REPO)] == [str(small)]
    assert not hub.requests
    assert locate(REPO, NONE) == (path,)


def test_a_repository_alone_is_what_fits_then_what_is_here(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"m-Q2_K.gguf": 200, "m-Q4_K_S.gguf": 300, TARGET: 500}
    hub.add(REPO, {name: b"GGUF" * (size // 4) for name, size in sizes.items()})
    assert resolve(f"{REPO}:q2_k", registry=NONE).name == "m-Q2_K.gguf"
    assert locate(REPO, NONE) is not None, "the nearest that is here"
    assert resolve(REPO, registry=NONE, room=lambda: 400.0).name == "m-Q4_K_S.gguf"
    assert resolve(REPO, registry=NONE, offline=True).name == "m-Q4_K_S.gguf"
    assert resolve(REPO, registry=NONE).name == TARGET
    hub.requests.clear()
    assert resolve(REPO, registry=NONE, room=lambda: 400.0).name == TARGET, "it is here"
    assert not hub.requests


def test_without_a_connection_a_repository_alone_is_the_nearest_that_is_here(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add(REPO, {"m-Q2_K.gguf": b"GGUF", TARGET: b"GGUF"})
    resolve(f"{REPO}:Q2_K", registry=NONE)
    monkeypatch.setattr(client, "WAITS", ())
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    assert resolve(REPO, registry=NONE).name == "m-Q2_K.gguf"
    with pytest.raises(DownloadError, match=r"the connection to http://127\.0\.0\.1:1 failed"):
        resolve(f"{REPO}:Q4_K_M", registry=NONE)
