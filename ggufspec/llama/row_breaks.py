"""The embeddings between the rows of Pixtral's images, which llama.cpp may compute wrongly."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ggufspec.errors import PromptError
from ggufspec.models.header import Header

_NAME = "v.token_embd.img_break"


class RowBreaks:
    """llama.cpp adds each break to unset memory times 0, which is NaN if the memory holds NaN."""

    def __init__(self, projector: Header) -> None:
        self._row: NDArray[np.float32] | None = None
        found = [each for each in projector.tensors if each.name == _NAME and each.type == "F32"]
        for tensor in found:
            file, at = projector.starts[_NAME]
            self._row = np.fromfile(file, np.float32, tensor.n_values, offset=at)

    def mend(self, rows: NDArray[np.float32]) -> None:
        """Write the breaks into the embeddings of an image, in place.

        Raises PromptError for embeddings that are no numbers elsewhere.
        """
        is_wrong = ~np.isfinite(rows).all(axis=1)
        if is_wrong.any():
            if self._row is None or 2 * is_wrong.sum() >= len(rows):
                raise PromptError("the projector computed values for an image that are no numbers")
            rows[is_wrong] = self._row
