"""The first costs of a pair, from the tables of its models."""

from __future__ import annotations

import numpy as np

from ggufspec.drafting.constants import UNMEASURED_STEP
from ggufspec.drafting.cost_model import Start
from ggufspec.llama.context import Context
from ggufspec.llama.context_options import OWN
from ggufspec.measure import table
from ggufspec.measure.attention import UsualText, usual_text


def first_costs(
    target: Context, draft: Context | None, n_most: int, text: UsualText | None = None
) -> Start | None:
    """Costs at the depth of a usual `text`, for passes of up to `n_most` tokens.

    None for models whose passes were not measured when they were first loaded.
    """
    depth = (text or usual_text(target.options)).depth
    of_target, of_draft = (_seconds(each, depth) if each else {} for each in (target, draft))
    if len(of_target) < 2:
        return None
    sizes, seconds = [*of_target], [*of_target.values()]
    slope = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])
    curve = np.interp(range(1, n_most + 1), sizes, seconds)
    further = [seconds[-1] + slope * (n - sizes[-1]) for n in range(sizes[-1] + 1, n_most + 1)]
    step, guesses_step = UNMEASURED_STEP * seconds[0], True  # of a head, which has no passes alone
    read = step
    if draft and draft.model is not target.model and of_draft.keys() >= {1, 2}:
        step, guesses_step = of_draft[1], False
        read = max(of_draft[2] - of_draft[1], 0.0)
    measured = [*map(float, curve[: sizes[-1]]), *further]
    return Start(measured, step, read, is_measured=True, guesses_step=guesses_step)


def _seconds(context: Context, depth: int) -> dict[int, float]:
    types = [*context.model.kernels.types]
    ways = dict.fromkeys((table.way(context.options.flash_attention), OWN, "on"))
    for about in (table.key_in(context), table.key_of(context.model)):
        rows = table.recall(about)
        for way in ways:
            if len(found := table.curve(rows, types, way, depth)) > 1:
                return found
    return {}
