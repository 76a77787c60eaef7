"""Identifies the models, settings and seeds of a batch, so that a later run can compare them."""

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
    """A short hash of the settings, which each record of a batch has."""
    text = json.dumps(settings, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:_N_RUN_DIGITS]


def prompt_seed(seed: int, index: int, turn: int = 0) -> int:
    """The seed of one text, derived from the batch's seed and the text's place in the file."""
    digest = hashlib.sha256(f"{seed} {index} {turn}".encode()).digest()
    return int.from_bytes(digest[:4], "little")
