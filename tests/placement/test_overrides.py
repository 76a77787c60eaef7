"""Patterns of tensors that stay on the CPU: as llama.cpp has them, and refused where wrong."""

from __future__ import annotations

import pytest

from ggufspec.errors import OptionError
from ggufspec.models.gguf_file import DENSE, EXPERTS
from ggufspec.placement.overrides import (
    Override,
    check_buffers,
    check_patterns,
    on_cpu,
    overrides_of,
    stays,
)

TENSORS = [
    f"blk.{i}.{name}.weight"
    for i in range(12)
    for name in ("attn_q", "ffn_gate_inp", "ffn_up_exps", "ffn_gate_up_exps", "ffn_down_shexp")
]


@pytest.mark.parametrize("n", [0, 11])
def test_experts_of_the_first_layers_stay(n: int) -> None:
    kept = {name for name in TENSORS if stays(on_cpu(EXPERTS, n), name)}
    assert kept == {
        f"blk.{i}.{name}.weight" for i in range(n) for name in ("ffn_up_exps", "ffn_gate_up_exps")
    }, "neither the router nor shared experts, which each token uses"


def test_all_layers_are_one_pattern_without_numbers() -> None:
    assert on_cpu(EXPERTS, -1) == (Override(EXPERTS, "CPU"),)
    assert stays(on_cpu(DENSE, -1), "blk.79.ffn_down.weight")
    assert not stays(on_cpu(DENSE, -1), "blk.79.ffn_down_exps.weight")


def test_the_first_override_that_matches_counts() -> None:
    given = overrides_of("", [r"blk\.1\.=Vulkan0", "exps=CPU"], None, None)
    assert given is not None
    assert not stays(given, "blk.1.ffn_up_exps.weight")
    assert stays(given, "blk.2.ffn_up_exps.weight")


def test_nothing_given_is_not_the_same_as_no_layers() -> None:
    assert overrides_of("", [], None, None) is None
    assert overrides_of("", [], 0, None) == ()


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ((["exps"], None, None), "override_tensor has 'exps'; it must be PATTERN=TYPE"),
        ((["=CPU"], None, None), "it must be PATTERN=TYPE"),
        ((["(=CPU"], None, None), r"the pattern '\(': missing \)"),
        (([f"{'(' * 2000}exps{')' * 2000}=CPU"], None, None), "recursion"),
        (([f"x{{{10**20}}}=CPU"], None, None), "too large"),
        (([f"exps|{'a' * 9999}=CPU"], None, None), "a pattern of 10,004 characters"),
        ((["(?i)EXPS=CPU"], None, None), r"has '\(\?' in .* different things in llama\.cpp"),
        ((["[[:digit:]]_exps=CPU"], None, None), r"has '\[:digit:\]' in the pattern"),
        ((["ex++ps=CPU"], None, None), r"has '\+\+' in the pattern"),
        ((["(x*)+exps=CPU"], None, None), "which may take forever"),
    ],
)
def test_what_is_no_override_is_refused(given: tuple[object, ...], found: str) -> None:
    with pytest.raises(OptionError, match=found):
        overrides_of("", *given)  # type: ignore[arg-type]


def test_a_pattern_of_both_is_taken() -> None:
    given = r"^blk\.(?:1[0-9]|2)[.](?=ffn)(?!ffn_gate_inp).*?_(ch|)exps\b.{1,9}$"
    (found,) = overrides_of("", [f"{given}=CPU"], None, None) or ()
    assert stays((found,), "blk.12.ffn_up_exps.weight")


def test_buffer_types_that_there_are_not_are_refused_with_those_that_there_are() -> None:
    with pytest.raises(OptionError, match=r"'CUDA7'; this build .* have CPU, CUDA0$"):
        check_buffers((Override("exps", "CUDA7"),), ["CPU", "CUDA0"])
    check_buffers((Override("exps", "CUDA0"),), ["CPU", "CUDA0"])


def test_a_pattern_of_no_tensor_is_refused_with_the_names_of_a_layer() -> None:
    with pytest.raises(OptionError, match=r"matches the pattern 'shexps' .* has attn_q\.weight"):
        check_patterns((Override("shexps"),), "a.gguf", TENSORS)
    with pytest.raises(
        OptionError, match=r"^a\.gguf has no dense .* \(--n-cpu-ffn\); its first .* attn_q"
    ):
        check_patterns(on_cpu(DENSE, 4), "a.gguf", TENSORS)
    check_patterns(on_cpu(EXPERTS, 40), "a.gguf", TENSORS)
