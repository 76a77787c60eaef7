"""What the texts of a batch depend on, in a form that a later run can compare with its own."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ggufspec.drafting import profile_store

_N_RUN_DIGITS = 12
_MAX_LENGTH = 60  # characters of a value in a message


def model_identity(path: str) -> dict[str, Any]:
    """The name and fingerprint of a model's file, without its folder."""
    return {"file": Path(path).name, "fingerprint": profile_store.fingerprint(Path(path))}


def as_json(value: Any) -> Any:
    """The same value in JSON's types; infinities and paths become strings."""
    if isinstance(value, Mapping):
        return {str(name): as_json(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(each) for each in value]
    is_infinite = isinstance(value, float) and not math.isfinite(value)
    return str(value) if is_infinite or isinstance(value, Path) else value


def run_name(settings: Mapping[str, Any]) -> str:
    """A short hash of the settings; each record holds the one of its batch."""
    text = json.dumps(settings, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:_N_RUN_DIGITS]


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """A phrase for each setting that has changed."""
    names = [*now, *(name for name in before if name not in now)]
    return [
        f"{name} was {_shown(before.get(name))}, is {_shown(now.get(name))}"
        for name in names
        if before.get(name) != now.get(name)
    ]


def prompt_seed(seed: int, index: int, turn: int = 0) -> int:
    """The seed of one text, from the batch's seed and the text's place; the same in any worker."""
    digest = hashlib.sha256(f"{seed} {index} {turn}".encode()).digest()
    return int.from_bytes(digest[:4], "little")


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _MAX_LENGTH else f"{text[: _MAX_LENGTH - 3]}..."
