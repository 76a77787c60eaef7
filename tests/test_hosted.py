"""What .github/ promises: workflows call scripts that exist, documents name files that exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted(ROOT.glob(".github/workflows/*.yml"))
FORMS = sorted(ROOT.glob(".github/ISSUE_TEMPLATE/*.yml"))


def name(path: Path) -> str:
    return path.stem


def steps(workflow: Path) -> list[dict[str, Any]]:
    jobs = yaml.safe_load(workflow.read_text(encoding="utf-8"))["jobs"]
    return [step for job in jobs.values() for step in job["steps"]]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=name)
def test_workflows_call_scripts_that_exist(workflow: Path) -> None:
    commands = "\n".join(step.get("run", "") for step in steps(workflow))
    scripts = re.findall(r"\.ci/[\w-]+", commands)
    assert scripts
    for script in scripts:
        assert (ROOT / script).is_file(), script
        assert sys.platform == "win32" or os.access(ROOT / script, os.X_OK), script


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=name)
def test_workflows_use_actions_of_github_alone(workflow: Path) -> None:
    """Tags of other owners could be moved to other code."""
    for step in steps(workflow):
        assert re.fullmatch(r"actions/[\w-]+@v\d+", step.get("uses", "actions/none@v1")), step


def test_each_python_that_the_package_names_is_tested() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    least = re.search(r'^requires-python = ">=(.+)"$', project, re.MULTILINE)
    named = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project)
    matrix = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text(encoding="utf-8"))
    tested = matrix["jobs"]["latest"]["strategy"]["matrix"]["python"]
    assert least is not None
    assert least[1] == tested[0]
    assert set(named) <= set(tested)


@pytest.mark.parametrize("form", FORMS, ids=name)
def test_issue_forms_ask_for_something(form: Path) -> None:
    fields = yaml.safe_load(form.read_text(encoding="utf-8"))["body"]
    assert any(field.get("validations", {}).get("required") for field in fields)
    assert len({field["id"] for field in fields}) == len(fields)


def test_the_map_of_contributing_names_what_exists() -> None:
    text = (ROOT / ".github/CONTRIBUTING.md").read_text(encoding="utf-8")
    paths = [path for path in re.findall(r"`([\w./]+)`", text) if "/" in path]
    assert len(paths) > 15
    for path in paths:
        assert (ROOT / path).exists() or (ROOT / "ggufspec" / path).exists(), path


@pytest.mark.skipif(sys.platform == "win32", reason="needs bash and awk")
def test_release_notes_are_a_section_of_the_changelog() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    sections = re.split(r"^## (\S+).*\n", changelog, flags=re.MULTILINE)[1:]
    for version, section in zip(sections[::2], sections[1::2], strict=True):
        printed = release_notes(version)
        assert printed.returncode == 0
        assert printed.stdout.strip() == section.strip()


@pytest.mark.skipif(sys.platform == "win32", reason="needs bash and awk")
def test_release_notes_of_an_unknown_version_say_what_is_missing() -> None:
    printed = release_notes("0.1")  # only the start of a version
    assert printed.returncode == 1
    assert "CHANGELOG.md has no section '## 0.1'" in printed.stderr


def release_notes(version: str) -> subprocess.CompletedProcess[str]:
    command = [str(ROOT / ".ci/release-notes"), version]
    return subprocess.run(command, capture_output=True, text=True, check=False)
