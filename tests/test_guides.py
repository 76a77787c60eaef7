"""The examples of README.md and of each room's guide run as printed."""

from __future__ import annotations

import json
import logging
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from fakes import FakeSession, scripted_logits, speculated

from ggufspec.cli import main
from ggufspec.decoding import verify
from ggufspec.decoding.sampling import Sampling
from ggufspec.standin.embedded import embedded_draft, embedded_target

ROOT = Path(__file__).parents[1]
GUIDES = sorted([ROOT / "README.md", *ROOT.glob("ggufspec/**/README.md")])
FENCE = re.compile(
    r"(?:^<!-- not run: (?P<reason>[^\n]+) -->\n)?^```(?P<kind>[a-z]*)\n(?P<code>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
PROMPTS = ["Once upon a time", "The prince", "In the year of the great frost"]


class Example(NamedTuple):
    """A fenced block: `python` or `bash` is run, unless it says why not."""

    kind: str
    code: str
    reason: str | None
    line: int


def examples(guide: Path) -> Iterator[Example]:
    text = guide.read_text(encoding="utf-8")
    for found in FENCE.finditer(text):
        line = text.count("\n", 0, found.start("code"))
        yield Example(found["kind"], found["code"], found["reason"], line)


def name(guide: Path) -> str:
    return str(guide.relative_to(ROOT).parent)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the guides assume: two models of one vocabulary, and prompts."""
    shutil.copy(embedded_target(), tmp_path / "large.gguf")
    shutil.copy(embedded_draft(), tmp_path / "small.gguf")
    lines = [json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS]
    (tmp_path / "prompts.jsonl").write_text("".join(lines), encoding="utf-8")
    (tmp_path / "prompt.txt").write_text(PROMPTS[0] + "\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for logger in map(logging.getLogger, ("ggufspec", "ggufspec.llama")):  # -v changes them
        monkeypatch.setattr(logger, "handlers", [*logger.handlers])
        monkeypatch.setattr(logger, "level", logger.level)
    return tmp_path


@pytest.mark.parametrize("guide", GUIDES, ids=name)
def test_the_examples_run(
    guide: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    namespace: dict[str, object] = {}
    for example in examples(guide):
        if example.reason is not None:
            continue
        if example.kind == "python":
            # As many lines before it as in the guide, so that a traceback points there.
            exec(
                compile("\n" * example.line + example.code, str(guide), "exec", dont_inherit=True),
                namespace,
            )
        elif example.kind == "bash":
            for command in example.code.replace("\\\n", "").splitlines():
                words = shlex.split(command, comments=True)
                if not words:
                    continue
                # In this process, which saves the second that each start takes.
                assert words[0] == "ggufspec", f"line {example.line}: {command}"
                monkeypatch.setattr(sys, "argv", words)
                capfd.readouterr()
                code = main.run()
                assert code == 0, f"line {example.line}: {capfd.readouterr().err}"


@pytest.mark.parametrize("guide", GUIDES, ids=name)
def test_what_is_not_run_is_python_all_the_same(guide: Path) -> None:
    for example in examples(guide):
        assert example.kind in ("", "python", "bash", "text", "toml", "json"), example
        if example.kind == "python":
            compile(example.code, str(guide), "exec")


@pytest.mark.parametrize(
    "guide", [*GUIDES, *ROOT.glob(".github/*.md")], ids=lambda path: str(path.relative_to(ROOT))
)
def test_links_between_guides_lead_somewhere(guide: Path) -> None:
    text = guide.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith("http"):
            continue
        path, _, anchor = link.partition("#")
        target = (guide.parent / path).resolve() if path else guide
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


def test_the_strategy_of_the_drafting_guide_drafts() -> None:
    (code,) = [
        example.code
        for example in examples(ROOT / "ggufspec" / "drafting" / "README.md")
        if "class Echo" in example.code
    ]
    namespace: dict[str, object] = {}
    exec(code, namespace)
    tokens = [1, 2]
    rounds = speculated(
        tokens,
        target=FakeSession(scripted_logits([1, 2], 5)),
        drafter=namespace["make"](None),  # type: ignore[operator]
        verify=verify.rule("rejection"),
        sampling=Sampling(temperature=0),
        uniforms=np.zeros,
        n_draft=3,
        n_end=12,
    )
    assert sum(round_.n_accepted for round_ in rounds) == 5
    assert tokens == [1, 2] * 6


def test_every_guide_is_linked_from_the_readme() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for guide in GUIDES[1:]:
        assert f"({guide.relative_to(ROOT).as_posix()})" in text


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 180


def anchors(guide: Path) -> set[str]:
    """The anchors of the headings, as code hosts make them."""
    found = re.findall(r"^#+ (.+)$", guide.read_text(encoding="utf-8"), re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in found]
    return {heading.replace(" ", "-") for heading in plain}
