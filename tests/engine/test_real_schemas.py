"""Texts of real models under schemas are valid whenever they are complete."""

from __future__ import annotations

import json
import os
from pathlib import Path

import jsonschema
import pytest

import ggufspec

MODELS = Path(os.environ.get("GGUFSPEC_REAL_MODELS", "~/.cache/ggufspec-real")).expanduser()
SCHEMAS: list[dict[str, object]] = [
    {"enum": ["positive", "negative", "neutral"]},
    {
        "type": "object",
        "properties": {
            "date": {"type": "string", "format": "date"},
            "guests": {"type": "integer", "minimum": 1, "maximum": 20, "multipleOf": 2},
            "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
            "note": {"type": ["string", "null"], "maxLength": 20},
        },
        "required": ["date", "guests", "code", "note"],
    },
]


@pytest.mark.parametrize("name", ["smollm2-135m", "gemma-3-270m"])
def test_complete_texts_are_valid(name: str) -> None:
    model = MODELS / f"{name}.gguf"
    if not model.exists():
        pytest.skip(f"{model} is not there")
    validator = jsonschema.Draft202012Validator
    with ggufspec.load(target=model, n_ctx=512, n_threads=1) as engine:
        for seed, schema in enumerate(SCHEMAS):
            prompt = "A table for my friends, please, as JSON: "
            done = engine.generate(prompt, json_schema=schema, seed=seed, max_tokens=128)
            assert done.finish_reason == "stop"
            value = json.loads(done.text)
            validator(schema, format_checker=validator.FORMAT_CHECKER).validate(value)
