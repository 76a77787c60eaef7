"""tests.benchmarks.auto: the order of contenders, the report, and llama.cpp's log."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ggufspec.bench import llama_cpp_runner, prompts
from ggufspec.bench.llama_cpp_runner import LlamaCppProgram
from ggufspec.drafting import profile_store
from ggufspec.engine.load import load
from ggufspec.errors import OptionError
from ggufspec.llama.lookup import BaselineText
from ggufspec.standin.embedded import embedded_draft, embedded_target
from tests.benchmarks import auto, cold_start, contender_options, llama_grid
from tests.benchmarks.ab_report import (
    FINALS,
    SURVEY,
    Condition,
    Text,
    best,
    geometric_mean,
    ratios,
    report,
    reports,
    single_best,
    speedups_of,
    verdicts,
)
from tests.benchmarks.ab_report_text import (
    condition_lines,
    document,
    overview_lines,
    render,
    texts_from,
)
from tests.benchmarks.auto_options import parser
from tests.benchmarks.replay import Replay
from tests.benchmarks.shuffled_draft import write_shuffled

CONDITION = Condition("large", "small", "0.7", "open", False)
GREEDY = CONDITION._replace(sampling="0")
ADVERSARIAL = CONDITION._replace(draft="small-shuffled", adversarial=True)

N_FIRST_OPEN = 21  # tokens of the first open prompt
LOG = """\
 a text that says "decoded" and goes on
0.00.891.033 I encoded    6 tokens in    0.021 seconds, speed:  283.943 t/s
0.00.891.034 I decoded   97 tokens in    0.616 seconds, speed:  157.341 t/s
0.00.891.034 I\x20
0.00.891.034 I n_draft   = 3
0.00.891.035 I n_predict = 97
0.00.891.035 I n_drafted = 93
0.00.891.035 I n_accept  = 65
0.00.891.035 I accept    = 69.892%
"""


def _texts(
    rates: dict[str, list[float]], condition: Condition = CONDITION, stage: str = SURVEY
) -> list[Text]:
    return [
        Text(condition, stage, f"{turn}.0", name, rate, 96, 0, 0)
        for name, speeds in rates.items()
        for turn, rate in enumerate(speeds)
    ]


def test_geometric_mean() -> None:
    assert geometric_mean([0.5, 2.0]) == pytest.approx(1)
    assert geometric_mean([2.0, 2.0, 16.0]) == pytest.approx(4)
    assert math.isnan(geometric_mean([]))


def test_ratios_are_of_the_same_turn() -> None:
    texts = _texts({"plain": [100.0, 50.0], "auto": [150.0, 100.0, 999.0]})
    assert ratios(texts, "auto", "plain") == (1.75, 1.5, 2.0, 2)
    assert speedups_of(texts) == {"plain": 1.0, "auto": 1.75}


def test_a_turn_of_the_finals_is_not_one_of_the_survey() -> None:
    texts = _texts({"plain": [100.0]}) + _texts({"auto": [150.0]}, stage=FINALS)
    assert ratios(texts, "auto", "plain") is None


def test_prompts_count_alike_and_turns_of_one_by_their_median() -> None:
    by_prompt = {"0": [1.0, 1.0, 9.0], "1": [4.0, 4.0, 0.1]}
    texts = [
        Text(CONDITION, SURVEY, f"{run}.{prompt}", name, rate, 96, 0, 0)
        for prompt, speedups in by_prompt.items()
        for run, speedup in enumerate(speedups)
        for name, rate in (("plain", 10.0), ("auto", 10.0 * speedup))
    ]
    assert ratios(texts, "auto", "plain") == (pytest.approx(2.0), 0.1, 9.0, 6)
    assert report(CONDITION, texts).rates["auto"].median == pytest.approx(20.0)


def test_the_best_are_of_one_kind() -> None:
    speedups = {"plain": 1.0, "fixed 2": 1.3, "fixed 10": 1.5, "llama n 2 p 0": 9.0, "auto": 2.0}
    assert best(speedups, "fixed ", 3) == ["fixed 10", "fixed 2"]
    assert best(speedups, "fixed ") == ["fixed 10"]


def test_the_finals_decide_and_the_survey_remembers() -> None:
    survey = _texts({"plain": [100.0], "fixed 1": [110.0], "fixed 2": [160.0], "auto": [100.0]})
    finals = _texts(
        {
            "plain": [100.0, 100.0],
            "fixed 1": [120.0, 120.0],
            "fixed 2": [118.0, 118.0],
            "auto": [126.0, 114.0],
            "llama default": [60.0, 60.0],
            "llama n 2 p 0.3": [80.0, 80.0],
            "llama n 7 p 0.9": [100.0, 100.0],
        },
        stage=FINALS,
    )
    found = report(CONDITION, survey + finals)
    assert (found.best_fixed, found.best_grid) == ("fixed 1", "llama n 7 p 0.9")
    assert found.surveyed["fixed 2"] == 1.6
    assert found.against["fixed"].median == pytest.approx(1.0)
    assert found.against["fixed"][1:] == (pytest.approx(0.95), pytest.approx(1.05), 2)
    assert found.against["llama default"].median == pytest.approx(2.0)
    assert found.against["llama best"].median == pytest.approx(1.2)


def test_without_auto_ours_is_the_best_fixed_length() -> None:
    found = report(CONDITION, _texts({"plain": [100.0], "fixed 1": [110.0], "fixed 3": [130.0]}))
    assert found.ours == "fixed 3"
    assert set(found.against) == {"plain"}
    assert [verdict.what.split(":")[0] for verdict in verdicts([found])] == [
        "worst condition / plain"
    ]


def test_the_single_best_length_serves_all_cells() -> None:
    one = _texts({"plain": [100.0], "fixed 1": [120.0], "fixed 8": [200.0], "auto": [195.0]})
    other = _texts(
        {"plain": [100.0], "fixed 1": [90.0], "fixed 8": [25.0], "auto": [99.0]}, ADVERSARIAL
    )
    single = single_best(reports(one + other))
    assert single is not None
    assert single.fixed == "fixed 1"
    assert single.fixed_speedup == pytest.approx(math.sqrt(1.2 * 0.9))
    assert single.ratio == pytest.approx(math.sqrt(1.95 * 0.99 / (1.2 * 0.9)))
    lines = "\n".join(overview_lines(reports(one + other)))
    assert (
        "best single length over all conditions: fixed 1, 1.039 x plain; auto 1.389, 1.337" in lines
    )
    assert "over all but the adversarial conditions: fixed 8, 2.000 x plain; auto 1.950" in lines


@pytest.mark.parametrize("is_finalist", [True, False])
def test_the_survey_chooses_the_single_length_and_the_finals_tell_of_it(
    *, is_finalist: bool
) -> None:
    survey = {"plain": [100.0], "fixed 1": [120.0], "fixed 2": [110.0], "auto": [130.0]}
    finals = {"plain": [100.0], "fixed 2": [190.0], "auto": [140.0]}
    if is_finalist:
        finals["fixed 1"] = [105.0]
    single = single_best(reports(_texts(survey) + _texts(finals, stage=FINALS)))
    assert single == ("fixed 1", *((1.05, 1.4) if is_finalist else (1.2, 1.3)))


def test_verdicts_name_the_worst_cell_and_the_sampling() -> None:
    rates = {"plain": [100.0], "fixed 1": [150.0], "auto": [150.0], "llama default": [100.0]}
    conditions = reports(
        _texts(rates) + _texts(rates, GREEDY) + _texts({**rates, "auto": [96.0]}, ADVERSARIAL)
    )
    found = {verdict.what: verdict for verdict in verdicts(conditions)}
    worst = found["worst condition / plain: large (small-shuffled), 0.7, open"]
    assert (worst.found, worst.needed, worst.holds) == (pytest.approx(0.96), 0.97, False)
    greedy = found["geometric mean / llama.cpp's defaults, sampling 0"]
    assert (greedy.found, greedy.needed, greedy.holds) == (pytest.approx(1.5), 1.2, True)
    warm = found["geometric mean / llama.cpp's defaults, sampling 0.7"]
    assert (warm.found, warm.needed) == (pytest.approx(math.sqrt(1.5 * 0.96)), 1.7)
    lines = overview_lines(conditions)
    assert any(line.startswith("FAILS  0.960 (needed 0.97)") for line in lines)
    assert any(line.startswith("holds  1.500 (needed 1.20)") for line in lines)


def test_the_document_is_json_and_keeps_every_text() -> None:
    texts = _texts({"plain": [100.0, 90.0], "fixed 1": [150.0, 140.0]}) + _texts(
        {"plain": [80.0]}, GREEDY
    )
    done = json.loads(json.dumps(document(texts, {"machine": {}}), allow_nan=False))
    assert set(done) == {"machine", "conditions", "verdicts", "texts"}
    assert done["conditions"][0]["best_fixed"] == "fixed 1"
    assert texts_from(done) == texts
    assert render(texts_from(done)) == render(texts)


def test_an_unfinished_cell_is_told_as_far_as_it_goes() -> None:
    assert condition_lines(report(CONDITION, _texts({"auto": [100.0]})))[0] == "large, 0.7, open"
    assert render(_texts({"plain": [100.0]}))


def test_the_log_of_llama_cpp() -> None:
    found = llama_cpp_runner.parse(LOG)
    counts = (found.n_prompt, found.n_generated, found.n_drafted, found.n_accepted)
    assert counts == (6, 97, 93, 65)
    assert (found.prompt_seconds, found.generation_seconds) == (0.021, 0.616)
    assert found.tokens_per_second == pytest.approx(157.341, rel=1e-3)
    with pytest.raises(OptionError, match="has no lines"):
        llama_cpp_runner.parse("error: invalid argument")


def test_the_command_line_of_llama_cpp() -> None:
    program = LlamaCppProgram(Path("binary"), Path("t.gguf"), Path("d.gguf"), 1024, 4, 1)
    name = llama_grid.GridPoint(7, 0.75).name
    at_default = llama_grid.command(
        program, "llama default", "x", sampling="0", n_tokens=96, seed=3
    )
    at_grid = llama_grid.command(program, name, "x", sampling="0.7", n_tokens=96, seed=3)
    as_theirs = llama_grid.command(program, name, "x", sampling="default", n_tokens=96, seed=3)
    assert "--spec-draft-n-max" not in at_default
    assert "--top-k" not in at_default
    assert at_default[at_default.index("-n") + 1] == "95"
    assert at_grid[at_grid.index("--spec-draft-n-max") + 1] == "7"
    assert at_grid[at_grid.index("--spec-draft-p-min") + 1] == "0.75"
    assert at_grid[at_grid.index("--temp") + 1] == "0.7"
    assert at_grid[at_grid.index("--top-k") + 1] == "0"
    assert "--temp" not in as_theirs
    assert len({point.name for point in llama_grid.GRID}) == 30


def test_a_rival_that_is_none_is_named(tmp_path: Path) -> None:
    program = LlamaCppProgram(tmp_path / "none", Path("t.gguf"), Path("d.gguf"), 1024, 1, 1)
    with pytest.raises(OptionError, match="give the path of a llama-speculative-simple"):
        llama_grid.run(program, "llama default", "x", sampling="0", n_tokens=8, seed=0)
    script = tmp_path / "fails"
    script.write_text("#!/bin/sh\necho no such model >&2\nexit 3\n")
    script.chmod(0o755)
    program = LlamaCppProgram(script, Path("t.gguf"), Path("d.gguf"), 1024, 1, 1)
    with pytest.raises(OptionError, match=r"code 3.*\n.*no such model"):
        llama_grid.run(program, "llama default", "x", sampling="0", n_tokens=8, seed=0)


def test_a_log_that_lost_its_end_is_asked_for_again(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(LOG)
    script = tmp_path / "loses"
    script.write_text(
        f'#!/bin/sh\ncd "{tmp_path}"\nif [ -e tried ]; then cat log; else touch tried; fi\n'
    )
    script.chmod(0o755)
    program = LlamaCppProgram(script, Path("t.gguf"), Path("d.gguf"), 1024, 1, 1)
    found = llama_grid.run(program, "llama default", "x", sampling="0", n_tokens=8, seed=0)
    assert found.n_generated == 97


def test_contenders_by_name() -> None:
    assert contender_options.options_of("fixed 12") == {"drafter": "model", "n_draft": 12}
    assert contender_options.options_of("auto") == {
        "drafter": "auto",
        "n_draft": "auto",
        "seed": None,
    }
    for name in ("fixed", "fixed x", "best"):
        with pytest.raises(OptionError, match="unknown contender"):
            contender_options.options_of(name)


def test_options_are_parsed() -> None:
    options = parser().parse_args([])
    assert options.temps == ["0", "0.7", "1.0", "default"]
    assert options.lengths == list(range(1, 17))
    assert options.prompts == ["open", "repetitive"]
    assert parser().parse_args(["--lengths", "8,2-4"]).lengths == [2, 3, 4, 8]


@pytest.mark.parametrize(
    "wrong",
    [
        ("--temps", "0,warm"),
        ("--temps", "nan"),
        ("--temps", "-1"),
        ("--lengths", "0-3"),
        ("--prompts", "open,closed"),
        ("--runs", "x"),
        ("--runs", "-1"),
        ("--tokens", "0"),
    ],
)
def test_wrong_options_are_refused(wrong: tuple[str, str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(wrong)


def test_a_shuffled_draft_is_the_same_but_for_its_weights(tmp_path: Path) -> None:
    import gguf

    path = write_shuffled(embedded_draft(), tmp_path)
    before, after = (gguf.GGUFReader(each) for each in (embedded_draft(), path))
    header = int(before.tensors[0].data_offset)
    assert path.read_bytes()[:header] == embedded_draft().read_bytes()[:header]
    assert path.stat().st_size == embedded_draft().stat().st_size
    for old, new in zip(before.tensors, after.tensors, strict=True):
        is_same = np.array_equal(old.data, new.data)
        assert is_same == (len(old.shape) < 2), old.name
        assert sorted(old.data.tobytes()) == sorted(new.data.tobytes()), old.name
    folder = tmp_path / "again"
    folder.mkdir()
    assert write_shuffled(embedded_draft(), folder).read_bytes() == path.read_bytes()


def test_a_shuffled_draft_makes_a_pair_that_accepts_nearly_nothing(tmp_path: Path) -> None:
    path = write_shuffled(embedded_draft(), tmp_path)
    with load(embedded_target(), path, n_threads=1) as engine:
        done = engine.generate("It was", max_tokens=48, temperature=0.0, n_draft=2, ignore_eos=True)
    assert done.stats.n_generated == 48
    assert done.stats.acceptance < 0.1


def test_the_whole_bench_on_the_embedded_pair(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.json"
    auto.main(
        [
            *("--target", str(embedded_target()), "--adversarial"),
            *("--contenders", "plain,fixed", "--lengths", "1,2", "--temps", "0"),
            *("--prompts", "repetitive", "--n-prompts", "1", "--tokens", "8", "--runs", "1"),
            *("--threads", "1", "--json", str(path)),
        ]
    )
    shown = capsys.readouterr()
    assert "classics-target (classics-draft-shuffled), 0, repetitive" in shown.out
    assert "best single length over all conditions" in shown.out
    assert "min left" in shown.err
    done = json.loads(path.read_text())
    assert [path] == list(tmp_path.iterdir())
    assert done["interrupted"] is False
    assert done["settings"]["lengths"] == [1, 2]
    assert len(done["conditions"]) == 2
    assert len(done["texts"]) == 2 * 2 * 3
    assert all(text["n_generated"] == 8 for text in done["texts"])
    auto.main(["--report", str(path)])
    assert capsys.readouterr().out == shown.out


def test_the_best_of_the_grid_meets_ours_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, path = tmp_path / "llama", tmp_path / "out.json"
    log = LOG.replace("encoded    6", f"encoded {N_FIRST_OPEN}")
    script.write_text(f"#!/bin/sh\ncat <<'END'\n{log}END\n")
    script.chmod(0o755)
    common = [
        *("--target", str(embedded_target()), "--llama", str(script), "--grid"),
        *("--contenders", "fixed", "--lengths", "1", "--temps", "0", "--prompts", "open"),
        *("--tokens", "4", "--runs", "2", "--threads", "1", "--json", str(path)),
    ]
    auto.main([*common, "--n-prompts", "1"])
    shown = capsys.readouterr()
    assert "geometric mean / llama.cpp's best of the grid, sampling 0" in shown.out
    assert "classics-target gets 1 threads" in shown.err
    texts = texts_from(json.loads(path.read_text()))
    by_stage = {
        stage: [text.contender for text in texts if text.stage == stage]
        for stage in (SURVEY, FINALS)
    }
    assert len(by_stage[SURVEY]) == 2 + len(llama_grid.GRID)
    assert by_stage[FINALS].count("llama default") == 2
    assert sum(name.startswith("llama n") for name in by_stage[FINALS]) == 2 * 3
    with pytest.raises(OptionError, match=r"llama\.cpp read 21 tokens where we read"):
        auto.main([*common, "--n-prompts", "2"])  # the log always tells of the first
    assert json.loads(path.read_text())["texts"]


def test_a_replay_goes_at_the_pace_of_another_target() -> None:
    after_others, again = ({(n, how): [0.1 * n] for n in (1, 2, 3)} for how in (False, True))
    again[1, True] = [0.05]
    how: dict[str, Any] = {"sampling": "0", "n_tokens": 24, "seed": 0}
    with load(embedded_target(), embedded_draft(), n_draft_max=2, n_threads=1) as engine:
        replay = Replay(engine, after_others | again)
        plain = replay.write("plain", prompts.OPEN[0], **how)
        fixed = replay.write("fixed 2", prompts.OPEN[0], **how)
        real = contender_options.write(engine, "fixed 2", prompts.OPEN[0], **how)
    assert plain.n_generated == 24
    assert plain.seconds.target == pytest.approx(0.1 + 23 * 0.05)
    assert (fixed.n_generated, fixed.n_accepted) == (24, real.n_accepted)
    assert fixed.seconds.target == pytest.approx(0.1 * (fixed.n_rounds + fixed.n_drafted))
    assert fixed.tokens_per_second < 24 / fixed.seconds.target


def test_a_replay_measures_every_size_after_its_like_and_after_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.json"
    common = ["--target", str(embedded_target()), "--replay", "--threads", "1"]
    condition = ["--lengths", "2", "--temps", "0.7", "--prompts", "open", "--n-prompts", "1"]
    auto.main([*common, *condition, "--tokens", "64", "--runs", "2", "--json", str(path)])
    shown = capsys.readouterr()
    assert "measuring passes of the target, 10 of 10" in shown.err
    assert "auto / fixed (fixed 2)" in shown.out
    assert len(json.loads(path.read_text())["texts"]) == 3 * 3
    assert not list(profile_store.records()), "no pair is as slow as that"
    with pytest.raises(OptionError, match="--replay cannot be combined"):
        auto.main([*common, "--cold-start"])


def test_an_interrupted_bench_keeps_what_is_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    n_written = 0

    def write(*arguments: object, **options: object) -> object:
        nonlocal n_written
        n_written += 1
        if n_written > 5:
            raise KeyboardInterrupt
        return BaselineText(1, 8, 0, 0, 0.1, 0.1, 0.08)

    monkeypatch.setattr(contender_options, "write", write)
    path = tmp_path / "out.json"
    with pytest.raises(SystemExit) as ended:
        auto.main(
            [
                *("--target", str(embedded_target()), "--contenders", "plain,fixed"),
                *("--lengths", "1,2", "--temps", "0", "--threads", "1", "--json", str(path)),
            ]
        )
    assert ended.value.code == 130
    done = json.loads(path.read_text())
    assert done["interrupted"] is True
    assert len(done["texts"]) == 2
    assert "plain" in capsys.readouterr().out


def test_first_tells_ratios_of_the_same_turn() -> None:
    texts = [
        cold_start.ColdStartText("condition", turn, name, rate, rate / 2, 1.0)
        for name, rates in {"plain": [100.0, 200.0], "auto": [90.0, 196.0]}.items()
        for turn, rate in enumerate(rates)
    ]
    shown = cold_start.render(texts)
    assert "condition: auto / plain, generation: 0.940 (0.900-0.980), 2 turns" in shown
    assert "FAILS  0.940 (needed 0.95)  worst condition of auto / plain, whole call" in shown


def test_first_runs_fresh_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "first.json"
    auto.main(
        [
            *("--cold-start", "--target", str(embedded_target()), "--cold-start-tokens", "4"),
            *("--contenders", "fixed", "--lengths", "1", "--temps", "0", "--prompts", "open"),
            *("--runs", "1", "--threads", "1", "--json", str(path)),
        ]
    )
    assert "fixed 1 / plain, generation" in capsys.readouterr().out
    done = json.loads(path.read_text())
    assert [text["contender"] for text in done["texts"]] == ["plain", "fixed 1"]
