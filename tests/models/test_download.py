"""Downloads by the real client's means, from a hub that misbehaves."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from full_disk import longest_file, small_disk
from hub import Hub, broken_off, corrupted, git_sha1, sha256, short, slow, status, without_ranges
from huggingface_hub import scan_cache_dir, try_to_load_from_cache
from patience import PATIENCE, comes_true

from ggufspec.errors import CacheError, DownloadError
from ggufspec.models import download, local, pull, registry
from ggufspec.models.local import HubFiles

REPO = "some/model-GGUF"
FILE = "model-Q4_K_M.gguf"
NAME = f"{REPO}/{FILE}"
DATA = random.Random(0).randbytes(300_000)
SHARDS = {f"big-Q8_0-0000{i}-of-00003.gguf": DATA[i * 90_000 : -i] for i in (1, 2, 3)}
NONE = registry.Registry({}, {})


def get(name: str = NAME, **how: object) -> Path:
    return pull.pull(name, registry=NONE, **how)[0]  # type: ignore[arg-type]


def parts() -> list[Path]:
    return sorted(local.hub_cache().glob(f"*/blobs/*{download.PART_SUFFIX}"))


def blobs() -> list[str]:
    found = local.hub_cache().glob("*/blobs/*")
    return sorted(path.name for path in found if path not in parts())


@pytest.fixture
def repo(hub: Hub) -> Hub:
    hub.add(REPO, {FILE: DATA, "README.md": b"# A model"})
    return hub


def test_a_download_lies_where_every_tool_of_the_hub_finds_it(repo: Hub) -> None:
    path = get()
    assert path.read_bytes() == DATA
    found = try_to_load_from_cache(REPO, FILE, cache_dir=local.hub_cache(), revision="main")
    assert found == str(path)
    scanned = scan_cache_dir(local.hub_cache())
    assert not scanned.warnings
    assert [(r.repo_id, r.size_on_disk) for r in scanned.repos] == [(REPO, len(DATA))]
    assert blobs() == [sha256(DATA)]
    assert not parts()
    path.resolve().unlink()  # its link leads nowhere now
    assert get().read_bytes() == DATA


def test_the_hub_is_not_asked_for_what_is_in_the_cache(repo: Hub) -> None:
    path = get()
    repo.requests.clear()
    assert pull.resolve(NAME, registry=NONE) == path
    assert pull.resolve(f"{REPO}:q4_k_m", registry=NONE) == path
    assert not repo.requests


def test_progress_goes_from_nothing_to_all(repo: Hub) -> None:
    repo.always[NAME] = slow(0.06, 2**15)
    heard: list[tuple[str, int, int]] = []
    get(progress=lambda *told: heard.append(told))
    assert {(what, total) for what, _, total in heard} == {("Downloading", len(DATA))}
    done = [n for _, n, _ in heard]
    assert done == sorted(done)
    assert len(set(done)) > 2
    assert done[-1] == len(DATA)


def test_a_split_model_comes_whole_and_at_once(hub: Hub) -> None:
    hub.add(REPO, dict(SHARDS))
    for shard in SHARDS:
        hub.always[f"{REPO}/{shard}"] = slow(0.02)
    paths = pull.pull(f"{REPO}:Q8_0", registry=NONE)
    assert [path.name for path in paths] == list(SHARDS)
    assert [path.read_bytes() for path in paths] == list(SHARDS.values())
    assert hub.n_most_at_once > 1


def test_an_error_ends_the_downloads_of_the_other_files(hub: Hub) -> None:
    hub.add(REPO, dict(SHARDS))
    first, *others = SHARDS
    hub.always = dict.fromkeys((f"{REPO}/{shard}" for shard in others), slow(0.3))
    hub.faults[f"{REPO}/{first}"] = [status(403)]
    with pytest.raises(DownloadError, match="refuses access"):
        get(f"{REPO}:Q8_0")
    assert not blobs()


def test_an_incomplete_set_is_refused_before_the_first_byte(hub: Hub) -> None:
    first, second, third = SHARDS
    hub.add(REPO, {first: SHARDS[first], third: SHARDS[third]})
    for name in (f"{REPO}:Q8_0", f"{REPO}/{first}"):
        with pytest.raises(DownloadError, match=f"only 2 of the 3 .*{second} is missing"):
            get(name)
    assert not hub.downloads()


def test_a_broken_connection_is_taken_up_again(repo: Hub) -> None:
    # three times as many failures as a hub that sends nothing may have
    repo.faults[NAME] = [broken_off(30_000), *[short(30_000)] * 8]
    assert get().read_bytes() == DATA
    assert {r.headers["Range"] for r in repo.downloads()} == {
        f"bytes={n}-" for n in range(0, 300_000, 30_000)
    }


def test_the_next_run_goes_on_where_the_last_one_ended(repo: Hub) -> None:
    repo.always[NAME] = short(0)
    repo.faults[NAME] = [short(100_000)]
    with pytest.raises(DownloadError, match=r"broke off after .* the next run continues"):
        get()
    assert not blobs()
    assert parts()[0].read_bytes() == DATA[:100_000]
    repo.always.clear()
    repo.requests.clear()
    assert get().read_bytes() == DATA
    assert [r.headers["Range"] for r in repo.downloads()] == ["bytes=100000-"]
    assert not parts()


def test_a_server_without_ranges_starts_anew(repo: Hub) -> None:
    repo.faults[NAME] = [short(100_000), without_ranges]
    assert get().read_bytes() == DATA


@pytest.mark.parametrize("is_lfs", [True, False])
def test_a_damaged_download_is_thrown_away(hub: Hub, is_lfs: bool) -> None:
    hub.add(REPO, {FILE: DATA}, is_lfs=is_lfs)
    hub.faults[NAME] = [corrupted(77_777)]
    with pytest.raises(DownloadError, match="damaged: its hash"):
        get()
    assert not blobs()
    assert not parts()
    assert local.find(HubFiles(REPO, (FILE,))) is None
    assert get().read_bytes() == DATA
    assert blobs() == [sha256(DATA) if is_lfs else git_sha1(DATA)]


@pytest.mark.parametrize("data", [b"x" + DATA[1:1000], DATA + b"more than there can be"])
def test_a_damaged_part_of_an_earlier_run_is_thrown_away(repo: Hub, data: bytes) -> None:
    part = local.repo_folder(REPO) / "blobs" / (sha256(DATA) + download.PART_SUFFIX)
    part.parent.mkdir(parents=True)
    part.write_bytes(data)
    with pytest.raises(DownloadError, match="damaged"):
        get()
    assert get().read_bytes() == DATA


def test_a_gated_model_names_the_page_and_the_token(
    repo: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo.repos[REPO].gated = True
    with pytest.raises(DownloadError, match=rf"https://huggingface.co/{REPO}.*HF_TOKEN"):
        get()
    monkeypatch.setenv("HF_TOKEN", "hf_welcome")
    assert get().read_bytes() == DATA


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no/body:Q4_K_M", "no repository no/body, or it is private"),
        (f"{REPO}@v9:Q4_K_M", "no revision v9"),
        (f"{REPO}/modell-Q4_K_M.gguf", f"did you mean {FILE}"),
        ("no/body/x.gguf", "no repository.*no local file no/body/x.gguf either"),
    ],
)
def test_a_missing_file_or_repository_is_reported(repo: Hub, name: str, message: str) -> None:
    with pytest.raises(DownloadError, match=message):
        get(name)


def test_a_hub_in_trouble_is_asked_again(repo: Hub) -> None:
    repo.faults[REPO] = [status(503)]
    repo.faults[NAME] = [status(502)]
    assert get().read_bytes() == DATA
    repo.add(REPO, {FILE: DATA[::-1]})
    repo.always[NAME] = status(503)
    with pytest.raises(DownloadError, match=r"status 503.*the next run continues"):
        get()


def test_a_limit_on_requests_tells_when(repo: Hub) -> None:
    repo.always[REPO] = status(429, Retry_After="240")
    with pytest.raises(DownloadError, match=r"429.*in 240 seconds"):
        get()
    assert len(repo.requests) == 1


def test_a_short_limit_is_waited_for(repo: Hub) -> None:
    repo.faults[NAME] = [status(429, Retry_After="1")]
    start = time.monotonic()
    assert get().read_bytes() == DATA
    assert time.monotonic() - start >= 1


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("http://127.0.0.1:9", f"connection to http://127.0.0.1:9 failed for {REPO}"),
        ("no-address", "no-address does not answer like a hub: check HF_ENDPOINT"),
        ("http://127.0.0.1:port", "does not answer like a hub: check HF_ENDPOINT"),
    ],
)
def test_no_hub_at_an_address(
    repo: Hub, monkeypatch: pytest.MonkeyPatch, address: str, message: str
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", address)
    with pytest.raises(DownloadError, match=message):
        get()


def test_a_disk_without_links_holds_one_copy(repo: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.file_download.are_symlinks_supported", lambda _: False)
    path = get()
    assert not path.is_symlink()
    assert path.read_bytes() == DATA
    assert not blobs()
    repo.requests.clear()
    assert get() == path
    assert not repo.downloads()


def test_a_page_that_is_no_hub(repo: Hub) -> None:
    def login_page(answer: object) -> None:
        answer.data = b"<html>Log in to the hotel's network"  # type: ignore[attr-defined]

    repo.always[REPO] = login_page
    with pytest.raises(DownloadError, match="does not answer like a hub"):
        get()


def test_a_full_disk_is_told_before_the_first_byte(
    repo: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=250_000))
    with pytest.raises(CacheError, match=r"0.3 MB must be downloaded.*HF_HUB_CACHE"):
        get()
    assert not repo.downloads()
    part = local.repo_folder(REPO) / "blobs" / (sha256(DATA) + download.PART_SUFFIX)
    part.parent.mkdir(parents=True)
    part.write_bytes(DATA[:60_000])  # what has come already takes no more room
    assert get().read_bytes() == DATA


def test_a_disk_that_fills_up_on_the_way(repo: Hub) -> None:
    old = get()
    repo.add(REPO, {FILE: DATA[::-1]})
    with (
        longest_file(150_000),
        pytest.raises(CacheError, match=f"cannot write {FILE} into .*File too large.*HF_HUB_CACHE"),
    ):
        get()
    assert get(offline=True) == old
    assert blobs() == [sha256(DATA)]
    repo.requests.clear()
    assert get().read_bytes() == DATA[::-1]
    assert repo.downloads()[0].headers["Range"] == "bytes=150000-"


def test_the_newest_version_stays_the_one_that_could_be_recorded(repo: Hub) -> None:
    """A model is found in the cache by the name of its commit, whose file cannot be written."""
    old = get()
    repo.add(REPO, {FILE: DATA[::-1]})
    new = get()
    reference = local.repo_folder(REPO) / "refs" / "main"
    reference.write_text(old.parent.name)
    with longest_file(13), pytest.raises(CacheError, match=r"cannot write main.*HF_HUB_CACHE"):
        get()
    assert get(offline=True) == old
    assert [path.name for path in reference.parent.iterdir()] == ["main"]
    assert get() == new


def test_a_read_only_cache_gives_what_it_has(
    repo: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_disk(tmp_path / "small") as disk:
        monkeypatch.setenv("HF_HUB_CACHE", str(disk.folder))
        old = get()
        subprocess.run(["mount", "-o", "remount,ro", str(disk.folder.parent)], check=True)
        assert get() == old
        repo.add(REPO, {FILE: DATA[::-1]})
        with pytest.raises(CacheError, match=r"Read-only file system.*HF_HUB_CACHE"):
            get()
        assert get(offline=True) == old


@pytest.mark.skipif(sys.platform == "win32", reason="signals are Unix's")
def test_an_interrupted_download_goes_on_in_the_next_run(repo: Hub) -> None:
    repo.always[NAME] = slow(0.3)
    process = subprocess.Popen(
        [sys.executable, "-m", "ggufspec", "models", "pull", NAME],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert comes_true(lambda: any(path.stat().st_size for path in parts()))
    process.send_signal(signal.SIGINT)
    _, talk = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert talk.strip() == "ggufspec: interrupted"
    n_there = parts()[0].stat().st_size
    assert 0 < n_there < len(DATA)
    assert not blobs()
    repo.always.clear()
    repo.requests.clear()
    assert get().read_bytes() == DATA
    assert repo.downloads()[0].headers["Range"] == f"bytes={n_there}-"


@pytest.mark.parametrize("has_links", [True, False])
def test_two_at_once_download_it_once(
    repo: Hub, monkeypatch: pytest.MonkeyPatch, has_links: bool
) -> None:
    monkeypatch.setattr("huggingface_hub.file_download.are_symlinks_supported", lambda _: has_links)
    repo.always[NAME] = slow(0.02)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: get(), range(2))
    assert first == second
    assert first.read_bytes() == DATA
    assert len(repo.downloads()) == 1


def test_offline_uses_the_cache_and_sends_no_request(
    repo: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DownloadError, match=r"not in the cache.*--offline"):
        get(offline=True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DownloadError, match=r"not in the cache.*HF_HUB_OFFLINE"):
        get()
    assert not repo.requests
    monkeypatch.delenv("HF_HUB_OFFLINE")
    path = get()
    repo.requests.clear()
    assert get(offline=True) == path
    assert not repo.requests


def registered(**facts: object) -> registry.Registry:
    values = {"repo": f'"{REPO}"', "files": f'["{FILE}"]', **facts}
    text = '[models."M"]\n' + "\n".join(f"{key} = {value}" for key, value in values.items())
    return registry.parse_registry([("models.toml", text)])


def test_a_registered_hash_that_the_hub_does_not_have_is_refused(repo: Hub) -> None:
    models = registered(sha256=f'["{"0" * 64}"]')
    with pytest.raises(DownloadError, match=f"replaced there, or .*name it {NAME}"):
        pull.pull("M", registry=models)
    assert not repo.downloads()
    right = registered(sha256=f'["{sha256(DATA)}"]')
    assert pull.pull("m", registry=right)[0].read_bytes() == DATA


def test_checking_tells_what_differs(repo: Hub) -> None:
    def differences(**facts: object) -> list[tuple[str, str]]:
        entry = registered(**facts).find("M")
        return [(found.what, found.found) for found in pull.check(entry)]

    assert differences(size=len(DATA), sha256=f'["{sha256(DATA)}"]') == []
    assert differences(size=5) == [("size", str(len(DATA)))]
    assert differences(sha256=f'["{"0" * 64}"]') == [(f"sha256 of {FILE}", sha256(DATA))]
    assert differences(files='["other.gguf"]', size=5) == [("file", "does not exist")]


def test_a_newer_revision_is_fetched_by_pull_and_the_older_one_stays(repo: Hub) -> None:
    old = get()
    commit = repo.repos[REPO].commit
    repo.add(REPO, {FILE: DATA[::-1]})
    assert pull.resolve(NAME, registry=NONE) == old
    assert get().read_bytes() == DATA[::-1]
    assert pull.resolve(NAME, registry=NONE).read_bytes() == DATA[::-1]
    assert pull.resolve(f"{REPO}@{commit}/{FILE}", registry=NONE, offline=True) == old


def test_what_a_hub_calls_its_files_stays_within_the_cache(repo: Hub) -> None:
    repo.repos[REPO].commit = "../../.."
    with pytest.raises(DownloadError, match="does not answer like a hub"):
        get()
