"""Converts GBNF to Lark: rewrites it so that llguidance's converter reads it as llama.cpp does."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

from llguidance.gbnf_to_lark import gbnf_to_lark

from ggufspec.errors import OptionError

MAX_RULES = 1000  # the converter takes half a second for these; its time grows quadratically

_TOKEN = re.compile(
    r"""(?P<comment>\#[^\r\n]*) | (?P<text>"(?:\\.|[^"\\])*")
    | (?P<spaces>(?P<space>\[(?:\\[nrt]|[ ])+\])[*+]) | (?P<set>\[(?:\\.|[^\]\\])*\])
    | (?P<times>\{\s*(?P<least>\d*)\s*(?P<comma>,?)\s*(?P<most>\d*)\s*\}) | (?P<name>[\w-]+)
    | (?P<any>\.) | (?P<model_token>!?<) | (?P<close>\)(?=\s*[*+?{])) | (?P<unclosed>["\[].*)
    | (?P<blank>\s+) | (?P<other>::=|.)""",
    re.DOTALL | re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", **{char: char for char in '"\\[]'}}
_LAST = 0x10FFFF
_ROOT = "root_of_gbnf"


def lark_of_gbnf(gbnf: str) -> str:
    """A GBNF grammar in Lark. Raises OptionError.

    A rule that does not refer to itself, even indirectly, becomes a terminal, which takes the
    longest match. If `root` is no terminal, repeated spaces stay rules: as terminals they
    would take the space or line end that often must follow them.
    """
    n_rules = gbnf.count("::=")
    if n_rules > MAX_RULES:
        raise OptionError(f"the grammar has {n_rules:,} rules; it may have {MAX_RULES:,}")
    lark = _converted(gbnf, spaces_are_rules=False)
    is_terminal = f"start: {_ROOT.upper()}\n" in lark
    return lark if is_terminal else _converted(gbnf, spaces_are_rules=True)


def _converted(gbnf: str, *, spaces_are_rules: bool) -> str:
    try:
        return gbnf_to_lark("".join(_rewritten(gbnf, spaces_are_rules)))
    except OptionError:
        raise
    except RecursionError as error:
        raise OptionError("the grammar is nested too deeply; make it flatter") from error
    except Exception as error:  # the converter raises bare Exceptions, too
        message = re.sub(r"line (\d+)", lambda match: f"line {int(match[1]) - 1}", str(error))
        raise OptionError(
            f'the grammar is not valid GBNF: {message}. Write rules such as root ::= "yes" | "no" '
            '(GBNF), or start: "yes" | "no" (Lark)'
        ) from error


def _rewritten(gbnf: str, spaces_are_rules: bool) -> Iterator[str]:
    yield f"root ::= {_ROOT}\n"
    names = {"root": _ROOT}
    tokens = list(_TOKEN.finditer(gbnf))
    words = [match[0] for match in tokens if match.lastgroup not in ("blank", "comment")]
    defined = {word for word, after in pairwise(words) if after == "::="}
    if "root" not in defined:
        raise OptionError('the grammar needs a rule start (Lark) or root (GBNF): start: "a" | "b"')
    spaces: list[str] = []
    before = ""
    for match in tokens:
        kind, text = str(match.lastgroup), match[0]
        if kind == "spaces" and not spaces_are_rules:
            yield f"{_set(match['space'])}{text[-1]}"
        elif kind == "spaces":
            yield f"({_set(match['space']) if text[-1] == '+' else ''} spaces{len(spaces)})"
            spaces.append(_set(match["space"]))
        elif kind == "text":
            yield f'"{"".join(map(_character, _ESCAPE.sub(_decoded, text[1:-1])))}"'
        elif kind == "set":
            yield _set(text)
        elif kind == "any":  # llguidance's "." does not match the end of a line
            yield f"[\\x00-{chr(_LAST)}]"
        elif kind == "name":
            if text not in defined:
                raise OptionError(f"the grammar names the rule {text}, but does not define it")
            # The converter ignores case: rules that differ only in case need different names.
            yield names.setdefault(text, f"r{len(names)}-{re.sub('[^a-z0-9]+', '-', text.lower())}")
        elif kind == "times" and match["comma"] and not match["least"]:
            yield "{0," + match["most"] + "}"
        elif kind == "model_token":
            raise OptionError(
                "the grammar names tokens of the model, such as <think>, which is not supported "
                "in GBNF; write Lark, where <think> and <[12]> name tokens"
            )
        elif kind == "unclosed":
            raise OptionError(f"the grammar has a {text[0]} that is never closed; close it")
        elif kind == "close" and re.search(r"[*+?}]$", before):
            yield ' "")'  # else the converter drops the parentheses between two repetitions
        elif kind != "comment":
            yield text
        if kind not in ("blank", "comment"):
            before = text
    yield from (f'\nspaces{i} ::= {one} spaces{i} | ""\n' for i, one in enumerate(spaces))


def _decoded(match: re.Match[str]) -> str:
    if match[4]:
        if match[4] not in _ESCAPES:
            raise OptionError(f"the grammar has an unknown escape, {match[0]}; write \\xHH")
        return _ESCAPES[match[4]]
    code = int(match[1] or match[2] or match[3], 16)
    if code > _LAST or 0xD800 <= code < 0xE000:
        raise OptionError(f"the grammar has {match[0]}, which is not a character")
    return chr(code)


def _character(char: str) -> str:
    is_plain = (char.isascii() and (char.isalnum() or char == " ")) or ord(char) >= 0xA0
    return char if is_plain else f"\\x{ord(char):02x}"


def _set(text: str) -> str:
    """A set such as [^a-z] for Rust; special are a leading "^", and "-" between characters."""
    negation = "^" if text.startswith("[^") else ""
    inside = text[1 + len(negation) : -1]
    written, at = "", 0
    chars = _ESCAPE.sub(_decoded, inside)
    while at < len(chars):
        is_range = at + 2 < len(chars) and chars[at + 1] == "-"
        written += _character(chars[at])
        if is_range:
            if chars[at] > chars[at + 2]:
                raise OptionError(f"the grammar has {text}, in which a range ends before it starts")
            written += "-" + _character(chars[at + 2])
        at += 3 if is_range else 1
    if not written:
        raise OptionError(f"the grammar has {text}, which matches no character; name some")
    return f"[{negation}{written}]"
