"""Brings messages and tools into the form that a chat template takes."""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from hashlib import sha256
from itertools import takewhile
from typing import Any

from ggufspec.engine.template_probe import (
    COMPLETE,
    Message,
    TemplateProbe,
    Tools,
    other_role,
    parts_of,
)
from ggufspec.errors import PromptError

_N_ID = 9  # letters and digits of a call's id in Mistral's templates
_REASONING = ("reasoning_content", "thinking", "reasoning")
_INSTRUCTIONS = ("system", "developer")
_FILLERS = ("", " ")  # contents without text; some templates refuse the first
# Roles between which one may be missing.
_PAIRS = {("tool", "user"), *((each, "assistant") for each in ("", *_INSTRUCTIONS))}


class MessageForms:
    """What a template expects of messages and tools."""

    def __init__(self, source: str, probe: TemplateProbe) -> None:
        self._probe = probe
        self._names_developer = "'developer'" in source or '"developer"' in source

    def messages(self, messages: Sequence[Message]) -> list[Message]:
        """The messages for the template. Raises PromptError for malformed messages."""
        _check(messages)
        made: list[Message] = []
        rest = [self._message(message) for message in self._with_ids(self._in_turns(messages))]
        at = 0
        while at < len(rest):
            message, calls = rest[at], rest[at].get("tool_calls", ())
            at += 1
            if len(calls) < 2 or self._probe.takes_calls(n=2) or not self._probe.takes_calls():
                made.append(message)
                continue
            # A message for each call, with its result behind it, where only one is written.
            results = [*takewhile(lambda message: message["role"] == "tool", rest[at:])]
            of_call = defaultdict[str, deque[Message]](deque)
            for result in results:
                of_call[str(result["tool_call_id"])].append(result)
            for i, call in enumerate(calls):
                later = {"role": message["role"], "content": self._empty(None)}
                made.append({**(later if i else message), "tool_calls": [call]})
                if mine := of_call[str(call["id"])]:
                    made.append(mine.popleft())
            left = {id(result) for waiting in of_call.values() for result in waiting}
            made += [result for result in results if id(result) in left]
            at += len(results)
        return made

    def tools(self, tools: Tools) -> list[Mapping[str, object]]:
        """The tools, with a description and parameters where the template needs these."""
        return [self._tool(tool) for tool in tools]

    def _tool(self, tool: Mapping[str, object]) -> Mapping[str, object]:
        if not isinstance(tool, Mapping):
            raise PromptError(
                f"a tool is of type {type(tool).__name__}; it must be "
                '{"type": "function", "function": {"name": ..., "parameters": ...}}'
            )
        function = tool.get("function")
        if not isinstance(function, Mapping) or {*COMPLETE} <= {*function}:
            return tool
        if self._probe.takes_bare_tool():
            return tool
        return {**tool, "function": {**COMPLETE, **function}}

    def _in_turns(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Messages whose roles follow one another as the template allows.

        Where it does not: instructions at the start become one message, or begin that of the user;
        later ones become a reminder in a message of the user; messages of one role are joined;
        a message without text stands where a turn is missing.
        """
        turns: list[list[dict[str, Any]]] = []  # messages that become one
        is_start, is_told = True, False  # only instructions so far; the last one is the user's
        for given in messages:
            message = {key: value for key, value in given.items() if value is not None}
            if message["role"] == "developer" and not (
                self._names_developer and self._probe.takes("developer")
            ):
                message["role"] = "system"
            before, was_told, is_told = turns[-1][0]["role"] if turns else "", is_told, False
            if message["role"] not in _INSTRUCTIONS:
                is_start = False
            elif not self._may_follow(before, message["role"]):
                if before in _INSTRUCTIONS:
                    turns[-1].append(message)
                    continue
                message, is_told = _of_user(message, is_start=is_start), True
            role = message["role"]
            if role != before or role not in ("user", "assistant"):
                turns += [[filler] for filler in self._filler(before, role)]
            elif "tool_calls" not in {*message, *turns[-1][0]} and (
                was_told or is_told or not self._may_follow(before, role)
            ):
                turns[-1].append(message)
                continue
            turns.append([message])
        return [_joined(together) for together in turns]

    def _may_follow(self, before: str, role: str) -> bool:
        """Whether this role may follow `before`; also if it is unknown what would be better."""
        return self._probe.takes_after(before, role) or not self._probe.takes_after("", "user")

    def _filler(self, before: str, role: str) -> list[dict[str, Any]]:
        """The message that has to stand between these roles, if one has to, and one helps."""
        takes = self._probe.takes_after
        if (before, role) not in _PAIRS or takes(before, role):
            return []
        contents = [each for each in _FILLERS if takes(before, role, filler=each)]
        return [{"role": other_role(role), "content": each} for each in contents[:1]]

    def _with_ids(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Messages whose calls have ids that the template allows, and results those of their calls.

        A result without an id belongs to the first call of its function that has no result yet.
        """
        made: list[dict[str, Any]] = []
        waiting = _WaitingCalls()
        for message in messages:
            if calls := message.get("tool_calls"):
                named = []
                for call in calls:
                    given, name = call.get("id"), _name_of(call)
                    named.append({**call, "id": self._id(given, name, waiting.n_calls)})
                    waiting.add(given, name, named[-1]["id"])
                message = {**message, "tool_calls": named}
            elif message["role"] == "tool":
                given, name = message.get("tool_call_id"), str(message.get("name", ""))
                id = waiting.take(given, name) or self._id(given, name, waiting.n_calls)
                message = {**message, "tool_call_id": id}
            made.append(message)
        return made

    def _id(self, given: Any, name: str, number: int) -> Any:
        """The id of a call; Mistral's templates allow nine letters or digits only."""
        if self._probe.takes_name_from_id():  # Kimi's
            return given if given and name in str(given) else f"functions.{name}:{number}"
        if not given:
            return f"call{number:05}"
        if self._probe.takes_calls(call_id="call_1") or not self._probe.takes_calls():
            return given
        text = str(given)
        fits = len(text) == _N_ID and text.isalnum()
        return text if fits else sha256(text.encode()).hexdigest()[:_N_ID]

    def _message(self, made: dict[str, Any]) -> dict[str, Any]:
        role, content, calls = made["role"], made.get("content"), made.pop("tool_calls", None)
        reasoning = next((made[key] for key in _REASONING if made.get(key)), None)
        if reasoning is not None:
            made = {"thinking": reasoning, **made, "reasoning_content": reasoning}
        made["content"] = self._content(role, content)
        if not calls:
            return made
        made["tool_calls"] = [self._call(call) for call in calls]
        if not content:
            made["content"] = self._empty(content)
        elif not self._probe.takes_call("a") and self._probe.takes_call(None):
            made["content"] = None  # else the calls are left out
        elif reasoning and isinstance(content, str) and self._wants_one_text():
            both = f"{reasoning}\n\n{content}"
            made |= {"content": "", "thinking": both, "reasoning_content": both}
        return made

    def _content(self, role: str, content: Any) -> Any:
        takes = self._probe.takes
        if isinstance(content, list):
            return content if takes(role, in_parts=True) else _text(content)
        takes_text = takes(role) or not takes(role, in_parts=True)
        return (content or "") if takes_text else parts_of(content or "")

    def _empty(self, content: str | None) -> str | None:
        """An empty content beside calls: some templates need null, others write "None" for it."""
        forms = ("", None) if content == "" else (None, "")
        return next(filter(self._probe.takes_call, forms), "")

    def _call(self, call: Any) -> Any:
        """The call with its arguments as an object, or as JSON text."""
        function = call.get("function")
        if not isinstance(function, Mapping):
            return call
        arguments = given = function.get("arguments") or {}
        if isinstance(given, str):
            try:
                arguments = json.loads(given)
            except (ValueError, RecursionError) as error:
                raise PromptError(
                    "the arguments of a tool call are not valid JSON; send them as JSON text"
                ) from error
        if not self._probe.takes_objects():
            # Text as it was written, so that the cache can hold it.
            is_text = isinstance(given, str)
            arguments = given if is_text else json.dumps(given, ensure_ascii=False)
        return {**call, "function": {**function, "arguments": arguments}}

    def _wants_one_text(self) -> bool:
        """Whether there may be content or reasoning beside calls, but not both, as for gpt-oss."""
        takes = self._probe.takes_call
        return not takes("a", reasoning="b") and takes("", reasoning="b")


class _WaitingCalls:
    """The calls that have no result yet."""

    def __init__(self) -> None:
        self.n_calls = 0
        self._answered: set[int] = set()  # numbers of calls
        # Numbers of calls and their ids for the template, by the ids that came, and by name.
        self._of_id = defaultdict[str, deque[tuple[int, Any]]](deque)
        self._of_name = defaultdict[str, deque[tuple[int, Any]]](deque)
        self._all: deque[tuple[int, Any]] = deque()

    def add(self, given: Any, name: str, id: Any) -> None:
        for calls in (self._of_id[str(given or "")], self._of_name[name], self._all):
            calls.append((self.n_calls, id))
        self.n_calls += 1

    def take(self, given: Any, name: str) -> Any:
        """The id of the call that a result with this id and name belongs to; None: of none."""
        ways = (self._of_id[str(given)], self._of_id[""])
        for calls in ways if given else (self._of_name[name], self._all):
            while calls:
                number, id = calls.popleft()
                if number not in self._answered:
                    self._answered.add(number)
                    return id
        return None


def _name_of(call: Mapping[str, Any]) -> str:
    """The name of the called function; empty for a call in another form."""
    function = call.get("function")
    return str(function.get("name") or "") if isinstance(function, Mapping) else ""


def _of_user(instruction: Mapping[str, Any], *, is_start: bool) -> dict[str, Any]:
    """An instruction as a message of the user; a later one is marked, as by Claude Code."""
    text = _text(instruction["content"])
    text = text if is_start else f"<system-reminder>\n{text}\n</system-reminder>"
    return {"role": "user", "content": text}


def _joined(messages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Messages of one role as one, their texts as paragraphs."""
    made = {key: value for message in reversed(messages) for key, value in message.items()}
    for key in ("content", *_REASONING) if len(messages) > 1 else ():
        texts = [message[key] for message in messages if message.get(key)]
        if texts and all(isinstance(text, str) for text in texts):
            made[key] = "\n\n".join(texts)
        elif texts:
            made[key] = [part for text in texts for part in _listed(text)]
    return made


def _listed(content: Any) -> list[Any]:
    return parts_of(content) if isinstance(content, str) else content


def _text(content: Any) -> str:
    """The text of a content; several parts are joined as lines."""
    return "\n".join(part["text"] for part in _listed(content))


def _check(messages: Sequence[Message]) -> None:
    if not messages:
        raise PromptError("there are no messages; give at least one with role 'user'")
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
        raise PromptError(
            f"messages is of type {type(messages).__name__}; give a list of "
            '{"role": ..., "content": ...}'
        )
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise PromptError(
                f'message {i} is {message!r}; it must be {{"role": ..., "content": ...}}'
            )
        if not isinstance(role := message.get("role"), str):
            raise PromptError(f"message {i} needs a text 'role'; found {role!r}")
        calls = message.get("tool_calls") or []
        if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
            raise PromptError(f"message {i} needs a list of calls as 'tool_calls'")
        content = message.get("content")
        if content is None and role == "assistant":
            continue
        parts = content if isinstance(content, list) else [{"text": content}]
        texts = [part.get("text") if isinstance(part, Mapping) else None for part in parts]
        if not all(isinstance(text, str) for text in texts):
            raise PromptError(
                f"message {i} needs a text 'content', or a list of "
                f'{{"type": "text", "text": ...}}; found {str(content)[:80]!r}'
            )
