"""`ggufspec models`, and names of models in other commands, against a hub on loopback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import tiny_heads
from cli.conftest import Command
from cli.terminal import Terminal
from hub import Hub, sha256, status

from ggufspec.common.files import format_bytes

TRIMMED = {
    "source": "Qwen",
    "source_hash": "ab12",
    "n_vocab": 500,
    "tokens": list(range(388)),
    "layers": [0, 2, 3, 4],
}
TARGET, DRAFT = "lab/target-GGUF", "lab/draft-GGUF"


@pytest.fixture
def names(
    hub: Hub, target: Path, draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Hub:
    """Both models on the hub, and registered as a pair by their user."""
    data, small = target.read_bytes(), draft.read_bytes()
    hub.add(TARGET, {"target-Q8_0.gguf": data})
    hub.add(DRAFT, {"draft-Q8_0.gguf": small})
    mine = tmp_path / "mine.toml"
    mine.write_text(
        f'[models."Large"]\nrepo = "{TARGET}"\nfiles = ["target-Q8_0.gguf"]\nsize = {len(data)}\n'
        f'sha256 = ["{sha256(data)}"]\n'
        f'[models."Small"]\nrepo = "{DRAFT}"\nfiles = ["draft-Q8_0.gguf"]\n'
        '[pairs."ours"]\ntarget = "Large"\ndraft = "Small"\nnote = "For tests."\n'
        "settings = { draft_n = 3 }\n"
    )
    monkeypatch.setenv("GGUFSPEC_MODELS", str(mine))
    return hub


def entry(command: Command, name: str) -> dict[str, object]:
    """What `models list` says of a model."""
    found = command("models", "list", "--json").document["models"]
    (facts,) = [facts for facts in found if facts["name"] == name]
    return dict(facts)


def test_the_list_tells_what_is_in_the_cache_and_what_fits(command: Command, names: Hub) -> None:
    assert entry(command, "Large")["cached"] is None
    path = command("models", "pull", "large").out.strip()
    found = entry(command, "Large")
    assert found["cached"] == path
    assert found["fits_memory"] is True
    assert entry(command, "Small")["fits_memory"] is None  # its size is not known
    listed = command("models", "list")
    assert listed.code == 0
    assert "70B-Q3_K_S" in listed.out
    (line,) = [line for line in listed.out.splitlines() if line.startswith("Large ")]
    assert line.split()[-3:] == ["yes", "yes", TARGET]


def test_pulled_models_are_where_path_says(command: Command, names: Hub, target: Path) -> None:
    missing = command("models", "path", "Large")
    assert missing.code == 1
    assert missing.out == ""
    assert "`ggufspec models pull Large` downloads it" in missing.err
    pulled = command("models", "pull", "Large", f"{DRAFT}:Q8_0")
    assert pulled.code == 0
    assert pulled.err == ""
    first, second = pulled.out.splitlines()
    assert Path(first).read_bytes() == target.read_bytes()
    assert command("models", "path", "Large").out == f"{first}\n"
    assert command("models", "path", "small").out == f"{second}\n"
    assert command("models", "path", target).out == f"{target}\n"


def test_show_tells_what_the_registry_knows(command: Command, names: Hub) -> None:
    shown = command("models", "show", "LARGE")
    assert shown.code == 0
    assert f"https://huggingface.co/{TARGET} at main" in shown.out
    assert "ggufspec run --target Large --draft Small --draft-n 3\n  For tests.\n" in shown.out
    document = command("models", "show", "small", "--json").document
    assert document["header"] is None
    assert document["pairs"][0]["settings"] == {"draft_n": 3}
    unknown = command("models", "show", "nobody/knows:Q8_0")
    assert unknown.code == 1
    assert "ggufspec models pull nobody/knows:Q8_0" in unknown.err


def test_show_tells_what_a_file_says_of_itself(command: Command, names: Hub, target: Path) -> None:
    pytest.importorskip("ggufspec.models.header")
    header = command("models", "show", target, "--json").document["header"]
    assert header["architecture"] == "llama"
    assert header["n_layers"] == len(header["layer_bytes"]) == 2
    assert header["n_bytes"] == target.stat().st_size
    command("models", "pull", "Large")
    shown = command("models", "show", "Large").out
    assert "architecture   llama" in shown
    assert f"fingerprint {header['vocabulary']}" in shown


def test_check_compares_with_the_hub(command: Command, names: Hub) -> None:
    assert command("models", "check", "Large", "Small").code == 0
    names.add(TARGET, {"target-Q8_0.gguf": b"GGUF, but another"})
    found = command("models", "check", "Large", "Small")
    assert found.code == 1
    assert "Large: size: " in found.out
    registered = entry(command, "Large")["sha256"][0]  # type: ignore[index]
    assert f"Large: sha256 of target-Q8_0.gguf: registered {registered}" in found.out
    assert "Small: as registered" in found.out
    del names.repos[DRAFT]
    document = command("models", "check", "small", "--json")
    assert document.code == 1
    assert document.document["differences"][0]["what"] == "repository"
    assert not names.downloads()


def test_check_reports_no_difference_if_the_hub_fails(command: Command, names: Hub) -> None:
    names.always[TARGET] = status(503)
    found = command("models", "check", "Large")
    assert found.out == ""
    assert "the hub failed (status 503" in found.err


def test_verify_reads_the_file_again(command: Command, names: Hub, target: Path) -> None:
    path = Path(command("models", "pull", "Large").out.strip())
    digest = sha256(target.read_bytes())
    whole = command("models", "verify", "Large")
    assert whole.code == 0
    assert whole.out == f"{digest}  target-Q8_0.gguf: correct\n"
    path.resolve().write_bytes(b"damaged")
    for name in ("Large", f"{TARGET}/target-Q8_0.gguf", path):
        damaged = command("models", "verify", name)
        assert damaged.code == 1
        assert f"DAMAGED: the correct one is {digest}" in damaged.out
        assert f"ggufspec models rm {name}" in damaged.err
    alone = command("models", "verify", target)
    assert (alone.code, alone.out) == (
        0,
        f"{digest}  target.gguf: not compared, no sha256 is known for it\n",
    )


def test_rm_asks_and_frees(command: Command, names: Hub, target: Path) -> None:
    path = Path(command("models", "pull", "Large").out.strip())
    kept = command("models", "rm", "Large", stdin=b"n\n")
    assert kept.code == 130
    assert "Remove 1 file of Large, " in kept.err
    assert path.exists()
    gone = command("models", "rm", "Large", "--yes")
    assert gone.code == 0
    assert gone.out.startswith("Freed ")
    assert not path.exists()
    assert command("models", "rm", "Large", "--yes").code == 1
    own = command("models", "rm", target, "--yes")
    assert own.code == 1
    assert "is not in the hub's cache" in own.err
    assert target.exists()


def test_run_takes_names(run: Command, names: Hub) -> None:
    ask = ("-p", "ab", "-n", "4", "--temp", "0", "--draft-n", "2", "--json")
    first = run("-m", f"{TARGET}:Q8_0", "-md", f"hf:{DRAFT}/draft-Q8_0.gguf", *ask)
    assert first.code == 0
    assert first.document["n_drafted"] > 0
    assert Path(first.document["settings"]["target"]).name == "target-Q8_0.gguf"
    names.requests.clear()
    again = run("-m", "Large", "-md", "Small", "--offline", *ask)
    assert again.document["tokens"] == first.document["tokens"]
    assert not names.requests


def test_run_proposes_the_registered_draft(run: Command, names: Hub) -> None:
    refused = run("-m", "Large", "-md", "auto", "-p", "ab", "-n", "4", "--json")
    assert (refused.code, refused.out) == (1, "")
    assert "no draft for Large is on this machine; --yes downloads Small (the reg" in refused.err
    assert not names.downloads("draft")
    result = run("-m", "Large", "-md", "auto", "--yes", "-p", "ab", "-n", "4", "--json")
    assert result.code == 0
    assert "drafting with Small: the registry pairs it with Large\n" in result.err
    assert Path(result.document["settings"]["draft"]).name == "draft-Q8_0.gguf"
    by_file = run(
        "-m", result.document["settings"]["target"], "-md", "auto", "-p", "ab", "-n", "4", "--json"
    )
    assert "drafting with Small" in by_file.err


def test_a_trimmed_file_says_what_it_was_cut_from(command: Command, tmp_path: Path) -> None:
    facts = {f"ggufspec.trim.{key}": value for key, value in TRIMMED.items()}
    path = tiny.write_llama(tmp_path / "cut.gguf", header=facts)
    assert "trimmed from Qwen to 388 of 500 tokens and layers 0,2-4\n" in (
        command("models", "show", path).out
    )
    header = command("models", "show", path, "--json").document["header"]
    assert header["trim"] == {
        "source": "Qwen",
        "source_hash": "ab12",
        "tokens": header["n_vocab"],
        "n_vocab": 500,
        "layers": [0, 2, 3, 4],
    }
    whole = tiny.write_llama(tmp_path / "whole.gguf")
    assert command("models", "show", whole, "--json").document["header"]["trim"] is None
    assert "origin" not in command("models", "show", whole).out


def test_errors_are_reported_before_anything_is_downloaded(run: Command, names: Hub) -> None:
    assert run("-m", "Large", "-p", "ab", "--draft-temp", "0.5").code == 2
    wrong = run("-m", "Lrge", "-p", "ab")
    assert wrong.code == 1
    assert "no file Lrge" in wrong.err
    assert "did you mean Large" in wrong.err
    assert not names.requests


def test_a_broken_registry_of_the_user(
    run: Command, names: Hub, target: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "broken.toml"
    broken.write_text("[models.x]\nrepos = 'a/b'")
    monkeypatch.setenv("GGUFSPEC_MODELS", str(broken))
    result = run("-m", "Large", "-p", "ab")
    assert result.code == 2
    assert f"the registry {broken}" in result.err
    assert "did you mean repo" in result.err
    assert run("-m", target, "-p", "ab", "-n", "2").code == 0  # a path needs no registry


def test_names_are_understood_without_the_hubs_client() -> None:
    code = (
        "import sys, ggufspec.cli.models, ggufspec.models as models; "
        "models.registry.load_registry().find('70B-Q3_K_S'); "
        "print([name for name in ('huggingface_hub', 'httpx2', 'llama_cpp', 'numpy', 'rich') "
        "if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n"


def test_rm_takes_a_link_of_the_users_own_and_not_what_it_leads_to(
    command: Command, names: Hub, target: Path, tmp_path: Path
) -> None:
    path = Path(command("models", "pull", "Large").out.strip())
    mine = tmp_path / "mine.gguf"
    mine.write_bytes(target.read_bytes())
    path.unlink()
    path.symlink_to(mine)
    assert command("models", "rm", "Large", "--yes").code == 0
    assert mine.exists()
    assert not path.exists()


def test_check_without_a_network_is_an_error_and_no_difference(
    command: Command, names: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    result = command("models", "check", "Large")
    assert result.code == 1
    assert "HF_HUB_OFFLINE is set" in result.err
    assert not result.out


def test_a_damaged_reference_in_the_cache_counts_as_none(command: Command, names: Hub) -> None:
    path = Path(command("models", "pull", "Large").out.strip())
    for content in (b"\xff\xfe", b"/etc", b"../.."):
        (path.parents[2] / "refs" / "main").write_bytes(content)
        result = command("models", "path", "Large")
        assert result.code == 1
        assert "not in the cache" in result.err


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a model and of its MTP head."""
    table, folder = tiny_heads.Table(), tmp_path_factory.mktemp("parts")
    head = tiny_heads.Head(table=table)
    return {
        part: tiny_heads.write_glm4moe(folder / part, table, head, part=part).read_bytes()
        for part in ("trunk", "head")
    }


@pytest.fixture
def with_heads(hub: Hub, parts: dict[str, bytes]) -> Hub:
    """A repository of a model with MTP heads, and one with a head alone."""
    hub.add(
        "lab/m",
        {
            **dict.fromkeys(("m-UD-Q4_K_XL.gguf", "m-Q8_0.gguf"), parts["trunk"]),
            **dict.fromkeys(("MTP/mtp-m-Q8_0.gguf", "MTP/mtp-m-BF16.gguf"), parts["head"]),
            "mmproj-BF16.gguf": b"GGUF",
        },
    )
    hub.add("lab/heads", {"mtp-m-Q8_0.gguf": parts["head"]})
    return hub


def test_a_head_is_never_the_model_of_a_quantization(command: Command, with_heads: Hub) -> None:
    refused = command("run", "-m", "lab/m:BF16", "-p", "ab")
    assert (refused.code, refused.out) == (1, "")
    assert "has no model of BF16, only draft heads (name the file with --draft: MTP/" in refused.err
    assert "it has Q8_0, UD-Q4_K_XL" in refused.err
    only = command("models", "pull", "lab/heads:Q8_0")
    assert "has no GGUF models, only draft heads" in only.err
    assert not with_heads.downloads()
    assert command("models", "pull", "lab/m:Q8_0").out.endswith("m-Q8_0.gguf\n")
    assert len(with_heads.downloads("m-Q8_0.gguf")) == len(with_heads.downloads()) == 1


def test_a_head_in_the_cache_is_only_a_draft(command: Command, with_heads: Hub) -> None:
    for file in ("m-Q8_0.gguf", "MTP/mtp-m-Q8_0.gguf", "MTP/mtp-m-BF16.gguf"):
        assert command("models", "pull", f"lab/m/{file}").code == 0
    assert command("models", "path", "lab/m:Q8_0").out.endswith("/m-Q8_0.gguf\n")
    assert command("models", "path", "lab/m:BF16").code == 1
    with_heads.repos.clear()
    for draft in ("lab/m:BF16", "auto"):
        asked = ("-m", "lab/m:Q8_0", "-md", draft, "-p", "ab", "-n", "6", "--draft-n", "2")
        found = command("run", *asked, "-t", "1", "--temp", "0", "--json")
        assert found.document["n_accepted"] == found.document["n_drafted"] > 0
    assert "MTP head beside the target" in found.err


def test_a_draft_on_the_hub_is_proposed_with_its_size(
    command: Command, with_heads: Hub, tmp_path: Path
) -> None:
    """Without a terminal, it is downloaded with --yes; then it is found without the hub."""
    n_bytes = len(with_heads.repos["lab/m"].files["MTP/mtp-m-Q8_0.gguf"])
    ask = ("run", "-m", "lab/m", "-p", "ab", "-n", "6", "-t", "1", "--temp", "0", "--json")
    refused = command(*ask, "-md", "auto")
    assert refused.code == 1
    assert "lab/m: m-UD-Q4_K_XL.gguf" in refused.err
    shown = f"lab/m/MTP/mtp-m-Q8_0.gguf (an MTP head in lab/m, {format_bytes(n_bytes)})"
    assert f"--yes downloads {shown}" in refused.err
    assert not with_heads.downloads("mtp")
    first = command(*ask, "-md", "auto", "--yes", "--draft-n", "2")
    assert "drafting with lab/m/MTP/mtp-m-Q8_0.gguf: an MTP head in lab/m" in first.err
    assert first.document["n_accepted"] == first.document["n_drafted"] > 0
    assert len(with_heads.downloads("mtp")) == 1
    with_heads.repos.clear()
    again = command(*ask, "-md", "auto", "--offline", "--draft-n", "2")
    assert "an MTP head beside the target" in again.err
    assert again.document["tokens"] == first.document["tokens"]


@pytest.mark.parametrize("answer", ["y", "n"])
def test_a_terminal_is_asked_before_a_draft_is_downloaded(with_heads: Hub, answer: str) -> None:
    ask = ("run", "-m", "lab/m", "-p", "ab", "-n", "6", "-t", "1", "-md", "auto")
    shown = Terminal(*ask, talk=True)
    shown.read_until(b"[Y/n]")
    assert b"Download lab/m/MTP/mtp-m-Q8_0.gguf (" in shown.data
    shown.type(f"{answer}\n")
    code, out, _ = shown.end()
    assert code == 0
    assert ("drafting with" in out) == (answer == "y") == bool(with_heads.downloads("mtp"))


def test_chat_takes_the_name_of_a_repository(command: Command, hub: Hub, tmp_path: Path) -> None:
    """The first time it is downloaded; the second time the hub is not asked."""
    model = tiny.write_llama(tmp_path / "chat.gguf", vocab=tiny.BPE, chat_template=tiny.CHATML)
    hub.add("lab/chat", {"c-Q8_0.gguf": model.read_bytes(), "c-Q4_K_M.gguf": model.read_bytes()})
    ask = ("chat", "-hf", "lab/chat", "-n", "4", "-t", "1", "--temp", "0", "--jinja")
    first = command(*ask, stdin=b"hello\n")
    assert first.code == 0
    assert "lab/chat: c-Q4_K_M.gguf" in first.err
    assert "without effect here: --jinja (always on)" in first.err
    assert [each.path.rpartition("/")[2] for each in hub.downloads()] == ["c-Q4_K_M.gguf"]
    hub.requests.clear()
    again = command(*ask, "--offline", stdin=b"hello\n")
    assert (again.code, again.out) == (0, first.out)
    assert command(*ask, stdin=b"hello\n").out == first.out
    assert not hub.requests
