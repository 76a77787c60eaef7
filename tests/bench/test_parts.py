"""The contenders and the prompts of a benchmark; its imports."""

from __future__ import annotations

import subprocess
import sys

from ggufspec.bench.experiment import contenders, own_prompts

# Contenders


def test_names_contain_only_what_differs() -> None:
    few = contenders(lengths=[3, "auto"], temperatures=[0.0], has_draft=True)
    assert [each.name for each in few] == ["plain", "draft alone", "draft 3", "draft auto"]
    assert [each.baseline for each in few] == [None, None, "plain", "plain"]
    assert [each.model for each in few] == ["pair", "draft", "pair", "pair"]
    many = contenders(
        lengths=[3],
        drafters=["model", "ngram"],
        rules=["rejection", "traversal"],
        temperatures=[0.0, 0.7],
        sampling={"top_k": 5},
        has_draft=False,
    )
    names = [each.name for each in many]
    assert names[:2] == ["plain, T 0", "draft 3, model, rejection, T 0"]
    assert names[-1] == "draft 3, ngram, traversal, T 0.7"
    assert len(set(names)) == len(names) == 2 * (1 + 4)
    assert many[-1].baseline == "plain, T 0.7"
    assert many[-1].temperature == 0.7
    assert dict(many[-1].options) == {
        **{"top_k": 5, "temperature": 0.7, "n_draft": 3},
        **{"drafter": "ngram", "verify": "traversal", "tree": "auto"},
    }


# Prompts


def test_there_are_prompts_without_a_file() -> None:
    found = own_prompts()
    assert len({prompt.name for prompt in found}) == len(found) > 3
    assert {prompt.category for prompt in found} == {"open", "repetitive"}


# Portability

WITHOUT_POSIX = """
import sys
import ggufspec.common.files  # checks the platform before it imports fcntl
for name in ("resource", "fcntl", "termios", "pwd", "grp"):
    sys.modules[name] = None  # an import raises ImportError, as on Windows
from ggufspec.bench import experiment, llama_server, plot, run, tune
from ggufspec.cli import bench, bench_jobs, race_view
from ggufspec.cli import tune as tune_command
assert run.peak_rss() is None
assert run.describe_machine()["cpu"]
"""


def test_the_benchmark_imports_without_posix_modules() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_POSIX], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
