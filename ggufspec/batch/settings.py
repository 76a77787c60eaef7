"""What the texts of a batch depend on, in a form that a later run can compare with its own."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ggufspec.drafting import profile_store

_N_RUN_DIGITS = 12


def model_identity(path: str) -> dict[str, Any]:
    """The name and fingerprint of a model's file, without its folder."""
    return {"file": Path(path).name, "fingerprint": profile_store.fingerprint(Path(path))}


def run_name(settings: Mapping[str, Any]) -> str:
    """A short hash of the settings; each record holds the one of its batch."""
    text = json.dumps(settings, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:_N_RUN_DIGITS]


def prompt_seed(seed: int, index: int, turn: int = 0) -> int:
    """The seed of one text, from the batch's seed and the text's place; the same in any worker."""
    digest = hashlib.sha256(f"{seed} {index} {turn}".encode()).digest()
    return int.from_bytes(digest[:4], "little")
