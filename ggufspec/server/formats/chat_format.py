"""The format of a chat template's answers: separates content, reasoning and tool calls."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Any

from ggufspec.engine.answer_syntax import ID, CallSyntax, Syntax, parts, syntax_of, words
from ggufspec.engine.chat_template import ChatTemplate
from ggufspec.server.formats.calls import CallParser, Schemas
from ggufspec.server.formats.deltas import (
    SPACES,
    ChatParser,
    Deltas,
    Marks,
    NoCallError,
    Parsing,
    Reader,
)

_FENCE, _LANGUAGE = "```", re.compile(r"[\w-]*")
_BARE = ("{", "[", _FENCE)  # possible beginnings of a call without the marks of its format
_MESSAGE, _CHANNEL = "<|message|>", "<|channel|>"
_ENDS = ("<|end|>", "<|return|>", "<|call|>", "<|start|>")
_RECIPIENT = re.compile(r"\bto=functions\.([^\s<]+)")
_HARMONY_MARKS = (*_ENDS, _MESSAGE, _CHANNEL, "<|constrain|>")


@dataclass(frozen=True)
class ChatFormat:
    syntax: Syntax

    @property
    def tools(self) -> bool:
        """Whether the template shows tools to the model, and the syntax of calls is known."""
        return self.syntax.call is not None

    @property
    def has_marks(self) -> bool:
        """Whether an answer without tools may have parts other than content."""
        return self.syntax.reasoning is not None or self.syntax.is_harmony

    @cached_property
    def text(self) -> str:
        """All marks in one text. Control tokens that occur in it must be visible to the parser."""
        syntax, call = self.syntax, self.syntax.call or CallSyntax("json")
        marks = [*(syntax.reasoning or ()), *syntax.dropped, call.opener, call.middle, call.tail]
        marks += [call.closer, call.joint or "", call.quote, *(call.parameter or ())]
        return " ".join(marks + list(_HARMONY_MARKS if syntax.is_harmony else ()))

    def parser(
        self,
        begun: str,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        is_parallel: bool = True,
        known_ids: Collection[str | None] = (),
    ) -> ChatParser:
        """A parser of the text after `begun`; without tools, calls are content.

        `known_ids`: those of earlier calls.
        """
        call, reader = self.syntax.call, Reader()
        texts = (call.opener, call.head, call.middle, call.tail) if call and tools else ()
        has_short_ids = any(ID in text for text in texts)
        deltas = Deltas(reader, has_short_ids=has_short_ids, known_ids=known_ids)
        if self.syntax.is_harmony:
            steps = _harmony_steps(reader, deltas, has_tools=tools is not None)
            return ChatParser(reader, deltas, steps, begun)
        schemas = None
        if tools is not None:
            functions = [tool["function"] for tool in tools]
            schemas = {each["name"]: each.get("parameters") or {} for each in functions}
        answer = _AnswerParser(reader, deltas, self.syntax, schemas, is_parallel)
        return ChatParser(reader, deltas, answer.run(), begun.strip())


@lru_cache(maxsize=4)
def format_of(template: ChatTemplate) -> ChatFormat:
    """The format of a template's answers; made once."""
    return ChatFormat(syntax_of(template))


class _AnswerParser:
    def __init__(
        self,
        reader: Reader,
        deltas: Deltas,
        syntax: Syntax,
        schemas: Schemas | None,
        is_parallel: bool,
    ) -> None:
        self._reader, self._deltas, self._syntax = reader, deltas, syntax
        call = syntax.call if schemas is not None else None
        self._opener = words(call.opener) if call else []
        if call and call.kind == "json" and self._opener:
            self._opener[-1] = self._opener[-1].rstrip("[")
            self._opener = [word for word in self._opener if word]
        self._calls = self._bare_calls = None
        if call:
            made = partial(CallParser, reader, deltas, schemas or {})
            self._calls = self._bare_calls = made(call)
            if self._opener:
                bare = replace(call, kind="json", opener="", tail="", name_key="name")
                self._bare_calls = made(bare)
        self._starts = {  # words of the opener; a further call may begin in its middle
            parts(word)[0]: i
            for i, word in reversed(list(enumerate(self._opener)))
            if i == 0 or word[0] in "<[]"
        }
        begin, end = syntax.reasoning or ("", "")
        self._reasoning_end = Marks([end.strip()])
        marks = [*self._starts, *syntax.dropped]
        self._marks = Marks(marks)
        self._is_parallel, self._in_fence = is_parallel, False
        # Marks that count only before content. The prompt may have opened the reasoning unseen.
        self._first_marks = [word for word in (*marks, begin, end) if word]
        if call:  # small models omit the marks
            self._first_marks += _BARE

    def run(self) -> Parsing[None]:
        reader, deltas, syntax = self._reader, self._deltas, self._syntax
        begin = syntax.reasoning[0] if syntax.reasoning else None
        while True:
            mark = None
            if not deltas.has_content and (self._is_parallel or not deltas.n_calls):
                deltas.content((yield from reader.matching(SPACES)))
                mark = yield from reader.accept(*self._first_marks)
            if mark is None:
                mark = yield from reader.until(self._marks, deltas.content)
            if mark is None:
                return
            if mark in (*self._starts, *_BARE):
                yield from self._section(mark)
                continue
            deltas.part()
            if mark == begin:
                yield from reader.until(self._reasoning_end, deltas.reasoning)
                deltas.part()

    def _section(self, mark: str) -> Parsing[None]:
        """Parse calls, of which the first begins with `mark`; if there are none, add content."""
        reader, deltas = self._reader, self._deltas
        reader.keep(reader.at - len(mark))
        n_before, calls, self._in_fence = deltas.n_calls, self._calls, False
        try:
            while True:
                if mark in _BARE and mark not in self._starts:
                    calls = self._bare_calls
                    if mark == _FENCE:
                        self._in_fence = True
                        yield from reader.matching(_LANGUAGE)
                        yield from reader.spaces()
                        mark = (yield from reader.accept(*self._starts)) or ""
                    else:
                        reader.at -= 1
                if mark in self._starts:
                    calls = self._calls
                assert calls is not None
                id = yield from self._rest_of_opener(mark)
                yield from calls.call(id)
                n_before = deltas.n_calls
                found = yield from self._next_call(calls)
                if found is None:
                    return
                mark = found
        except NoCallError:
            if deltas.n_calls == n_before:
                text = reader.taken()
                deltas.content(text.removeprefix(mark) if mark in self._syntax.dropped else text)
        finally:
            reader.forget()

    def _rest_of_opener(self, mark: str) -> Parsing[str | None]:
        """Skip the opener after its first mark; returns the id in it, if any."""
        if self._calls is None or mark not in self._starts:
            return None
        i = self._starts[mark]
        rest = " ".join([self._opener[i][len(mark) :], *self._opener[i + 1 :]])
        id, _ = yield from self._calls.pattern(rest)
        return id or None

    def _next_call(self, calls: CallParser) -> Parsing[str | None]:
        """Skip the end of a call; returns the mark of the next call, None if none follows."""
        reader = self._reader
        separators = (",", ";", "]") if calls.kind in ("json", "python") else ()
        may_follow = self._is_parallel or not calls.is_bare
        found = None
        while True:
            yield from reader.spaces()
            last = found
            fences = (_FENCE,) if self._in_fence or (calls.is_bare and may_follow) else ()
            found = yield from reader.accept(*calls.closers, *self._starts, *separators, *fences)
            is_closer = found in calls.closers or self._in_fence
            if found in self._starts or (found == _FENCE and not is_closer):
                reader.keep(reader.at - len(found or ""))
                return found
            if found == _FENCE:
                self._in_fence = False
            if found is None:
                following = yield from reader.peek()
                is_next = calls.kind == "json" and following == "{" and may_follow
                if is_next or (calls.kind == "python" and last in separators and following):
                    reader.keep(reader.at)
                    return ""
                return None
            if found not in separators:
                separators = ()


def _harmony_steps(reader: Reader, deltas: Deltas, *, has_tools: bool) -> Parsing[None]:
    """Parse the channels of gpt-oss: analysis is reasoning, a message to a function is a call."""
    before, inside = Marks([_MESSAGE, *_ENDS]), Marks([*_ENDS, _CHANNEL])
    while True:
        pieces: list[str] = []
        mark = yield from reader.until(before, pieces.append)
        header = "".join(pieces)
        recipient = _RECIPIENT.search(header) if has_tools else None
        if mark != _MESSAGE:
            text = header.replace(_CHANNEL, "")
            if text.strip() != "assistant":
                deltas.content(text)
            if mark is None:
                return
            continue
        deltas.part()
        write = deltas.content
        if recipient:
            deltas.begin(recipient[1], None)
            write = deltas.write
        elif "analysis" in header:
            write = deltas.reasoning
        mark = yield from reader.until(inside, write)
        if write != deltas.content:
            deltas.part()
        if mark is None:
            return
