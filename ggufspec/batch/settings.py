"""What the texts of a batch depend on, told so that a later run can know it again.

Knows values and files; no models, no processes.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ggufspec.drafting import profile_store

_N_RUN_DIGITS = 12
_LONGEST = 60  # characters of a value in a message


def model_identity(path: Path | None) -> dict[str, Any] | None:
    """Tells a model's file from others, wherever it lies."""
    if path is None:
        return None
    return {"file": path.name, "fingerprint": profile_store.fingerprint(path)}


def as_json(value: Any) -> Any:
    """The same as JSON reads it back; it knows no infinity."""
    if isinstance(value, Mapping):
        return {str(name): as_json(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(each) for each in value]
    is_endless = isinstance(value, float) and not math.isfinite(value)
    return str(value) if is_endless or isinstance(value, Path) else value


def run_name(settings: Mapping[str, Any]) -> str:
    """A short name for these settings, that every record of theirs bears."""
    text = json.dumps(settings, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:_N_RUN_DIGITS]


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What is not the same, in words."""
    names = [*now, *(name for name in before if name not in now)]
    return [
        f"{name} was {_shown(before.get(name))}, is {_shown(now.get(name))}"
        for name in names
        if before.get(name) != now.get(name)
    ]


def prompt_seed(seed: int, index: int, turn: int = 0) -> int:
    """The seed of a text, by the batch's and by which text it is: no worker has a part in it."""
    digest = hashlib.sha256(f"{seed} {index} {turn}".encode()).digest()
    return int.from_bytes(digest[:4], "little")


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
