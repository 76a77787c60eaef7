"""Names of files in a repository never lead out of the folder of the cache, on any system."""

from __future__ import annotations

import ntpath
from pathlib import PureWindowsPath
from urllib.parse import quote

import pytest
from hub import Hub

from ggufspec.errors import ModelError, OptionError
from ggufspec.models import local, pull, quants, registry

REPO = "some/model-GGUF"
NONE = registry.Registry({}, {})
ALLOWED = ("x-Q8_0.gguf", "Q8_0/x y.gguf", "a/b.c/..x-Q8_0.gguf", "é(1)-Q8_0.gguf")
REFUSED = (
    *("../x-Q8_0.gguf", "a/../../x-Q8_0.gguf", "/x-Q8_0.gguf", "a//x-Q8_0.gguf", "./x-Q8_0.gguf"),
    *("..\\x-Q8_0.gguf", "a\\..\\..\\x-Q8_0.gguf", "\\x-Q8_0.gguf", "\\\\host\\x-Q8_0.gguf"),
    *("C:x-Q8_0.gguf", "C:\\x-Q8_0.gguf", "C:/x-Q8_0.gguf", "a/x:y-Q8_0.gguf"),
    *(".. /x-Q8_0.gguf", "... /x-Q8_0.gguf", "a./x-Q8_0.gguf", "a\0/x-Q8_0.gguf", "a\n-Q8_0.gguf"),
)


@pytest.mark.parametrize("path", ALLOWED)
def test_other_names_stay_within_the_folder_on_windows_too(path: str) -> None:
    assert quants.stays_within(path)
    folder = PureWindowsPath("C:/cache/snapshots")
    joined = ntpath.normpath(folder.joinpath(*path.split("/")))
    assert PureWindowsPath(joined).relative_to(folder).as_posix() == path


def test_what_a_hub_calls_its_files_is_left_out(hub: Hub) -> None:
    hub.add(REPO, dict.fromkeys(REFUSED, b"GGUF"))
    with pytest.raises(ModelError, match="has no GGUF models"):
        pull.pull(f"{REPO}:Q8_0", registry=NONE)
    hub.add(REPO, dict.fromkeys([*REFUSED, ALLOWED[0]], b"GGUF"))
    assert [path.name for path in pull.pull(f"{REPO}:Q8_0", registry=NONE)] == [ALLOWED[0]]


@pytest.mark.parametrize("path", REFUSED)
def test_what_a_user_or_a_registry_names_is_refused(path: str) -> None:
    url = f"https://huggingface.co/{REPO}/resolve/main/{quote(path, safe='')}"
    with pytest.raises(ModelError, match="there is no file"):
        local.parse(url, NONE)
    escaped = path.replace("\\", "\\\\").replace("\0", "\\u0000").replace("\n", "\\n")
    with pytest.raises(OptionError, match="files must be paths within the repository"):
        registry.parse_registry([("mine", f'[models.m]\nrepo = "u/r"\nfiles = ["{escaped}"]\n')])


def test_a_revision_is_no_folder() -> None:
    with pytest.raises(ModelError, match="there is no file"):
        local.parse(f"{REPO}@../x.gguf", NONE)
    text = '[models.m]\nrepo = "u/r"\nfiles = ["a.gguf"]\nrevision = ".."'
    with pytest.raises(OptionError, match="it must be a branch, a tag or a commit"):
        registry.parse_registry([("mine", text)])
