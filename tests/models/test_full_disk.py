"""A download that cannot be written keeps what was there, and goes on in the next run."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path
from typing import Any

import pytest
from full_disk import PAGE, longest_file, small_disk
from hub import Hub

from ggufspec.errors import CacheError
from ggufspec.models import local, pull, registry

REPO = "some/model-GGUF"
FILE = "model-Q4_K_M.gguf"
NAME = f"{REPO}/{FILE}"
DATA = random.Random(0).randbytes(10 * PAGE)
NEWER = DATA[::-1]
NONE = registry.Registry({}, {})


def get(name: str = NAME, **how: Any) -> Path:
    return pull.pull(name, registry=NONE, **how)[0]


@pytest.fixture
def repo(hub: Hub) -> Hub:
    hub.add(REPO, {FILE: DATA})
    return hub


def test_the_newest_version_stays_the_one_that_could_be_recorded(repo: Hub) -> None:
    """A model is found in the cache by the name of its commit, whose file cannot be written."""
    old = get()
    repo.add(REPO, {FILE: NEWER})
    new = get()
    reference = local.repo_folder(REPO) / "refs" / "main"
    reference.write_text(old.parent.name)
    for limit in range(0, 40, 13):
        with (
            longest_file(limit),
            pytest.raises(CacheError, match=r"cannot write main.*HF_HUB_CACHE"),
        ):
            get()
        assert get(offline=True) == old
        assert [path.name for path in reference.parent.iterdir()] == ["main"]
    assert get() == new
    assert get(offline=True) == new


def test_every_room_that_a_disk_may_have_left(
    repo: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_disk(tmp_path / "small") as disk:
        monkeypatch.setenv("HF_HUB_CACHE", str(disk.folder))
        monkeypatch.setattr("ggufspec.models.download.free_bytes", lambda _: None)  # unknown
        old = get()
        repo.add(REPO, {FILE: NEWER})
        for n_pages in range(4):  # in addition to those of the runs before
            disk.leave(n_pages * PAGE)
            with pytest.raises(
                CacheError, match=rf"cannot write {FILE}.*No space left.*HF_HUB_CACHE"
            ):
                get()
            assert get(offline=True) == old
            assert old.read_bytes() == DATA
        disk.leave_all()
        repo.requests.clear()
        assert get().read_bytes() == NEWER
        assert [r.headers["Range"] for r in repo.downloads()] == [f"bytes={6 * PAGE}-"]


def test_a_read_only_cache_gives_what_it_has(
    repo: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_disk(tmp_path / "small") as disk:
        monkeypatch.setenv("HF_HUB_CACHE", str(disk.folder))
        old = get()
        subprocess.run(["mount", "-o", "remount,ro", str(disk.folder.parent)], check=True)
        assert get() == old
        repo.add(REPO, {FILE: NEWER})
        with pytest.raises(CacheError, match=r"Read-only file system.*HF_HUB_CACHE"):
            get()
        assert get(offline=True) == old


# Disks without symbolic links


@pytest.fixture
def no_links(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.file_download.are_symlinks_supported", lambda _: False)


SHARDS = [f"big-Q8_0-0000{i}-of-00003.gguf" for i in (1, 2, 3)]


@pytest.mark.usefixtures("no_links")
def test_files_of_the_same_content_are_copied_where_there_are_no_links(hub: Hub) -> None:
    hub.add(REPO, dict.fromkeys(SHARDS, DATA))
    paths = pull.pull(f"{REPO}:Q8_0", registry=NONE)
    assert [path.name for path in paths] == SHARDS
    assert [path.read_bytes() for path in paths] == [DATA] * 3
    assert not any(path.is_symlink() for path in paths)
    assert len(hub.downloads()) == 1
    assert not [*local.hub_cache().glob("*/blobs/*")]
    hub.requests.clear()
    assert pull.pull(f"{REPO}:Q8_0", registry=NONE) == paths
    assert not hub.downloads()
