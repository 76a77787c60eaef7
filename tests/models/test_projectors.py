"""Which projector belongs to a model."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import tiny_projectors
from hub import Hub

from ggufspec.errors import ModelError
from ggufspec.models.projectors import (
    best_projector,
    check_projector,
    projector_beside,
    projector_bytes,
)
from ggufspec.models.pull import resolve
from ggufspec.models.registry import Registry


@pytest.mark.parametrize(
    ("files", "target", "found"),
    [
        ("mmproj-F16.gguf mmproj-F32.gguf mmproj-Q8_0.gguf", "m-Q8_0.gguf", "mmproj-Q8_0.gguf"),
        ("mmproj-F16.gguf mmproj-F32.gguf", "m-Q4_K_M.gguf", "mmproj-F16.gguf"),
        ("mmproj-F16.gguf sub/mmproj-F32.gguf", "sub/m-Q4_K_M.gguf", "sub/mmproj-F32.gguf"),
        ("mmproj-F16.gguf other/mmproj-Q4_0.gguf", "sub/m-Q4_0.gguf", "mmproj-F16.gguf"),
        ("m-Q4_0.gguf README.md mmproj.txt", "m-Q4_0.gguf", None),
    ],
)
def test_the_best_of_a_repository(files: str, target: str, found: str | None) -> None:
    assert best_projector(files.split(), target) == found


@pytest.mark.parametrize(
    ("projector", "target", "is_found"),
    [
        ("mmproj-model-f16.gguf", "gemma-3-4b-it-Q4_K_M.gguf", True),
        ("mmproj-gemma-3-4b-it-f16.gguf", "gemma-3-4b-it-Q4_K_M.gguf", True),
        ("gemma-3-4b-it.mmproj-Q8_0.gguf", "gemma-3-4b-it-Q4_K_M.gguf", True),
        ("mmproj-gemma-3-12b-it-f16.gguf", "gemma-3-4b-it-Q4_K_M.gguf", False),
        ("mmproj-Qwen2.5-VL-3B.gguf", "gemma-3-4b-it-Q4_K_M.gguf", False),
    ],
)
def test_a_projector_beside_a_model_fits_by_its_name(
    projector: str, target: str, is_found: bool, tmp_path: Path
) -> None:
    for name in (projector, target, "another.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    wanted = tmp_path / projector if is_found else None
    assert projector_beside(tmp_path / target) == wanted


def test_a_projector_comes_with_a_model_of_the_hub(hub: Hub, tmp_path: Path) -> None:
    model = tiny.write_llama(tmp_path / "m.gguf").read_bytes()
    projector = tiny_projectors.write_llava(tmp_path / "p.gguf").read_bytes()
    hub.add("lab/m-GGUF", {"m-Q4_K_M.gguf": model, "mmproj-F16.gguf": projector})
    none = Registry({}, {})
    alone = resolve("lab/m-GGUF:Q4_K_M", registry=none)
    assert projector_beside(alone) is None
    hub.add("lab/n-GGUF", {"m-Q4_K_M.gguf": model, "mmproj-F16.gguf": projector})
    path = resolve("lab/n-GGUF:Q4_K_M", registry=none, projector=True)
    assert path.name == "m-Q4_K_M.gguf"
    beside = projector_beside(path)
    assert beside is not None
    assert check_projector(beside).values["clip.projector_type"] == "mlp"
    assert projector_bytes(beside) > len(projector)


def test_what_is_no_projector_for_images_is_refused(tmp_path: Path) -> None:
    model = tiny.write_llama(tmp_path / "m.gguf")
    with pytest.raises(ModelError, match="is not a projector for images"):
        check_projector(model)
    sound = tiny.write_gguf(tmp_path / "s.gguf", "clip", {}, None, {})
    with pytest.raises(ModelError, match="not for images"):
        check_projector(sound)
    for kind in ("hunyuanvl", "deepseek4v"):
        facts = {"has_vision_encoder": True, "projector_type": kind}
        file = tiny.write_gguf(tmp_path / f"{kind}.gguf", "clip", facts, None, {})
        with pytest.raises(ModelError, match=f"of type {kind} are not supported"):
            check_projector(file)
