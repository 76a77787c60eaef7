"""`ggufspec tune`: what passes cost, in a table and a chart; remembered, and taken later."""

from __future__ import annotations

from pathlib import Path

import head_pairs
import pytest
import tiny
from cli.conftest import Command, check_interrupted

import ggufspec
from ggufspec.cli.render import echo_bars
from ggufspec.drafting import cost_model, profile_store
from ggufspec.drafting.cost_model import CostModel
from ggufspec.engine.calibration import Drafted
from ggufspec.llama.context_options import default_attention
from ggufspec.llama.devices import libraries
from ggufspec.measure import table
from ggufspec.measure.attention import Attention
from ggufspec.measure.pairs import profile_key
from ggufspec.measure.table import Row
from ggufspec.standin.embedded import embedded_draft

QUICK = ("--runs", "1", "--max-n", "4", "--depth", "20")


@pytest.fixture(autouse=True)
def _in_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer and shorter measurements, and only one thread: the tests need no exact times."""
    monkeypatch.setattr("ggufspec.bench.tune.MIN_SECONDS", 0.0)
    monkeypatch.setattr("ggufspec.bench.tune.PROMPT_TOKENS", (64, 64))
    for name in (
        "bench.tune.n_logical_cores",
        "bench.tune.n_threads_default",
        "llama.context.n_threads_default",
    ):
        monkeypatch.setattr(f"ggufspec.{name}", lambda: 1)


@pytest.fixture
def tune(command: Command, target: Path, draft: Path) -> Command:
    return lambda *args, **how: command("tune", "-m", target, "-md", draft, *QUICK, *args, **how)


def records() -> list[profile_store.Record]:
    """Those of `tune` about pairs: loading stores passes of models, too."""
    return [each for each in profile_store.records() if each.facts.get("about") != "passes"]


def tables(path: Path) -> list[profile_store.Record]:
    """The tables of a model's passes."""
    model = profile_store.fingerprint(path)
    return [each for each in profile_store.records() if each.facts.get("model") == model]


# What it tells


def test_the_output_has_tables_and_a_plot(tune: Command) -> None:
    result = tune()
    assert (result.code, result.err) == (0, "")
    lines = [line.split() for line in result.out.splitlines()]
    settings = [line[:3] for line in lines if line and line[0] in ("target,", "draft,")]
    if any(hasattr(each, "ggml_backend_cpu_init") for each in libraries()):  # else it is not timed
        assert lines[0][:2] == ["Flash", "attention"]
    assert ["target,", "1", "thread"] in settings
    assert ["draft,", "1", "thread"] in settings
    assert ["target,", "n_batch", "512"] in settings
    assert ["draft,", "n_batch", "512"] in settings
    assert sum("chosen" in line for line in lines) == 4
    (header,) = (i for i, line in enumerate(lines) if line[:2] == ["Tokens", "per"])
    rows = lines[header + 2 : header + 7]
    assert [row[0] for row in rows] == ["1", "2", "3", "4", "5"]
    assert rows[0][2] == "1.00"
    bars = [line for line in lines if any("█" in cell for cell in line)]
    assert [line[0] for line in bars] == ["1:", "2:", "3:", "4:", "5:"]
    assert "Milliseconds by tokens per pass, with 20 tokens in the cache:" in result.out
    assert "One draft token costs" in result.out
    assert ("best draft length" in result.out) != ("Drafting cannot help" in result.out)
    assert "The target's weights are mostly F32: on a CPU, " in result.out


def test_the_document(tune: Command, target: Path, draft: Path) -> None:
    result = tune("--json", "-t", "1")
    assert (result.code, result.err) == (0, "")
    document = result.document
    assert document["remembered"] is True
    assert document["depth"] == 20
    for row in document["target"]:
        assert 0 < row["least"] <= row["seconds"] <= row["most"]
        assert row["seconds_per_token"] == row["seconds"] / row["n_tokens"]
    assert document["target"][0]["relative_to_one"] == 1
    drafted = document["draft"]
    assert drafted["step"]["seconds"] > 0
    assert drafted["reading"]["n_tokens"] == 16
    assert list(drafted["break_even_acceptance"]) == ["1", "2", "3", "4"]
    assert [best["acceptance"] for best in drafted["best_lengths"]] == [0.5, 0.6, 0.7, 0.8, 0.9]
    tried = {trial["what"] for trial in document["trials"]}
    assert tried == {"n_threads_draft", "n_batch", "n_batch_draft"}
    read = [trial for trial in document["trials"] if trial["what"] == "n_batch"]
    assert len(read) >= 2
    assert all(trial["reading_seconds"] > 0 for trial in read)
    chosen = [trial["value"] for trial in read if trial["is_chosen"]]
    assert chosen == [document["chosen"]["n_batch"]]
    assert (document["settings"]["target"], document["settings"]["max_n"]) == (str(target), 4)


def test_what_is_given_is_not_tried(tune: Command) -> None:
    document = tune("--json", "-t", "1", "-td", "2", "-fa", "on", "-b", "64").document
    assert document["trials"] == []
    assert document["chosen"] == {
        "n_threads": 1,
        "n_threads_draft": 2,
        "flash_attention": "on",
        "n_batch": 64,
        "n_batch_draft": 64,
    }


def test_caches_that_need_flash_attention_keep_it(command: Command) -> None:
    caches = ("-ctk", "q8_0", "-ctv", "q8_0")  # of heads wider than those of the tiny models
    document = command(
        "tune", "-m", embedded_draft(), *QUICK, *caches, "-t", "1", "-b", "64", "--json"
    ).document
    assert document["trials"] == []
    assert document["chosen"]["flash_attention"] == default_attention()


def test_a_target_alone(command: Command, target: Path) -> None:
    result = command("tune", "-m", target, *QUICK)
    assert (result.code, result.err) == (0, "")
    assert "draft" not in result.out
    document = command("tune", "-m", target, *QUICK, "--json").document
    assert document["draft"] is None
    assert document["chosen"]["n_threads_draft"] is None
    passes = [trial for trial in document["trials"] if trial["what"] != "n_batch"]
    assert {tuple(trial["target_seconds"]) for trial in passes} == {("1",)}


def test_a_model_that_cannot_drop_a_tail(command: Command, tmp_path: Path) -> None:
    model = tiny.write_mamba(tmp_path / "model.gguf")
    document = command("tune", "-m", model, "-md", model, *QUICK, "--json").document
    assert [row["n_tokens"] for row in document["target"]] == [1, 2, 3, 4, 5]


def test_a_small_context_has_less_before_a_batch(
    command: Command, target: Path, draft: Path
) -> None:
    short = ("--runs", "1", "--max-n", "3", "--json")
    document = command("tune", "-m", target, "-md", draft, *short, "-c", "10").document
    assert document["depth"] == 6
    document = command("tune", "-m", target, "-md", draft, *short).document
    assert document["depth"] == 256 - 4, "the models were trained for 256"


def test_a_draft_that_costs_too_much_cannot_pay(
    tune: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "ggufspec.measure.passes.time_target",
        lambda context, sizes, **how: {n: [0.01] for n in sizes},
    )
    steps = [Drafted(0.0101, 1, 0)], [Drafted(0.02, 1, 15)]
    monkeypatch.setattr("ggufspec.bench.tune.time_drafts", lambda *_: steps)
    given = ("-t", "1", "-td", "1", "-fa", "on")
    drafted = tune(*given, "--json").document["draft"]
    assert drafted["cannot_pay"] is True
    assert drafted["step_relative_to_one"] == pytest.approx(1.01)
    told = tune(*given).out
    assert "Drafting cannot help" in told
    assert "best draft length" not in told


def test_a_step_that_drafts_a_block_is_called_so(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = head_pairs.WRITERS["dflash"](tmp_path)
    steps = [Drafted(0.004, 1, 0)], list[Drafted]()
    monkeypatch.setattr("ggufspec.bench.tune.time_drafts", lambda *_: steps)
    found = command("tune", "-m", pair.target, "-md", pair.draft, *QUICK, "-t", "1", "-td", "1")
    assert "One block of 3 draft tokens costs 4.00 ms" in found.out


# What is remembered


def test_a_later_load_takes_what_was_found_and_knows_the_costs(
    tune: Command, target: Path, draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ggufspec.bench.tune.n_logical_cores", lambda: 2)
    off = Attention("off", 0.5)
    monkeypatch.setattr("ggufspec.bench.tune.measure_attention", lambda *models: off)
    # As if the last that was tried had been found to be faster by far than the usual.
    monkeypatch.setattr(
        "ggufspec.bench.tune.choose", lambda seconds, usual: {**seconds}.popitem()[0]
    )
    document = tune("--json").document
    assert document["attention"] == off.reason
    chosen = document["chosen"]
    assert (chosen["n_threads"], chosen["flash_attention"]) == (2, "off")
    with ggufspec.load(target, draft) as engine:
        assert engine.pair.target.n_threads == chosen["n_threads"]
        assert engine.pair.draft.n_threads == chosen["n_threads_draft"]
        assert engine.pair.target.options.flash_attention == "off"
        batches = (engine.pair.target.n_batch, engine.pair.draft.n_batch)
        most = engine.pair.target.n_ctx
        assert batches == (min(chosen["n_batch"], most), min(chosen["n_batch_draft"], most))
        assert chosen["n_batch"] < 512, "halves are tried"
        document = profile_store.recall(profile_key(engine.pair.target, engine.pair.draft))
        rows = table.recall(table.key_in(engine.pair.target))
        types = " ".join(engine.pair.target.model.kernels.types)
    assert (document["settings"], document["measured"]) == (chosen, "tune")
    costs = cost_model.of_document(document["costs"]).resized(5)
    assert costs.curve[0] > 0
    assert costs.step > 0
    assert {Row(types, "off", n, 20) for n in range(1, 6)} <= rows.keys()


def test_what_was_learned_beside_the_costs_stays(tune: Command, target: Path, draft: Path) -> None:
    given = ("-t", "1", "-td", "1", "-fa", "on")
    with ggufspec.load(
        target, draft, n_threads=1, n_threads_draft=1, flash_attention="on"
    ) as engine:
        known = profile_key(engine.pair.target, engine.pair.draft)
    costs = CostModel(17)
    costs.observe_target(1, 1.0)
    learned = {"costs": cost_model.to_document(costs), "acceptance": {"0.8": [0.5, 0.25]}}
    profile_store.remember(known, {**learned, "measured": "run"})
    assert tune(*given).code == 0
    document = profile_store.recall(known)
    assert (document["acceptance"], document["measured"]) == (learned["acceptance"], "tune")
    assert document["costs"] != learned["costs"]


def test_tuning_does_not_start_from_what_was_tuned(
    tune: Command, target: Path, draft: Path
) -> None:
    with ggufspec.load(target, draft) as engine:
        pair = profile_key(engine.pair.target, engine.pair.draft)["pair"]
    profile_store.remember_settings(pair, profile_store.TunedSettings(511, 511, "off"))
    trials = tune("--json").document["trials"]
    assert max(trial["value"] for trial in trials if trial["what"].startswith("n_threads")) < 511


def test_an_unwritable_folder_is_reported(
    tune: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("GGUFSPEC_CACHE", str(file))
    result = tune("--json")
    assert (result.code, result.document["remembered"]) == (0, False)
    assert "could not be stored" in result.err
    assert "GGUFSPEC_CACHE" in result.err


def test_a_pair_is_forgotten_or_everything(
    tune: Command, command: Command, target: Path, draft: Path
) -> None:
    tune()
    tune("-t", "3")
    command("tune", "-m", draft, *QUICK)
    assert len(records()) == 5
    result = command("tune", "-m", target, "-md", draft, "--forget")
    assert (result.code, result.out) == (0, "Deleted 3 records.\n")
    n_tables, n_of_draft = len(tables(target)), len(tables(draft))
    assert min(n_tables, n_of_draft) > 0, "a pair's go with its target"
    found = command("tune", "-m", target, "--forget", "--json").document
    assert found == {"forgotten": n_tables}
    assert (tables(target), len(records())) == ([], 2)
    assert command("tune", "--forget").out == f"Deleted {2 + n_of_draft} records.\n"
    assert [*profile_store.records()] == []


# What can be wrong


def test_ctrl_c_ends_it_with_nothing_remembered(target: Path, draft: Path) -> None:
    arguments = ["tune", "-m", target, "-md", draft, "-v", "--runs", "1000", "--max-n", "64"]
    check_interrupted(arguments)
    assert records() == []


# The bars


def test_bars_are_as_long_as_the_values(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "42")
    echo_bars([1.0, 2.0, 4.0, 3.0], ["1", "2", "3", "4"])
    bars = [line.split()[1] for line in capsys.readouterr().out.splitlines()]
    assert [len(bar) for bar in bars] == [10, 20, 40, 30]


def test_a_terminal_without_blocks_gets_ascii(program: Command, target: Path) -> None:
    args = ("tune", "-m", target, *QUICK, "-t", "1", "-fa", "on")
    result = program(*args, PYTHONIOENCODING="ascii", COLUMNS="40")
    assert (result.code, result.err) == (0, "")
    assert result.out.isascii()
    assert "#" in result.out
    assert max(map(len, result.out.splitlines()[-4:])) <= 40
    assert "█" in program(*args, PYTHONIOENCODING="utf-8").out
