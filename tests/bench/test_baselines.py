"""Baselines: which can run, what they are given, what they return, and that none is left."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import lora
import pytest
import tiny
from llama_build import Build

from ggufspec.bench import baselines
from ggufspec.bench.baselines import BASELINES, Baseline, supported
from ggufspec.bench.experiment import Experiment, baseline_contenders, contenders
from ggufspec.bench.llama_server import LlamaCppProgram
from ggufspec.bench.run import measure
from ggufspec.common.prompts import Prompt
from ggufspec.decoding.sampling import Sampling
from ggufspec.engine.engine import Engine
from ggufspec.engine.load import load
from ggufspec.errors import OptionError, PromptError
from ggufspec.llama.python_llama import BaselineRequest, BaselineText
from ggufspec.models.adapters import Adapter
from ggufspec.standin.embedded import embedded_draft, embedded_target

GREEDY = Sampling(temperature=0)


@pytest.fixture
def build(tmp_path: Path) -> Build:
    return Build(tmp_path)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with load(embedded_target(), embedded_draft(), n_ctx=256, n_threads=1, tuned=False) as made:
        yield made


# Which can run here


def test_an_option_that_a_baseline_lacks_is_named() -> None:
    options = {"temperature": 0.5, "top_n_sigma": 1.5, "repeat_last_n": 64, "logit_bias": {5: 1.0}}
    sampling, breakers = supported("it", {**options, "dry_sequence_breakers": ["."]})
    assert (sampling.top_n_sigma, sampling.logit_bias, breakers) == (1.5, {5: 1.0}, (".",))
    with pytest.raises(OptionError, match="it does not support top_n_sigma, logit_bias; leave"):
        supported("it", options, ["temperature"])
    with pytest.raises(OptionError, match="support grammar, dry_sequence_breakers;"):
        supported(
            "it", {"grammar": 'root ::= "a"', "dry_sequence_breakers": ["."]}, ["temperature"]
        )
    assert supported("it", {"temperature": 0.0, "top_k": 40}, ["temperature"])[0].temperature == 0


PAIR = LlamaCppProgram(Path(), embedded_target(), embedded_draft(), 256, 1, 1, 0, 0)


def _opened(
    folder: Path | None, warnings: list[str], wanted: Collection[str] = BASELINES, **how: Any
) -> Any:
    return baselines.open_baselines(folder, replace(PAIR, **how), warnings.append, wanted)


def test_all_that_are_there_and_why_others_are_not(build: Build) -> None:
    warnings: list[str] = []
    build.server("fails with a draft")
    with _opened(build.folder, warnings) as found:
        names = [each.name for each in found]
        assert len(build.left) == 1
    assert names == ["llama.cpp server, plain", *BASELINES[2:]]
    assert len(warnings) == 1
    assert "server is left out" in warnings[0]
    assert "failed to load model" in warnings[0]
    assert build.left == []


def test_a_folder_without_programs_is_an_error(build: Build) -> None:
    with (
        pytest.raises(
            OptionError, match=r"no program to compare with in .*(.*\n)+.*no program llama-s"
        ),
        _opened(build.folder, []),
    ):
        pass
    with _opened(build.folder, [], wanted=[baselines.PYTHON_PLAIN]) as found:
        assert [each.name for each in found] == [baselines.PYTHON_PLAIN], "no program was wanted"


def test_models_that_only_some_programs_can_run(build: Build, tmp_path: Path) -> None:
    build.server()
    foreign = tiny.write_llama(tmp_path / "foreign.gguf")
    file = lora.write_lora(tmp_path / "lora.gguf", {"blk.0.attn_q.weight": (256, 256)})
    cases: list[tuple[dict[str, Any], Sequence[str], str]] = [
        ({"draft": None}, BASELINES[1:], "needs a draft model"),
        ({"draft": foreign}, BASELINES[1:], "refuses a draft of another vocabulary"),
        ({"adapters": (Adapter(file, 0.5),) * 2}, BASELINES[:2], "one LoRA adapter"),
    ]
    for how, names, told in cases:
        warnings: list[str] = []
        with _opened(build.folder, warnings, **how) as found:
            assert [each.name for each in found] == list(names)
        assert told in "".join(warnings)


def test_what_would_not_fit_is_left_out(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(baselines, "free_memory", lambda: 1_000)
    with (
        pytest.raises(OptionError, match=r"may need .* GB more"),
        _opened(None, warnings, wanted=[baselines.PYTHON_PLAIN]),
    ):
        pass


def test_sigterm_stops_the_servers(build: Build) -> None:
    build.server()
    script = (
        "import os, signal, sys, time\n"
        "from pathlib import Path\n"
        "from ggufspec.bench.baselines import LLAMA_SERVER_PLAIN, open_baselines\n"
        "folder, target = map(Path, sys.argv[1:])\n"
        "from ggufspec.bench.llama_server import LlamaCppProgram\n"
        "program = LlamaCppProgram(Path(), target, None, 256, 1, 1, 0, 0)\n"
        "with open_baselines(folder, program, print, [LLAMA_SERVER_PLAIN]):\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    time.sleep(30)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, build.folder, embedded_target()])
    assert done.returncode == 143
    assert (build.folder / "pids").read_text()
    assert build.left == []


# In turns with ours


@dataclass
class FakeRunner:
    """Writes token 30 again and again; cannot read one prompt."""

    unknown: list[int] = field(default_factory=list)
    sampling_options: Sequence[str] | None = None
    requests: list[BaselineRequest] = field(default_factory=list)

    def write(self, request: BaselineRequest) -> BaselineText:
        self.requests.append(request)
        if list(request.tokens) == self.unknown:
            raise PromptError("it cannot be read")
        return BaselineText(
            n_prompt=len(request.tokens),
            n_generated=request.n_tokens,
            n_drafted=10,
            n_accepted=request.n_tokens // 2,
            prompt_seconds=0.5,
            first_token_seconds=0.6,
            generation_seconds=2.0,
            tokens=[30] * (request.n_tokens + 1),
        )


def _experiment(prompts: Sequence[Prompt], names: Sequence[str], n_runs: int = 2) -> Experiment:
    made = contenders(lengths=[2], temperatures=[0], has_draft=False)
    made += baseline_contenders(names, temperatures=[0], sampling={"top_k": 20})
    return Experiment(made, prompts, n_runs=n_runs, n_tokens=8, n_warm_up=4, seed=7)


def test_a_baseline_alternates_with_ours(engine: Engine) -> None:
    runner = FakeRunner(engine.tokenize("the unknown"))
    warnings: list[str] = []
    progress: list[tuple[int, int, str]] = []
    prompts = [Prompt(id="1", turns=("It was", "And then")), Prompt(id="2", turns=("the unknown",))]
    experiment = _experiment(prompts, ["other"])
    found = list(
        measure(
            *(engine, experiment),
            baselines=[Baseline("other", runner)],
            warn=warnings.append,
            progress=lambda *made: progress.append(made),
        )
    )
    assert [each.contender for each in found if each.run == 0 and each.prompt == "1"] == [
        *("plain", "draft 2", "other")
    ]
    mine = [each for each in found if each.contender == "other"]
    assert [each.key[1:] for each in mine] == [("1", 0), ("1", 1)]
    assert warnings == ["other leaves out prompt 2: it cannot be read"]
    text = mine[0]
    assert (text.n_generated, text.n_drafted, text.n_accepted, text.n_rounds) == (16, 20, 8, 8)
    assert (text.prompt_seconds, text.first_token_seconds) == (1.0, 0.6)
    assert text.tokens_per_second == 4
    assert text.tokens == [30] * 16
    assert (list(text.rounds), list(text.drafted_by_position)) == ([], [])
    warm_up, first, second, *_ = runner.requests
    assert warm_up.n_tokens == 4
    assert first.tokens == engine.tokenize("It was")
    assert (first.sampling.top_k, first.sampling.temperature) == (20, 0)
    assert (first.ignore_eos, first.n_tokens) == (True, 8)
    assert experiment.contenders[-1].baseline == "plain"
    said = 8 * engine.vocab.piece(30).decode()
    assert second.tokens == engine.tokenize(f"It was\n{said}\nAnd then"), "after its own reply"
    assert runner.requests[-1].seed != first.seed, "the second run has another seed"
    done, totals = zip(*((n, total) for n, total, _ in progress), strict=True)
    assert list(done) == sorted(done)
    assert max(done) <= totals[0]


def test_the_real_adapters_in_one_table(engine: Engine, build: Build) -> None:
    warnings: list[str] = []
    build.server()
    with _opened(build.folder, warnings) as found:
        experiment = _experiment(
            [Prompt(id="1", turns=("It was",)), Prompt(id="2", turns=("He was not",))],
            [*BASELINES, "nobody"],
        )
        experiment = replace(experiment, n_runs=1)
        left_out: list[str] = []
        texts = {
            each.key[:2]: each
            for each in measure(engine, experiment, baselines=found, warn=left_out.append)
        }
    assert warnings == []
    assert left_out == []
    assert "nobody" not in {contender for contender, _ in texts}, "its program is not open"
    server = texts[baselines.LLAMA_SERVER, "2"]
    assert (server.n_generated, list(server.tokens)) == (8, list(range(30, 38)))
    plain = texts["plain", "1"]
    assert list(texts[baselines.PYTHON_PLAIN, "1"].tokens) == list(plain.tokens)
    assert build.left == []


def test_a_server_that_reads_other_tokens_is_left_out(engine: Engine, build: Build) -> None:
    build.server("reads more")
    left_out: list[str] = []
    with _opened(build.folder, [], wanted=[baselines.LLAMA_SERVER]) as found:
        experiment = _experiment([Prompt(id="1", turns=("It was",))], [baselines.LLAMA_SERVER])
        texts = list(measure(engine, experiment, baselines=found, warn=left_out.append))
    assert {each.contender for each in texts} == {"plain", "draft 2"}
    assert len(left_out) == 2, "the warm-up, and the text once"
