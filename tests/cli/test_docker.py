"""The Dockerfile copies what exists, builds the lowest version allowed, and serves with options."""

from __future__ import annotations

import json
import re
from pathlib import Path

from cli.conftest import Command

ROOT = Path(__file__).parents[2]
LINES = (ROOT / ".docker/Dockerfile").read_text().replace("\\\n", " ").splitlines()


def arguments(instruction: str) -> list[str]:
    return [line.partition(" ")[2] for line in LINES if line.startswith(f"{instruction} ")]


def test_all_that_it_copies_is_there_and_not_ignored() -> None:
    allowed = (ROOT / ".dockerignore").read_text().splitlines()
    sources = [line.split()[:-1] for line in arguments("COPY") if "--from" not in line]
    copied = [name for each in sources for name in each]
    assert copied
    for name in copied:
        assert (ROOT / name).exists()
        assert f"!{name}" in allowed


def test_it_has_the_llama_cpp_python_that_the_package_needs() -> None:
    (version,) = re.findall(r"^LLAMA_CPP_PYTHON=(\S+)", "\n".join(arguments("ARG")), re.MULTILINE)
    assert f'"llama-cpp-python>={version},<' in (ROOT / "pyproject.toml").read_text()


def test_it_serves(command: Command) -> None:
    (entry,), (shown,) = map(arguments, ("ENTRYPOINT", "CMD"))
    assert json.loads(entry) == ["ggufspec"]
    name, *options = json.loads(shown)
    text = command(name, "--help-all").out
    assert all(each in text for each in options if each.startswith("--"))
    assert arguments("USER") == ["10001"], "a number, which Kubernetes can tell from root"
