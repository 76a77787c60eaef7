"""Turns JSON schemas, grammars, regular expressions and choices into Lark, for llguidance."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from ggufspec.common import validate
from ggufspec.common.child import LimitedProcess, LimitExceededError
from ggufspec.errors import OptionError

SCHEMA_OF_TOOL = "JSON schema of a tool"
TOO_DEEP = "the JSON schema is nested too deeply; make it flatter"
MAX_BYTES = 128 * 1024  # of a source text: a schema of 1 MB takes seconds to compile
MAX_GRAMMAR_BYTES = 2 * MAX_BYTES  # a grammar may contain the schemas of hundreds of tools
MAX_SECONDS = 0.7  # to compile a source; a long chain of nested terminals takes a minute
# Results of the last sources that are kept; more of short ones: an agent sends the schemas of
# hundreds of tools with each request.
_N_KEPT, _N_SHORT_KEPT, _SHORT = 32, 1024, 4096  # characters

_process = LimitedProcess("ggufspec.structured.grammar_process")


def of_json_schema(schema: object) -> str:
    """The grammar of the JSON that a schema allows.

    `schema`: a text, a dict, or a pydantic model class. An object with `properties` may have no
    further properties, unless the schema allows them or combines objects. Raises OptionError, with
    the path in the schema, for keywords that cannot be guaranteed.
    """
    if isinstance(schema, type) and callable(getattr(schema, "model_json_schema", None)):
        schema = schema.model_json_schema()  # type: ignore[attr-defined]
    return _lark_of("JSON schema", _text_of(schema))


def of_schema_of_tool(schema: object) -> tuple[str, Sequence[str]]:
    """As of_json_schema, but leaves out keywords that cannot be guaranteed, and names these."""
    answer = _answer_of(SCHEMA_OF_TOOL, _text_of(schema))
    return answer["lark"], answer["dropped"]


def _text_of(schema: object) -> str:
    if isinstance(schema, str):
        return schema
    with schema_errors():
        made = dict(schema) if isinstance(schema, Mapping) else schema
        return json.dumps(made, allow_nan=False, ensure_ascii=False)


@contextmanager
def schema_errors() -> Iterator[None]:
    """Turn errors of reading or writing a schema as JSON into OptionErrors."""
    try:
        yield
    except OptionError:
        raise
    except RecursionError as error:
        raise OptionError(TOO_DEEP) from error
    except (TypeError, ValueError) as error:
        raise OptionError(
            f'the JSON schema is not JSON: {error}; give a JSON object such as {{"type": "object"}}'
        ) from error


def of_grammar(text: str) -> str:
    """The grammar of a text in llguidance's Lark syntax (rule `start`) or in GBNF (rule `root`).

    Raises OptionError if it is not valid. GrammarConstraint checks whether the vocabulary has the
    tokens that it names.
    """
    return _lark_of("grammar", text)


def of_regex(regex: str) -> str:
    """The grammar of the texts that a regular expression in Rust's syntax matches entirely.

    Raises OptionError if it is not valid.
    """
    return _lark_of("regular expression", regex)


def of_choices(choices: Sequence[str]) -> str:
    """The grammar that allows exactly one of several texts."""
    text = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
    text = text.replace("\x7f", "\\u007f")
    _check_size(text, "list of choices")
    return f"start: CHOICE\nCHOICE: {text}"  # a rule could have only 2,000 alternatives


def _lark_of(kind: str, text: str) -> str:
    lark: str = _answer_of(kind, text)["lark"]
    return lark


def _answer_of(kind: str, text: str) -> Mapping[str, Any]:
    _check_size(text, kind)
    compiled = _compiled_short if len(text) <= _SHORT else _compiled
    answer = compiled(kind, text, MAX_SECONDS)
    if error := answer.get("error"):
        raise OptionError(error)
    return answer


def _ask(kind: str, text: str, seconds: float) -> Mapping[str, Any]:
    """The answer of the process. Raises OptionError at a limit, so that it is not kept: a busy
    machine compiles the same text in time later."""
    try:
        answer: Mapping[str, Any] = _process.ask([kind, text], seconds=seconds)
        return answer
    except LimitExceededError as error:
        raise OptionError(f"the {kind} {error} to compile; simplify it") from error


_compiled = lru_cache(maxsize=_N_KEPT)(_ask)
_compiled_short = lru_cache(maxsize=_N_SHORT_KEPT)(_ask)


def _check_size(text: str, what: str) -> None:
    n_bytes = len(validate.text(f"the {what}", text).encode())
    n_most = MAX_GRAMMAR_BYTES if what == "grammar" else MAX_BYTES
    if n_bytes > n_most:
        raise OptionError(
            f"the {what} has {n_bytes:,} bytes; it may have {n_most:,}. Make it smaller"
        )
