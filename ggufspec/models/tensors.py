"""Tensors of a GGUF file: their types, shapes and sizes."""

from __future__ import annotations

import math
from typing import NamedTuple


class WeightType(NamedTuple):
    """How weights are stored: a block of `n_values` numbers takes `n_bytes`."""

    number: int  # its code in a file: enum ggml_type in ggml.h
    name: str
    n_values: int
    n_bytes: int


_TYPES = (
    WeightType(0, "F32", 1, 4),
    WeightType(1, "F16", 1, 2),
    WeightType(2, "Q4_0", 32, 18),
    WeightType(3, "Q4_1", 32, 20),
    WeightType(6, "Q5_0", 32, 22),
    WeightType(7, "Q5_1", 32, 24),
    WeightType(8, "Q8_0", 32, 34),
    WeightType(9, "Q8_1", 32, 40),
    WeightType(10, "Q2_K", 256, 84),
    WeightType(11, "Q3_K", 256, 110),
    WeightType(12, "Q4_K", 256, 144),
    WeightType(13, "Q5_K", 256, 176),
    WeightType(14, "Q6_K", 256, 210),
    WeightType(15, "Q8_K", 256, 292),
    WeightType(16, "IQ2_XXS", 256, 66),
    WeightType(17, "IQ2_XS", 256, 74),
    WeightType(18, "IQ3_XXS", 256, 98),
    WeightType(19, "IQ1_S", 256, 50),
    WeightType(20, "IQ4_NL", 32, 18),
    WeightType(21, "IQ3_S", 256, 110),
    WeightType(22, "IQ2_S", 256, 82),
    WeightType(23, "IQ4_XS", 256, 136),
    WeightType(24, "I8", 1, 1),
    WeightType(25, "I16", 1, 2),
    WeightType(26, "I32", 1, 4),
    WeightType(27, "I64", 1, 8),
    WeightType(28, "F64", 1, 8),
    WeightType(29, "IQ1_M", 256, 56),
    WeightType(30, "BF16", 1, 2),
    WeightType(34, "TQ1_0", 256, 54),
    WeightType(35, "TQ2_0", 256, 66),
    WeightType(39, "MXFP4", 32, 17),
    WeightType(40, "NVFP4", 64, 36),
    WeightType(41, "Q1_0", 128, 18),
)
# llama-quantize's names, indexed by llama_ftype (llama.h); "": the number is not in use.
QUANTIZATIONS = (
    *("F32", "F16", "Q4_0", "Q4_1", "", "", "", "Q8_0", "Q5_0", "Q5_1", "Q2_K", "Q3_K_S", "Q3_K_M"),
    *("Q3_K_L", "Q4_K_S", "Q4_K_M", "Q5_K_S", "Q5_K_M", "Q6_K", "IQ2_XXS", "IQ2_XS", "Q2_K_S"),
    *("IQ3_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S", "IQ3_M", "IQ2_S", "IQ2_M", "IQ4_XS"),
    *("IQ1_M", "BF16", "", "", "", "TQ1_0", "TQ2_0", "MXFP4_MOE", "NVFP4", "Q1_0"),
)
# llama.cpp's name patterns (common.h) for experts of a mixture, and dense feed-forward networks.
EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"
DENSE = r"\.ffn_(up|down|gate)\."
TYPES_BY_NUMBER = {each.number: each for each in _TYPES}
TYPES = {each.name: each for each in _TYPES}


class Tensor(NamedTuple):
    """An array of weights. type: a key of TYPES. shape: the innermost dimension first."""

    name: str
    shape: tuple[int, ...]
    type: str

    @property
    def n_values(self) -> int:
        return math.prod(self.shape)

    @property
    def n_rows(self) -> int:
        """Number of rows of shape[0] weights, over all experts."""
        return math.prod(self.shape[1:])

    @property
    def row_bytes(self) -> int:
        """Size of a row in the file."""
        of = TYPES[self.type]
        return self.shape[0] // of.n_values * of.n_bytes

    @property
    def n_bytes(self) -> int:
        return self.n_rows * self.row_bytes
