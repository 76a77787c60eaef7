"""Compiles constraints in a child process with limits, since native code cannot be interrupted."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from llguidance import LLMatcher, regex_to_lark

from ggufspec.common.child import answer_requests
from ggufspec.errors import OptionError
from ggufspec.structured.gbnf import lark_of_gbnf
from ggufspec.structured.grammar import SCHEMA_OF_TOOL
from ggufspec.structured.json_schema import lark_of_schema
from ggufspec.structured.limits import LIMITS, byte_tokenizer, limited_matcher, summary

_MAX_MEMORY = 2**30
_LARK = re.compile(r"^[ \t]*(?:%llguidance\b|[?!]?start\b[^:\n]*:(?!:=))", re.MULTILINE)
_NOT_ROLLED_BACK = re.compile(r"^[ \t]*\w+\[[^\]\n]*\b(max_tokens|stop)[ \t]*=", re.MULTILINE)


def main() -> None:
    """Answer requests of [kind, text] with {"lark": ..., "dropped": ...} or {"error": ...}."""
    byte_tokenizer()
    answer_requests(_answer, n_bytes_max=_MAX_MEMORY)


def _answer(request: tuple[str, str]) -> Mapping[str, Any]:
    kind, text = request
    dropped: list[str] = []
    try:
        lark = lark_of_schema(text, dropped) if kind == SCHEMA_OF_TOOL else _MAKERS[kind](text)
    except OptionError as error:
        return {"error": str(error)}
    # Runs the work that does not depend on the vocabulary; the limits bound the rest.
    limited_matcher(byte_tokenizer(), lark).compute_bitmask()
    return {"lark": lark, "dropped": dropped}


def _lark_of_grammar(text: str) -> str:
    made = text if _LARK.search(text) else lark_of_gbnf(text)
    refused = _NOT_ROLLED_BACK.search(text)
    if refused:
        raise OptionError(f"the grammar has {refused[1]}=, which is not supported; leave it out")
    complaint = LLMatcher.validate_grammar(made, limits=LIMITS)
    if complaint:
        raise OptionError(f"the grammar cannot be used: {summary(complaint)}")
    return made


def _lark_of_regex(regex: str) -> str:
    made = f"start: /{regex_to_lark(regex)}/"
    complaint = LLMatcher.validate_grammar(made, limits=LIMITS)
    if complaint:
        reason = complaint.partition("\n   1 |")[0].splitlines()[-1]
        reason = summary(reason.rpartition("(in regex): ")[2].removeprefix("error: "))
        raise OptionError(
            f"the regular expression cannot be used: {reason}. Its syntax is Rust's, without "
            "look-around and back-references"
        )
    return made


_MAKERS: Mapping[str, Callable[[str], str]] = {
    "JSON schema": lark_of_schema,
    "grammar": _lark_of_grammar,
    "regular expression": _lark_of_regex,
}
