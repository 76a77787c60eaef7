"""The format of a chat template's answers: their parser and their marks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from ggufspec.engine.chat_template import ChatTemplate
from ggufspec.engine.message_forms import LimitError
from ggufspec.errors import PromptError
from ggufspec.server.formats.deltas import ChatParser, Deltas
from ggufspec.server.formats.grammar import Reasoning
from ggufspec.server.formats.parser import (
    HARMONY_MARKS,
    AnswerSteps,
    SteppedParser,
    harmony_steps,
)
from ggufspec.server.formats.reader import Reader
from ggufspec.server.formats.syntax import ID, CallSyntax, Syntax, derive

_HARMONY_HEADER = "<|start|>assistant"
Tools = Sequence[Mapping[str, Any]]  # as in OpenAI's API


@dataclass(frozen=True)
class ChatFormat:
    """The format of answers in a chat template."""

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
        return " ".join(marks + list(HARMONY_MARKS if syntax.is_harmony else ()))

    def begun(self, prompt: str) -> str:
        """The beginning of the answer that is already in the prompt."""
        header = self.syntax.header
        return prompt.rpartition(header)[2] if header and header in prompt else ""

    def reasoning(self, begun: str) -> Reasoning | None:
        """The reasoning that may follow `begun`; None: none may follow."""
        if self.syntax.reasoning is None:
            return None
        begin, end = self.syntax.reasoning
        opened, closed = begun.rfind(begin) if begin else -1, begun.rfind(end)
        if closed > opened or (opened < 0 and begun.strip()):
            return None
        if self.syntax.is_harmony:
            end += _HARMONY_HEADER
        return Reasoning(begin, end, opened >= 0) if begin else None

    def parser(
        self, begun: str, tools: Tools | None = None, *, is_parallel: bool = True
    ) -> ChatParser:
        """A parser of the text after `begun`; without tools, calls are content."""
        call, reader = self.syntax.call, Reader()
        texts = (call.opener, call.head, call.middle, call.tail) if call and tools else ()
        deltas = Deltas(has_short_ids=any(ID in text for text in texts))
        if self.syntax.is_harmony:
            steps = harmony_steps(reader, deltas, has_tools=tools is not None)
            return SteppedParser(reader, deltas, steps, begun)
        schemas = None
        if tools is not None:
            functions = [tool["function"] for tool in tools]
            schemas = {each["name"]: each.get("parameters") or {} for each in functions}
        answer = AnswerSteps(reader, deltas, self.syntax, schemas, is_parallel)
        return SteppedParser(reader, deltas, answer.run(), begun.strip())


@lru_cache(maxsize=4)
def format_of(template: ChatTemplate) -> ChatFormat:
    """Derives the format from conversations that the template renders; no marks if it cannot."""
    try:
        return ChatFormat(derive(template))
    except LimitError:
        raise
    except PromptError:
        return ChatFormat(Syntax("", None, (), None))
