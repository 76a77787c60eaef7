"""The messages of a chat: parses saved chats, and turns answers into messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

from ggufspec.decoding.sampling_options import SAMPLING
from ggufspec.errors import PromptError

if TYPE_CHECKING:
    from ggufspec.engine.engine import Engine
    from ggufspec.engine.message_forms import Message

KEPT = (*SAMPLING, "dry_sequence_breakers")  # the options that are saved with a chat


class AnswerForm:
    """Turns the text of an answer into the message that goes into the next prompt.

    Reasoning stays in the message; the template may leave it out of later prompts.
    """

    def __init__(self, engine: Engine, *, is_free: bool) -> None:
        """`is_free`: no constraint determines the form of answers. Raises PromptError."""
        from ggufspec.server.formats.chat_format import format_of

        assert engine.chat_template is not None
        self._vocab = engine.vocab
        self._format = format_of(engine.chat_template)
        self._has_marks = is_free and self._format.has_marks
        # Some marks of reasoning are control tokens, which texts omit. Keep them: without the marks
        # the next prompt could not tell reasoning from the answer.
        marks = self._vocab.specials_in(self._format.text) if self._has_marks else {}
        self.shown_tokens = frozenset(marks.values())

    def message(self, prompt: Sequence[int], text: str) -> Message:
        """The assistant's message whose `text` follows a prompt."""
        made: dict[str, Any] = {"role": "assistant", "content": text}
        if not self._has_marks:
            return made
        begun = self._format.begun_in(prompt, self._vocab)
        if self._format.syntax.is_harmony:  # its template refuses marks in contents
            from ggufspec.server.formats.deltas import ContentDelta, ReasoningDelta

            parser = self._format.parser(begun)
            deltas = [*parser.push(text), *parser.finish()]
            for name, kind in (("content", ContentDelta), ("reasoning_content", ReasoningDelta)):
                made[name] = "".join(each.text for each in deltas if isinstance(each, kind))
            return made
        reasoning = self._format.reasoning(begun)
        if reasoning is not None and reasoning.is_open:
            made["content"] = begun.lstrip() + text
        return made


def parts_of(document: Mapping[str, Any]) -> tuple[list[Message], dict[str, Any]]:
    """The messages and the sampling options of a saved chat. Raises PromptError."""
    messages, sampling = document.get("messages"), document.get("sampling", {})
    if not isinstance(messages, list) or not isinstance(sampling, dict):
        raise PromptError('it is not a JSON object with a list "messages" and an object "sampling"')
    roles = [each.get("role") if isinstance(each, dict) else None for each in messages]
    turns = roles[1:] if roles[:1] == ["system"] else roles
    if any(found != role for found, role in zip(turns, cycle(("user", "assistant")), strict=False)):
        raise PromptError("its messages are not those of user and assistant in turn")
    if len(turns) % 2:
        raise PromptError("its last message is not an answer")
    if unknown := sampling.keys() - {*KEPT}:
        raise PromptError(f"there is no sampling option {', '.join(map(repr, sorted(unknown)))}")
    if biases := sampling.get("logit_bias"):
        try:
            sampling["logit_bias"] = {int(token): float(bias) for token, bias in biases.items()}
        except (AttributeError, TypeError, ValueError) as error:
            raise PromptError(f"logit_bias is {biases!r}, not numbers by token ids") from error
    return messages, sampling
