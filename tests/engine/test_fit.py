"""Where a pair goes: by what is free, by what was asked for, and smaller where memory runs out."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import paper
import pytest
import tiny

import ggufspec
from ggufspec.engine import fit, load
from ggufspec.engine.load_options import LoadOptions
from ggufspec.errors import ClosedError, OptionError, OutOfMemoryError
from ggufspec.llama.context import Context
from ggufspec.llama.model import Model
from ggufspec.models.gguf_file import EXPERTS
from ggufspec.placement.overrides import on_cpu, stays
from ggufspec.placement.speeds import Gpu

MIB = 2**20


@pytest.fixture
def has_gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def give(*n_free: int) -> None:
        found = tuple(Gpu(f"GPU {i}", n) for i, n in enumerate(n_free))
        monkeypatch.setattr(fit, "gpus", lambda: found)

    return give


@pytest.mark.parametrize(
    "asked",
    [
        {"n_gpu_layers": 99},
        {"n_gpu_layers": 0, "n_gpu_layers_draft": -1},
        {"tensor_split": [3, 1]},
        {"main_gpu": 0},
    ],
)
def test_options_for_gpus_without_one_are_answered_by_a_note(
    asked: dict[str, Any], target: Path, draft: Path, has_gpus: Callable[..., None]
) -> None:
    has_gpus()
    with ggufspec.load(target, draft, n_threads=1, **asked) as engine:
        (note,) = engine.notes
        assert engine.generate("a", max_tokens=2).text
    assert note.startswith("no layers were offloaded: ")
    assert note.endswith("; see `ggufspec devices`")


def test_the_placement_is_one_line(tmp_path: Path, has_gpus: Callable[..., None]) -> None:
    has_gpus(1000 * MIB)
    target = tiny.write_llama(tmp_path / "larger.gguf", n_embd=512)  # starting kernels takes time
    draft = tiny.write_llama(tmp_path / "draft.gguf", n_embd=512, n_layer=1)
    with ggufspec.load(target, draft, n_threads=1) as engine:
        assert engine.placement is not None
        assert "3 of 3 layers of the target and 2 of 2 of the draft" in engine.placement


def test_experts_that_have_no_room_stay_on_the_cpu(
    tmp_path: Path, has_gpus: Callable[..., None]
) -> None:
    target = paper.write(tmp_path / "moe.gguf", paper.QWEN_3_30B)
    has_gpus(12 * 1024 * MIB)
    placed = fit.Fit(LoadOptions(target)).first()
    assert placed.n_gpu_layers == 49
    assert placed.overrides
    assert stays(placed.overrides, "blk.0.ffn_up_exps.weight")
    assert not stays(placed.overrides, "blk.47.ffn_up_exps.weight")
    assert "layers of the target without experts of the first" in (placed.placement or "")
    whole = fit.Fit(LoadOptions(target, overrides=())).first()
    assert whole.n_gpu_layers < 49
    assert whole.overrides == ()
    named = fit.Fit(LoadOptions(target, overrides=on_cpu(EXPERTS, 5))).first()
    assert "the tensors that you named are where you put them" in (named.placement or "")
    assert "of the first" not in (named.placement or "")


def test_an_mtp_head_that_costs_more_than_it_saves_is_left_out(
    tmp_path: Path, has_gpus: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its experts take memory of the target's."""
    monkeypatch.setattr(fit, "free_memory", lambda: 100 * 1024 * MIB)
    path = paper.write_glm_with_mtp(tmp_path / "glm.gguf")
    with_head, told = [], []
    for n_free in (6, 24):
        has_gpus(n_free * 1024 * MIB)
        places = fit.Fit(LoadOptions(path, draft="mtp", tuned=False))
        placed = places.first()
        with_head.append((placed.draft, places.head is not None))
        told.append("its MTP head is left out" in (placed.placement or ""))
        asked = LoadOptions(path, draft="mtp", n_gpu_layers=10, tuned=False)
        assert fit.Fit(asked).first().draft == "mtp", "layers that were given keep it"
    assert with_head == [(None, False), ("mtp", True)]
    assert told == [True, False]


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ({"override_tensor": ["exps=Nowhere9"]}, "'Nowhere9'; this build of llama.cpp"),
        ({"override_tensor": ["shexp=CPU"]}, r"moe\.gguf matches the pattern 'shexp'"),
        ({"n_cpu_ffn": 3}, r"moe\.gguf has no dense feed-forward matrices"),
        ({"override_tensor_draft": ["nothing=CPU"]}, "its first layer has"),
        ({"n_cpu_moe_draft": -1}, r"draft\.gguf has no experts"),
    ],
)
def test_overrides_that_fit_no_tensor_or_no_device_are_refused(
    asked: dict[str, Any], found: str, tmp_path: Path, draft: Path
) -> None:
    target = tiny.write_moe(tmp_path / "moe.gguf")
    with pytest.raises(OptionError, match=found):
        ggufspec.load(target, draft, **asked)


def test_a_gpu_without_room_gets_nothing(target: Path, has_gpus: Callable[..., None]) -> None:
    has_gpus(100 * MIB)
    with ggufspec.load(target, n_threads=1) as engine:
        assert engine.placement is not None
        assert engine.placement.startswith("0 of 3 layers")
        assert not engine.pair.target.options.offloads, "nor does it read prompts"


def test_layers_that_were_asked_for_are_not_decided(
    target: Path, draft: Path, has_gpus: Callable[..., None]
) -> None:
    has_gpus(1000 * MIB)
    with ggufspec.load(target, draft, n_gpu_layers=1, n_gpu_layers_draft=0, n_threads=1) as engine:
        assert engine.placement is None
    with ggufspec.load(target, draft, n_gpu_layers=1, n_threads=1) as engine:
        assert engine.placement is not None
        assert "1 of 3 layers of the target" in engine.placement


@pytest.mark.parametrize("main_gpu", [2, 1000])
def test_a_gpu_that_is_not_there_is_refused(
    main_gpu: int, target: Path, has_gpus: Callable[..., None]
) -> None:
    has_gpus(1000 * MIB, 500 * MIB)
    with pytest.raises(OptionError, match=r"no GPU .* 0 \(GPU 0\), 1 \(GPU 1\)"):
        ggufspec.load(target, main_gpu=main_gpu)


def test_a_plan_keeps_to_what_the_positions_of_a_draft_reach(
    tmp_path: Path, has_gpus: Callable[..., None]
) -> None:
    has_gpus(1000 * MIB)
    target = tiny.write_timed(tmp_path / "t.gguf", tiny.SPM.spell("ab"), n_ctx_train=64)
    draft = tiny.write_timed(tmp_path / "d.gguf", tiny.SPM.spell("ab"), n_ctx_train=32)
    with ggufspec.load(target, draft, n_threads=1) as engine:
        assert engine.n_ctx == 32


def test_a_context_of_0_is_what_the_target_was_trained_for(tmp_path: Path) -> None:
    path = tiny.write_llama(tmp_path / "long.gguf", n_ctx_train=5000)
    for n_ctx, wanted in ((None, 4096), (0, 5000), (5100, 5100)):
        with ggufspec.load(path, n_ctx=n_ctx, n_threads=1) as engine:
            assert engine.n_ctx == wanted


def test_where_memory_runs_out_it_is_tried_once_with_a_smaller_context(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []

    class Narrow(Context):
        def __init__(self, model: object, options: object, link: None, pools: object) -> None:
            tried.append(options.n_ctx)  # type: ignore[attr-defined]
            if options.n_ctx > 128:  # type: ignore[attr-defined]
                raise OutOfMemoryError("too large")
            super().__init__(model, options)  # type: ignore[arg-type]

    monkeypatch.setattr(load, "Context", Narrow)
    with ggufspec.load(target, n_threads=1) as engine:
        assert engine.n_ctx == 128
        assert engine.placement is not None
        assert "128 tokens" in engine.placement
    assert tried == [256, 128]
    with pytest.raises(OutOfMemoryError):
        ggufspec.load(target, n_ctx=200, n_threads=1)
    assert tried == [256, 128, 200], "what was asked for is not changed"


@pytest.mark.parametrize("layers", ["auto", 0])
def test_where_memory_of_a_gpu_runs_out_it_is_left_out_at_last(
    layers: int | str,
    target: Path,
    has_gpus: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[bool] = []

    class Full(Context):
        def __init__(self, model: object, options: object, link: None, pools: object) -> None:
            tried.append(options.offloads)  # type: ignore[attr-defined]
            if options.offloads:  # type: ignore[attr-defined]
                raise OutOfMemoryError("too large")
            super().__init__(model, options)  # type: ignore[arg-type]

    has_gpus(1000 * MIB)
    monkeypatch.setattr(load, "Context", Full)
    how: dict[str, Any] = {"n_gpu_layers": layers, "n_gpu_layers_draft": layers, "n_threads": 1}
    with ggufspec.load(target, n_ctx=200, **how) as engine:
        assert layers == 0 or str(engine.placement).startswith("0 of 3 layers")
    assert tried == [True, False]


def test_an_engine_that_cannot_be_made_frees_its_models(
    target: Path, draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models: list[Model] = []

    def failing(target: Context, draft: Context, **_: object) -> None:
        models.extend([target.model, draft.model])
        raise MemoryError

    monkeypatch.setattr(load, "Pair", failing)
    with pytest.raises(MemoryError):
        ggufspec.load(target, draft, n_threads=1)
    assert len(models) == 2
    for model in models:
        with pytest.raises(ClosedError):
            model.pointer  # noqa: B018


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and RLIMIT_AS")
def test_exhausted_memory_is_an_error_and_no_crash(tmp_path: Path) -> None:
    """Under a limit on address space, 4 GB cannot be read into memory."""
    path = paper.write(tmp_path / "large.gguf", paper.LLAMA_3_8B)
    script = """
        import resource, sys
        import ggufspec
        from ggufspec.llama.model import Model
        from ggufspec.errors import OutOfMemoryError
        held = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + 200 * 2**20,) * 2)
        try:
            Model(sys.argv[1], mmap=False)
        except OutOfMemoryError as error:
            print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert "not enough memory" in done.stdout, done.stderr
    assert done.returncode == 0


def test_a_context_that_fits_is_chosen_by_what_is_free(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_trained = 16384
    long = tiny.write_llama(target.parent / "long.gguf", n_ctx_train=n_trained)
    options: dict[str, Any] = {"n_threads": 1, "tuned": False, "n_slots": 2}
    with ggufspec.load(long, n_ctx="fit", **options) as engine:
        assert engine.n_ctx == n_trained
    monkeypatch.setattr(fit, "free_memory", lambda: 1 * MIB)
    with ggufspec.load(long, n_ctx="fit", **options) as engine:
        assert engine.n_ctx == 4096
