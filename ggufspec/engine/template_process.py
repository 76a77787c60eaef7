"""Renders chat templates in a process of its own, with limits: model files are not trusted.

Run as a program, with the limit of seconds and the folders of jinja2 and markupsafe as arguments:
it answers each line of JSON on stdin with a line on stdout. It imports only the standard library
and jinja2.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from types import GeneratorType
from typing import Any

SECONDS = 2.0  # of one template; usual ones take a few milliseconds
MEGABYTES = 512  # of the process, where the system can limit it
N_CHARS_MIN = 2**20  # of the text; a longer request allows more

EXIT_TIME = 1  # the status that faulthandler ends a process with
EXIT_MEMORY = 3


def main(seconds: float, folders: Sequence[str]) -> None:
    """Answer requests until stdin ends. A template that exceeds a limit ends the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    sys.path += folders
    compiled = lru_cache(maxsize=16)(_environment().from_string)
    _limit_memory()
    for line in sys.stdin.buffer:
        # Its thread ends the process even inside one long operation of C code.
        faulthandler.dump_traceback_later(seconds, exit=True)
        try:
            reply = json.dumps(_answer(json.loads(line), 4 * len(line), compiled))
        except MemoryError:
            os._exit(EXIT_MEMORY)
        faulthandler.cancel_dump_traceback_later()
        sys.stdout.buffer.write(reply.encode() + b"\n")
        sys.stdout.buffer.flush()


def _answer(
    request: Mapping[str, Any], n_chars: int, compiled: Callable[[str], Any]
) -> dict[str, str]:
    """`text`, or what went wrong as `error`. Without variables, the template is compiled only."""
    try:
        template = compiled(request["template"])
        variables = request["variables"]
        text = "" if variables is None else template.render(variables)
    except RecursionError:
        return {"error": "it recurses too deeply"}
    except MemoryError:
        raise
    except Exception as error:
        line = getattr(error, "lineno", None)
        return {"error": f"{error}{f' (line {line})' if line else ''}" or type(error).__name__}
    if len(text) > max(n_chars, N_CHARS_MIN):
        return {"error": f"it writes {len(text):,} characters"}
    return {"text": text}


def _environment() -> Any:
    """As the one of transformers: its filters, globals, tags and whitespace."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import SandboxedEnvironment
    from jinja2.utils import Namespace

    class Generation(Extension):
        """`{% generation %}` marks answers for training: a block with a scope of its own."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> nodes.Node:
            n_line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("body"), [], [], body).set_lineno(n_line)

        def body(self, caller: Callable[[], str]) -> str:
            return caller()

    class PublicNamespace(Namespace):
        """A namespace without names such as __class__."""

        def __init__(*args: Any, **values: Any) -> None:
            self, *rest = args  # `self` may be one of the values
            values = dict(*rest, **values)
            for name in values:
                _check_public(name)
            Namespace.__init__(self, values)

        def __setitem__(self, name: str, value: Any) -> None:
            _check_public(name)
            super().__setitem__(name, value)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    # The one of transformers is immutable, which some templates are not written for (Kimi K2);
    # here, what a template could change is its own.
    made = SandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    made.filters["tojson"] = _to_json
    made.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "namespace": PublicNamespace,
    }
    return made


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


def _limit_memory() -> None:
    with suppress(ImportError):
        import resource

        for name in ("RLIMIT_AS", "RLIMIT_DATA"):
            with suppress(AttributeError, ValueError, OSError):
                limit = MEGABYTES * 2**20
                resource.setrlimit(getattr(resource, name), (limit, limit))


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2:])
