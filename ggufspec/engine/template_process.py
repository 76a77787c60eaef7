"""Renders chat templates in a process of its own, with limits: model files are not trusted."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import lru_cache
from types import GeneratorType
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import SandboxedEnvironment
from jinja2.utils import Namespace

from ggufspec.common.child import answer_requests

_MAX_MEMORY = 2**29
_N_CHARS_MIN = 2**20  # of the text that is allowed; a longer request allows more


def main() -> None:
    """Answer requests of [template, variables] with {"text": ...} or {"error": ...}."""
    compiled = lru_cache(maxsize=16)(_environment().from_string)

    def answer(request: tuple[str, Mapping[str, Any] | None]) -> dict[str, str]:
        source, variables = request
        try:
            template = compiled(source)
            text = "" if variables is None else template.render(variables)
        except RecursionError:
            return {"error": "it recurses too deeply"}
        except MemoryError:
            raise
        except Exception as error:
            line = getattr(error, "lineno", None)
            return {"error": f"{error}{f' (line {line})' if line else ''}" or type(error).__name__}
        if len(text) > _N_CHARS_MIN and len(text) > 4 * len(json.dumps(request)):
            return {"error": f"it writes {len(text):,} characters"}
        return {"text": text}

    answer_requests(answer, n_bytes_max=_MAX_MEMORY)


def _environment() -> SandboxedEnvironment:
    """A Jinja environment like that of transformers: its filters, globals, tags, whitespace."""
    # Transformers forbids changes to values, but some templates need them (Kimi K2); here, values
    # belong to the template's own process.
    made = SandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    made.filters["tojson"] = _to_json
    made.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "namespace": _PublicNamespace,
    }
    return made


class _Generation(Extension):
    """`{% generation %}` marks answers for training: a block with a scope of its own."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        n_line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("body"), [], [], body).set_lineno(n_line)

    def body(self, caller: Callable[[], str]) -> str:
        return caller()


class _PublicNamespace(Namespace):
    def __init__(*args: Any, **values: Any) -> None:
        self, *rest = args  # `self` may be one of the values
        values = dict(*rest, **values)
        for name in values:
            _check_public(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_public(name)
        super().__setitem__(name, value)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _check_public(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise ValueError(f"{name!r} begins with an underscore: a namespace must not have it")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """JSON without escapes for HTML; a filter's generator is a list."""

    def listed(value: Any) -> list[Any]:
        if isinstance(value, GeneratorType):
            return list(value)
        raise TypeError(f"{type(value).__name__} is not JSON")

    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=listed,
    )
