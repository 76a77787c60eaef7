"""Drafts with the draft model, whose own tokens are drafted from n-grams."""

from __future__ import annotations

from ggufspec.drafting.strategies import Materials
from ggufspec.drafting.strategies.model import ModelDrafter
from ggufspec.errors import OptionError

USES_MODEL = True  # the draft model may read a prompt before the first round


def make(materials: Materials) -> ModelDrafter:
    if materials.session is None or materials.stage is None:
        raise OptionError(
            "the drafter 'staged' needs a draft model that is no head; name one with draft= "
            "(--draft)"
        )
    return ModelDrafter(materials.session, materials)
